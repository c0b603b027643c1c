"""Tables, figures, and source code in chapters; running and checking chapters."""

from labkit.lazy import offer

__getattr__, __all__ = offer(
    __name__,
    {
        "tables": ["bound", "table", "to_the_bit"],
        "show": ["source"],
        "exercises": ["checker"],
    },
)
