"""One trainer of the suite as a script of its own, for a certificate.

    python -m ddp_doctor --certify --ranks 2 labs/conformance/as_script.py transformers

2 ranks × 3 micro-batches, as in the properties WxK and order. The samples repeat, so that there are
as many steps as a certificate looks at. One process has the same number of micro-batches.
"""

import importlib
import logging
import os
import sys
import warnings

from cases import CASES
from trainers import TRAINERS

PASSES = 17


def main(name: str) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    trainer, case = TRAINERS[name], CASES["WxK"]
    file, function = trainer.adapter.split(":")
    adapter = getattr(importlib.import_module(file), function)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if world > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    adapter(case._replace(world=world, samples=case.samples * PASSES), rank, *trainer.options)


if __name__ == "__main__":
    main(sys.argv[1])
