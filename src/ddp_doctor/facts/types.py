"""What a rank writes down: one type for each kind of fact, and for what is inside of one.

The observers make them, journals keep them as JSON, and the rules read them. mypy
checks all of these by name. A rank is a number; a place is "file:line"; a hash of 0 cannot be told
from that of a tensor which could not be read. Fields without a note are what torch calls so.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict, cast

Groups = list[list[int]]  # disjoint groups of ranks
Projections = dict[str, list[float] | None]  # by parameter; None for what could not be read


class ScalingFact(TypedDict):
    """A loss was multiplied or divided by a number."""

    op: str  # * or /
    value: float
    text: str  # the expression, and the factor in it
    operand: str
    place: str


class TermFact(TypedDict):
    """A loss function, or a sum or mean, that a backward came through."""

    function: str
    reduction: str
    count: float  # items
    rows: int
    place: str
    loss: bool  # whether it is a loss function, and no plain sum or mean
    factor: float  # the gradient that arrived at its output, summed
    spread: NotRequired[list[float]]  # of its elements: the smallest and the largest that is not 0
    input: NotRequired[int]  # hashes
    target: NotRequired[int]
    shape: NotRequired[list[int]]
    square: NotRequired[list[int] | None]  # rows, columns, ascending: every row has its own target
    over_parameters: NotRequired[bool]


class BackwardFact(TypedDict):
    """One backward pass that reached an optimizer's parameters."""

    place: str
    call: NotRequired[int]  # as `place`, for the whole stack
    scale: NotRequired[float]  # of the GradScaler
    retained: NotRequired[bool]
    prepared: NotRequired[dict[str, bool | None]]  # by wrapper: called, and whether to synchronize
    wrappers: NotRequired[dict[str, int]]  # by wrapper: how many of its parameters were reached
    terms: NotRequired[list[TermFact]]
    values: NotRequired[list[float]]


class SnapshotFact(TypedDict):
    """What was in `.grad`, once combined and before it was clipped or unscaled."""

    grads: Projections
    hashes: dict[str, int]
    local: Projections  # sums of what backward computed on this rank
    missing: list[str]
    pieces: dict[str, int]  # of fully_shard: `grads` has this rank's shard, of so many
    unscaled: NotRequired[float]


class ClipFact(TypedDict):
    kind: str  # norm or value
    norm: float | None
    limit: float | None
    collectives: int  # how many were called before it
    place: str


# The functions of torch.distributed in which ranks wait for each other. The observers replace them,
# and the rules recognize them in a journal. `isend` and `irecv` are left alone: they do not wait,
# and `torch.distributed.P2POp` accepts only the originals.
CALLS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "all_gather_single", "all_gather_coalesced", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single", "barrier",
    "monitored_barrier", "all_gather_object", "broadcast_object_list", "gather_object",
    "scatter_object_list", "send", "recv", "send_object_list", "recv_object_list",
    "all_reduce_coalesced",
)  # fmt: skip
REDUCTIONS = tuple(name for name in CALLS if "reduce" in name)
UNEVEN = {"all_to_all_single"}  # ranks may pass tensors of different shapes


class CollectiveFact(TypedDict):
    """A call of torch.distributed."""

    op: str
    place: str
    backwards: dict[str, int]  # by optimizer, as of this call
    through_autograd: bool
    in_backward: bool
    group: NotRequired[list[int]]  # unless all ranks take part
    shape: NotRequired[list[int]]
    numel: NotRequired[int]
    what: NotRequired[str]  # gradient, flat, like a gradient, parameter, loss, activation, other
    name: NotRequired[str]
    optimizer: NotRequired[int]
    grad: NotRequired[bool]
    needed: NotRequired[bool]  # whether a later backward came through it


class ForwardFact(TypedDict):
    sync: bool
    place: str


class ParametersFact(TypedDict):
    """Hashes of an optimizer's parameters, and the first number of each one's projection."""

    parameters: dict[str, int]
    values: dict[str, float]  # 0 of what could not be read


class ReplicaFact(ParametersFact):
    """What a step has left: hashes of the buffers, too."""

    buffers: dict[str, int]


class StartFact(ParametersFact):
    """An optimizer's parameters before its first step."""

    shards: dict[str, list[int]]
    constant: list[str]


class ChangeFact(TypedDict):
    name: str
    how: str


