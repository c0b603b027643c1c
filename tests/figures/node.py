"""Call the functions of a figure's logic script in node, and get what they return."""

import json
import math
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import playwright

from labkit.launch.scripts import project_root

# pip brings it with Playwright.
NODE = Path(playwright.__file__).parent / "driver" / "node"
LOGIC = project_root() / "book" / "_static" / "figures" / "logic"
# JSON has no NaN and no infinity, and a JavaScript number has: they travel as text.
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_PROGRAM = """
const logic = require(process.argv[1]);
const special = (key, value) =>
  typeof value === "number" && !Number.isFinite(value) ? { number: String(value) } : value;
for (const line of require("fs").readFileSync(0, "utf8").trim().split("\\n")) {
  const [name, ...given] = JSON.parse(line);
  console.log(JSON.stringify({ result: logic[name](...given) }, special));
}
"""


def call(figure: str, function: str, cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """`function` of the figure's logic, once per case; a case is a tuple of arguments for JSON.

    One node process for all cases. A function that returns nothing gives None. Raises
    AssertionError if the function raises, or if node does not end in five minutes.
    """
    lines = [json.dumps([function, *case], allow_nan=False) for case in cases]
    done = subprocess.run(
        [NODE, "-e", _PROGRAM, str(LOGIC / f"{figure}.js")],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = (json.loads(line, object_hook=_plain) for line in done.stdout.splitlines())
    results = [one.get("result") for one in said]
    assert len(results) == len(lines)
    return results


def _plain(value: dict[str, Any]) -> Any:
    return _SPECIAL[value["number"]] if list(value) == ["number"] else value
