"""Micro-batches: gradients that are cleared too often or never, and windows that are cut short."""

from collections.abc import Callable, Iterator

from ddp_doctor.explain.combination import untouched
from ddp_doctor.explain.equation import Equation, Step, by_optimizer, usual_length
from ddp_doctor.explain.findings import Finding, finding
from ddp_doctor.explain.numbers import near, number
from ddp_doctor.explain.rules.loss import WINDOW
from ddp_doctor.facts.merged import Run, Window
from ddp_doctor.facts.types import ScalingFact, WindowFact


def micro_batches_discarded(run: Run, equation: Equation) -> Iterator[Finding]:
    """zero_grad runs between the micro-batches of one step, so all but the last ones are lost.

    Right if the lost backwards are not micro-batches: another call made them (an attack on the
    inputs), they see the same data (SAM), or the script keeps their gradients somewhere and writes
    the result into `.grad`. Right if it is rare: a batch with a NaN is skipped.
    """
    steps = {(step.window.n, step.optimizer): step for step in equation.steps}

    def lost(window: Window, fact: WindowFact) -> int:
        return _lost(window, fact, steps.get((window.n, window.optimizer)))

    for windows in by_optimizer(run.complete).values():
        for window, rank, fact, count, often in _usual(windows, lost):
            yield finding(
                "micro_batches_discarded",
                f"Step {window.n}, rank {rank}: {count + len(fact['backwards'])} micro-batches ran "
                f"backward, and zero_grad() cleared the gradients of {count} of them before the "
                f"optimizer stepped. {often}",
                fact["backwards"][-1]["place"],
                "Call optimizer.zero_grad() once per step: right after optimizer.step(), or before "
                "the first micro-batch.",
            )


def _usual(
    windows: list[Window], count: Callable[[Window, WindowFact], int]
) -> Iterator[tuple[Window, int, WindowFact, int, str]]:
    """The first window and rank for which there is something to count, if most windows have one."""
    found = [
        (window, rank, fact, counted)
        for window in windows
        for rank, fact in window
        if (counted := count(window, fact))
    ]
    seen = len({window.n for window, *_ in found})
    if seen > 1 and 2 * seen > len(windows):
        yield *found[0], f"Seen in {seen} of {len(windows)} observed steps."


def _lost(window: Window, fact: WindowFact, step: Step | None) -> int:
    """How many micro-batches of this window zero_grad has cleared."""
    if not fact["backwards"]:
        return 0
    last = fact["backwards"][-1]
    dropped = [
        backward for backward in fact["dropped"] if backward["optimizer"] == window.optimizer
    ]
    lost = [backward for backward in dropped if backward["call"] == last.get("call")]
    inputs = [str(group) for group in fact["inputs"] if group]
    if len(inputs) > 1:
        other_data = len(set(inputs)) == len(inputs)
    else:
        targets = [term["target"] for term in last.get("terms", ()) if "target" in term]
        other_data = all(
            backward["targets"] and backward["targets"] != targets for backward in lost
        )
    measured = step is not None and step.combination.kind in ("averaged", "summed", "scaled")
    return len(lost) if other_data and (measured or untouched(fact)) else 0


def gradients_not_cleared(run: Run, equation: Equation) -> Iterator[Finding]:
    """Backward adds to the very gradients that the step before has used: nothing cleared them.

    Right if a script does so on purpose, and then it changes them in between (a decay, what a
    compression left over): only gradients that are the same as right after the step count.
    """

    def kept(window: Window, fact: WindowFact) -> int:
        return 0 if "stepped_in_backward" in fact else window.leftover(fact)

    for windows in by_optimizer(run.complete).values():
        later = [window for window in windows[1:] if window.backwards]
        for window, rank, fact, count, often in _usual(later, kept):
            yield finding(
                "gradients_not_cleared",
                f"Step {window.n}, rank {rank}: when backward began, {count} parameters still held "
                f"the previous step's gradient, and backward added to it. {often}",
                fact["backwards"][0]["place"],
                "optimizer.zero_grad() in every step: before the first backward, or right after "
                "optimizer.step().",
            )


def partial_window_divided_by_k(run: Run, equation: Equation) -> Iterator[Finding]:
    """The last window of an epoch has fewer micro-batches and is divided as if it were full; or
    every window has one.

    Right if the short window is divided by its own length. A note if two short windows in a row
    make one full window: then the update was only cut in two.
    """
    for steps in by_optimizer(equation.steps).values():
        usual = usual_length(steps)
        lengths = {step.window.n: step.micros for step in steps}
        full = [step for step in steps if step.micros == usual]
        if usual == 1 and (divided := _divided_by_more(full[0])):
            yield finding(
                "partial_window_divided_by_k",
                f"Each step has one micro-batch, and its loss is divided by the number of "
                f"accumulation steps, {number(divided['value'])} ({divided['text']}): all weights "
                f"together are {number(full[0].total)}.",
                divided["place"],
                f"Step once per {number(divided['value'])} micro-batches, or do not divide.",
            )
            return
        if usual < 2 or not full or not near(full[0].total, 1.0):
            continue
        for step in steps:
            if step.micros < usual and near(step.total, step.micros / usual):
                neighbors = [lengths.get(step.window.n + by, usual) for by in (-1, 1)]
                cut = any(step.micros + length == usual for length in neighbors)
                yield finding(
                    "partial_window_divided_by_k",
                    f"Step {step.window.n} has {step.micros} of {usual} micro-batches, each still "
                    f"divided by {usual}: all weights together are {number(step.total)}.",
                    step.window.backward_place or step.place,
                    "Divide by the number of micro-batches in this window, or drop the last one.",
                    "note" if cut else None,
                )
                return


def _divided_by_more(step: Step) -> ScalingFact | None:
    """A division by the number of accumulation steps that leaves so small a part of the weights."""
    for one in step.scaling:
        named = WINDOW.search(one["operand"]) and one["op"] == "/" and one["value"] > 1
        if named and near(step.total * one["value"], 1.0):
            return one
    return None


RULES = (micro_batches_discarded, gradients_not_cleared, partial_window_divided_by_k)
