"""Every exhibit looks innocent, is rejected by the invariant on its label, and can be repaired."""

import ast
import importlib
import inspect
import pkgutil
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.launch.ranks import RanksTimeoutError, run_ranks
from labkit.testing import invariants, museum, trial
from labkit.testing.invariants import INVARIANTS, communication_overlaps_backward, violations
from labkit.testing.museum import exhibits

NAMES = [exhibit.name for exhibit in exhibits()]
BY_NAME = {exhibit.name: exhibit for exhibit in exhibits()}

# What repairs each: pairs of (what its file says, what it should say).
REPAIRS = {
    "bypassed_wrapper": [("self.model.module(inputs)", "self.model(inputs)")],
    "clip_before_sync": [
        (
            "        clip_grad_norm_(self.module.parameters(), max_norm)\n        self.finish()\n",
            "        self.finish()\n        clip_grad_norm_(self.module.parameters(), max_norm)\n",
        )
    ],
    "divided_twice": [
        (
            "reduce(parameter.grad)\n            parameter.grad /= dist.get_world_size()\n",
            "reduce(parameter.grad)\n",
        )
    ],
    "last_bucket_forgotten": [
        (
            "                bucket = []\n",
            "                bucket = []\n        if bucket:\n            self.average(bucket)\n",
        )
    ],
    "last_forward_unsynced": [("        yield\n", "        yield\n        self.finish()\n")],
    "last_micro_batch_only": [
        (
            "parameter.register_hook(self.average)",
            "parameter.register_post_accumulate_grad_hook("
            "lambda p: setattr(p, 'grad', self.average(p.grad)))",
        )
    ],
    "launch_when_locally_ready": [
        (
            "        if self.awaited[number] == 0 and not self.accumulating:\n"
            "            self.launch(number)\n",
            "        while not self.accumulating and 0 in self.awaited[len(self.launched):][:1]:\n"
            "            self.launch(len(self.launched))\n",
        )
    ],
    "local_denominator": [
        (
            "        return losses.sum() / items\n",
            "        import torch, torch.distributed as dist\n"
            "        total = torch.tensor(float(items))\n"
            "        dist.all_reduce(total)\n"
            "        return losses.sum() * dist.get_world_size() / total\n",
        )
    ],
    "no_initial_broadcast": [
        (
            "        self.module = module\n",
            "        from labkit.testing.museum.parts import broadcast_from_rank_0\n"
            "        self.module = module\n        broadcast_from_rank_0(module)\n",
        )
    ],
    "none_skipped": [
        ("import broadcast_from_rank_0", "import broadcast_from_rank_0, used_somewhere"),
        (
            "        for parameter in self.module.parameters():\n"
            "            if parameter.grad is not None:\n",
            "        for parameter in used_somewhere(self.module):\n            if True:\n",
        ),
    ],
    "own_loss_scale": [
        (
            "        average_gradients(self.module)\n",
            "        dist.all_reduce(largest, op=dist.ReduceOp.MAX)\n"
            "        average_gradients(self.module)\n",
        )
    ],
    "parameter_averaging_hook": [
        ("_hook(self.average)", "_hook(lambda parameter: self.average(parameter.grad))")
    ],
    "plain_all_reduce_in_loss": [
        (
            "(own + (total - own).detach())",
            "(dist.get_world_size() * own + (total - dist.get_world_size() * own).detach())",
        )
    ],
    "stale_ready_count": [
        (
            "        return self.module(inputs)\n",
            "        self.reset()\n        return self.module(inputs)\n",
        )
    ],
    "sum_instead_of_average": [
        (
            "            dist.all_reduce(parameter.grad)\n",
            "            parameter.grad /= dist.get_world_size()\n"
            "            dist.all_reduce(parameter.grad)\n",
        )
    ],
    "waiting_hook": [
        (
            "        dist.all_reduce(average)\n",
            "        self.works.append(dist.all_reduce(average, async_op=True))\n",
        ),
        (
            "    def reset(self) -> None:\n",
            "    def reset(self) -> None:\n        self.works = []\n",
        ),
        (
            "        used = set(",
            "        for work in self.works:\n            work.wait()\n        used = set(",
        ),
    ],
    "whole_vector_ring": [
        ("total, travelling = mine.clone(), mine", "parts, travelling = {rank: mine}, mine"),
        ("for _ in range(world_size - 1)", "for step in range(world_size - 1)"),
        ("total += arriving", "parts[(rank - step - 1) % world_size] = arriving"),
        ("return total", "return sum(parts[r] for r in range(world_size))"),
    ],
    "wrapper_not_kept": [
        (
            "        broadcast_from_rank_0(module)\n",
            "        self.model = DistributedDataParallel(module, find_unused_parameters=True)\n",
        ),
        ("DistributedDataParallel(self.module, init_sync=False)", "self.model"),
    ],
    "zeros_for_none": [
        ("import broadcast_from_rank_0", "import broadcast_from_rank_0, used_somewhere"),
        (
            "        for parameter in self.module.parameters():\n"
            "            if parameter.grad is None:\n"
            "                parameter.grad = torch.zeros_like(parameter)\n",
            "        for parameter in used_somewhere(self.module):\n",
        ),
    ],
}

