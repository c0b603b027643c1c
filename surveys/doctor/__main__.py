"""Score the doctor on its corpus.

    PYTHONPATH=tests python -m surveys.doctor [-k PART] [-v] [--kept FOLDER]

The path has the harness that runs a script under the doctor, which the tests use, too.

Each script runs three times: plain, with the doctor, and under `--certify`. One run prints three
scores: the certificate alone, the rules alone, and both, where a hint that the certificate
contradicts does not count. README.md says what counts as right.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from doctor.harness.certify import certified
from doctor.harness.runs import Server, frameworks_of
from doctor.harness.scripts import Script, corpus

from ddp_doctor.explain.answers import with_answers
from ddp_doctor.explain.findings import ORDER, Prediction, finding
from ddp_doctor.facts.certificate import Certificate
from labkit.launch.forks import ForkServer

# What is wrong with the gradient of one step, as one process would compute it.
OF_ONE_GRADIENT = {
    *("unequal_denominators", "unequal_denominators_accumulation", "missing_world_size_factor"),
    *("scaled_by_world_size", "loss_reduced_before_backward", "own_reduction_sums"),
    *("wrapper_bypassed", "wrapper_lost", "model_changed_after_wrapping"),
    *("gather_without_gradient", "last_micro_batch_unsynced"),
    *("clipped_before_sync", "clipped_local_shards"),
    *("manual_all_reduce_skips_none", "optimizer_in_backward", "parameters_averaged"),
    *("world_size_one", "replicas_differ_at_start"),
    *("optimizer_on_other_parameters",),
}
BAD = ("missed", "false alarm", "failed")
Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only scripts with this in their name")
    parser.add_argument("-v", action="store_true", help="print every script, not only misses")
    parser.add_argument("--kept", type=Path, help="a folder of results: what is there is not run")
    given = parser.parse_args()
    scripts = [script for script in corpus() if given.k in script.name]
    if given.kept is not None:
        given.kept.mkdir(parents=True, exist_ok=True)
    counts: Counter[tuple[str, str]] = Counter()
    for in_frameworks in (False, True):
        part = [script for script in scripts if bool(frameworks_of([script.text])) == in_frameworks]
        for script, result in zip(part, _results(part, given.kept), strict=True):
            scores = _scores(script, result)
            counts.update(scores.items())
            counts["output", "changed"] += bool(result["changed"])
            counts["found", _level(script, result)] += 1
            if given.v or result["changed"] or set(BAD) & set(scores.values()):
                _print(script, result, scores)
    _print_scores(counts)


def _results(scripts: list[Script], kept: Path | None) -> Iterator[Result]:
    """What rules and certificate say about each script, in order; two run at a time."""
    frameworks = frameworks_of([script.text for script in scripts])
    forks = ForkServer(*frameworks)
    with Server(*frameworks) as server, ThreadPoolExecutor(2) as pool:

        def result(script: Script) -> Result:
            found = _kept(kept, f"{script.name}.rules", lambda: _by_rules(script, server))
            certificate = _kept(
                kept, f"{script.name}.certificate", lambda: _certificate(script, forks)
            )
            return found | {"certificate": certificate}

        yield from pool.map(result, scripts)
    forks.stop()


def _kept(folder: Path | None, name: str, made: Callable[[], Result]) -> Result:
    """What is in the folder under this name; else it is made, and put there."""
    if folder is None:
        return made()
    path = folder / f"{name}.json"
    if not path.exists():
        path.write_text(json.dumps(made(), indent=1))
    return dict(json.loads(path.read_text()))


def _by_rules(script: Script, server: Server) -> Result:
    looked, plain = server.run(script, doctor=True), server.run(script, doctor=False)
    report = looked.report or {"findings": [], "notes": ["stopped: there is no report"]}
    return {
        "findings": {one["code"]: one["severity"] for one in report["findings"]},
        "predicts": {o["code"]: o["predicts"] for o in report["findings"] if "predicts" in o},
        "stopped": [note for note in report["notes"] if "stopped" in note],
        "exit": looked.codes,
        "changed": looked.differences(plain),
    }


def _certificate(script: Script, forks: ForkServer) -> Result:
    try:
        return certified(forks, script)
    except (EOFError, TimeoutError) as error:
        return Certificate("failed", repr(error)).as_json()


def _scores(script: Script, result: Result) -> dict[str, str]:
    """How the certificate, the rules, and both do on this script, in a word each."""
    certificate, severities = result["certificate"], result["findings"]
    left = _answered(certificate, result)
    failed = bool(result["stopped"]) or (not script.broken and any(result["exit"]))
    # What is different by design, such as local SGD, is called different without an alarm.
    measured = certificate["verdict"] in ("scaled", "different")
    measured = measured and "by design" not in certificate["why"]
    inside = not script.broken or bool(script.expected & OF_ONE_GRADIENT)

    def score(findings: Result, measured: bool) -> str:
        if script.broken:
            found = measured or script.expected <= findings.keys()
            return "right" if found and not failed else "missed"
        alarm = measured or failed or set(findings.values()) & {"error", "warning"}
        return "false alarm" if alarm else "right"

    alone = certificate["verdict"]
    if not inside:
        alone = "outside"
    elif alone not in ("not judged", "failed"):
        alone = (
            ("missed", "right")[measured] if script.broken else ("right", "false alarm")[measured]
        )
    return {
        "certificate": alone,
        "rules": score(severities, False),
        "both": score(left, measured and inside),
    }


def _answered(certificate: Result, result: Result) -> Result:
    """The codes and severities of a run's findings, with the certificate's answers to its hints."""
    of = Certificate.of_json(certificate)
    found = []
    for code, severity in result["findings"].items():
        predicts = result["predicts"].get(code)
        if predicts is not None:
            predicts = Prediction(**predicts | {"shares": tuple(predicts["shares"])})
        found.append(finding(code, "", "", "", severity, predicts))
    answers = with_answers(of, found)
    return {one.code: one.severity for one in answers if not one.answer.startswith("contradicted")}


def _level(script: Script, result: Result) -> str:
    """The weakest severity that names the cause; of a correct script, the strongest of all."""
    severities = result["findings"]
    named = [severities.get(code, "nothing") for code in script.expected] or list(
        severities.values()
    )
    order = [*ORDER, "nothing"]
    if script.broken:
        return f"broken: {max(named, key=order.index)}"
    return f"correct: {min(named, key=order.index, default='nothing')}"


def _print(script: Script, result: Result, scores: dict[str, str]) -> None:
    certificate = result["certificate"]
    expected = ", ".join(sorted(script.expected)) or "none"
    print(f"{script.name} (expected: {expected}): {scores}")
    print(f"    certificate: {certificate['verdict']}. {certificate['why'][:200]}")
    print(f"    rules: {result['findings']}; exit {result['exit']} {result['stopped'] or ''}")
    if result["changed"]:
        print(f"    output changed: {result['changed']}")
    sys.stdout.flush()


def _print_scores(counts: Counter[tuple[str, str]]) -> None:
    for who in ("certificate", "rules", "both"):
        of = {word: number for (one, word), number in sorted(counts.items()) if one == who}
        judged = sum(of.get(word, 0) for word in ("right", "missed", "false alarm"))
        print(f"{who}: {of}; right {of.get('right', 0)} of {judged} judged")
    print({level: number for (of, level), number in sorted(counts.items()) if of == "found"})
    print(f"output changed: {counts['output', 'changed']}")


if __name__ == "__main__":
    main()
