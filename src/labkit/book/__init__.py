"""What chapters print and show, and how they are executed and checked."""

from labkit.lazy import offer

__getattr__, __all__ = offer(
    __name__,
    {
        "tables": ["bound", "table", "to_the_bit"],
        "show": ["source"],
    },
)
