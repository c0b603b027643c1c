"""Certify public programs at pinned commits; store what was measured, and print it on the page.

python -m surveys.programs COPIES [NAME …]
"""

import argparse
import datetime
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

from surveys.programs.programs import PROGRAMS, Program

HERE = Path(__file__).resolve().parent
TABLE = HERE.parents[1] / "book/reference/public_programs.json"
PAGE = TABLE.with_suffix(".md")
START, END = "% The next lines are written by surveys/programs.\n", "% Until here.\n"
LIMIT = 1200  # seconds for one program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("copies", type=Path, help="git clones, as COPIES/owner/name")
    parser.add_argument("names", nargs="*", help="only programs whose names contain one of these")
    given = parser.parse_args()
    for program in PROGRAMS:
        if given.names and not any(name in program.name for name in given.names):
            continue
        copy = given.copies / program.repository
        if not copy.is_dir():
            print(f"{program.name}: no copy in {copy}; left as stored.")
            continue
        row = measured(program, copy)
        print(f"{program.name}: {row['verdict']}. {row['why']}", flush=True)
        stored = json.loads(TABLE.read_text()) if TABLE.exists() else []
        rows = {one["name"]: one for one in stored} | {program.name: row}
        kept = [rows[one.name] for one in PROGRAMS if one.name in rows]
        TABLE.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    before, rest = PAGE.read_text().split(START)
    rows = json.loads(TABLE.read_text())
    PAGE.write_text(before + START + printed(rows) + END + rest.split(END)[1])
    return 0


def measured(program: Program, copy: Path) -> dict[str, Any]:
    """One row: the program, and what the doctor says of it."""
    with tempfile.TemporaryDirectory(prefix="public-") as name:
        temporary = Path(name)
        checkout = temporary / "program"
        _check_out(program, copy, checkout)
        shims = temporary / "shims"
        shims.mkdir()
        for shim in program.shims:
            source = HERE / "shims" / shim
            (shutil.copytree if source.is_dir() else shutil.copy)(source, shims / shim)
        program.data(checkout)
        report = _certified(program, checkout / program.folder, shims, temporary / "report.json")
    names = ("name", "repository", "commit", "command", "launched", "known", "report")
    return {
        **{name: getattr(program, name) for name in names},
        "shims": list(program.shims),
        "packages": list(program.packages),
        "sizes": [new for changes in program.sizes.values() for new in changes.values()],
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        **report,
    }


def printed(rows: list[dict[str, Any]]) -> str:
    """The rows as the page shows them: a table, then the commands."""
    lines = ["| program | publicly known | certificate | ratio | cosine | rules |"]
    lines += ["|---|---|---|--:|--:|---|"]
    for row in rows:
        name = f"[{row['name']}](https://github.com/{row['repository']}/tree/{row['commit']})"
        known = f"{row['known']} ([report]({row['report']}))" if row["known"] else ""
        verdict = row["verdict"] + (f", {row['factor']}" if row["factor"] else "")
        numbers = [
            "" if row[key] is None or row["verdict"] == "not judged" else f"{row[key]:.4f}"
            for key in ("ratio", "cosine")
        ]
        said = [f"`{f['code']}`" for f in row["findings"] if f["severity"] != "note"]
        lines.append(f"| {' | '.join([name, known, verdict, *numbers, ', '.join(said)])} |")
    dates = sorted({row["date"] for row in rows})
    versions = " and ".join(sorted({row["torch"] for row in rows}))
    lines += [
        "",
        "````{admonition} What was run, and what the certificate says",
        ":class: dropdown",
        f"Measured on {' to '.join(dict.fromkeys((dates[0], dates[-1])))} with torch {versions}.",
        "",
    ]
    lines += [_run(row) for row in rows]
    return "\n".join([*lines, "````", ""])


def _run(row: dict[str, Any]) -> str:
    """One program's command, and why it is not equal."""
    said = "" if row["verdict"] == "equal" else f" {row['why']}"
    line = f"- **{row['name']}**:{said} `{row['command']}`"
    for name, title in (("packages", "packages"), ("shims", "shims"), ("sizes", "changed")):
        if listed := [one for one in row.get(name, []) if not row["command"].startswith(one)]:
            line += f"; {title}: " + ", ".join(f"`{one.strip('# ')}`" for one in listed)
    return line + "."


def _check_out(program: Program, copy: Path, folder: Path) -> None:
    """The commit's files, with nothing changed but the sizes that the list names."""
    command = ["git", "-C", str(copy), "archive", program.commit, *program.paths.split()]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    for name, changes in program.sizes.items():
        text = (folder / name).read_text()
        for old, new in changes.items():
            if text.count(old) != 1:
                raise ValueError(f"{program.name}: {old!r} is {text.count(old)} times in {name}.")
            text = text.replace(old, new)
        (folder / name).write_text(text)


def _certified(program: Program, folder: Path, shims: Path, result: Path) -> dict[str, Any]:
    script, *arguments = shlex.split(program.command)
    if script in program.shims:
        script = str(shims / script)
    paths = [str(HERE.parents[1] / "src"), str(shims), str(folder)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    ranks = ["--ranks", "2"] if program.launched else []
    command = [sys.executable, "-m", "ddp_doctor", "--cpu", "--certify", *ranks]
    command += ["--json", str(result), "--folder", str(result.parent), script, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, timeout=LIMIT, capture_output=True, text=True
    )
    if not result.exists():
        raise RuntimeError(f"{program.name}: no report.\n{done.stderr[-2000:]}")
    report = json.loads(result.read_text().replace(f"{result.parent}/program/", ""))
    certificate = report["certificate"]
    kept = ("verdict", "why", "ratio", "cosine", "factor", "worst", "noise", "world")
    return {
        **{key: certificate[key] for key in (*kept, "micro_batches", "properties", "notes")},
        "findings": [
            {key: finding[key] for key in ("code", "severity")} for finding in report["findings"]
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
