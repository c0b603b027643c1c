"""devices=2 asks for two processes that train."""


def value(script, run):
    return "processes of the second Trainer", run.printed("processes: "), 2
