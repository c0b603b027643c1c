"""Measure how broken a script is, without the doctor.

    python -m tests.doctor.measure_development [NAME …]

Runs the broken script and the correct one it was made from, and compares, step by step, the
gradients that the optimizer sees on rank 0: ratio of the norms and cosine, in the first step in
which they differ. Replicas are compared between the ranks of the broken script: the largest
difference of a parameter. With `--write` the second line of the script is replaced.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from tests.doctor import corpus_runs
from tests.doctor.corpus_runs import Script, Server, frameworks_of

DEVELOPMENT = Path(__file__).parent / "corpus" / "development"
REFERENCES = {
    "accumulate_divided_twice": "accumulate_no_sync",
    "accumulate_undivided": "accumulate_no_sync",
    "accelerate_divides_again": "accelerate_accumulates",
    "accelerate_loader_not_prepared": "accelerate_accumulates",
    "accelerate_scheduler": "accelerate_accumulates",
    "accelerate_unwrapped": "accelerate_accumulates",
    "captioner_accumulates": "captioner_counts_tokens",
    "clip_every_micro_batch": "clip_once",
    "clip_local_negatives": "clip_differentiable_gather",
    "clip_plain_gather": "clip_differentiable_gather",
    "dataset_before_seed": "mean_loss",
    "divided_by_world": "coefficient_half",
    "double_and_back": "mean_loss",
    "dropout_same_seed": "dropout_seed_per_rank",
    "every_micro_synced": "accumulate_no_sync",
    "find_unused": "mean_loss",
    "fsdp2_local_clip": "fsdp2",
    "hand_clip_first": "hand_average",
    "hand_different_start": "hand_average",
    "hand_left_local_rank": "hand_average",
    "hand_loss_reduced": "hand_average",
    "hand_no_reduction": "hand_average",
    "hand_parameters": "hand_average",
    "hand_rank_skips": "hand_average",
    "hand_same_data": "hand_average",
    "hand_sum": "hand_average",
    "last_in_no_sync": "accumulate_no_sync",
    "layer_replaced": "mean_loss",
    "lightning_divides_again": "lightning_ddp",
    "lightning_padded_tokens": "lightning_ddp",
    "masked_local_mean": "masked_global_mean",
    "module_forward": "wrapper_forward",
    "no_set_epoch": "accumulate_no_sync",
    "optimizer_before_new_model": "mean_loss",
    "partial_window": "partial_window_own_length",
    "shuffle_without_sampler": "mean_loss",
    "static_graph_accumulates": "mean_loss",
    "step_in_hook": "mean_loss",
    "sum_loss": "sum_loss_times_world",
    "token_means": "token_sum_times_world",
    "token_sum_over_global_count": "token_sum_times_world",
    "trainer_own_loss": "trainer_gpt2",
    "trainer_tokens_per_rank": "trainer_gpt2",
    "unfrozen_after_wrapping": "mean_loss",
}
Steps = list[list[torch.Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=sorted(REFERENCES))
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    os.environ["MEASURE"] = "1"
    kept: dict[str, list[Steps]] = {}
    for name in given.names:
        broken = Script.read(DEVELOPMENT / "broken" / f"{name}.py")
        correct = Script.read(DEVELOPMENT / "correct" / f"{REFERENCES[name]}.py")
        with Server(frameworks_of([broken])) as server:
            if REFERENCES[name] not in kept:
                kept[REFERENCES[name]] = _steps(server, correct)
            measured = _compared(_steps(server, broken), kept[REFERENCES[name]])
        line = f"# measured: {measured} (reference: correct/{correct.path.name})"
        print(name, line, flush=True)
        if given.write:
            lines = broken.path.read_text().split("\n")
            lines[1] = line
            broken.path.write_text("\n".join(lines))


def _steps(server: Server, script: Script) -> list[Steps]:
    """Per rank the steps that the script took: gradient and parameters, flattened."""
    found: list[Steps] = []
    collect = corpus_runs._outcome

    def also(folder: Path, answer: dict[str, Any]) -> corpus_runs.Outcome:
        found.extend(torch.load(path) for path in sorted((folder / "steps").glob("*.pt")))
        return collect(folder, answer)

    corpus_runs._outcome = also
    try:
        server.run(script, doctor=False)
    finally:
        corpus_runs._outcome = collect
    return found


def _compared(broken: list[Steps], correct: list[Steps]) -> str:
    text: list[str] = []
    if not broken:
        return "no optimizer step is reached"
    for step, (ours, theirs) in enumerate(zip(broken[0], correct[0], strict=False)):
        (gradient, _), (wanted, _) = ours, theirs
        if gradient.shape != wanted.shape or torch.allclose(gradient, wanted, 1e-4, 1e-7):
            continue
        ratio = float(gradient.norm() / wanted.norm())
        product = gradient.norm() * wanted.norm()
        cosine = float(gradient @ wanted / product) if product else 0.0
        text.append(f"step {step}: gradient ratio {ratio:.3f}, cosine {cosine:.3f}")
        break
    last = min(len(each) for each in broken) - 1
    ends = [each[last][1] for each in broken]
    if len(ends) > 1 and all(each.shape == ends[0].shape for each in ends):
        apart = max(float((each - ends[0]).abs().max()) for each in ends[1:])
        if apart:
            text.append(f"replicas differ by {apart:.1e} after {last + 1} steps")
    if len({len(each) for each in broken}) > 1:
        text.append(f"optimizer steps per rank {[len(each) for each in broken]}")
    return "; ".join(text) or "gradients and replicas are right: it costs time or wastes work"


if __name__ == "__main__":
    main()
