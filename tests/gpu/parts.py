"""All parts of the kit, in the order in which they run."""

from . import (
    doctor,
    draws,
    equality,
    hooks,
    labs,
    memory,
    precision,
    rungs,
    several,
    streams,
    timeline,
    torchs_tests,
)
from .proofs import Part

PARTS = (
    Part("streams", "no gradient is sent before it is computed", 1, streams.find),
    Part("equality", "MiniDDP trains as torch's DDP does, to the bit", 1, equality.find),
    Part("ladder", "every rung and the average by hand train as torch's DDP", 1, rungs.find),
    Part("hooks", "comm hooks do what they do under torch's DDP", 1, hooks.find),
    Part("precision", "half precision gives torch's gradients", 1, precision.find),
    Part("replicas", "MiniDataParallel sums over replicas", 1, equality.find_data_parallel),
    Part("memory", "MiniDDP holds no more memory than torch's DDP", 1, memory.find),
    Part("draws", "the emulated generator draws what a GPU draws", 1, draws.find),
    Part("timeline", "the events of one backward are in the promised order", 1, timeline.find),
    Part("labs", "the threads' labs hold on GPUs", 1, labs.find),
    Part("doctor", "the doctor watches a run on GPUs and changes nothing", 1, doctor.find),
    Part("pytorch", "PyTorch's own tests of DDP pass", 1, torchs_tests.find),
    Part("data-parallel", "MiniDataParallel beside torch's", 2, several.find_data_parallel),
    Part("overlap", "NCCL's kernels run behind computation", 2, several.find_overlap),
    Part("race", "how long a step takes, beside torch's DDP", 2, several.find_race),
    Part("chapters", "every chapter runs with its ranks on GPUs", 2, several.find_chapters),
    Part("pytorch-nccl", "PyTorch's own tests of DDP pass over NCCL", 2, torchs_tests.find_nccl),
)