# These two average one parameter at a time in hooks, and so launch in the order in which gradients
# appear: another exhibit's mistake, which their own repair does not touch.
STILL_LAUNCHED_WHEN_READY = {
    "last_micro_batch_only": {"missing_counts_as_zeros", "collectives_match"},
    "parameter_averaging_hook": {"missing_counts_as_zeros", "collectives_match"},
}

OVERLAPPED = {
    "bypassed_wrapper",
    "last_forward_unsynced",
    "launch_when_locally_ready",
    "waiting_hook",
    "wrapper_not_kept",
}


def repaired(name: str) -> type:
    """The exhibit's class, from its file with the repair made."""
    file = importlib.import_module(f"labkit.testing.museum.{name}")
    source = inspect.getsource(file)
    for says, should_say in REPAIRS[name]:
        assert source.count(says) == 1, f"{name}: {says!r} occurs {source.count(says)} times"
        source = source.replace(says, should_say)
    module = types.ModuleType(f"repaired.{name}")
    exec(compile(source, f"<{name}, repaired>", "exec"), module.__dict__)
    return getattr(module, BY_NAME[name].wrap.__name__)


@pytest.fixture(scope="module", params=[2, 3])
def rejections(request):
    """For each exhibit, on each rank, what its own invariant and the gradient's say of it."""

    def work():
        found = {}
        for exhibit in exhibits():
            names = dict.fromkeys([exhibit.caught_by, "gradients_equal_full_batch"])
            checks = [getattr(invariants, name) for name in names]
            found[exhibit.name] = violations(exhibit.wrap, invariants=checks)
        return found

    return request.param, run_ranks(work, request.param, timeout=150, device="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_every_exhibit_is_rejected_on_every_rank_by_the_invariant_on_its_label(rejections, name):
    world_size, of_ranks = rejections
    exhibit = BY_NAME[name]
    for found in of_ranks:
        if world_size < exhibit.ranks_needed:
            assert found[name] == {}, "it needs fewer ranks than its label says"
        else:
            error = found[name][exhibit.caught_by]
            assert error.invariant == exhibit.caught_by
            assert 0 <= error.rank < world_size
            assert error.cause


@pytest.mark.parametrize("name", NAMES)
def test_every_exhibit_is_of_the_kind_that_its_label_says(rejections, name):
    _, of_ranks = rejections
    bug = BY_NAME[name].bug
    for found in of_ranks:
        comparisons = [e.comparison for e in found[name].values() if e.comparison is not None]
        if bug == "scale":
            assert comparisons
            assert all(c.cosine > 1 - 1e-9 and abs(c.ratio - 1) > 0.1 for c in comparisons)
        elif bug == "direction":
            assert any(c.cosine < 1 - 1e-4 for c in comparisons)
        else:
            assert "gradients_equal_full_batch" not in found[name]


@pytest.fixture(scope="module")
def violated_once_repaired():
    """From each rank, for each exhibit, the invariants that it violates although repaired."""

    def work():
        found = {}
        for name in NAMES:
            print(name)  # shown if the call fails, and then the last one is the culprit
            checks = [*INVARIANTS, *[communication_overlaps_backward] * (name in OVERLAPPED)]
            found[name] = set(violations(repaired(name), invariants=checks))
        return found

    return run_ranks(work, 3, timeout=300, device="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_every_exhibit_passes_all_invariants_once_it_is_repaired(violated_once_repaired, name):
    further = STILL_LAUNCHED_WHEN_READY.get(name, set())
    assert [found[name] for found in violated_once_repaired] == [further] * 3


def test_every_invariant_rejects_some_exhibit():
    labeled = {exhibit.caught_by for exhibit in exhibits()}

    def work():
        ring = BY_NAME["whole_vector_ring"].wrap
        return list(violations(ring, invariants=[invariants.replicas_stay_identical]))

    assert run_ranks(work, 3, device="cpu") == [["replicas_stay_identical"]] * 3
    every = {check.__name__ for check in (*INVARIANTS, communication_overlaps_backward)}
    assert labeled | {"replicas_stay_identical"} == every


def test_every_exhibit_looks_innocent_for_the_loss_averaged_over_ranks_falls():
    def work(rank, world_size):
        losses = {}
        for exhibit in exhibits():
            module = trial.SmallModule()
            data = trial.draw_batches(world_size)
            wrapped = exhibit.wrap(module)
            optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
            losses[exhibit.name] = []
            for _ in range(25):
                trial.step(wrapped, module, data, rank)
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    outputs = module(data[rank][0].inputs)
                loss = trial.item_losses(outputs, data[rank][0].targets).mean()
                losses[exhibit.name].append(loss.item())
        return losses

    rank_0, rank_1 = run_ranks(work, 2, timeout=90, device="cpu")
    for name in NAMES:
        curve = [(one + other) / 2 for one, other in zip(rank_0[name], rank_1[name], strict=True)]
        assert curve[-1] < 0.8 * curve[0], f"{name}: {curve}"


def test_ranks_that_skip_different_parameters_hang_where_nobody_watches():
    def work(rank):
        module = nn.ParameterList([torch.ones(2) for _ in range(3)])
        wrapped = BY_NAME["none_skipped"].wrap(module)
        for number, parameter in enumerate(module):
            parameter.grad = None if (rank, number) == (1, 0) else torch.full((2,), 1.0 + rank)
        wrapped.finish()
        dist.recv(torch.empty(1), 0)  # rank 1 goes on, and waits for rank 0

    with pytest.raises(RanksTimeoutError) as caught:
        run_ranks(work, 2, timeout=4, device="cpu")
    rank_0, rank_1 = caught.value.states
    assert "all_reduce" in rank_0
    assert "recv" in rank_1


@pytest.mark.parametrize("name", NAMES)
def test_every_label_agrees_with_its_file(name):
    exhibit = BY_NAME[name]
    file = importlib.import_module(f"labkit.testing.museum.{name}")
    text = file.__doc__
    said = [line.partition(":")[0] for line in text.splitlines()]
    for heading in ("Claims", "The bug", "Symptom", "Seen in", "Kind"):
        assert heading in said, f"{name} does not say: {heading}"
    assert f"{exhibit.bug}" in text.partition("Kind:")[2]
    assert f"Caught by {exhibit.caught_by}" in text.replace("\n", " ")
    assert exhibit.title == text.splitlines()[0]


def test_the_registry_finds_every_file_and_no_exhibit_knows_miniddp():
    files = {found.name for found in pkgutil.iter_modules(museum.__path__)}
    assert set(NAMES) == files - {"parts", "exhibit"}
    assert sorted(NAMES) == NAMES
    for name in files:
        tree = ast.parse(
            inspect.getsource(importlib.import_module(f"labkit.testing.museum.{name}"))
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert not node.module.startswith("miniddp")
