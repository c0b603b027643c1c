"""Collectives from scratch: all-reduce from send and receive, and collectives with a gradient."""

from miniddp.collectives.all_reduce import (
    Nodes,
    hierarchical_all_reduce,
    naive_all_reduce,
    recursive_doubling_all_reduce,
    ring_all_reduce,
)

__all__ = [
    "Nodes",
    "hierarchical_all_reduce",
    "naive_all_reduce",
    "recursive_doubling_all_reduce",
    "ring_all_reduce",
]
