"""The models and recorded steps that the figure `bucket_timeline` shows, written into its script.

    python -m labkit.book.timeline_data          # after labs/benchmarks/recorded_steps.py --json …

The figure works without a server, so its numbers are part of its script: one JSON object between
two marked lines of `logic/bucket_timeline.js`. The sources are the stored recording and, for the
model of the page on choosing buckets, its parameters. Sizes are bytes, times are microseconds.
"""

import json
import re
from pathlib import Path
from typing import Any

from labkit.launch.scripts import project_root
from labkit.scenarios.toy_steps import small_transformer

RECORDING = Path("labs/benchmarks/results/recorded_steps.json")
SCRIPT = Path("book/_static/figures/logic/bucket_timeline.js")
ASSUMED = {"forward": 80_000, "backward": 160_000}  # as on the page on choosing buckets
_OF_A_WAY = ("caps", "ready", "forward", "bytes", "launched", "done")
_BEGIN = "  // Data: written by python -m labkit.book.timeline_data.\n"
_END = "  // End of data.\n"


def models_of_figure(recording: dict[str, Any]) -> dict[str, Any]:
    """By name: each recorded model with its recorded ways, and "assumed", which nobody timed."""
    found: dict[str, Any] = {}
    for name, model in recording["models"].items():
        ways = {way: {key: step[key] for key in _OF_A_WAY} for way, step in model["ways"].items()}
        found[name] = {**model, "ways": ways}
    parameters = reversed(list(small_transformer().model.parameters()))
    found["assumed"] = {"bytes": [one.nbytes for one in parameters], **ASSUMED, "ways": {}}
    return found


def written(script: str, recording: dict[str, Any]) -> str:
    """`script` with the data of `recording` between its marked lines.

    Raises ValueError if the script does not have each of these lines once.
    """
    shown = ("gbit_per_s", "latency_us", "ranks")
    data = {
        "link": {key: recording["link"][key] for key in shown},
        "models": models_of_figure(recording),
    }
    text = json.dumps(data, separators=(",", ":"))
    text = re.sub(r'(?=,"(?:models|stack|transformer|assumed|ways|ready|sent)":)', "\n", text)
    for line in (_BEGIN, _END):
        if script.count(line) != 1:
            raise ValueError(f"the script has {script.count(line)} lines {line!r}; it needs one")
    above, _, rest = script.partition(_BEGIN)
    below = rest.partition(_END)[2]
    return f"{above}{_BEGIN}  const DATA = {text};\n{_END}{below}"


def main() -> None:
    root = project_root()
    recording = json.loads((root / RECORDING).read_text())
    script = root / SCRIPT
    script.write_text(written(script.read_text(), recording))
    print(f"{SCRIPT}: {script.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    main()
