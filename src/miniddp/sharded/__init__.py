"""The same average, in pieces: every rank keeps 1/W of the state, the gradients, the parameters.

===================  ============================================================================
`sharding`           the rows of one parameter that a rank holds
`zero1`              ZeRO-1: the optimizer's state
`zero2`              ZeRO-2: gradients, too, reduce-scattered while backward runs
`param`              one parameter: sharded, or whole while it is needed
`reduction`          gradients reduced to the ranks that hold their rows
`param_group`        what moves together: an all-gather and a reduce-scatter
`fully_sharded`      `fully_shard`: what it accepts, and what it adds to a module
`schedule`           when the groups of a model move
`fsdp_state`         what one module does then: its hooks
`state`, `clip`      whole state dicts from shards; the norm of a gradient in pieces
`muon`               Muon, which needs whole matrices: two right ways and a wrong one
===================  ============================================================================
"""

from torch.distributed.fsdp import MixedPrecisionPolicy

from miniddp.sharded.clip import clip_grad_norm_
from miniddp.sharded.fully_sharded import FSDPModule, fully_shard
from miniddp.sharded.state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from miniddp.sharded.zero1 import ZeroRedundancyOptimizer
from miniddp.sharded.zero2 import Zero2, Zero2Optimizer

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "Zero2",
    "Zero2Optimizer",
    "ZeroRedundancyOptimizer",
    "clip_grad_norm_",
    "full_optimizer_state_dict",
    "full_state_dict",
    "fully_shard",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
]
