"""Code shown in a chapter is the code that runs."""

import inspect

from labkit.book.show import source


class Example:
    """A class to be shown."""

    def method(self) -> int:
        """Say seven."""
        return 7


def bare() -> int:
    return 8


def test_the_source_is_shown_as_a_block_of_python():
    shown = source(Example).data
    assert shown == f"```python\n{inspect.getsource(Example).rstrip()}\n```"


def test_several_things_stand_in_one_block_without_their_own_docstrings():
    shown = source(Example.method, bare, docstrings=False).data
    assert shown.splitlines() == [
        "```python",
        "def method(self) -> int:",
        "    return 7",
        "",
        "",
        "def bare() -> int:",
        "    return 8",
        "```",
    ]
