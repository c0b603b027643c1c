"""What a notebook understands and Python does not: magics and shell commands, taken out of a cell.

`%%time` above a solution, `%matplotlib inline`, `!pip list`, `name?`: a student's notebook runs
with them, so a solution must not be lost over them. Each becomes a blank line or `pass`, which
keeps the numbers of the lines; what it did is not done.
"""

import ast
import re

# Cell magics whose body is Python all the same.
_PYTHON = {"time", "timeit", "capture", "prun", "python", "python3", "pypy", "memit", "mprun"}
_MAGIC = re.compile(r"^(\s*)(%[A-Za-z_]\w*.*|!.*|[\w.]+\?\??\s*|\?\??[\w.]+\s*)$")
_ASSIGNED = re.compile(r"^(\s*[\w.,\s]+=\s*)(%[A-Za-z_]\w*.*|!.*)$")
_MOST = 100  # magics of one cell
_TIMED = re.compile(r"^(\s*)%(?:time|timeit|prun|memit)\s+(?!-)(.*\S)\s*$")


def without_magics(source: str) -> tuple[str, list[str]]:
    """`source` as Python, with as many lines, and what was taken out of it.

    Valid Python is left alone.
    """
    if _is_python(source):
        return source, []
    lines = source.split("\n")
    ignored: list[str] = []
    first = next((n for n, line in enumerate(lines) if line.strip()), 0)
    if lines[first].lstrip().startswith("%%"):
        name = lines[first].strip()[2:].split(" ")[0]
        ignored.append(f"%%{name}"[:40])
        lines[first] = ""
        if name not in _PYTHON:
            return source, []  # another language: nothing of it is Python
    for _ in range(_MOST):
        error = _syntax_error("\n".join(lines))
        number = (error.lineno or 0) - 1 if error else -1
        if not 0 <= number < len(lines):
            break
        # Only a line at which Python gives up: inside a text one may begin with % or !, too.
        replaced = _replaced(lines[number], ignored)
        if replaced == lines[number]:
            break  # the student's own syntax error, which is to be seen as it is
        lines[number] = replaced
    return "\n".join(lines), ignored


def _replaced(line: str, ignored: list[str]) -> str:
    timed = _TIMED.match(line)
    if timed:
        ignored.append(line.strip().split(" ")[0])
        return timed[1] + timed[2]
    for pattern, instead in ((_MAGIC, "pass"), (_ASSIGNED, "None")):
        found = pattern.match(line)
        if found:
            ignored.append(found[2].strip()[:40])
            return found[1] + instead
    return line


def _is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _syntax_error(source: str) -> SyntaxError | None:
    try:
        ast.parse(source)
    except SyntaxError as error:
        return error
    except (ValueError, RecursionError, MemoryError):
        return None
    return None
