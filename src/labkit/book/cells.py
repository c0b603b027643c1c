"""What a chapter's cells call: show source code, and check a reader's answer to an exercise.

@checker
def check_average(average):
    found = run_ranks(step, 2, average)
    assert found == wanted, f"rank 0 has {found[0]}, and the average is {wanted[0]}"


check_average(my_average)  # prints "Right." or "Not yet: …"
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from IPython.display import Markdown

from labkit.launch.ranks import RanksError, ends_when_stuck


def checker(check: Callable[..., Any]) -> Callable[..., None]:
    """`check`, but it prints "Right." if it returns, and "Not yet:" with the reason if it fails.

    It fails by an assertion, by a stub's NotImplementedError, and by ranks that are killed, do not
    return in time, or of which none has moved for two seconds: the message says where each waits.
    Any other exception prints "Not yet:", too, and passes through, because the reader needs its
    traceback.
    """

    @wraps(check)
    def run(*answers: Any) -> None:
        try:
            with ends_when_stuck(2):
                check(*answers)
        except (AssertionError, NotImplementedError, RanksError) as error:
            print(f"Not yet: {error}")
        except Exception:
            print("Not yet: it raises an error.")
            raise
        else:
            print("Right.")

    return run


def untouched(answer: Callable[..., Any], but: str = "") -> Callable[..., Any]:
    """`answer`, but it raises AssertionError if it changes what it is given, by a single bit.

    Compared are tensors, also in lists, tuples, and dictionaries; and of a module its parameters
    (values, gradients, `requires_grad`, and which objects they are), buffers, and modes. `but` is
    what it may change: "gradients", "weights" (and buffers), or "tensors" outside of modules. An
    answer that raises may not change more.
    """

    @wraps(answer)
    def call(*args: Any, **options: Any) -> Any:
        before = dict(_parts("arguments", args))
        try:
            return answer(*args, **options)
        finally:
            now = dict(_parts("arguments", args))
            for name in before | now:
                kind = name.rpartition(" of ")[0] or "tensors"
                same = kind in but or _is_same(before.get(name), now.get(name))
                assert same, f"it changes the {name}"

    return call


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What may be changed in `value`, by name; copies of tensors."""
    if isinstance(value, torch.Tensor):
        yield name, value.detach().clone()
    elif isinstance(value, torch.nn.Module):
        for each, parameter in value.named_parameters():
            gradient = None if parameter.grad is None else parameter.grad.clone()
            yield f"gradients of {each}", gradient
            yield f"weights of {each}", parameter.detach().clone()
            yield f"requires_grad of {each}", parameter.requires_grad
            yield f"parameter object of {each}", id(parameter)
        for each, buffer in value.named_buffers():
            yield f"weights of {each}", buffer.clone()
        yield "modes of the modules", [each.training for each in value.modules()]
    elif isinstance(value, list | tuple | dict):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in pairs:
            yield from _parts(f"{name}[{key!r}]", each)


def _is_same(before: Any, now: Any) -> bool:
    if not isinstance(before, torch.Tensor) or not isinstance(now, torch.Tensor):
        return type(before) is type(now) and before == now
    if before.shape != now.shape or before.dtype != now.dtype:
        return False
    return bool(((before == now) | ((before != before) & (now != now))).all())


def source(*things: Any, docstrings: bool = True) -> Markdown:
    """The code of functions, classes, or modules, read from their files, as one block of Python.

    `docstrings=False` leaves out the docstrings of functions and classes, for pages that explain
    them.
    """
    texts = [textwrap.dedent(inspect.getsource(thing)).rstrip() for thing in things]
    if not docstrings:
        texts = [_without_docstring(text) for text in texts]
    return Markdown("```python\n" + "\n\n\n".join(texts) + "\n```")


def _without_docstring(text: str) -> str:
    definition = ast.parse(text).body[0]
    if not isinstance(definition, ast.FunctionDef | ast.ClassDef) or not ast.get_docstring(
        definition
    ):
        return text
    docstring = definition.body[0]
    if len(definition.body) == 1 or docstring.lineno == definition.lineno:
        return text  # nothing would be left
    lines = text.splitlines()
    del lines[docstring.lineno - 1 : docstring.end_lineno]
    return "\n".join(lines)
