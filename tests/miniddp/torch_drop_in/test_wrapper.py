"""What the wrapper does besides averaging, and what goes wrong around it.

Errors come on every rank, nothing hangs, and the next step is right.
"""

import copy
import inspect
import pickle
import warnings
from collections import defaultdict
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_sequence

from labkit.testing.compare import gradients, largest_difference
from miniddp import MiniDDP
from miniddp.data_parallel import gather
from miniddp.extras.comm_hooks import total
from miniddp.ladder import RUNGS, Flat
from miniddp.losses import global_mean
from miniddp.manual import average_gradients
from miniddp.sync_batch_norm import SyncBatchNorm
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from miniddp.torch_drop_in.keywords import moved_to
from tests.ddp_models import Branches, TwoHeads, UsedTwice, linear, loss_of
from tests.ddp_models import rows as inputs
from tests.on_ranks import on_ranks


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
        wrapped(inputs(rank, step)).sum().backward()
    for r in range(world_size):
        (alone(inputs(r, 1)).sum() / world_size).backward()
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@on_ranks(2)
def test_no_sync_is_decided_by_the_forward_and_survives_exceptions(rank):
    wrapped = DropIn(linear())
    own, average = (
        torch.stack([inputs(each).sum(0) for each in ranks]).mean(0).expand(2, 3)
        for ranks in ([rank], [0, 1])
    )
    with pytest.raises(KeyError), wrapped.no_sync():
        raise KeyError
    assert wrapped.require_backward_grad_sync
    with wrapped.no_sync():
        assert not wrapped.require_backward_grad_sync
        output = wrapped(inputs(rank))
    assert wrapped.require_backward_grad_sync
    output.sum().backward()  # outside: what counts is where the forward ran
    torch.testing.assert_close(wrapped.module.weight.grad, own)
    wrapped(inputs(rank)).sum().backward()
    torch.testing.assert_close(wrapped.module.weight.grad, 2 * average)
    wrapped.zero_grad()
    output = wrapped(inputs(rank))
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
            loss_of_outputs(*wrapped(inputs(rank, step))).backward()
            alone.zero_grad()
            for other in range(2):
                (loss_of_outputs(*alone(inputs(other, step))) / 2).backward()
            with torch.no_grad():  # nothing to gate: the caller gets the parameter itself
                assert wrapped(inputs(rank, step))[1] is wrapped.module.scale
            for p, q in zip(wrapped.module.parameters(), alone.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                assert p.grad is None or torch.allclose(p.grad, q.grad, atol=1e-6)


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


@on_ranks(2)
def test_a_second_gradient_in_one_backward_is_an_error_unless_the_graph_is_static(rank):
    wrapped = DropIn(UsedTwice())
    once_only = "(?s)Expected to mark a variable ready only once.*with name shared\\."
    with pytest.raises(RuntimeError, match=once_only):
        wrapped(inputs(rank)).sum().backward()
    static, full = DropIn(UsedTwice(), static_graph=True), UsedTwice()
    full.load_state_dict(static.module.state_dict())
    for step in range(3):
        static.zero_grad()
        static(inputs(rank, step)).sum().backward()
    (sum(full(inputs(each, 2)).sum() for each in range(2)) / 2).backward()
    torch.testing.assert_close(static.module.shared.weight.grad, full.shared.weight.grad)


@on_ranks(2)
def test_a_backward_that_creates_a_graph_averages_like_one_that_does_not(rank):
    def of_steps(wrap, views):
        torch.manual_seed(5)
        module = nn.Sequential(linear(), nn.Tanh(), nn.Linear(2, 2))
        wrapped, found = wrap(module, gradient_as_bucket_view=views), []
        for step in range(3):
            wrapped.zero_grad(set_to_none=step % 2 == 0)
            loss = wrapped(inputs(rank, step)).square().mean()
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
            wrapped.module(inputs(rank)).sum().backward()
            wrapped(inputs(rank))
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


@on_ranks(2)
def test_a_rung_built_on_a_module_that_has_one_already_averages_alone(rank):
    single = linear()
    single(torch.cat([inputs(0), inputs(1)])).sum().div(2).backward()
    right = gradients(single)
    for first, second in product(RUNGS, RUNGS):
        module = linear()
        first(module).finish()
        rung = second(module)
        rung(inputs(rank)).sum().backward()
        rung.finish()
        assert largest_difference(gradients(module), right) < 1e-6


@on_ranks(2)
def test_a_reducer_may_be_prepared_for_backward_after_the_forward_as_libraries_do_it(rank):
    found = []
    for wrap in (DropIn, DistributedDataParallel):
        ddp = wrap(linear())
        for _ in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                output = ddp(inputs(rank))
            ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
            ddp.reducer.prepare_for_backward([])
            output.sum().backward()
        found.append(gradients(ddp))
    assert largest_difference(*found) == 0


def average_or_fail(failing, bucket):
    """A comm hook of two ranks whose future fails as long as `failing[0]` is true."""

    def then(future):
        if failing[0]:
            raise ValueError("the hook's future fails")
        return future.value()[0]

    summed = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    return summed.get_future().then(then)


@on_ranks(2)
def test_after_a_comm_hooks_future_has_failed_the_next_step_is_right(rank):
    full = TwoHeads()
    (sum(full(inputs(r), "b").sum() for r in range(2)) / 2).backward()
    right = full.b.weight.grad
    failing = [True]
    ddp = DropIn(TwoHeads(), find_unused_parameters=True)
    ddp.register_comm_hook(failing, average_or_fail)
    with pytest.raises(Exception, match="the hook's future fails"):
        ddp(inputs(rank), "a").sum().backward()
    failing[0] = False
    ddp.zero_grad()
    ddp(inputs(rank), "b").sum().backward()
    assert ddp.module.a.weight.grad is None
    torch.testing.assert_close(ddp.module.b.weight.grad, right)


@on_ranks(2)
def test_a_copy_keeps_the_comm_hook_and_refuses_delayed_parameters(rank):
    full = linear()
    sum(full(inputs(r)).sum() for r in range(2)).backward()
    right = gradients(full)
    ddp = DropIn(linear())
    ddp.register_comm_hook(None, total)
    for each in (ddp, copy.deepcopy(ddp)):
        each(inputs(rank)).sum().backward()
        assert largest_difference(gradients(each), right) < 1e-6
    module = nn.Sequential(linear(), nn.Linear(2, 2))
    delayed = DropIn(
        module,
        delay_all_reduce_named_params=[("0.weight", module[0].weight)],
        param_to_hook_all_reduce=module[1].weight,
    )
    with pytest.raises(RuntimeError, match=r"cannot be copied.*Copy its \.module"):
        copy.deepcopy(delayed)


@on_ranks(2)
def test_skipped_buckets_are_not_the_last_one_and_the_rest_is_averaged(rank):
    seen = []

    def hook(state, bucket):
        seen.append(bucket.is_last())
        return total(state, bucket).then(lambda done: done.value().div_(2))

    settings = {
        "find_unused_parameters": True,
        "skip_all_reduce_unused_params": True,
        "bucket_cap_mb": 1e-6,
    }
    ddp = DropIn(TwoHeads(), **settings)
    ddp.register_comm_hook(None, hook)
    ddp(inputs(rank), "b").sum().backward()
    reference = DistributedDataParallel(TwoHeads(), **settings)
    reference(inputs(rank), "b").sum().backward()
    assert largest_difference(gradients(ddp), gradients(reference)) == 0
    # Of six buckets of one tensor each, those of head a are not sent.
    assert seen == [False, False, False, True]


@on_ranks(2)
def test_what_could_not_be_reduced_or_broadcast_is_refused_on_every_rank(rank):
    ddp = DropIn(TwoHeads(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    with pytest.raises(ValueError, match="skip_all_reduce_unused_params does not go with join"):
        ddp.join().__enter__()
    module = linear()
    delayed = {"delay_all_reduce_named_params": list(module.named_parameters())}
    with pytest.raises(NotImplementedError, match="delay_all_reduce_named_params"):
        DropIn(module, param_to_hook_all_reduce=module.weight, **delayed)
    module.register_buffer("mask", torch.full((1, 3), float(rank)).expand(4, 3))
    with pytest.raises(ValueError, match=r"shape \(4, 3\) is expanded.*clone\(\)"):
        DropIn(module)


@on_ranks(2)
def test_a_rank_outside_of_the_group_is_told_so_and_its_gradients_stay(rank):
    group = dist.new_group([0])
    module = linear()
    module(inputs(rank)).sum().backward()
    before = gradients(module)
    for call in (
        lambda: average_gradients(module, group=group),
        lambda: average_gradients(module, flat=True, group=group),
        lambda: global_mean(module(inputs(rank)).sum(), 2, group),
        lambda: SyncBatchNorm(3, process_group=group)(inputs(rank)),
        lambda: Flat(module, group),
        lambda: DropIn(copy.deepcopy(module), process_group=group),
    ):
        if rank == 0:
            call()
        else:
            with pytest.raises(ValueError, match="not in the group: call on its members only"):
                call()
    assert largest_difference(gradients(module), before) == 0


def test_without_a_process_group_the_error_is_torchs():
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        DropIn(linear())


class HiddenHeads(TwoHeads):
    """Returns an object in which no wrapper finds the tensor."""

    def forward(self, *inputs):
        return SimpleNamespace(output=super().forward(*inputs))


@pytest.mark.parametrize(
    ("module", "strict"), [(TwoHeads, False), (TwoHeads, True), (HiddenHeads, False)]
)
@on_ranks(2)
def test_a_rank_without_inputs_where_a_static_graph_is_learned_takes_part_in_the_next_epoch(
    rank, module, strict
):
    ddp, full = DropIn(module(), static_graph=True, strict=strict), TwoHeads()
    for steps in ((0, 3), (3, 3)):
        with ddp.join():
            for _ in range(steps[rank]):
                ddp.zero_grad()
                output = ddp(inputs(rank), "b")
                getattr(output, "output", output).sum().backward()
    for each in range(2):
        (full(inputs(each), "b").sum() / 2).backward()
    for ours, right in zip(ddp.parameters(), full.parameters(), strict=True):
        assert (ours.grad is None) == (right.grad is None)
        assert ours.grad is None or torch.allclose(ours.grad, right.grad)


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


def test_inputs_are_moved_to_a_device_however_they_nest_and_a_packed_sequence_as_a_whole():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    counts = defaultdict(list, n=[torch.tensor(1.0)])
    given = [Pair(torch.tensor(2.0), "text"), {"packed": packed, "counts": counts}]
    pair, of_names = moved_to(given, torch.device("meta"))
    assert isinstance(pair, Pair)
    assert pair.left.is_meta
    assert pair.right == "text"
    assert of_names["packed"].data.is_meta
    assert not of_names["packed"].batch_sizes.is_meta
    assert isinstance(of_names["counts"], defaultdict)
    assert of_names["counts"]["n"][0].is_meta
    assert not counts["n"][0].is_meta


class UnannouncedSparse(nn.Module):
    """Its table's gradient is sparse, and no layer says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(5, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.embedding(words, self.table, sparse=True))


@on_ranks(2)
def test_a_sparse_gradient_that_no_layer_announced_is_named_on_every_rank(rank):
    said = "to have dense gradient of the parameter's dtype"
    said += rf".*Not so on rank {rank}: table\. .*nn\.Embedding"
    for views in (False, True):
        ddp = DropIn(UnannouncedSparse(), gradient_as_bucket_view=views)
        with pytest.raises(RuntimeError, match=rf"(?s){said}"):
            ddp(torch.tensor([rank, 3])).sum().backward()


@on_ranks(2)
def test_under_join_each_rank_keeps_its_own_static_graph(rank):
    full = TwoHeads()
    for each in range(2):
        (full(inputs(each), "ab"[each]).sum() / 2).backward()
    right = gradients(full)
    ddp = DropIn(TwoHeads(), static_graph=True)
    with ddp.join():
        for _ in range(3):
            ddp.zero_grad()
            ddp(inputs(rank), "ab"[rank]).sum().backward()
    assert largest_difference(gradients(ddp.module), right) < 1e-6


@pytest.mark.parametrize("module", [TwoHeads, HiddenHeads])
@on_ranks(2)
def test_strict_tells_a_joined_rank_too_that_a_gradient_is_missing(rank, module):
    said = "Parameters which did not receive grad for rank 0: b.weight, b.bias"
    ddp = DropIn(module(), strict=True)

    def steps():
        for step in range(2 - rank):
            ddp.zero_grad()
            used = ("a", "b") if step == 0 else ("a",)
            outputs = [ddp.module(inputs(rank), head) for head in used[1:]]
            output = ddp(inputs(rank), "a")
            sum(getattr(o, "output", o).sum() for o in [output, *outputs]).backward()

    with pytest.raises(RuntimeError, match=said), ddp.join():
        steps()


def returns_work(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True)


def returns_a_number(state, bucket):
    done = torch.futures.Future()
    done.set_result(torch.ones(1))
    return done


@on_ranks(2)
def test_a_comm_hook_that_returns_something_else_than_a_buffers_future_is_told_so(rank):
    for hook, said in (
        (returns_work, r"of a Work return its get_future\(\)"),
        (returns_a_number, "the comm hook's result has 1 elements, but the bucket has 8"),
    ):
        ddp = DropIn(linear())
        ddp.register_comm_hook(None, hook)
        with pytest.raises(RuntimeError, match=said):
            ddp(inputs(rank)).sum().backward()