class StepFact(TypedDict):
    """What happens between two optimizer steps, as far as it belongs to no backward."""

    scaling: list[ScalingFact]
    clips: list[ClipFact]
    collectives: list[CollectiveFact]
    forwards: list[ForwardFact]
    inputs: list[list[list[Any]]]  # of each forward and tensor: hash, size, shape
    random: list[int]  # hashes of the generators' states
    dropout: int
    step_place: str
    stepped_in_backward: NotRequired[str]
    combined_in_step: NotRequired[str]  # where the optimizer's own step combines gradients
    waiting: NotRequired[int]  # gradients that fully_shard keeps for a later backward


class WindowFact(StepFact):
    """One optimizer step of a rank."""

    n: int
    optimizer: int
    skipped: bool
    backwards: list[BackwardFact]
    cleared: int  # backwards before these, whose gradients zero_grad has cleared
    leftover: int  # parameters that still held the gradient of the step before
    snapshot: SnapshotFact
    left: Projections | None  # what the last backward left in `.grad`
    after: ReplicaFact
    outside: int  # parameters with gradients that are in no optimizer
    changed: list[ChangeFact]
    gone: list[int]
    cut: bool
    batch_norms: int
    world: int
    sharded: bool  # whether a parameter is a DTensor


class ProcessFact(TypedDict):
    started: float
    environment: dict[str, str]


class GroupFact(TypedDict):
    rank: int
    world: int


class WrapperFact(TypedDict):
    index: int
    world: int
    of: int  # all ranks
    broadcast_buffers: bool
    ignored: list[str]
    manual: bool  # whether Lightning leaves backward to the module: see `manual_backward`
    place: str


class OptimizerFact(TypedDict):
    type: str
    momentum: bool


class SettingsFact(TypedDict):
    """An optimizer's hyperparameters have changed."""

    n: int
    optimizer: int
    groups: list[dict[str, float]]
    full: bool


class SamplerFact(TypedDict):
    """A sampler begins an epoch."""

    sampler: int
    epoch: int | None
    seed: int | None
    shuffle: bool
    replicas: int | None
    length: int | None
    grad: bool
    backwards: int
    place: str


class LoaderFact(TypedDict):
    dataset: str
    length: int | None
    content: int | None  # a hash
    usual: bool  # whether torch's own samplers give the whole data set, each row once
    replicas: int | None  # into how many parts a sampler cuts the data, if any does
    grad: bool
    place: str


class BatchFact(TypedDict):
    iterator: int
    size: int
    rows: list[int]


class ScaleFact(TypedDict):
    n: int
    scale: float
    place: str


class ScheduleFact(TypedDict):
    scheduler: int
    count: int
    steps: int
    backwards: int
    total: int | None
    rate: float | None
    place: str


class TotalsFact(TypedDict):
    steps: dict[str, int]
    starts: dict[str, int]  # by step: a checksum of some parameters


class StuckFact(TypedDict):
    since: float
    stack: list[str]


class FailedFact(TypedDict):
    """The doctor has stopped in this process."""

    error: str
    at: str


class CpuFact(TypedDict):
    name: str


class ErrorFact(TypedDict):
    type: str
    text: str
    place: str


class EndFact(TypedDict):
    raised: bool
    during: str
    cut: NotRequired[bool]  # whether facts did not fit
    error: NotRequired[ErrorFact]


class Facts(TypedDict):
    """A journal: its facts by kind, in order."""

    process: list[ProcessFact]
    group: list[GroupFact]
    join: list[dict[str, Any]]
    wrapper: list[WrapperFact]
    optimizer: list[OptimizerFact]
    start: list[StartFact]
    settings: list[SettingsFact]
    window: list[WindowFact]
    sampler: list[SamplerFact]
    loader: list[LoaderFact]
    batch: list[BatchFact]
    scale: list[ScaleFact]
    schedule: list[ScheduleFact]
    totals: list[TotalsFact]
    stuck: list[StuckFact]
    failed: list[FailedFact]
    cpu: list[CpuFact]
    end: list[EndFact]


def uneven(term: Mapping[str, Any]) -> bool:
    """Whether the items of one call of a loss have other weights than one another."""
    smallest, largest = term.get("spread", (1.0, 1.0))
    return bool(smallest and largest > 1.01 * smallest)


def no_facts() -> Facts:
    """A journal in which nothing is written yet."""
    empty: Any = {kind: [] for kind in Facts.__annotations__}
    return cast(Facts, empty)


def no_snapshot() -> SnapshotFact:
    """No gradients."""
    return {"grads": {}, "hashes": {}, "local": {}, "missing": [], "pieces": {}}


def nothing_yet() -> StepFact:
    """A step in which nothing has happened yet."""
    return {
        "scaling": [],
        "clips": [],
        "collectives": [],
        "forwards": [],
        "inputs": [],
        "random": [],
        "dropout": 0,
        "step_place": "",
    }
