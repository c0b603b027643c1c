"""One trainer of the suite as a script of its own, for a certificate.

    PYTHONPATH=. python -m ddp_doctor --certify --ranks 2 surveys/trainers/as_script.py transformers

2 ranks, in the first of `SETTINGS` that the trainer has. The samples repeat, so that there are as
many steps as a certificate looks at.
"""

import importlib
import logging
import os
import sys
import warnings
from typing import Any

from surveys.trainers.cases import Deal
from surveys.trainers.trainers import TRAINERS

SETTINGS = "WxK", "W", "W=2"
PASSES = 17


def several_steps(case: Any, world: int) -> Any:
    """The case with its samples again and again, for its ranks, or for one process: that has as
    many micro-batches, with the samples of all ranks.
    """
    if isinstance(case, Deal):
        joined = (sum(case.ranks, ()),)
        return case._replace(ranks=case.ranks if world > 1 else joined, windows=PASSES)
    size = case.size * case.world // world
    return case._replace(world=world, size=size, samples=case.samples * PASSES)


def main(name: str) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    trainer = TRAINERS[name]
    case = trainer.family.cases[next(one for one in SETTINGS if trainer.has(one))]
    file, function = trainer.adapter.split(":")
    adapter = getattr(importlib.import_module(f"surveys.trainers.{file}"), function)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if world > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    adapter(several_steps(case, world), rank, *trainer.options)


if __name__ == "__main__":
    main(sys.argv[1])
