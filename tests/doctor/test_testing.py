"""The helper for users' tests: what it certifies, and what it refuses."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from doctor.harness.certify import certified_command
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ddp_doctor import testing
from ddp_doctor.facts.certificate import Certificate
from ddp_doctor.testing import NotJudgedError, assert_certified
from labkit.launch.forks import ForkServer


def make_model() -> nn.Module:
    return nn.Linear(4, 1)


def batches(rank: int, world: int) -> Iterator[Tensor]:
    """One more sample on each further rank."""
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(6):
        yield torch.randn(3 + rank, 4, generator=drawn)


def loader(rank: int, world: int) -> DataLoader:
    drawn = torch.Generator().manual_seed(rank)
    return DataLoader(TensorDataset(torch.randn(16, 4, generator=drawn)), 4 + rank)


def no_batches(rank: int, world: int) -> list[Tensor]:
    return []


def of_all(model: nn.Module, x: Tensor) -> Tensor:
    count = torch.tensor(float(len(x)))
    dist.all_reduce(count)
    summed = mse_loss(model(x), x.sum(1, keepdim=True), reduction="sum")
    return summed * dist.get_world_size() / count


def of_all_loaded(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return of_all(model, batch[0])


def of_this_rank(model: nn.Module, x: Tensor) -> Tensor:
    return mse_loss(model(x), x.sum(1, keepdim=True))


def raises(model: nn.Module, x: Tensor) -> Tensor:
    raise ArithmeticError("no loss today")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Certify in forks of a server, instead of in an interpreter of its own."""
    server = ForkServer()

    def certify(command: list[str], ranks: int, cpu: bool, explain: bool) -> Any:
        found = certified_command(server, command, tmp_path, ranks)
        return Certificate.of_json(found), "the rules"

    monkeypatch.setattr(testing, "certify_apart", certify)
    yield
    server.stop()


@pytest.mark.parametrize(("loss", "given"), [(of_all, batches), (of_all_loaded, loader)])
def test_functions_that_count_over_all_ranks_are_certified(
    forked: None, loss: Callable[..., Tensor], given: Callable[..., Any]
) -> None:
    assert_certified(make_model=make_model, loss=loss, batches=given)


def test_a_mean_of_each_ranks_own_is_refused_with_the_certificate_and_the_rules(
    forked: None,
) -> None:
    with pytest.raises(AssertionError, match=r"0\.429 : 0\.571") as raised:
        assert_certified(make_model=make_model, loss=of_this_rank, batches=batches)
    assert not isinstance(raised.value, NotJudgedError)
    assert str(raised.value).endswith("the rules")


def test_without_an_optimizer_step_nothing_is_certified(forked: None) -> None:
    with pytest.raises(NotJudgedError, match="took no optimizer step"):
        assert_certified(make_model=make_model, loss=of_all, batches=no_batches)


def test_an_error_in_a_function_is_named_with_its_line(forked: None) -> None:
    with pytest.raises(NotJudgedError) as raised:
        assert_certified(make_model=make_model, loss=raises, batches=batches)
    said = " ".join(str(raised.value).split())
    assert "ArithmeticError: no loss today at test_testing.py:" in said


class Task:
    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return of_all(model, x)


@pytest.mark.parametrize("loss", [lambda model, x: x, functools.partial(of_all), Task().loss])
def test_a_function_that_ranks_cannot_import_is_refused(loss: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"^loss is .* cannot import by its name"):
        assert_certified(make_model=make_model, loss=loss, batches=batches)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"script": __file__, "ranks": 1}, ValueError, "ranks is 1"),
        ({"script": "no_such.py"}, FileNotFoundError, "no script 'no_such.py' here"),
        ({}, TypeError, "pass a script, or make_model, loss, and batches"),
        ({"make_model": make_model, "loss": of_all}, TypeError, "batches missing"),
        ({"script": __file__, "loss": of_all}, TypeError, "pass a script, or"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        assert_certified(**arguments)


SCRIPT = """
import sys
import torch
import torch.distributed as dist

assert sys.argv[1:] == ["--lr", "1"]
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).pow(2).mean().backward()
    optimizer.step()
"""


def test_a_script_is_certified_whatever_the_tests_own_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert_certified("train.py", "--lr", "1")
