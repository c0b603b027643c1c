"""An implementation that a student's test has to judge, in a process that is not the student's.

To the student's rank every implementation is the same class, `Remote`: it says which number it has,
and exchanges numbers. The implementation runs in a process of its own per rank (`answer_calls`), on
a module that has the same parameters; these processes have a process group of their own. So in the
student's process, implementations differ only in what they do to the weights and the gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Wrap = Callable[[nn.Module], Any]


class Remote:
    """What `wrap(model)` returns: call it like the model, then `finish()` after backward."""

    def __init__(self, link, number: int, module: nn.Module) -> None:
        self._link = link
        self._number = number
        self.module = module
        weights = {name: p.detach() for name, p in self._named().items()}
        trained = [name for name, p in self._named().items() if p.requires_grad]
        answer = self._ask("wrap", {"weights": weights, "trained": trained})
        with torch.no_grad():
            for name, parameter in self._named().items():
                parameter.copy_(_tensor(answer[name], parameter))

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def finish(self) -> None:
        """Combine the gradients, in the way of the implementation."""
        gradients = {name: p.grad for name, p in self._named().items()}
        answer = self._ask("finish", {"gradients": gradients})
        for name, parameter in self._named().items():
            value = answer[name]
            parameter.grad = None if value is None else _tensor(value, parameter)

    def _named(self) -> dict[str, nn.Parameter]:
        return {str(n): p for n, p in enumerate(self.module.parameters())}

    def _ask(self, step: str, value: dict[str, Any]) -> Any:
        return self._link.call(step, self._number, _plain(value))


def remotes(link, number: int) -> Callable[[nn.Module], Remote]:
    """The function `wrap` of implementation `number`. All are named alike."""

    def wrap(module: nn.Module) -> Remote:
        return Remote(link, number, module)

    return wrap


def answer_calls(channel_receive, tell, implementations: list[Wrap]) -> None:
    """Answer calls, one after the other, until the connection is closed."""
    wrapped: dict[int, _Stand] = {}
    while (call := channel_receive()) is not None:
        try:
            number, value = call["which"], call["value"]
            if call["step"] == "wrap":
                wrapped[number] = _Stand(implementations[number], value)
                answer = wrapped[number].weights()
            else:
                answer = wrapped[number].finish(value["gradients"])
            tell({"kind": "call answered", "value": _plain(answer)})
        except Exception as error:
            tell({"kind": "call answered", "failed": f"{type(error).__name__}: {error}"[:300]})


class _Stand(nn.Module):
    """Has the parameters of the student's model, and any gradients that it is told to have."""

    def __init__(self, implementation: Wrap, value: dict[str, Any]) -> None:
        super().__init__()
        trained = set(value["trained"])
        for name, array in value["weights"].items():
            parameter = nn.Parameter(torch.from_numpy(array), requires_grad=name in trained)
            self.register_parameter(f"p{name}", parameter)
        self._wrapped = [implementation(self)]

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum((getattr(self, f"p{name}") * g).sum() for name, g in gradients.items())

    def weights(self) -> dict[str, Tensor]:
        return {name[1:]: p.detach() for name, p in self.named_parameters()}

    def finish(self, gradients: dict[str, Any]) -> dict[str, Any]:
        for parameter in self.parameters():
            parameter.grad = None
        there = {name: torch.from_numpy(g) for name, g in gradients.items() if g is not None}
        wrapped = self._wrapped[0]
        loss = wrapped(there)
        if isinstance(loss, Tensor):
            loss.backward()
        wrapped.finish()
        return {name[1:]: p.grad for name, p in self.named_parameters()}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu").contiguous().clone().numpy()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _tensor(array: Any, like: Tensor) -> Tensor:
    return torch.from_numpy(array).view_as(like).to(like.dtype)
