"""Codebooks of one model are the same everywhere."""


def value(script, run):
    return "difference of the ranks' codebook norms", run.printed("codebook spread "), 0.0
