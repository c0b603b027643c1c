"""Data: which rank sees which samples."""

from collections.abc import Iterator
from itertools import pairwise

from ddp_doctor.explain.findings import Finding, finding, rule
from ddp_doctor.explain.steps import Step
from ddp_doctor.facts.merged import Rank, Run
from ddp_doctor.facts.types import LoaderFact


@rule("same_data_on_ranks")
def same_data_on_ranks(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Some ranks compute their loss from the same inputs and targets, step after step.

    Right if the ranks split the batch after the forward's inputs are made: the targets or losses
    differ then. Right too if they split a model instead of data, or train models of their own, and
    if they exchange activations: then they may split one sequence, one graph, or one image.
    """
    windows = [window for window in run.complete if window.trains]
    if run.world < 2 or len(windows) < 2 or run.in_groups or run.split or run.exchanges:
        return
    if 0 < len(run.same_data) < run.world:
        alike = " and ".join(
            f"ranks {', '.join(map(str, group[:8]))}" for group in run.same_data if len(group) > 1
        )
        yield finding(
            "same_data_on_ranks",
            f"In all {len(windows)} observed steps {alike} computed the loss from equal data: "
            f"inputs and targets, or the loss itself where these were not seen. {run.world} ranks "
            f"do the work of {len(run.same_data)}.",
            run.loader["place"] if run.loader else windows[0].backward_place,
            "DataLoader(dataset, sampler=DistributedSampler(dataset)), and call "
            "sampler.set_epoch(epoch) in every epoch.",
        )
        return
    yield from _overlap(run)


def _overlap(run: Run) -> Iterator[Finding]:
    """Ranks read the same rows in another order: each walks through the whole data set.

    Right if each rank trains on its own slice of what it reads, or draws with replacement, or if a
    custom sampler decides. Ranks that read other parts of the data have no rows in common, however
    few of them were seen.
    """
    loaders = [one for one in run.ranks[0].facts["loader"] if one["grad"] and one["length"]]
    if not loaders or not loaders[0]["usual"]:
        return
    whole = loaders[0]["length"] or 0
    if any(not rank.facts["batch"] or _sliced(rank) for rank in run.ranks):
        return
    listed = [_first_epoch(rank, whole) for rank in run.ranks]
    if len(listed) < 2 or any(len(set(rows)) < 0.9 * len(rows) for rows in listed):
        return  # rows that are equal by chance tell nothing
    read = [set(rows) for rows in listed]
    other = min(read[1:], key=lambda rows: len(rows & read[0]))  # if it shares rows, all ranks do
    # Two random parts of one data set have about this many rows in common.
    common, expected = len(other & read[0]), len(other) * len(read[0]) / whole
    if expected < 8 or common < 0.5 * expected:
        return
    yield finding(
        "same_data_on_ranks",
        f"The ranks do not split the {whole} samples between them: {common} of the first "
        f"{len(other)} rows that two ranks read are the same. (Two random orders of one data set "
        f"share about {expected:.0f}.)",
        loaders[0]["place"],
        "DataLoader(dataset, sampler=DistributedSampler(dataset)).",
        "warning",
    )


def _first_epoch(rank: Rank, whole: int) -> list[int]:
    """The rows of a rank's first iterator. With persistent workers, it goes on after an epoch."""
    batches = rank.facts["batch"]
    first = [batch for batch in batches if batch["iterator"] == batches[0]["iterator"]]
    return [row for batch in first for row in batch["rows"]][:whole]


def _sliced(rank: Rank) -> bool:
    """Whether a rank's forward sees fewer rows than its loader reads, or if that is unknown.

    Rows of a forward are those of its largest input; without a wrapper, those of a loss. Many more
    rows than the batch has are other units (tokens), which tells nothing.
    """
    inputs = [group for fact in rank.windows for group in fact["inputs"]]
    seen = [shape[0] for group in inputs for *_, shape in group if shape]
    backwards = [backward for fact in rank.windows for backward in fact["backwards"]]
    seen = seen or [term["rows"] for one in backwards for term in one.get("terms", ())]
    size = max(batch["size"] for batch in rank.facts["batch"])
    return not seen or not 0.75 * size <= max(seen) <= 2.5 * size


@rule("datasets_differ")
def datasets_differ(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """A sampler splits one data set over the ranks, but the ranks hold different data.

    Right if each rank loads its own part and no sampler splits it again.
    """
    loaders: list[list[LoaderFact]] = [
        [one for one in rank.facts["loader"] if one["content"] and (one["replicas"] or 1) > 1]
        for rank in run.ranks
    ]
    if run.world < 2 or len(loaders) < run.world:
        return
    for same in zip(*loaders, strict=False):
        alike = len({(loader["length"], loader["dataset"]) for loader in same}) == 1
        if alike and len({loader["content"] for loader in same}) > 1:
            yield finding(
                "datasets_differ",
                f"{same[0]['dataset']} has {same[0]['length']} samples on every rank, but not the "
                f"same contents. The sampler splits indices as if the data were the same.",
                same[0]["place"],
                "Seed before the data are made or shuffled (torch.manual_seed(0) on every rank), "
                "or make them once and load the file.",
            )
            return


@rule("sampler_seeds_differ")
def sampler_seeds_differ(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Samplers that split one data set over the ranks shuffle it with other seeds.

    The parts then overlap, and some samples are in none of them. Right if the ranks' epochs and
    seeds are the same, or if nothing is shuffled.
    """
    if run.world < 2 or run.missing:
        return
    for same in zip(*(rank.facts["sampler"] for rank in run.ranks), strict=False):
        split = all(fact["shuffle"] and fact["replicas"] == run.world for fact in same)
        orders = [(fact["seed"], fact["epoch"]) for fact in same]
        alike = len({(fact["length"], fact["place"]) for fact in same}) == 1
        if split and alike and len(set(orders)) > 1:
            listed = ", ".join(f"rank {at}: {order}" for at, order in enumerate(orders[:8]))
            yield finding(
                "sampler_seeds_differ",
                f"(seed, epoch) of the sampler is {listed}. Each rank takes its part of another "
                f"order, so the parts overlap and leave samples out.",
                same[0]["place"],
                "Give every rank's sampler the same seed, and call set_epoch with the same epoch.",
            )
            return


@rule("epoch_order_repeats")
def epoch_order_repeats(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """A shuffling DistributedSampler starts another training epoch without set_epoch.

    Right if the sampler does not shuffle, or is only used for evaluation, or if its seed changes.
    """
    facts = [fact for rank in run.ranks[:1] for fact in rank.facts["sampler"]]
    for sampler in dict.fromkeys(fact["sampler"] for fact in facts):
        own = [f for f in facts if f["sampler"] == sampler and f["shuffle"] and f["grad"]]
        orders = {(fact["epoch"], fact["seed"]) for fact in own}
        trained = all(later["backwards"] > one["backwards"] for one, later in pairwise(own))
        if len(own) > 1 and len(orders) == 1 and trained:
            yield finding(
                "epoch_order_repeats",
                f"The sampler started {len(own)} training epochs, all with epoch = "
                f"{own[0]['epoch']}: every epoch has the same order and the same split between the "
                f"ranks.",
                own[1]["place"],
                "sampler.set_epoch(epoch) at the start of every epoch.",
            )
            return


@rule("world_size_one")
def world_size_one(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """A process believes that it is one of several ranks, but its process group has one.

    Signs: the environment's WORLD_SIZE, or a sampler that splits the data over more replicas than
    the group has ranks. Right if the sampler's replicas are the ranks of the run.
    """
    for rank in run.ranks:
        groups = rank.facts["group"]
        world = groups[-1]["world"] if groups else 1
        for fact in reversed((*rank.facts["sampler"], *rank.facts["loader"])):
            if (fact["replicas"] or 0) <= world:
                continue
            left = rank.process["environment"].get("LOCAL_RANK")
            yield finding(
                "world_size_one",
                f"Rank {rank.rank}: the sampler gives this process 1/{fact['replicas']} of the "
                f"data, but its process group has {world} rank{'s' * (world != 1)}."
                + (f" LOCAL_RANK={left} was in the environment." if left is not None else ""),
                fact["place"],
                "Start all ranks (torchrun, or devices=N in a fresh process). If an earlier run in "
                "this process set LOCAL_RANK, run the second one in its own process.",
            )
            return
    claimed = int(run.ranks[0].process["environment"].get("WORLD_SIZE") or 1) if run.ranks else 1
    if claimed > 1 and run.world == 1 and run.ranks[0].windows:
        yield finding(
            "world_size_one",
            f"The environment says WORLD_SIZE={claimed}, but this process joined no group of that "
            f"size: it trains alone.",
            run.ranks[0].windows[0]["step_place"],
            "Call dist.init_process_group() and wrap the model before training.",
        )
