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
    parser.add_argument("--once", action="store_true", help="only with the doctor: compare nothing")
    parser.add_argument("-v", action="store_true", help="print every script's findings")
    given = parser.parse_args()
    scripts = [script for script in corpus() if given.k in script.name]
    found = broken = false = correct = changed = 0
    for in_frameworks in (False, True):
        part = [script for script in scripts if bool(frameworks_of([script.text])) == in_frameworks]
        if not part:
            continue
        with Server(frameworks_of([script.text for script in part])) as server:
            for script in part:
                looked = server.run(script, doctor=True)
                plain = looked if given.once else server.run(script, doctor=False)
                same = looked.same(plain)
                changed += not same
                wrong = _judge(script, looked)
                if script.expected:
                    broken += 1
                    found += not wrong
                else:
                    correct += 1
                    false += bool(wrong)
                _say(script, looked, wrong, looked.differences(plain), given.v)
    print(f"found {found} of {broken}, false alarms {false} of {correct}, output changed {changed}")


def _judge(script: Script, outcome: Outcome) -> str:
    """What is wrong with the report, or an empty string."""
    if outcome.report is None:
        return "no report"
    findings = outcome.report["findings"]
    if script.expected:
        missing = script.expected - {each["code"] for each in findings}
        return f"missing {', '.join(sorted(missing))}" if missing else ""
    alarms = [each["code"] for each in findings if each["severity"] != "note"]
    return f"false alarm {', '.join(alarms)}" if alarms else ""


def _say(script: Script, outcome: Outcome, wrong: str, changes: str, verbose: bool) -> None:
    name = script.name
    codes = []
    if outcome.report is not None:
        codes = [f"{each['severity'][0]}:{each['code']}" for each in outcome.report["findings"]]
        stopped = [
            each for each in outcome.report["notes"] if "stopped" in each or "failed" in each
        ]
        if stopped:
            print(f"NOTE     {name}: {stopped}", flush=True)
    if wrong:
        print(f"WRONG    {name}: {wrong}; found {codes}; exit {outcome.codes}", flush=True)
        if outcome.report is None or any(outcome.codes):
            print(outcome.errors[-1500:])
    elif verbose:
        print(f"right    {name} ({outcome.seconds:.1f} s): {codes}", flush=True)
    if changes:
        print(f"CHANGED  {name}: {changes}", flush=True)


if __name__ == "__main__":
    main()
