"""Start ranks in a notebook cell, under torchrun, or on several nodes, and leave none behind."""

from labkit.lazy import offer

__getattr__, __all__ = offer(
    __name__,
    {
        "ranks": ["run_ranks", "RanksError", "RanksTimeoutError"],
        "scripts": ["run_script", "project_root", "ScriptError"],
        "lab": ["leave_group"],
        "guard": ["run_guarded"],
    },
)
