"""DataParallel: one process, several devices, and a batch that is split among them.

Each forward has four parts, and this file has one function for each:

1. `scatter`: cut the inputs into one chunk per device, along the batch dimension;
2. `replicate`: copy the module to every device, in a way that backward can follow;
3. `parallel_apply`: run each replica on its chunk, in its own thread;
4. `gather`: concatenate the outputs on one device.

**Gradients are summed.** There is one loss, over the gathered output, and each replica is a
differentiable copy of the same parameters. So backward adds the replicas' gradients in the original
parameters, as for any tensor that is used several times. Nothing is divided, because the loss has
already averaged over the whole batch. DDP has one loss per *process*, each a mean over its own
share, so it averages. DDP around a `MiniDataParallel` sums within a process and averages across
processes. (With one device per process, plain DDP is faster.)

Cost, for R devices and P bytes of parameters: each forward sends (R−1)·P bytes from the first
device, and each backward (R−1)·P bytes back to it, besides inputs and outputs. Nothing overlaps,
and R threads share one Python interpreter.

Source: `torch.nn.DataParallel` (torch/nn/parallel), which without a GPU runs the plain module.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from miniddp.errors import stacklevel_of_caller

Device = torch.device | str | int


class MiniDataParallel(nn.Module):
    """Run `module` on several devices, each with its share of the batch: `torch.nn.DataParallel`.

    The wrapped module is `.module`, so names in the state dict start with `module.`. With one
    device it is called directly.

    A forward changes a replica, not the module: an attribute that it sets is lost. In-place updates
    of parameters and buffers are lost, too, except on the first replica, which shares its memory
    with `module`. So BatchNorm's running statistics follow the first chunk alone. BatchNorm
    normalizes each chunk separately, and dropout draws a separate mask for each.

    Args:
        module: all its parameters and buffers are on `devices[0]`.
        devices: one replica for each; a device may be named several times: `["cpu"] * 4`.
        output_device: where the outputs are gathered; by default `devices[0]`.
        dim: the dimension along which inputs are cut and outputs are concatenated.

    Raises:
        ValueError: there is no device; in forward, inputs that make different numbers of chunks.
        RuntimeError: in forward, a parameter or buffer is not on `devices[0]`.
        whatever the module raises on a replica, with a note that names the replica.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device],
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        if not devices:
            raise ValueError('no devices: name at least one, such as ["cpu"] * 4')
        self.module = module
        self.devices = [_exact(device) for device in devices]
        self.output_device = self.devices[0] if output_device is None else _exact(output_device)
        self.dim = dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._check_placement()
        if not inputs and not kwargs:
            shares: list[Any] = [((), {})]  # nothing to cut: one call, on the first device
        else:
            shares = scatter((inputs, kwargs), self.devices, self.dim)
        if len(self.devices) == 1:
            [(own_inputs, own_kwargs)] = shares
            return self.module(*own_inputs, **own_kwargs)
        devices = self.devices[: len(shares)]
        outputs = parallel_apply(replicate(self.module, devices), shares, devices)
        return gather(outputs, self.output_device, self.dim)

    def _check_placement(self) -> None:
        first = self.devices[0]
        for name, tensor in chain(self.module.named_parameters(), self.module.named_buffers()):
            if tensor.device != first:
                raise RuntimeError(
                    f"{name} is on {tensor.device}, and replicas are made from devices[0], "
                    f'{first}: call module.to("{first}") first'
                )


def scatter(inputs: Any, devices: Sequence[Device], dim: int = 0) -> list[Any]:
    """Cut every tensor within `inputs` along `dim`: one nested structure of chunks per device.

    Tensors may be inside nested tuples, named tuples, lists, and dicts; anything else goes to every
    device unchanged. Chunks are those of `torch.chunk`: ⌈size / R⌉ long, the last one shorter. If
    the size is too small there are *fewer chunks than devices*: 5 rows on 4 devices make 3 chunks.
    Gradients flow back through the cut.

    Raises ValueError if a tensor is 0-d, or if two tensors make different numbers of chunks. (torch
    drops the surplus chunks of the longer one instead, and never computes them.)
    """
    numbers: dict[int, Tensor] = {}

    def cut(item: Any) -> list[Any]:
        if isinstance(item, Tensor):
            if item.dim() == 0:
                raise ValueError("a 0-d tensor cannot be cut: pass a number, or expand it first")
            chunks = item.chunk(len(devices), dim)
            numbers.setdefault(len(chunks), item)
            return [chunk.to(device) for chunk, device in zip(chunks, devices, strict=False)]
        if isinstance(item, (tuple, list, dict)) and item:
            parts = item.values() if isinstance(item, dict) else item
            # The shortest decides: anything but a tensor was given to devices without a chunk, too.
            return [_like(item, share) for share in zip(*map(cut, parts), strict=False)]
        return [item] * len(devices)

    shares = cut(inputs)
    if len(numbers) > 1:
        found = ", ".join(f"{tuple(t.shape)} makes {n}" for n, t in sorted(numbers.items()))
        raise ValueError(
            f"inputs make different numbers of chunks along dim {dim} for {len(devices)} devices: "
            f"{found}. Give all of them the same batch size"
        )
    return shares


