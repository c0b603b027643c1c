"""The functions of torch.distributed in which ranks wait for each other.

The observers replace them, and the rules recognize them in a journal.
"""

CALLS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "barrier", "monitored_barrier", "all_gather_object", "broadcast_object_list", "gather_object",
    "scatter_object_list", "send", "recv", "isend", "irecv", "all_reduce_coalesced",
)  # fmt: skip
REDUCTIONS = tuple(each for each in CALLS if "reduce" in each)
UNEVEN = {"all_to_all_single"}  # ranks may pass tensors of different shapes
