"""What the wrapper does besides averaging: verification, synchronization, copies and errors."""

import copy
import inspect
import pickle
import warnings
from itertools import product

import pytest
import torch
from ddp_models import Branches, loss_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import miniddp
from labkit.launch.ranks import run_ranks
from miniddp import MiniDDP
from miniddp.data_parallel import gather
from miniddp.torch_drop_in import DistributedDataParallel as DropIn


def linear() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(4, 3)


def batch(rank: int, step: int = 0, size: int = 6) -> torch.Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(100 * rank + step))


def error_of(function) -> str:
    """The text of the RuntimeError that `function` raises."""
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return "no error"


# Averages -----------------------------------------------------------------------------------------


def delayed(rank, world_size):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    alone = copy.deepcopy(module)
    above = [(name, p) for name, p in module.named_parameters() if not name.startswith("0.")]
    wrapped = DropIn(
        module, delay_all_reduce_named_params=above, param_to_hook_all_reduce=module[0].weight
    )
    for step in range(2):
        wrapped.zero_grad()
        wrapped(batch(rank, step)).sum().backward()
    for r in range(world_size):
        (alone(batch(r, 1)).sum() / world_size).backward()
    return [(p.grad, q.grad) for p, q in zip(module.parameters(), alone.parameters(), strict=True)]


def test_delayed_parameters_are_averaged_together_when_the_other_ones_gradient_arrives():
    for pairs in run_ranks(delayed, 3):
        for gradient, expected in pairs:
            torch.testing.assert_close(gradient, expected)


# Forward and backward -----------------------------------------------------------------------------


def no_sync_cases(rank, world_size):
    wrapped = DropIn(linear())
    with wrapped.no_sync():
        synchronized_inside = wrapped.require_backward_grad_sync
        output = wrapped(batch(rank))
    output.sum().backward()  # outside: what counts is where the forward ran
    local = wrapped.module.weight.grad.clone()
    wrapped(batch(rank, 1)).sum().backward()
    accumulated = wrapped.module.weight.grad.clone()
    wrapped.zero_grad()
    output = wrapped(batch(rank, 2))
    with wrapped.no_sync():
        output.sum().backward()
    reduced = wrapped.module.weight.grad.clone()
    with pytest.raises(KeyError), wrapped.no_sync():
        raise KeyError
    return synchronized_inside, local, accumulated, reduced, wrapped.require_backward_grad_sync


def test_no_sync_is_decided_by_the_forward_and_survives_exceptions():
    per_rank = run_ranks(no_sync_cases, 2)
    for synchronized_inside, _, accumulated, reduced, afterwards in per_rank:
        assert (synchronized_inside, afterwards) == (False, True)
        assert torch.equal(accumulated, per_rank[0][2])
        assert torch.equal(reduced, per_rank[0][3])
    assert not torch.equal(per_rank[0][1], per_rank[1][1])


class WithItsScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(2.0)), nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x), self.scale


LOSSES = (lambda output, scale: output.sum(), lambda output, scale: (output * scale).sum())


def returned_parameters(rank, world_size):
    found = []
    for wrap, loss_of_outputs in product((DropIn, MiniDDP), LOSSES):
        torch.manual_seed(3)
        wrapped, alone = wrap(WithItsScale(), find_unused_parameters=True), WithItsScale()
        alone.load_state_dict(wrapped.module.state_dict())
        for step in range(3):
            wrapped.zero_grad()
            loss_of_outputs(*wrapped(batch(rank, step))).backward()
            alone.zero_grad()
            for other in range(world_size):
                (loss_of_outputs(*alone(batch(other, step))) / world_size).backward()
            with torch.no_grad():  # nothing to gate: the caller gets the parameter itself
                found.append(wrapped(batch(rank, step))[1] is wrapped.module.scale)
            for p, q in zip(wrapped.module.parameters(), alone.parameters(), strict=True):
                found.append((p.grad is None) == (q.grad is None))
                found.append(p.grad is None or torch.allclose(p.grad, q.grad, atol=1e-6))
    return found


def test_a_parameter_that_is_itself_an_output_may_be_used_by_the_loss_or_ignored():
    assert run_ranks(returned_parameters, 2) == [[True] * 84] * 2


# Errors -------------------------------------------------------------------------------------------


def unused_without_the_flag(rank, world_size, strict):
    torch.manual_seed(3)
    wrapped = DropIn(Branches(), strict=strict)
    inputs = batch(rank, size=12).view(4, 12)
    inputs[0, 0] = 1.0 if rank == 0 else -1.0
    first = error_of(lambda: loss_of(wrapped(inputs)).backward())
    second = error_of(lambda: loss_of(wrapped(inputs)).backward())
    return first, second


