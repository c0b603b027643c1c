"""A second program for each cell that is not equal: ratio and cosine by formula, steps by counting.

    python -m surveys.trainers.by_hand              # all trainers that are installed
    python -m surveys.trainers.by_hand --store      # and print on the page what they confirm

`formulas` has the formulas. For "no step", the trainer runs here in a program of its own, on
numbers instead of samples, and its steps are counted. Where that needs more than the trainer's
loop, the line that decides was read instead.
"""

import argparse
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surveys.trainers.page import write
from surveys.trainers.stored import BY_HAND, agrees, as_json, rows
from surveys.trainers.stored import by_hand as by_hand_stored
from surveys.trainers.trainers import TRAINERS

K = 3
LAST_WINDOW, SHORT_BATCH = [4] * 5, [8, 8, 4]  # the sizes of the micro-batches
# Where a number of steps, or an error, was read: the line that decides.
DEEPSPEED = "(self.micro_steps + 1) % self.gradient_accumulation_steps() == 0"
READ = {
    ("torchtune-recipe", "last-window"): "(idx + 1) % self._gradient_accumulation_steps == 0",
    ("litgpt-fit", "last-window"): 'state["iter_num"] % train.gradient_accumulation_iters(…) != 0',
    ("llamafactory-dft", "empty-rank"): "if not valid_mask.any(): return torch.tensor(0.0, …)",
    (
        "torchtitan-step",
        "last-window",
    ): "except StopIteration: raise DataloaderExhaustedError()",
    ("deepspeed-zero1", "last-window"): DEEPSPEED,
    ("deepspeed-zero1-counted", "last-window"): DEEPSPEED,
    ("deepspeed-zero2-counted", "last-window"): DEEPSPEED,
    ("keras", "last-window"): "(self._iterations + 1) % self.gradient_accumulation_steps == 0",
}
Found = dict[str, Any]


def steps(name: str, property_: str) -> Found:
    """How many steps the trainer takes with micro-batches of these sizes, K at a time."""
    import torch

    class Counted(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            return super().step(closure)

    sizes = LAST_WINDOW if property_ == "last-window" else SHORT_BATCH
    net = torch.nn.Linear(1, 1)
    optimizer = Counted(net.parameters(), lr=0.1)
    batches = [(torch.rand(n, 1), torch.rand(n, 1)) for n in sizes]
    COUNTED[name](net, optimizer, batches)
    return {"steps": optimizer.steps}


def ignite(net: Any, optimizer: Any, batches: Sequence[Any]) -> None:
    from ignite.engine import create_supervised_trainer
    from torch.nn.functional import mse_loss

    create_supervised_trainer(net, optimizer, mse_loss, gradient_accumulation_steps=K).run(batches)


def skorch(net: Any, optimizer: Any, batches: Sequence[Any]) -> None:
    """The class of its FAQ."""
    import torch
    from skorch import NeuralNetRegressor

    class Accumulating(NeuralNetRegressor):
        def get_loss(self, *given: Any, **more: Any) -> Any:
            return super().get_loss(*given, **more) / K

        def train_step(self, Xi: Any, *given: Any, **parameters: Any) -> Any:  # noqa: N803
            step = self.train_step_single(Xi, *given, **parameters)
            if len(self.history[-1, "batches"]) % K == 0:
                self.optimizer_.step()
                self.optimizer_.zero_grad()
            return step

    x, y = (torch.cat(parts).numpy() for parts in zip(*batches, strict=True))
    of = {"optimizer": lambda *_, **__: optimizer, "train_split": None, "verbose": 0}
    Accumulating(net, max_epochs=1, batch_size=len(batches[0][0]), **of).fit(x, y)


def speechbrain(net: Any, optimizer: Any, batches: Sequence[Any]) -> None:
    from speechbrain import Brain
    from torch.nn.functional import mse_loss

    class Own(Brain):
        def compute_forward(self, batch: Any, stage: Any) -> Any:
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
            return mse_loss(predictions, batch[1])

    options = {"device": "cpu", "grad_accumulation_factor": K}
    own = Own({"net": net}, lambda _: optimizer, run_opts=options)
    own.fit(range(1), batches, progressbar=False)


def fastai(net: Any, optimizer: Any, batches: Sequence[Any]) -> None:
    from fastai.callback.training import GradientAccumulation
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper
    from torch.nn.functional import mse_loss

    learner = Learner(
        DataLoaders(batches, []),
        net,
        loss_func=mse_loss,
        opt_func=lambda *_, **__: OptimWrapper(opt=optimizer),
        cbs=[GradientAccumulation(K * len(batches[0][0]))],
        train_bn=False,
    )
    with learner.no_bar(), learner.no_logging():
        learner.fit(1)


COUNTED: dict[str, Callable[[Any, Any, Sequence[Any]], None]] = {
    "ignite": ignite,
    "skorch": skorch,
    "speechbrain": speechbrain,
    "fastai": fastai,
}


def by_hand(name: str, property_: str, text: str) -> Found | None:
    """What the second program finds for a cell that says `text`; None if there is none."""
    from surveys.trainers import formulas

    if line := READ.get((name, property_)):
        return {"read": line}
    if text == "no step":
        return steps(name, property_)
    for known, of in formulas.KNOWN:
        if name in known:
            return of(name, property_)
    return None


def store(found: Mapping[tuple[str, str], Found]) -> None:
    """Both files; the page last."""
    known = by_hand_stored() | dict(found)
    kept = [
        {"trainer": name, "property": one, **known[name, one]}
        for name, trainer in TRAINERS.items()
        for one in trainer.family.cases
        if (name, one) in known
    ]
    BY_HAND.write_text(as_json(kept))
    write(rows())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainers", nargs="*", metavar="TRAINER", help="default: all installed")
    parser.add_argument("--store", action="store_true")
    given = parser.parse_args()
    names = given.trainers or [name for name, one in TRAINERS.items() if not one.missing()]
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    warnings.filterwarnings("ignore")
    known = {}
    for row in rows():
        for property_, cell in row["cells"].items():
            name = row["trainer"]
            if name not in names or cell["text"] == "equal":
                continue
            found = by_hand(name, property_, cell["text"])
            said = "agrees" if agrees(cell, found) else f"BUT the page: {cell['detail']}"
            print(f"{name}, {property_}: {found} {said}", flush=True)
            if found:
                known[name, property_] = found
    if given.store:
        store(known)


if __name__ == "__main__":
    main()
