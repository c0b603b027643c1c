"""A second program for each cell that is not equal: ratio and cosine by formula.

    python -m surveys.trainers.by_hand [TRAINER …]    # compute, store, print on the page

`formulas` has the formulas. For "no step" and for an error, the line that decides was read.
"""

import argparse
import os
import warnings
from typing import Any

from surveys.trainers.page import write
from surveys.trainers.stored import BY_HAND, agrees, as_json, rows
from surveys.trainers.stored import by_hand as by_hand_stored
from surveys.trainers.trainers import TRAINERS

# Where a number of steps, or an error, was read: the line that decides.
DEEPSPEED = "(self.micro_steps + 1) % self.gradient_accumulation_steps() == 0"
ZERO = "zero1", "zero1-counted", "zero2-counted"
FASTAI = "if self.count<self.n_acc: raise CancelBatchException()"
READ = {
    ("torchtune-recipe", "last-window"): "(idx + 1) % self._gradient_accumulation_steps == 0",
    ("litgpt-fit", "last-window"): 'state["iter_num"] % train.gradient_accumulation_iters(…) != 0',
    ("llamafactory-dft", "empty-rank"): "if not valid_mask.any(): return torch.tensor(0.0, …)",
    ("torchtitan-step", "last-window"): "except StopIteration: raise DataloaderExhaustedError",
    **{(f"deepspeed-{one}", "last-window"): DEEPSPEED for one in ZERO},
    ("ignite", "last-window"): "engine.state.iteration % gradient_accumulation_steps == 0",
    ("skorch", "last-window"): "n_train_batches % self.acc_steps == 0",
    ("speechbrain", "last-window"): "(self.step % self.grad_accumulation_factor) == 0",
    ("fastai", "last-window"): FASTAI,
    ("fastai", "short-batch"): FASTAI,
    ("keras", "last-window"): "(self._iterations + 1) % self.gradient_accumulation_steps == 0",
}
Found = dict[str, Any]


def by_hand(name: str, property_: str) -> Found | None:
    """What the second program finds for a cell; None if there is none."""
    from surveys.trainers import formulas

    if line := READ.get((name, property_)):
        return {"read": line}
    for known, of in formulas.KNOWN:
        if name in known:
            return of(name, property_)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainers", nargs="*", metavar="TRAINER", help="default: all installed")
    names = parser.parse_args().trainers or [
        name for name, one in TRAINERS.items() if not one.missing()
    ]
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    warnings.filterwarnings("ignore")
    known = by_hand_stored()
    for row in rows():
        for property_, cell in row["cells"].items():
            name = row["trainer"]
            if name not in names or cell["text"] == "equal":
                continue
            found = by_hand(name, property_)
            said = "agrees" if agrees(cell, found) else f"BUT the page: {cell['detail']}"
            print(f"{name}, {property_}: {found} {said}", flush=True)
            if found:
                known[name, property_] = found
    kept = [
        {"trainer": name, "property": one, **known[name, one]}
        for name, trainer in TRAINERS.items()
        for one in trainer.family.cases
        if (name, one) in known
    ]
    BY_HAND.write_text(as_json(kept))
    write(rows())


if __name__ == "__main__":
    main()