def replicate(module: nn.Module, devices: Sequence[Device]) -> list[nn.Module]:
    """A copy of `module` for each device; its parameters are functions of the original's.

    A replica has plain tensors in place of parameters. They are not leaves of the autograd graph:
    their gradients flow on to the module's own parameters and add up there. The first replica's
    tensors are views of these parameters. Under `torch.no_grad`, no gradient flows back.
    """
    return [_replica(module, _exact(device), number) for number, device in enumerate(devices)]


def parallel_apply(
    replicas: Sequence[Callable[..., Any]],
    shares: Sequence[tuple[Sequence[Any], dict[str, Any]]],
    devices: Sequence[Device],
) -> list[Any]:
    """Call all replicas at the same time, each on its (inputs, kwargs); return outputs in order.

    Grad mode, inference mode, autocast, and the current stream belong to a thread, so each thread
    copies them from the caller. (Copying the stream has not been run on a GPU yet.) If replicas
    fail, the others still finish. Then the exception of the failed replica with the lowest number
    is raised, with a note that names the replica.
    """
    devices = [_exact(device) for device in devices]
    autocast = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in {"cpu", *(device.type for device in devices)}
    ]
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    streams = [torch.accelerator.current_stream(d) if d.type != "cpu" else None for d in devices]

    def call(number: int) -> Any:
        inputs, kwargs = shares[number]
        with ExitStack() as context:
            context.enter_context(torch.inference_mode(inference))
            context.enter_context(torch.set_grad_enabled(grad))
            for state in autocast:
                context.enter_context(torch.autocast(*state))
            if streams[number] is not None:
                context.enter_context(torch.accelerator.device_index(devices[number].index))
                context.enter_context(streams[number])
            return replicas[number](*inputs, **kwargs)

    with ThreadPoolExecutor(max_workers=len(replicas)) as pool:
        calls = [pool.submit(call, number) for number in range(len(replicas))]
    for number, finished in enumerate(calls):
        if error := finished.exception():
            error.add_note(f"raised in replica {number} of {len(replicas)}, on {devices[number]}")
            raise error
    return [finished.result() for finished in calls]


def gather(outputs: Sequence[Any], device: Device, dim: int = 0) -> Any:
    """Concatenate the replicas' outputs on `device`: the inverse of `scatter`, differentiable.

    Tensors are concatenated along `dim`, also inside nested tuples, named tuples, lists, and dicts
    of the same structure. None stays None. 0-d tensors, such as one loss per replica, become a
    vector with one entry per replica, with a warning.

    Raises TypeError for anything else, and ValueError if the outputs' structures differ.
    """
    first = outputs[0]
    builds = [_build(output) for output in outputs]
    if any(build != builds[0] for build in builds):
        raise ValueError(f"the replicas' outputs differ in type, length or keys: {builds}")
    if first is None:
        return None
    if isinstance(first, Tensor):
        outputs = [output.to(device) for output in outputs]
        if first.dim() > 0:
            return torch.cat(outputs, dim)
        warnings.warn(
            f"each replica returned a scalar: gathered into a vector of {len(outputs)}. Reduce it "
            "before backward(), with .mean() only if all chunks are of the same size",
            stacklevel=stacklevel_of_caller(),
        )
        return torch.stack(outputs)
    if isinstance(first, (tuple, list, dict)):
        keys = first if isinstance(first, dict) else range(len(first))
        return _like(first, [gather([o[key] for o in outputs], device, dim) for key in keys])
    raise TypeError(
        f"a replica returned a {type(first).__name__}: only tensors, None, and tuples, lists and "
        "dicts of these can be gathered"
    )


def _replica(module: nn.Module, device: torch.device, number: int) -> nn.Module:
    """One replica: a copy of the module tree; shared modules and parameters stay shared."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor) if number == 0 else tensor.to(device, copy=True)

    tensors = {id(t): moved(t) for t in chain(module.parameters(), module.buffers())}
    # There is no public way to copy a module without its parameters, and this one is overridden by
    # modules that keep references to their parameters elsewhere (nn.RNN does).
    copies = {id(m): m._replicate_for_data_parallel() for m in module.modules()}
    for original in module.modules():
        replica = copies[id(original)]
        for name, child in original._modules.items():
            replica._modules[name] = None if child is None else copies[id(child)]
        for name, tensor in original._parameters.items():
            # nn.Module files a plain tensor as an attribute, which is where forward looks it up.
            setattr(replica, name, None if tensor is None else tensors[id(tensor)])
        for name, tensor in original._buffers.items():
            replica._buffers[name] = None if tensor is None else tensors[id(tensor)]
    return copies[id(module)]


def _like(nest: Any, items: Sequence[Any]) -> Any:
    """A tuple, named tuple, list, or dict with the structure of `nest` that holds `items`."""
    if isinstance(nest, dict):
        result = copy.copy(nest)  # keeps what a subclass knows besides, such as a default factory
        result.update(zip(nest, items, strict=True))
        return result
    return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)


def _build(output: Any) -> tuple[str, Any]:
    """The type and length or keys, which must be equal in all replicas' outputs."""
    if isinstance(output, dict):
        return type(output).__name__, sorted(map(str, output))
    return type(output).__name__, len(output) if isinstance(output, (tuple, list)) else None


def _exact(device: Device) -> torch.device:
    """The device with its index: "cuda" becomes "cuda:0" (not yet run on a GPU).

    Raises RuntimeError if the device does not exist.
    """
    return torch.empty(0, device=device).device
