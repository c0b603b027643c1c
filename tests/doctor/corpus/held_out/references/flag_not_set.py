"""Two workers share 60 samples in batches of 10: three steps per epoch, not six."""


def value(script, run):
    return "optimizer steps of rank 0 in two epochs", len(run.ranks[0]["steps"][0]), 6
