"""``python -m tests.torch_suite``: PyTorch's own tests of its DDP, on a class that you choose.

The tests are those that ship inside the installed torch: none of their text is kept here, and none
of their assertions is touched. Two things are replaced around them (`replaced`): the class that the
name ``DistributedDataParallel`` stands for, and the device that tensors are placed on. What torch's
own DDP passes in this way, constructing the class, is what another class has to pass:
``table.json`` has the tests, with the reason for each that cannot run here. `runner` says how they
are run.
"""

import argparse
import dataclasses
import fnmatch
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from labkit.launch.memory import gc_paused

DESCRIPTION = """\
Run PyTorch's own tests of DistributedDataParallel on a class of your choice: on the CPU over gloo,
on one GPU that the ranks share (--device gpu), or on a GPU for each rank (--device gpus)."""
TARGETS = {"cpu": "cpu", "gpu": "cuda:0", "gpus": ""}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.torch_suite", description=DESCRIPTION)
    add = parser.add_argument
    add(
        "--class",
        dest="cls",
        default="miniddp",
        help="torch, miniddp (the default) or module:Class",
    )
    add("--file", action="append", default=[], help="one of the files that ship, by name")
    add(
        "-k",
        dest="patterns",
        action="append",
        default=[],
        help="part of a name, or a pattern with *",
    )
    add("--runnable", action="store_true", help="only those that table.json calls runnable")
    add(
        "--device",
        choices=list(TARGETS),
        default="cpu",
        help="cpu (the default); gpu: all ranks on the first GPU, over gloo; gpus: nothing is "
        "replaced but the class, each rank has a GPU of its own, over NCCL",
    )
    add("--world-size", type=int, default=4, help="ranks of distributed_test (default 4)")
    add("--jobs", type=int, default=2, help="tests at a time (default 2)")
    add("--timeout", type=float, default=60, help="seconds for one test (default 60)")
    add("--json", help="write the results to this file")
    add("--names", help="write the names of all tests, chosen or not, to this file")
    add("-v", dest="verbose", action="store_true", help="print failures whole")
    return parser.parse_args()


@gc_paused()
def load(options: argparse.Namespace) -> tuple[list[tuple[type, str]], Any]:
    """Load the files with everything replaced; return their tests and the target device."""
    import torch

    from . import discover, replaced, runner

    cls = replaced.load(options.cls)
    target = None
    if options.device != "gpus":
        target = torch.device(TARGETS[options.device])
        replaced.open_gates()
        replaced.pretend_devices(target)
        replaced.replace_device_ids(cls, target)
    replaced.Constructions.watch(cls)
    replaced.swap(cls)
    runner.fork_ranks()
    found = []
    for source in options.file or discover.SHIPPED:
        module = discover.SHIPPED[source]()
        replaced.swap(cls)
        found += discover.tests(module)
    return found, target


def asked_for(options: argparse.Namespace, name: str, runnable: set[str]) -> bool:
    """Whether the options choose the test of that name."""
    patterns = [f"*{pattern}*" for pattern in options.patterns] or ["*"]
    chosen = any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    return chosen and (name in runnable or not options.runnable)


def main() -> int:
    options = arguments()
    # PyTorch's files read these when they are imported.
    os.environ.update(
        BACKEND="nccl" if options.device == "gpus" else "gloo",
        WORLD_SIZE=str(options.world_size),
        TEMP_DIR=tempfile.gettempdir(),
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1",
        PYTORCH_NVML_BASED_CUDA_CHECK="1",  # tests are forked, which CUDA would not survive
        # Otherwise Inductor compiles the headers of ATen, and tries each kind of vector
        # instructions, before its first kernel: four times the work of the test that needs it.
        TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0",
        TORCHINDUCTOR_VEC_ISA_OK="0",
    )
    found, target = load(options)

    from . import runner

    of_name = {runner.name_of(*test): test for test in found}
    if options.names:
        Path(options.names).write_text("\n".join(of_name))
    runnable = set(json.loads(Path(__file__).with_name("table.json").read_text())["runnable"])
    chosen = [test for name, test in of_name.items() if asked_for(options, name, runnable)]

    def report(result: runner.Result) -> None:
        ended = f"{result.outcome:8}{result.seconds:6.1f} s"
        print(ended, result.name, result.detail.strip().rpartition("\n")[2][:200], flush=True)
        if options.verbose and result.detail:
            print(result.detail, flush=True)

    results = runner.run(chosen, options.jobs, options.timeout, report, target)
    totals = Counter(result.outcome for result in results)
    print(", ".join(f"{n} {outcome}" for outcome, n in totals.most_common()), f"({options.cls})")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([dataclasses.asdict(result) for result in results], file, indent=1)
    return int(any(result.outcome not in ("passed", "skipped") for result in results))


if __name__ == "__main__":
    sys.exit(main())
