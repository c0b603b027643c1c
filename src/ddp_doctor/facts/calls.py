"""The functions of torch.distributed in which ranks wait for each other.

The observers replace them, and the rules recognize them in a journal. `isend` and `irecv` are left
alone: they do not wait, and `torch.distributed.P2POp` accepts only the originals.
"""

CALLS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "all_gather_single", "all_gather_coalesced", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single", "barrier",
    "monitored_barrier", "all_gather_object", "broadcast_object_list", "gather_object",
    "scatter_object_list", "send", "recv", "send_object_list", "recv_object_list",
    "all_reduce_coalesced",
)  # fmt: skip
REDUCTIONS = tuple(name for name in CALLS if "reduce" in name)
UNEVEN = {"all_to_all_single"}  # ranks may pass tensors of different shapes
