"""What a step of the plan changes in a model, and how it is put back: all steps start alike."""

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ddp_doctor.certificate.record import StepNotes, assign, elements_of, full_tensor

TINY = 0.02  # standard deviation of the values that replace zeros
BYTES = 1 << 28  # of weights that nobody trains: frozen ones may be many
Number = int | float


class State:
    """Weights, buffers, and plain numbers of modules, as they were before a step."""

    def __init__(self, notes: StepNotes) -> None:
        self.notes = notes
        self._weights: list[tuple[Tensor, Tensor]] = []
        # (id of a module, name): the module, the buffer, and its value before this step.
        self._buffers: dict[tuple[int, str], tuple[nn.Module, Tensor, Tensor]] = {}
        # By id, parameters that nobody trains: the name and the value. A forward may move them.
        self._untrained: dict[int, tuple[str, Tensor, Tensor]] = {}
        # The plain numbers of modules before a call, and each that calls of this step changed.
        self._numbers: dict[int, tuple[nn.Module, dict[str, Number]]] = {}
        self._counters: dict[tuple[int, str], tuple[nn.Module, Number]] = {}
        # Whose gradients the next forward clears. What follows a step may still read them.
        self._repeated: list[Tensor] = []

    def keep_weights(self, parameters: Iterable[Tensor]) -> None:
        """Before an update; cost: a copy of the parameters until it is over."""
        self._weights = [(parameter, parameter.detach().clone()) for parameter in parameters]

    def keep_modules(self, module: nn.Module) -> None:
        """Buffers and plain numbers. A criterion has some, too: a count that seeds its draws."""
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                key = id(owner), name
                if buffer is not None and not is_lazy(buffer) and key not in self._buffers:
                    self._buffers[key] = owner, buffer, buffer.detach().clone()
            if not isinstance(owner, DistributedDataParallel):  # which counts for itself
                numbers = {k: v for k, v in vars(owner).items() if type(v) in (int, float)}
                self._numbers.setdefault(id(owner), (owner, numbers))

    def note_untrained(self, module: nn.Module, trained: Iterable[int]) -> None:
        """Keep, at the first forward of this step, parameters that nobody trains, of references and
        teachers, too, and note some elements of them. `trained`: ids.
        """
        ids = set(trained)
        trains = any(id(parameter) in ids for parameter in module.parameters())
        prefix = "" if trains else f"{type(module).__name__}."
        for name, parameter in module.named_parameters():
            plain_float = type(parameter.data) is Tensor and parameter.is_floating_point()
            if parameter.requires_grad or not plain_float:
                continue
            key = prefix + name.removeprefix("module.")
            if id(parameter) not in ids:
                self.notes.untrained_weights.setdefault(key, elements_of(parameter))
            if id(parameter) not in self._untrained:
                kept = sum(value.nbytes for _, _, value in self._untrained.values())
                if kept + parameter.nbytes < BYTES:
                    self._untrained[id(parameter)] = key, parameter, parameter.detach().clone()

    def note_moved(self) -> None:
        """The same elements, now that the forwards of this step have run."""
        of_names = {key: weight for key, weight, _ in reversed(self._untrained.values())}
        self.notes.moved_weights = {
            key: elements_of(of_names[key])
            for key in self.notes.untrained_weights.keys() & of_names.keys()
        }

    def note_counters(self) -> None:
        """The numbers that a call changed. What the script itself counts up stays so."""
        for owner, numbers in self._numbers.values():
            for name, number in numbers.items():
                now = vars(owner).get(name)
                if type(now) is not type(number) or now != number:
                    self._counters.setdefault((id(owner), name), (owner, number))
        self._numbers.clear()

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo an update, if weights were kept before it."""
        for parameter, value in self._weights:
            parameter.copy_(value)
            self._repeated.append(parameter)
        for _, weight, value in self._untrained.values() if self._weights else ():
            weight.data.copy_(value)
        for (_, name), (owner, buffer, value) in self._buffers.items() if self._weights else ():
            if buffer.shape != value.shape:
                buffer.resize_(value.shape)  # its first forward gave it its size
            buffer.copy_(value)
            owner._buffers[name] = buffer  # the script may have assigned another
        for (_, name), (owner, number) in self._counters.items() if self._weights else ():
            vars(owner)[name] = number
        self._weights = []
        self._buffers.clear()
        self._untrained.clear()
        self._counters.clear()

    def clear_gradients(self) -> None:
        """Before the first forward after an update that was undone."""
        while self._repeated:
            _clear(self._repeated.pop())


def _clear(parameter: Tensor) -> None:
    """Leave no gradient; one that is a view of a buffer of the script's stays there and is zero."""
    grad = parameter.grad
    if (
        type(grad) is Tensor
        and grad.layout == torch.strided
        and (grad._is_view() or grad.untyped_storage().nbytes() > grad.nbytes)
    ):
        grad.detach().zero_()
    else:
        parameter.grad = None


@torch.no_grad()
def fill(parameter: Tensor, key: str) -> bool:
    """Give a weight that is all zero small values, the same in all processes; whether it was."""
    weight = full_tensor(parameter)
    if not weight.is_floating_point() or not weight.numel() or bool(weight.any()):
        return False
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    values = TINY * torch.randn(weight.shape, generator=generator, device="cpu")
    assign(parameter, values)
    return True


@torch.no_grad()
def load(weights: dict[str, Tensor], parameters: Iterable[tuple[Tensor, str]]) -> None:
    """Give parameters the ranks' weights, by key. Of one process, a shard is the whole."""
    for parameter, key in parameters:
        if key in weights and weights[key].shape == parameter.shape:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.data.copy_(weights[key])  # `data`: a loss may have been begun
