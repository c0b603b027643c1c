"""What the wrapper does besides averaging: verification, synchronization, copies and errors."""

import copy
import inspect
import pickle
import warnings
from itertools import product

import pytest
import torch
from ddp_models import Branches, linear, loss_of, rows
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from miniddp import MiniDDP
from miniddp.data_parallel import gather
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from tests.on_ranks import on_ranks

# Averages -----------------------------------------------------------------------------------------


@on_ranks(3)
def test_delayed_parameters_are_averaged_together_when_the_other_ones_gradient_arrives(
    rank, world_size
):
    torch.manual_seed(1)
    layers = nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)
    module = nn.Sequential(*layers)
    alone = copy.deepcopy(module)
    above = [(name, p) for name, p in module.named_parameters() if not name.startswith("0.")]
    wrapped = DropIn(
        module, delay_all_reduce_named_params=above, param_to_hook_all_reduce=module[0].weight
    )
    for step in range(2):
        wrapped.zero_grad()
        wrapped(rows(rank, step)).sum().backward()
    for r in range(world_size):
        (alone(rows(r, 1)).sum() / world_size).backward()
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


# Forward and backward -----------------------------------------------------------------------------


@on_ranks(2)
def test_no_sync_is_decided_by_the_forward_and_survives_exceptions(rank):
    wrapped = DropIn(linear())
    own, average = (
        torch.stack([rows(each).sum(0) for each in ranks]).mean(0).expand(2, 3)
        for ranks in ([rank], [0, 1])
    )
    with pytest.raises(KeyError), wrapped.no_sync():
        raise KeyError
    assert wrapped.require_backward_grad_sync
    with wrapped.no_sync():
        assert not wrapped.require_backward_grad_sync
        output = wrapped(rows(rank))
    assert wrapped.require_backward_grad_sync
    output.sum().backward()  # outside: what counts is where the forward ran
    torch.testing.assert_close(wrapped.module.weight.grad, own)
    wrapped(rows(rank)).sum().backward()
    torch.testing.assert_close(wrapped.module.weight.grad, 2 * average)
    wrapped.zero_grad()
    output = wrapped(rows(rank))
    with wrapped.no_sync():
        output.sum().backward()
    torch.testing.assert_close(wrapped.module.weight.grad, average)


class WithItsScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(2.0)), nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x), self.scale


LOSSES = (lambda output, scale: output.sum(), lambda output, scale: (output * scale).sum())


