"""Ways to average, recorded side by side; and the buckets of torch's DDP, step by step."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labkit.scenarios.recorded_ways import buckets_in_first_steps, record_ways, torch_ddp
from labkit.scenarios.toy_steps import loss_of, stack_of_linears
from labkit.scenarios.two_orders import run_in_two_orders
from labkit.testing.compare import flatten, gradients

MIB = 2**20


class AfterBackward:
    """Averages when `finish` is called."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.module, self.group = module, group

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs)

    def finish(self) -> None:
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=self.group)


def test_each_way_is_recorded_finished_and_leaves_every_rank_the_full_batchs_gradient():
    model, inputs = stack_of_linears(layers=2, width=16, samples=8)
    ways = {"after": AfterBackward, "ddp": partial(torch_ddp, bucket_cap_mb=1)}
    found = record_ways(ways, model, inputs, gbit_per_s=10)
    loss_of(model(inputs)).backward()
    wanted = flatten(gradients(model))
    assert list(found) == ["after", "ddp"]
    for one in found.values():
        assert one.ms > 0
        assert len(one.averages) == 2
        for average in one.averages:
            torch.testing.assert_close(average, wanted)
    assert [sent.after for sent in found["after"].step.ranks[0].buckets()] == [4] * 4
    assert len(found["ddp"].step.ranks[0].buckets()) == 1


def test_default_caps_are_applied_after_the_first_step_and_an_explicit_25_never_splits():
    model, inputs = stack_of_linears(samples=4)
    by_default = buckets_in_first_steps(model, inputs)
    sizes = [[round(size / MIB) for size in of_step] for of_step, _ in by_default]
    assert sizes == [[6], [1, 5], [1, 5]]
    assert [overlaps for _, overlaps in by_default] == [False, True, True]
    one_bucket = buckets_in_first_steps(model, inputs, bucket_cap_mb=25)
    assert [len(of_step) for of_step, _ in one_bucket] == [1, 1, 1]


def test_gradients_arrive_in_two_orders_and_an_eager_reducer_mixes_them_up():
    def eager(module, group):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=group)
            )
        return module

    mixed = run_in_two_orders(eager)
    assert [seen.arrived for seen in mixed] == ["l b a", "l a b"]
    assert [seen.right for seen in mixed] == [[False, False, True]] * 2
    in_order = run_in_two_orders(AfterBackward)
    assert [seen.ready_at_launch for seen in in_order] == [[3, 3, 3]] * 2
    assert [seen.right for seen in in_order] == [[True, True, True]] * 2
