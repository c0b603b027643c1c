"""Micro-batches that are cleared, gradients that are not, and factors and clips that hide."""

from typing import Any

from doctor.journals import OWN, SAME, fact, findings, run_of, run_with_steps, window
from doctor.test_intended import scaled_by

from ddp_doctor.facts.merged import Run
from ddp_doctor.facts.types import ClipFact, CollectiveFact, DroppedFact


def clearing(
    lost: int, call: int = 1, inputs: list[int] | None = None, steps: int = 3, **more: Any
) -> Run:
    """Steps in which zero_grad cleared `lost` backwards before the one that counts."""
    windows = []
    for mine in OWN:
        one = window([4], [1.0], SAME, mine, left=SAME, **more)
        one["backwards"][0] |= {"call": 1, "values": [mine["weight"]]}
        one["dropped"] = [fact(DroppedFact, call=call)] * lost
        hashes = inputs or range(lost + 1)
        one["inputs"] = [[[hash_ + 100 * mine["weight"], 8, [4, 2]]] for hash_ in hashes]
        windows.append(one)
    plain = [{**one, "dropped": []} for one in windows]
    return run_with_steps([windows] * steps + [plain] * (3 - steps))


def test_micro_batches_that_zero_grad_clears_are_counted() -> None:
    found = findings(clearing(3))["micro_batches_discarded"]
    assert found.severity == "error"
    assert "4 micro-batches ran backward" in found.evidence
    assert "gradients of 3 of them" in found.evidence


def test_gradients_may_be_cleared_that_are_not_those_of_a_micro_batch() -> None:
    assert findings(clearing(0)) == {}
    assert findings(clearing(1, call=2)) == {}  # an attack on the inputs, elsewhere in the code
    assert findings(clearing(1, inputs=[7, 7])) == {}  # SAM: the same batch once more
    assert findings(clearing(1, steps=1)) == {}  # a batch with a NaN is skipped
    run = clearing(3)  # the script wrote what it had kept into .grad
    for rank in run.ranks:
        for one in rank.windows:
            one["snapshot"]["grads"] = {"weight": 9.0, "bias": 9.0}
    assert findings(run) == {}


def keeping(*leftover: int) -> Run:
    """The second optimizer's gradients stay: a GAN's discriminator in the generator's step."""
    steps = []
    for count in leftover:
        windows = [window([4], [1.0], SAME, mine) for mine in OWN]
        for one, mine in zip(windows, OWN, strict=True):
            one["backwards"][0]["values"] = [mine["weight"]]
            one["backwards"][0]["leftover"] = {"0": count, "1": 2}
        steps.append(windows)
    return run_with_steps(steps)


def test_gradients_that_are_never_cleared_are_found() -> None:
    run = keeping(0, 2, 2, 2)
    found = findings(run)["gradients_not_cleared"]
    assert "Step 1, rank 0" in found.evidence
    assert "3 of 3 observed steps" in found.evidence
    assert findings(keeping(0, 0, 0, 0)) == {}
    assert findings(keeping(0, 2, 0, 0)) == {}


def beside_an_idle_optimizer(backwards: dict[str, int], **facts: Any) -> Run:
    windows = []
    for mine in OWN:
        one = window([4, 4], [0.5, 0.5], SAME, mine, **facts)
        for each in (*one["clips"], *one["collectives"]):
            each["backwards"] = backwards
        windows.append(one)
    return run_of(windows)


def test_an_optimizer_that_never_steps_hides_no_early_clip_and_no_early_all_reduce() -> None:
    clip = fact(ClipFact, kind="norm", norm=3.0, limit=1.0)
    early = beside_an_idle_optimizer({"0": 1, "1": 40}, clips=[{**clip}])
    assert "clipped_per_micro_batch" in findings(early)
    late = beside_an_idle_optimizer({"0": 2, "1": 1}, clips=[{**clip}])
    assert "clipped_per_micro_batch" not in findings(late)
    loss = fact(CollectiveFact, op="all_reduce", what="activation", grad=True, numel=4)
    early = beside_an_idle_optimizer({"0": 1, "1": 40}, collectives=[{**loss}])
    assert "loss_reduced_before_backward" in findings(early)
    late = beside_an_idle_optimizer({"0": 2, "1": 1}, collectives=[{**loss}])
    assert "loss_reduced_before_backward" not in findings(late)


def test_means_of_micro_batches_that_are_divided_twice_are_named() -> None:
    """accelerator.backward(loss / 4): Accelerate divides by the accumulation steps, too."""

    def found(k: int, *operands: str, terms: int = 1) -> set[str]:
        by = [scaled_by("/", float(k), each) for each in operands]
        windows = [window([4] * k, [1 / k**2] * k, SAME, mine, scaling=by) for mine in OWN]
        for backward in (b for one in windows for b in one["backwards"] if terms > 1):
            term = backward["terms"][0]
            backward["terms"].append({**term, "function": "l1_loss", "factor": term["factor"] / 2})
        return set(findings(run_of(windows)))

    assert found(4) == {"loss_divided_twice"}
    assert found(2, "steps", "accumulation") == {"loss_divided_twice"}
    assert found(2, "2", "accumulation") == set()  # half of a square
    assert found(4, terms=2) == set()  # the mean of four losses
