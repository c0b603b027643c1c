"""One parameter: its rows on this rank, and the whole, which `fully_shard` frees when it can.

The module's attribute is the *sharded* parameter, which the optimizer holds, or the *unsharded*
one, with which forward and backward compute. Autograd may keep references to the unsharded
parameter from forward to backward. So its memory is freed in between by resizing its storage to
zero bytes, and the same tensor is filled again. Source: FSDPParam in torch's _fsdp_param.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from miniddp.sharded.sharding import Sharding

Owner = tuple[nn.Module, str]  # a module and the name of its attribute


class ShardedParam:
    """One parameter whose gradient is computed whole, and averaged to each rank's rows.

    Args:
        sharded_param: this rank's rows, with their `sharding`; the optimizer's.
        unsharded_param: the whole parameter.
    """

    def __init__(self, sharded_param: nn.Parameter, unsharded_param: Tensor):
        self.sharded_param, self.unsharded_param = sharded_param, unsharded_param
        self.sharding: Sharding = sharded_param.sharding
        self.reduce_dtype = unsharded_param.dtype  # of the sum over the ranks
        self.accumulated: Tensor | None = None  # unsynchronized gradients, in `reduce_dtype`

    def has_gradient(self) -> bool:
        """Whether a gradient waits to be reduced."""
        return self.accumulated is not None or self.unsharded_param.grad is not None

    def take_gradient(self) -> Tensor:
        """The sum of all gradients since the last reduction, which are then forgotten."""
        total, gradient = self.accumulated, self.unsharded_param.grad
        self.accumulated = self.unsharded_param.grad = None
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        if total is None or gradient is None:
            return gradient if total is None else total
        return total.add_(gradient)

    def accumulate_sharded(self, chunk: Tensor) -> None:
        """Add this rank's rows of a reduced gradient to the sharded parameter's gradient."""
        gradient = self.sharding.unpad(chunk).to(self.sharded_param.dtype)
        if self.sharded_param.grad is None:
            self.sharded_param.grad = gradient
        else:
            self.sharded_param.grad += gradient
        # The user's hooks; private, and there is no public way to call them.
        for hook in (self.sharded_param._post_accumulate_grad_hooks or {}).values():
            hook(self.sharded_param)


class FSDPParam(ShardedParam):
    """One parameter of `fully_shard`. Its modules have the sharded or the unsharded one.

    Args:
        parameter: the whole parameter, with the same values on every rank.
        owners: all places in which it is registered; more than one if it is tied.
        sharding: how it is divided.
        policy: the dtypes of the unsharded parameter and of the reduction.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        owners: list[Owner],
        sharding: Sharding,
        policy: MixedPrecisionPolicy,
    ):
        self.owners, self.policy = owners, policy
        self.on_gradient: Callable[[Tensor], None]  # set by FSDPState; gets the unsharded parameter
        shard = sharding.shard(parameter.detach()).clone()
        # Integers, and gradients of them, do not exist; quantized frozen weights do.
        differentiable = shard.is_floating_point() or shard.is_complex()
        sharded_param = nn.Parameter(shard, requires_grad=differentiable)
        unsharded_param = nn.Parameter(torch.empty_like(shard), requires_grad=differentiable)
        if differentiable:
            sharded_param.register_hook(self.refuse_gradient)
            unsharded_param.register_post_accumulate_grad_hook(lambda p: self.on_gradient(p))
        sharded_param.sharding = sharding
        parameter.sharded_as = sharded_param  # found if it is tied to a module outside
        super().__init__(sharded_param.requires_grad_(parameter.requires_grad), unsharded_param)
        self.make_unsharded()

    def make_unsharded(self) -> None:
        """Shape the unsharded parameter, without memory, for the sharded one's dtype and device."""
        floating = self.sharded_param.is_floating_point()
        dtype = (floating and self.policy.param_dtype) or self.sharded_param.dtype
        shape = (self.sharding.group.size(), self.sharding.chunk_numel)
        # One chunk per rank; the unsharded parameter is a view of it.
        self.all_gather_output = self.sharded_param.new_empty(shape, dtype=dtype)
        # `.data` has a version counter of its own: autograd does not take filling for a change.
        self.unsharded_param.data = self.sharding.from_chunks(self.all_gather_output).data
        self.unsharded_param.requires_grad_(self.sharded_param.requires_grad)
        self.reduce_dtype = (floating and self.policy.reduce_dtype) or dtype
        self.to_sharded()

    def refuse_gradient(self, gradient: Tensor) -> None:
        """Raise: autograd has no reason to send a gradient to this rank's rows."""
        module, name = self.owners[0]
        raise used_while_sharded(f"{type(module).__name__}.{name}")

    def let_modules_use(self, parameter: nn.Parameter, instead_of: nn.Parameter) -> None:
        """Let the modules use `parameter`, frozen if the one that they used before is."""
        parameter.requires_grad_(instead_of.requires_grad)
        for module, name in self.owners:
            setattr(module, name, parameter)

    def all_gather_input(self) -> Tensor:
        """This rank's rows in `param_dtype`, as bytes: one message may hold several dtypes."""
        rows, dtype = self.sharded_param.detach(), self.all_gather_output.dtype
        return self.sharding.pad(rows, dtype).view(torch.uint8)

    def to_unsharded(self, gathered: Tensor) -> None:
        """Fill the unsharded parameter from W chunks of bytes, and register it."""
        output = self.all_gather_output
        output.untyped_storage().resize_(output.nbytes)
        output.view(torch.uint8).copy_(gathered)
        self.let_modules_use(self.unsharded_param, instead_of=self.sharded_param)

    def to_sharded(self) -> None:
        """Free the unsharded parameter, and register the sharded one."""
        self.let_modules_use(self.sharded_param, instead_of=self.unsharded_param)
        self.all_gather_output.untyped_storage().resize_(0)

    def accumulate_unsharded(self) -> None:
        """Keep the gradients of unsynchronized backwards, in the dtype of the reduction."""
        if self.has_gradient():
            self.accumulated = self.take_gradient().to(self.reduce_dtype)


def used_while_sharded(what: str) -> RuntimeError:
    """The error for a computation with this rank's rows."""
    return RuntimeError(
        f"{what} was used while sharded. Parameters are unsharded only inside the forward of the "
        "module passed to fully_shard: call that module, not its forward method, a part of it, or "
        "another method, and use its parameters nowhere else"
    )
