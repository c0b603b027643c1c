"""Bytes that each rank keeps and sends, for DDP, sharded training, and local updates.

    job = TrainingJob(parameters=7_500_000_000, ranks=64, precision="bf16", optimizer="adam")
    memory(job, "zero2").total, traffic(job, "zero2").total        # bytes per rank; and per step

Two rules give every number here:

1. *Memory.* The training state of P parameters is weights, gradients, and the optimizer's state.
   What a strategy splits over n ranks takes 1/n of its bytes on each; the rest is on every rank.
2. *Traffic.* To reduce-scatter or to all-gather b bytes over n ranks, each rank sends b·(n−1)/n.
   An all-reduce is one of each: 2·b·(n−1)/n.

Counted is the state between the steps, in fractions of bytes: nothing is padded or rounded up. Left
out are activations, temporary buffers, and weights gathered for one layer at a time. Gathered
weights are counted only with `free_weights=False`, which keeps all of them until backward.

| strategy | split | sent |
|---|---|---|
| ddp | nothing | all-reduce of gradients |
| zero1 | optimizer state, master weights | reduce-scatter of gradients, all-gather of weights |
| zero2 | the same, and gradients | the same |
| fsdp | everything | the same, and one more all-gather of weights if they are freed |
| hsdp | everything, over `shard_ranks` | as fsdp in a shard group; all-reduce of shards across |
| local | nothing | every `every` steps, all-reduce of (master) weights |

"zero1" is the algorithm of the paper. torch's ZeroRedundancyOptimizer under DDP sends more: it
keeps the all-reduce and broadcasts the updated weights. "local" is another algorithm, not another
way to compute the same step: between two averages each rank updates its own weights. Its
optimizer state is not averaged.

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2020), sections 3 and 7, for bytes per parameter, stages and volumes; torch's documentation of
`fully_shard` for `reshard_after_forward` and 2-D meshes, of DistributedDataParallel for
`gradient_as_bucket_view`, and of `PeriodicModelAverager`; Stich, "Local SGD Converges Fast and
Communicates Little" (2019); Patarasuk and Yuan (2009) for the bytes of an all-reduce.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Sharding = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp", "local"]
Precision = Literal["fp32", "bf16"]
Optimizer = Literal["sgd", "momentum", "adam"]

STRATEGIES: tuple[Sharding, ...] = get_args(Sharding)
WEIGHT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2}
MASTER_BYTES: dict[Precision, int] = {"fp32": 0, "bf16": 4}
OPTIMIZER_BYTES: dict[Optimizer, int] = {"sgd": 0, "momentum": 4, "adam": 8}


@dataclass(frozen=True)
class TrainingJob:
    """A model and the ranks that train it.

    Args:
        parameters: how many there are, all of them trained.
        ranks: W.
        precision: "fp32" for everything; or "bf16" weights and gradients with fp32 master weights.
        optimizer: "sgd", with "momentum", or "adam"; its state is fp32.
        bucket_views: DDP's `gradient_as_bucket_view`. If False, gradients are also in buckets.
        free_weights: for "fsdp" and "hsdp", whether gathered weights are freed after forward and
            gathered again in backward: `reshard_after_forward` of torch's `fully_shard`.
        shard_ranks: the ranks of one shard group of "hsdp"; divides `ranks`.
        every: the number of steps between two averages of "local".
    """

    parameters: int
    ranks: int
    precision: Precision = "fp32"
    optimizer: Optimizer = "adam"
    bucket_views: bool = False
    free_weights: bool = True
    shard_ranks: int = 1
    every: int = 1

    @property
    def weights(self) -> int:
        """The bytes of the weights that compute; the gradients have as many."""
        return self.parameters * WEIGHT_BYTES[self.precision]

    @property
    def master(self) -> int:
        """The bytes of the fp32 copies that the optimizer updates; 0 if weights are fp32."""
        return self.parameters * MASTER_BYTES[self.precision]

    @property
    def optimizer_state(self) -> int:
        """The bytes of momentum, or of Adam's two moments."""
        return self.parameters * OPTIMIZER_BYTES[self.optimizer]


class Memory(NamedTuple):
    """Bytes per rank. `buckets` is 0 where gradients are views of them."""

    weights: float
    gradients: float
    buckets: float
    master: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


class Traffic(NamedTuple):
    """Bytes that each rank sends per step, on average over the steps.

    `gradients` and `weights` are sent in the shard group, or among all ranks if there is only one;
    `across` is what "hsdp" sends to other shard groups.
    """

    gradients: float
    weights: float
    across: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


def memory(job: TrainingJob, strategy: Sharding) -> Memory:
    """The training state on each rank, in bytes."""
    ranks = _shared_by(job, strategy)
    splits_weights = strategy in ("fsdp", "hsdp")
    splits_gradients = splits_weights or strategy == "zero2"
    splits_optimizer = splits_gradients or strategy == "zero1"
    has_buckets = strategy == "ddp" and not job.bucket_views
    gathered = job.weights if splits_weights and not job.free_weights else 0
    of_optimizer = ranks if splits_optimizer else 1
    return Memory(
        weights=gathered + job.weights / (ranks if splits_weights else 1),
        gradients=job.weights / (ranks if splits_gradients else 1),
        buckets=float(job.weights) if has_buckets else 0.0,
        master=job.master / of_optimizer,
        optimizer=job.optimizer_state / of_optimizer,
    )


def traffic(job: TrainingJob, strategy: Sharding) -> Traffic:
    """What each rank sends per step, in bytes."""
    ranks = _shared_by(job, strategy)
    once = scattered_bytes(job.weights, ranks)  # one reduce-scatter, or one all-gather
    gathers = 2 if job.free_weights else 1
    match strategy:
        case "ddp":
            return Traffic(gradients=2 * once, weights=0.0)
        case "zero1" | "zero2":
            return Traffic(gradients=once, weights=once)
        case "fsdp":
            return Traffic(gradients=once, weights=gathers * once)
        case "hsdp":
            across = 2 * scattered_bytes(job.weights / ranks, job.ranks // ranks)
            return Traffic(gradients=once, weights=gathers * once, across=across)
        case "local":
            averaged = job.master or job.weights
            return Traffic(0.0, weights=2 * scattered_bytes(averaged, ranks) / job.every)


def scattered_bytes(nbytes: float, ranks: int) -> float:
    """What each of `ranks` sends to reduce-scatter, or to all-gather, `nbytes` in all."""
    return nbytes * (ranks - 1) / ranks


def _shared_by(job: TrainingJob, strategy: Sharding) -> int:
    """How many ranks share one copy of what is split."""
    return job.shard_ranks if strategy == "hsdp" else job.ranks
