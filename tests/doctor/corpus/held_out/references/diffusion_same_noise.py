"""Independent noise per sample: the next random number differs between the ranks."""


def value(script, run):
    label = "the next random number is the same everywhere: "
    return "ranks draw the same noise (1: yes)", run.printed(label), 0
