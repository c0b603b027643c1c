"""Show a piece of this project's code in a chapter, from where it lives: never from a copy."""

from __future__ import annotations

import inspect
from typing import Any

from IPython.display import Markdown


def source(thing: Any) -> Markdown:
    """The source text of a function, class or module, as a highlighted block of Python."""
    return Markdown(f"```python\n{inspect.getsource(thing).rstrip()}\n```")
