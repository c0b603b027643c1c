"""Score the doctor on its corpus: `python tests/doctor/score.py [-k PART-OF-A-NAME] [-v]`."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from doctor.corpus_runs import Outcome, Server, frameworks_of
from doctor.corpus_scripts import Script, corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only scripts with this in their name")
    parser.add_argument("-v", action="store_true", help="print every script's findings")
    given = parser.parse_args()
    scripts = [script for script in corpus() if given.k in script.name]
    wrong: list[Script] = []
    changed = 0
    for in_frameworks in (False, True):
        part = [script for script in scripts if bool(frameworks_of([script.text])) == in_frameworks]
        with Server(*frameworks_of([script.text for script in part])) as server:
            for script in part:
                looked, plain = server.run(script, doctor=True), server.run(script, doctor=False)
                fault, codes = _judged(script, looked)
                if fault:
                    wrong.append(script)
                    print(f"WRONG    {script.name}: {fault}; found {codes}; exit {looked.codes}")
                    print(looked.errors[-1500:])
                elif given.v:
                    print(f"right    {script.name} ({looked.seconds:.1f} s): {codes}", flush=True)
                if changes := looked.differences(plain):
                    changed += 1
                    print(f"CHANGED  {script.name}: {changes}", flush=True)
    broken = sum(script.broken for script in scripts)
    missed = sum(script.broken for script in wrong)
    alarms = f"false alarms {len(wrong) - missed} of {len(scripts) - broken}"
    print(f"found {broken - missed} of {broken}, {alarms}, output changed {changed}")


def _judged(script: Script, outcome: Outcome) -> tuple[str, list[str]]:
    """What is wrong with the report, or an empty string; and its codes with their severities."""
    if outcome.report is None:
        return "no report", []
    if stopped := [note for note in outcome.report["notes"] if "stopped" in note]:
        return str(stopped), []
    findings = outcome.report["findings"]
    codes = [f"{finding['severity'][0]}:{finding['code']}" for finding in findings]
    if script.broken:
        missing = script.expected - {finding["code"] for finding in findings}
        return f"missing {', '.join(sorted(missing))}" if missing else "", codes
    if any(outcome.codes):
        return "it did not end with exit code 0", codes
    return "false alarm" if any(code[0] != "n" for code in codes) else "", codes


if __name__ == "__main__":
    main()
