"""Score the doctor on its corpus: `python tests/doctor/score.py [-k PART-OF-A-NAME] [-v]`.

With --certificate, score the certificate alone. Its subject is the gradient of one step against
that of one process. Scripts with another fault (the order of data, cost, hangs, a division by the
number of micro-batches) are outside of what it measures, and are counted apart.
"""

import argparse
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from doctor.certified import certified
from doctor.corpus_runs import Outcome, Server, frameworks_of
from doctor.corpus_scripts import Script, corpus

from labkit.launch.forks import ForkServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only scripts with this in their name")
    parser.add_argument("-v", action="store_true", help="print every script's findings")
    parser.add_argument("--certificate", action="store_true", help="score the certificate alone")
    given = parser.parse_args()
    scripts = [script for script in corpus() if given.k in script.name]
    if given.certificate:
        _score_certificates(scripts)
        return
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


# What is wrong with the gradient of one step, as one process would compute it.
OF_ONE_GRADIENT = {
    *("unequal_denominators", "unequal_denominators_accumulation", "missing_world_size_factor"),
    *("scaled_by_world_size", "loss_reduced_before_backward", "own_reduction_sums"),
    *("wrapper_bypassed", "wrapper_lost", "model_changed_after_wrapping"),
    *("gather_without_gradient", "local_negatives", "last_micro_batch_unsynced"),
    *("clipped_before_sync", "clipped_per_micro_batch", "clipped_local_shards"),
    *("manual_all_reduce_skips_none", "optimizer_in_backward", "parameters_averaged"),
    *("world_size_one", "unused_parameters", "replicas_differ_at_start"),
    *("optimizer_on_other_parameters",),
}


def _score_certificates(scripts: list[Script]) -> None:
    counts: Counter[str] = Counter()

    def score(script: Script, forks: ForkServer) -> None:
        try:
            certificate = certified(forks, script)
            verdict = certificate["verdict"]
        except (EOFError, TimeoutError) as error:
            certificate, verdict = {"why": repr(error)}, "failed"
        if script.broken and not script.expected & OF_ONE_GRADIENT:
            outcome = "outside"
        elif verdict in ("not judged", "failed"):
            outcome = verdict
        else:
            outcome = "right" if (verdict == "equal") != script.broken else "WRONG"
        counts[outcome] += 1
        wanted = ",".join(sorted(script.expected)) or "none"
        print(
            f"{outcome:10} {script.name}: {verdict} ({wanted}); {certificate['why'][:160]}",
            flush=True,
        )

    for in_frameworks in (False, True):
        part = [script for script in scripts if bool(frameworks_of([script.text])) == in_frameworks]
        forks = ForkServer(*frameworks_of([script.text for script in part]))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(score, part, [forks] * len(part)))
        forks.stop()
    judged = counts["right"] + counts["WRONG"]
    inside = judged + counts["not judged"] + counts["failed"]
    print(
        f"right {counts['right']} of {judged} judged; judged {judged} of {inside}; "
        f"outside of what it measures: {counts['outside']}"
    )


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