@on_ranks(2)
def test_a_parameter_that_is_itself_an_output_may_be_used_by_the_loss_or_ignored(rank):
    for wrap, loss_of_outputs in product((DropIn, MiniDDP), LOSSES):
        torch.manual_seed(3)
        wrapped, alone = wrap(WithItsScale(), find_unused_parameters=True), WithItsScale()
        alone.load_state_dict(wrapped.module.state_dict())
        for step in range(3):
            wrapped.zero_grad()
            loss_of_outputs(*wrapped(rows(rank, step))).backward()
            alone.zero_grad()
            for other in range(2):
                (loss_of_outputs(*alone(rows(other, step))) / 2).backward()
            with torch.no_grad():  # nothing to gate: the caller gets the parameter itself
                assert wrapped(rows(rank, step))[1] is wrapped.module.scale
            for p, q in zip(wrapped.module.parameters(), alone.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                assert p.grad is None or torch.allclose(p.grad, q.grad, atol=1e-6)


# Errors -------------------------------------------------------------------------------------------


@on_ranks(2)
def test_strict_reports_what_each_rank_lacked_in_the_step_itself_and_on_every_rank(rank):
    wrapped = DropIn(Branches(), strict=True)
    torch.manual_seed(rank)
    inputs = torch.randn(4, 12)
    inputs[0, 0] = 1.0 if rank == 0 else -1.0
    for _ in range(2):  # and again in the next step: nothing is left hanging
        with pytest.raises(RuntimeError) as caught:
            loss_of(wrapped(inputs)).backward()
        error = str(caught.value)
        assert "rank 0: right.weight, right.bias, never.weight, never.bias" in error
        assert "rank 1: left.weight, left.bias, never.weight, never.bias" in error


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.shared = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        x = checkpoint(self.shared, self.stem(x), use_reentrant=True)
        return checkpoint(self.shared, x, use_reentrant=True)


@on_ranks(2)
def test_a_second_gradient_in_one_backward_is_an_error_unless_the_graph_is_static(rank):
    wrapped = DropIn(Twice())
    once_only = "(?s)Expected to mark a variable ready only once.*with name shared\\."
    with pytest.raises(RuntimeError, match=once_only):
        wrapped(rows(rank)).sum().backward()
    static, full = DropIn(Twice(), static_graph=True), Twice()
    full.load_state_dict(static.module.state_dict())
    for step in range(3):
        static.zero_grad()
        static(rows(rank, step)).sum().backward()
    (sum(full(rows(each, 2)).sum() for each in range(2)) / 2).backward()
    torch.testing.assert_close(static.module.shared.weight.grad, full.shared.weight.grad)


# Copies and neighbors -----------------------------------------------------------------------------


@on_ranks(2)
def test_a_backward_that_creates_a_graph_averages_like_one_that_does_not(rank):
    def of_steps(wrap, views):
        torch.manual_seed(5)
        module = nn.Sequential(linear(), nn.Tanh(), nn.Linear(2, 2))
        wrapped, found = wrap(module, gradient_as_bucket_view=views), []
        for step in range(3):
            wrapped.zero_grad(set_to_none=step % 2 == 0)
            loss = wrapped(rows(rank, step)).square().mean()
            # torch's DDP raises with create_graph=True.
            loss.backward(create_graph=wrap is not DistributedDataParallel)
            found += [p.grad.detach().clone() for p in wrapped.parameters()]
        return found

    for views in (False, True):
        torchs = of_steps(DistributedDataParallel, views)
        for wrap in (MiniDDP, DropIn):
            assert all(map(torch.equal, of_steps(wrap, views), torchs))


def test_the_wrapper_takes_torchs_parameters_in_torchs_order_with_torchs_defaults():
    def described(parameter: inspect.Parameter) -> tuple[str, object, object]:
        # What is True in torch 2.11 is None in later versions, with the same meaning.
        same = parameter.name == "broadcast_buffers" and parameter.default is None
        return parameter.name, True if same else parameter.default, parameter.kind

    theirs = [*map(described, inspect.signature(DistributedDataParallel).parameters.values())]
    ours = [*map(described, inspect.signature(DropIn).parameters.values())]
    assert ours[: len(theirs)] == theirs
    assert issubclass(DropIn, DistributedDataParallel)  # how libraries recognize a wrapper


@on_ranks(2)
def test_every_warning_names_the_users_line(rank):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DropIn(linear(), static_graph=True, find_unused_parameters=True)
        DropIn(linear(), static_graph=True)._set_static_graph()
        gather([torch.tensor(1.0), torch.tensor(2.0)], "cpu")
        gather([{"a": torch.tensor(1.0)}, {"a": torch.tensor(2.0)}], "cpu")
        DropIn(linear(), broadcast_buffers=True)
        DropIn(linear(), broadcast_buffers=True, forward_sync_buffers=True)
        for wrapped in (DropIn(linear()), MiniDDP(linear())):
            wrapped.module(rows(rank)).sum().backward()
            wrapped(rows(rank))
    assert [each.filename for each in caught] == [__file__] * 8


@on_ranks(1)
def test_what_mini_ddp_cannot_do_names_what_can():
    wrapped = MiniDDP(linear())
    takes_it = r"static_graph\. miniddp\.torch_drop_in\.DistributedDataParallel takes"
    with pytest.raises(TypeError, match=takes_it):
        MiniDDP(linear(), static_graph=True)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"copy or save its \.module"):
            attempt(wrapped)
