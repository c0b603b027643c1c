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
from collections.abc import Callable
from functools import wraps
from typing import Any

from IPython.display import Markdown

from labkit.launch.ranks import RanksTimeoutError, ends_when_stuck


def checker(check: Callable[..., Any]) -> Callable[..., None]:
    """`check`, but it prints "Right." if it returns, and "Not yet:" with the reason if it fails.

    It fails by an assertion, by a stub's NotImplementedError, and by ranks that do not return in
    time, or of which none has moved for two seconds: the message then says where each one waits.
    Any other exception prints "Not yet:", too, and passes through, because the reader needs its
    traceback.
    """

    @wraps(check)
    def run(*answers: Any) -> None:
        try:
            with ends_when_stuck(2):
                check(*answers)
        except (AssertionError, NotImplementedError, RanksTimeoutError) as error:
            print(f"Not yet: {error}")
        except Exception:
            print("Not yet: it raises an error.")
            raise
        else:
            print("Right.")

    return run


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
