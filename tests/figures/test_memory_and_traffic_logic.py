"""What the figure of memory and traffic computes, against `figures.memory_and_traffic`."""

import random
from dataclasses import asdict
from typing import Any, get_args

import pytest
from figures.memory_and_traffic import (
    STRATEGIES,
    Optimizer,
    Precision,
    TrainingJob,
    memory,
    traffic,
)
from figures.node import call

CASES = 600
NAMES = {
    "bucket_views": "bucketViews",
    "free_weights": "freeWeights",
    "shard_ranks": "shardRanks",
}


def random_job(rng: random.Random) -> TrainingJob:
    shard_ranks = rng.randint(1, 64)
    return TrainingJob(
        parameters=round(10 ** rng.uniform(0, 12.5)),
        ranks=shard_ranks * rng.randint(1, 300),
        precision=rng.choice(get_args(Precision)),
        optimizer=rng.choice(get_args(Optimizer)),
        bucket_views=rng.random() < 0.5,
        free_weights=rng.random() < 0.5,
        shard_ranks=shard_ranks,
        every=rng.randint(1, 1000),
    )


def as_javascript(job: TrainingJob) -> dict[str, Any]:
    return {NAMES.get(name, name): value for name, value in asdict(job).items()}


def test_node_and_python_count_the_same_bytes_for_every_strategy():
    rng = random.Random(20)
    jobs = [random_job(rng) for _ in range(CASES)]
    compared = call("memory_and_traffic", "compare", [(as_javascript(job),) for job in jobs])
    for job, rows in zip(jobs, compared, strict=True):
        assert [row["strategy"] for row in rows] == list(STRATEGIES)
        for row, strategy in zip(rows, STRATEGIES, strict=True):
            kept, sent = memory(job, strategy), traffic(job, strategy)
            wanted = {**kept._asdict(), "total": kept.total}
            assert row["memory"] == pytest.approx(wanted, rel=1e-9, abs=1e-9), (job, strategy)
            wanted = {**sent._asdict(), "total": sent.total}
            assert row["traffic"] == pytest.approx(wanted, rel=1e-9, abs=1e-9), (job, strategy)