def test_strict_reports_what_each_rank_lacked_in_the_step_itself_and_on_every_rank():
    for errors in run_ranks(unused_without_the_flag, 2, True):
        for error in errors:  # and again in the next step: nothing is left hanging
            assert "rank 0: right.weight, right.bias, never.weight, never.bias" in error
            assert "rank 1: left.weight, left.bias, never.weight, never.bias" in error


def shared_between_reentrant_checkpoints(rank, world_size):
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = checkpoint(self.shared, self.stem(x), use_reentrant=True)
            return checkpoint(self.shared, x, use_reentrant=True)

    wrapped = DropIn(Twice())
    error = error_of(lambda: wrapped(batch(rank)).sum().backward())
    static = DropIn(Twice(), static_graph=True)
    for step in range(3):
        static.zero_grad()
        static(batch(rank, step)).sum().backward()
    return error, static.module.shared.weight.grad


def test_a_second_gradient_in_one_backward_is_an_error_unless_the_graph_is_static():
    per_rank = run_ranks(shared_between_reentrant_checkpoints, 2)
    for error, gradient in per_rank:
        assert "Expected to mark a variable ready only once" in error
        assert "with name shared." in error
        assert torch.equal(gradient, per_rank[0][1])


# Copies and neighbors -----------------------------------------------------------------------------


def with_a_graph_of_the_gradients(rank):
    return [with_a_graph(rank, views) for views in (False, True)]


def with_a_graph(rank, views):
    found = []
    for wrap in (MiniDDP, DropIn, DistributedDataParallel):
        torch.manual_seed(5)
        wrapped = wrap(
            nn.Sequential(linear(), nn.Tanh(), nn.Linear(3, 2)), gradient_as_bucket_view=views
        )
        # torch's DDP raises with create_graph=True.
        create_graph = wrap is not DistributedDataParallel
        of_steps = []
        for step in range(3):
            wrapped.zero_grad(set_to_none=step % 2 == 0)
            loss = wrapped(batch(rank, step)).square().mean()
            loss.backward(create_graph=create_graph)
            of_steps.append([p.grad.detach().clone() for p in wrapped.parameters()])
        found.append(of_steps)
    return found


def test_a_backward_that_creates_a_graph_averages_like_one_that_does_not():
    for found in run_ranks(with_a_graph_of_the_gradients, 2):
        for core, drop_in, torchs in found:
            for ours in (core, drop_in):
                for of_step, expected in zip(ours, torchs, strict=True):
                    assert all(map(torch.equal, of_step, expected))


def test_the_wrapper_takes_torchs_parameters_in_torchs_order_with_torchs_defaults():
    def described(parameter: inspect.Parameter) -> tuple[str, object, object]:
        # What is True in torch 2.11 is None in later versions, with the same meaning.
        same = parameter.name == "broadcast_buffers" and parameter.default is None
        return parameter.name, True if same else parameter.default, parameter.kind

    theirs = [*map(described, inspect.signature(DistributedDataParallel).parameters.values())]
    ours = [*map(described, inspect.signature(DropIn).parameters.values())]
    assert ours[: len(theirs)] == theirs
    assert issubclass(DropIn, DistributedDataParallel)  # how libraries recognize a wrapper


def lines_that_warnings_name(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DropIn(linear(), static_graph=True, find_unused_parameters=True)
        DropIn(linear(), static_graph=True)._set_static_graph()
        gather([torch.tensor(1.0), torch.tensor(2.0)], "cpu")
        gather([{"a": torch.tensor(1.0)}, {"a": torch.tensor(2.0)}], "cpu")
        DropIn(linear(), broadcast_buffers=True)
        DropIn(linear(), broadcast_buffers=True, forward_sync_buffers=True)
        for wrapped in (DropIn(linear()), miniddp.MiniDDP(linear())):
            wrapped.module(batch(rank)).sum().backward()
            wrapped(batch(rank))
    return [each.filename for each in caught]


def test_every_warning_names_the_users_line():
    for files in run_ranks(lines_that_warnings_name, 2):
        assert files == [__file__] * 8


def refusals(rank):
    wrapped, said = MiniDDP(linear()), []
    for attempt in (
        lambda: MiniDDP(linear(), static_graph=True),
        lambda: copy.deepcopy(wrapped),
        lambda: pickle.dumps(wrapped),
    ):
        with pytest.raises(TypeError) as caught:
            attempt()
        said.append(str(caught.value))
    return said


def test_what_mini_ddp_cannot_do_names_what_can():
    [[keyword, *copies]] = run_ranks(refusals, 1)
    assert "static_graph. miniddp.torch_drop_in.DistributedDataParallel takes" in keyword
    assert all("copy or save its .module" in text for text in copies)
