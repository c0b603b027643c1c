"""A linear decay over the run is at half of 0.1 in its middle."""


def value(script, run):
    label = "learning rate in the middle of the run"
    return label, run.printed(label + " "), 0.05
