"""What a script tells TrainCheck of its step and rank."""

meta_vars: dict[str, int] = {}
