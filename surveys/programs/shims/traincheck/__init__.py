"""Stands for TrainCheck's instrumentation: records nothing."""


def annotate_stage(name: str) -> None:
    """Nothing."""
