"""The user's modules: names of parameters, buffers, and how the model is split."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ddp_doctor.observe.states import WrapperState


class Names:
    """Finds the module that a list of parameters belongs to, wrapped or not."""

    def __init__(self) -> None:
        self._root: weakref.ref[nn.Module] | None = None
        self._names = WeakIdKeyDictionary()  # empty: searched for, and in no module

    def of(self, parameters: Sequence[Tensor], wrappers: Sequence[WrapperState]) -> list[str]:
        """A name per parameter. The first call for new parameters searches the live modules."""
        missing = [parameter for parameter in parameters if not self._names.get(parameter)]
        if missing:
            for wrapper in wrappers:
                module = wrapper.module()
                if module is not None:
                    self._take(module, f"{wrapper.index}:" if wrapper.index else "")
            missing = [parameter for parameter in missing if self._names.get(parameter) is None]
        if missing:
            root = _smallest_module_with(missing)
            if root is not None:  # a name tells one model from another
                self._take(root, f"{type(root).__name__}:" if self.roots(wrappers) else "")
            for parameter in missing:
                if self._names.get(parameter) is None:
                    self._names[parameter] = ""
        return [
            self._names.get(parameter) or f"parameter {at}"
            for at, parameter in enumerate(parameters)
        ]

    def _take(self, module: nn.Module, prefix: str) -> None:
        for name, parameter in module.named_parameters():
            if not self._names.get(parameter):
                self._names[parameter] = prefix + name
        if self._root is None or self._root() is None:
            self._root = weakref.ref(module)

    def roots(self, wrappers: Sequence[WrapperState]) -> list[nn.Module]:
        wrapped = [wrapper.module() for wrapper in wrappers]
        found = [module for module in wrapped if module is not None]
        if not found and self._root is not None and (root := self._root()) is not None:
            found.append(root)
        return found

    def buffers(self, wrappers: Sequence[WrapperState]) -> list[tuple[str, Tensor]]:
        """Those that are saved with the model; others are caches."""
        return [
            (f"{path}.{name}" if path else name, buffer)
            for root in self.roots(wrappers)
            for path, module in root.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]

    def batch_norms(self, wrappers: Sequence[WrapperState]) -> int:
        """How many layers with torch's own forward train on the statistics of this rank alone."""
        own = nn.modules.batchnorm._BatchNorm.forward
        return sum(
            module.training and getattr(type(module), "forward", None) is own
            for root in self.roots(wrappers)
            for module in root.modules()
        )


def live_modules() -> Iterator[nn.Module]:
    """All modules of this process whose constructor has run."""
    for candidate in gc.get_objects():
        kind: Any = type(candidate)
        if issubclass(kind, nn.Module) and "_modules" in candidate.__dict__:
            yield candidate


def _smallest_module_with(parameters: Sequence[Tensor]) -> nn.Module | None:
    """The live module that holds most of the parameters and least besides.

    A wrapper holds the same parameters as what it wraps, so modules are counted, too: the inner one
    is taken. The order of live objects must not decide. It differs between ranks, and ranks that
    name a parameter differently look as if their gradients differed.
    """
    wanted = {id(parameter) for parameter in parameters}
    best: tuple[int, int, int, nn.Module] | None = None
    for candidate in live_modules():
        inside = {id(parameter) for parameter in candidate.parameters()}
        found = len(wanted & inside)
        if not found:
            continue
        key = (found, -len(inside), -sum(1 for _ in candidate.modules()))
        if best is None or key > best[:3]:
            best = (*key, candidate)
    return None if best is None else best[3]
