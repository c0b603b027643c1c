"""Replace an attribute by a function that also observes, and put the original back."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins

Before = Callable[..., Any]
After = Callable[..., None]
Args = tuple[Any, ...]  # of a call that is observed
Kwargs = dict[str, Any]
# TorchScript's table holds their ids. They are kept, so that no other object gets one of these.
_REGISTERED: list[Any] = []


class Patches:
    """Replaced attributes. `undo` restores every one that nobody has replaced since."""

    def __init__(self, guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._guard = guard
        self._done: list[tuple[Any, str, Any, Any, bool]] = []
        self._handles: list[Any] = []

    def observe(
        self,
        owner: Any,
        name: str,
        before: Before | None = None,
        after: After | None = None,
        when: Callable[[], bool] | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Call `before(args, kwargs)` and `after(token, result, args, kwargs)` around a function.

        `token` is what `before` returned. If the original raises, `failed(error)` is called instead
        of `after`. The original is called with the caller's own arguments,
        and its result or exception is the caller's. Both observers are guarded: their errors end
        the observation, not the run. The original is called alone while torch.compile traces, and
        while `when()` is false.
        """
        original = getattr(owner, name, None)
        if original is None:
            return
        start = self._guard(before) if before else None
        finish = self._guard(after) if after else None
        give_up = self._guard(failed) if failed else None

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or (when is not None and not when()):
                return original(*args, **kwargs)
            token = start(args, kwargs) if start else None
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                if give_up:
                    give_up(error)
                raise
            if finish:
                finish(token, result, args, kwargs)
            return result

        _let_torchscript_see(original, observed)
        self.replace(owner, name, observed)

    def hold(self, handle: Any) -> None:
        """Remember a handle of a hook, to remove it with the rest."""
        self._handles.append(handle)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set the attribute and remember what was there."""
        inherited = isinstance(owner, type) and name not in vars(owner)
        original = getattr(owner, name)
        setattr(owner, name, value)
        self._done.append((owner, name, value, original, inherited))

    def undo(self) -> None:
        """Put the originals back, last first, and remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        while self._done:
            owner, name, value, original, inherited = self._done.pop()
            if getattr(owner, name, None) is not value:
                continue
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _let_torchscript_see(original: Callable[..., Any], observed: Any) -> None:
    """Let torch.jit.script compile the original where a script names the observed function.

    It knows built-in functions by their identity, in a table without a public name.
    """
    operator = _builtins._find_builtin(original)
    if operator is None:
        observed.__prepare_scriptable__ = lambda: original
    else:
        _builtins._register_builtin(observed, operator)
        _REGISTERED.append(observed)
