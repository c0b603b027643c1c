"""Every collective over the routed link does what it does over gloo.

Each case runs on three ranks twice, in the sandbox: over the link that the grader sees, and over
real gloo. Results and classes of errors have to be the same on every rank. Data differ between
ranks.
"""

import numpy as np
import pytest

from grader.check import difference
from grader.ranks import run_group

HEAD = """
import pickle
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed.device_mesh import init_device_mesh

W = dist.get_world_size()
R = dist.get_rank()


def own(*shape, dtype=torch.float32):
    count = 1
    for size in shape:
        count *= size
    values = torch.arange(count).reshape(shape) * (R + 1) % 7 + R
    return values.to(dtype) if dtype != torch.bool else values % 2 == 0


def room(*shape, dtype=torch.float32):
    return [torch.zeros(*shape, dtype=dtype) for _ in range(W)]


@dataclass
class Note:
    rank: int
    words: list
"""

CHECK = """
def on_rank(student, given):
    import warnings
    from time import sleep

    from torch.distributed import barrier

    warnings.simplefilter("ignore")
    found = {}
    for name, call in student.CASES.items():
        try:
            found[name] = tidy(call())
        except BaseException as error:
            found[name] = "raised " + type(error).__name__
            # A barrier of gloo waits for work that is not yet put away, and raises its error.
            sleep(0.05)
        barrier()
    return found


def tidy(value):
    import torch

    if isinstance(value, torch.Tensor) and value.is_complex():
        return torch.view_as_real(value.resolve_conj())
    if isinstance(value, (list, tuple)):
        return [tidy(item) for item in value]
    return value
"""

DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]
REFUSED = ["int16", "complex64"]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def reduced(op: str, dtype: str) -> str:
    return f"""
def reduce_{op}_{dtype}():
    x = own(3, 2, dtype=torch.{dtype})
    dist.all_reduce(x, op=dist.ReduceOp.{op})
    return x
"""


REDUCTIONS = "".join(reduced(op, dtype) for op in OPS for dtype in [*DTYPES, *REFUSED])

COLLECTIVES = """
def all_reduce_async():
    x = own(4)
    work = dist.all_reduce(x, async_op=True)
    return [work.wait(), work.is_completed(), x, work.get_future().value(), work.result()]

def all_reduce_then():
    work = dist.all_reduce(own(4), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] * 2).wait()

def all_reduce_scalar():
    x = torch.tensor(float(R))
    dist.all_reduce(x)
    return x

def all_reduce_empty():
    x = torch.zeros(0)
    dist.all_reduce(x)
    return x

def all_reduce_expanded():
    x = torch.tensor([R + 1.0]).expand(3)
    dist.all_reduce(x)
    return x

def all_reduce_of_a_parameter():
    x = torch.nn.Parameter(own(3))
    dist.all_reduce(x)
    return x.detach()

def all_reduce_in_inference_mode():
    with torch.inference_mode():
        x = own(3)
        dist.all_reduce(x)
        return x.clone()

def all_reduce_sparse():
    x = torch.eye(2).mul(R + 1).to_sparse()
    dist.all_reduce(x)
    return x.to_dense()

def all_reduce_coalesced():
    xs = [own(2), own(3)]
    dist.all_reduce_coalesced(xs)
    return xs

def all_reduce_of_a_list():
    dist.all_reduce([1])

def reduce():
    x = own(3)
    dist.reduce(x, dst=1)
    return x if R == 1 else None

def broadcast():
    x = own(2, 3)
    dist.broadcast(x, src=2)
    return x

def broadcast_bfloat16():
    x = own(3, dtype=torch.bfloat16)
    dist.broadcast(x, src=1)
    return x

def broadcast_from_nobody():
    dist.broadcast(own(2), src=9)

def all_gather():
    into = room(2, 2)
    dist.all_gather(into, own(2, 2))
    return into

def all_gather_of_an_expanded():
    into = room(3)
    dist.all_gather(into, torch.tensor([R + 1.0]).expand(3))
    return into

def all_gather_of_rows():
    into = room(3)
    dist.all_gather(into, own(2, 3)[1])
    return into

def all_gather_into_other_sizes():
    dist.all_gather(room(3), own(2))

def all_gather_into_other_types():
    dist.all_gather(room(2, dtype=torch.float64), own(2))

def all_gather_into_tensor():
    into = torch.zeros(W * 2, 2)
    dist.all_gather_into_tensor(into, own(2, 2))
    return into

def all_gather_into_a_wrong_tensor():
    dist.all_gather_into_tensor(torch.zeros(5), own(2))

def all_gather_coalesced():
    into = [[torch.zeros(2)] for _ in range(W)]
    dist.all_gather_coalesced(into, [own(2)])
    return into

def gather():
    into = room(2) if R == 1 else None
    dist.gather(own(2), into, dst=1)
    return into

def scatter():
    x = torch.zeros(2)
    dist.scatter(x, [torch.full((2,), float(n)) for n in range(W)] if R == 0 else None, src=0)
    return x

def reduce_scatter():
    x = torch.zeros(2)
    dist.reduce_scatter(x, [own(2) + n for n in range(W)])
    return x

def reduce_scatter_max():
    x = torch.zeros(2)
    dist.reduce_scatter(x, [own(2) + n for n in range(W)], op=dist.ReduceOp.MAX)
    return x

def reduce_scatter_tensor():
    x = torch.zeros(2)
    dist.reduce_scatter_tensor(x, own(W * 2))
    return x

def reduce_scatter_tensor_average():
    x = torch.zeros(2)
    dist.reduce_scatter_tensor(x, own(W * 2), op=dist.ReduceOp.AVG)
    return x

def all_to_all():
    into = room(2)
    dist.all_to_all(into, [own(2) + 10 * n for n in range(W)])
    return into

def all_to_all_single():
    x = torch.zeros(W * 2)
    dist.all_to_all_single(x, own(W * 2))
    return x

def all_to_all_single_uneven():
    x = torch.zeros(W * (R + 1), 2)
    sent = torch.cat([torch.full((n + 1, 2), float(R)) for n in range(W)])
    dist.all_to_all_single(x, sent, [R + 1] * W, [n + 1 for n in range(W)])
    return x

def barrier():
    return dist.barrier()

def barrier_async():
    return dist.barrier(async_op=True).wait()

def monitored_barrier():
    return dist.monitored_barrier()

def send_and_receive():
    x = torch.zeros(2)
    if R == 0:
        dist.send(torch.ones(2) * 5, 1)
    elif R == 1:
        return [dist.recv(x, 0), x]

def receive_from_anybody():
    x = torch.zeros(2)
    if R == 2:
        dist.send(torch.ones(2) * 5, 1)
    elif R == 1:
        return [dist.recv(x), x]

def a_ring():
    x = torch.zeros(2)
    works = [dist.isend(own(2), (R + 1) % W), dist.irecv(x, (R - 1) % W)]
    for work in works:
        work.wait()
    return x

def a_ring_in_a_batch():
    x = torch.zeros(2)
    ops = [dist.P2POp(dist.isend, own(2), (R + 1) % W), dist.P2POp(dist.irecv, x, (R - 1) % W)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return x

def messages_by_tag():
    x, y = torch.zeros(1), torch.zeros(1)
    if R == 0:
        works = [dist.isend(torch.ones(1) * tag, 1, tag=tag) for tag in (7, 8)]
        for work in works:
            work.wait()
    elif R == 1:
        works = [dist.irecv(y, 0, tag=8), dist.irecv(x, 0, tag=7)]
        for work in works:
            work.wait()
        return [x, y]

def send_to_itself():
    dist.send(torch.ones(1), R)

def all_gather_object():
    into = [None] * W
    dist.all_gather_object(into, {"rank": R, "flags": [True] * (R + 1)})
    return [str(one) for one in into]

def all_gather_object_of_an_own_class():
    into = [None] * W
    dist.all_gather_object(into, Note(R, ["a"] * R))
    return [[one.rank, one.words] for one in into]

def gather_object():
    into = [None] * W if R == 0 else None
    dist.gather_object(f"rank {R}", into, dst=0)
    return into

def broadcast_object_list():
    things = [{"from": R}, R]
    dist.broadcast_object_list(things, src=1)
    return [str(one) for one in things]

def scatter_object_list():
    mine = [None]
    dist.scatter_object_list(mine, [f"for {n}" for n in range(W)] if R == 0 else None, src=0)
    return mine

def send_object_list():
    things = [None]
    if R == 0:
        dist.send_object_list(["hello"], dst=2)
    elif R == 2:
        dist.recv_object_list(things, src=0)
    return things

def a_subgroup():
    group = dist.new_group([0, 2])
    x = own(2)
    if R != 1:
        dist.all_reduce(x, group=group)
        dist.broadcast(x, src=2, group=group)
    return [x, dist.get_rank(group), dist.get_process_group_ranks(group) if R != 1 else None]

def two_subgroups():
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    x = own(2)
    dist.all_reduce(x, group=groups[R > 0])
    return x

def a_group_that_is_called_gloo():
    group = dist.new_group(backend="gloo")
    x = own(2)
    dist.all_reduce(x, group=group)
    return [x, dist.get_backend(), dist.get_backend(group)]

def a_device_mesh():
    mesh = init_device_mesh("cpu", (W,), mesh_dim_names=("ranks",))
    x = own(2)
    dist.all_reduce(x, group=mesh.get_group("ranks"))
    return [x, mesh.get_local_rank()]

def functional_all_reduce():
    return fc.all_reduce(own(2), "sum", dist.group.WORLD) + 0

def functional_all_reduce_average():
    return fc.all_reduce(own(2), "avg", dist.group.WORLD) + 0

def functional_all_reduce_coalesced():
    return [x + 0 for x in fc.all_reduce_coalesced([own(2), own(3)], "sum", dist.group.WORLD)]

def functional_all_gather():
    return fc.all_gather_tensor(own(2, 2), 0, dist.group.WORLD) + 0

def functional_all_gather_columns():
    return fc.all_gather_tensor(own(2, 2), 1, dist.group.WORLD) + 0

def functional_all_gather_coalesced():
    given = [own(2), own(3)]
    return [x + 0 for x in fc.all_gather_into_tensor_coalesced(given, dist.group.WORLD)]

def functional_reduce_scatter():
    return fc.reduce_scatter_tensor(own(W * 2), "sum", 0, dist.group.WORLD) + 0

def functional_reduce_scatter_coalesced():
    given = [own(W * 2), own(W)]
    out = fc.reduce_scatter_tensor_coalesced(given, "sum", [0, 0], dist.group.WORLD)
    return [x + 0 for x in out]

def functional_all_to_all():
    return fc.all_to_all_single(own(W * 2), None, None, dist.group.WORLD) + 0

def functional_broadcast():
    return fc.broadcast(own(2), 1, dist.group.WORLD) + 0

def with_autograd():
    from torch.distributed.nn.functional import all_gather, all_reduce
    x = own(2).requires_grad_()
    (torch.stack(all_gather(x)).sum() * (R + 1) + all_reduce(x * 2).sum()).backward()
    return x.grad

def ddp():
    torch.manual_seed(R)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(own(4, 3)).square().mean().backward()
    return [p.grad for p in model.parameters()]

def the_store():
    store = dist.distributed_c10d._get_default_store()
    store.set(f"key {R}", f"value {R}")
    store.wait([f"key {n}" for n in range(W)])
    store.add("count", R + 1)
    dist.barrier()
    return [store.get(f"key {(R + 1) % W}").decode(), store.add("count", 0)]
"""


def names_in(source: str) -> list[str]:
    lines = [line for line in source.splitlines() if line.startswith("def ")]
    return [line.removeprefix("def ").partition("(")[0] for line in lines]


CASES = {"reductions": REDUCTIONS, "collectives": COLLECTIVES}


def results(server, link: str, source: str) -> list[dict]:
    cases = ", ".join(f"{name!r}: {name}" for name in names_in(source))
    cell = f"{HEAD}\n{source}\nCASES = {{{cases}}}\n"
    jobs = [
        {
            "call": "on_rank",
            "cells": [{"id": "cases", "source": cell}],
            "check": CHECK,
            "given": {},
            "rank": rank,
            "world_size": 3,
            "seed": rank,
            "link": link,
            "torch_ddp": True,
            "meet": "../meet",
            "seconds": 60,
        }
        for rank in range(3)
    ]
    end = run_group(server.address, jobs, link=link, seconds=60)
    assert [rank.how for rank in end.ranks] == ["returned"] * 3, (end.ranks, end.seen.trouble)
    return [rank.value for rank in end.ranks]


@pytest.fixture(scope="module")
def both(server):
    """For each case, per link, what every rank got."""
    found = {}
    for source in CASES.values():
        for link in ("routed", "gloo"):
            for name in names_in(source):
                found.setdefault(name, {})
            for rank in results(server, link, source):
                for name, value in rank.items():
                    found[name].setdefault(link, []).append(value)
    return found


@pytest.mark.parametrize("name", [name for source in CASES.values() for name in names_in(source)])
def test_a_collective_does_over_the_link_what_it_does_over_gloo(both, name):
    routed, gloo = both[name]["routed"], both[name]["gloo"]
    tolerance = 1e-2 if "float16" in name else 1e-6
    assert difference(routed, gloo, tolerance) is None, (routed, gloo)


def test_elements_and_not_memory_are_reduced_where_a_tensor_has_gaps(server):
    """Here gloo 2.13 adds up the memory in which the tensor begins, gaps included."""
    source = """
def a_column():
    x = own(4, 2)
    column = x[:, 0]
    dist.all_reduce(column)
    return x

def transposed():
    x = own(2, 3).t()
    dist.all_reduce(x)
    return x
"""
    for rank, found in enumerate(results(server, "routed", source)):
        owns = [np.arange(8).reshape(4, 2) * (r + 1) % 7 + r for r in range(3)]
        want = owns[rank].astype("float32")
        want[:, 0] = sum(own[:, 0] for own in owns)
        assert np.array_equal(found["a_column"], want)
        owns = [np.arange(6).reshape(2, 3) * (r + 1) % 7 + r for r in range(3)]
        assert np.array_equal(found["transposed"], sum(owns).T)


def test_what_gloo_refuses_and_nccl_does_is_done(server):
    source = """
def all_gather_into_a_stack():
    into = torch.zeros(W, 2)
    dist.all_gather_into_tensor(into, own(2))
    return into

def all_to_all_uneven():
    into = [torch.zeros(R + 1) for _ in range(W)]
    dist.all_to_all(into, [torch.full((n + 1,), float(R)) for n in range(W)])
    return into
"""
    for rank, found in enumerate(results(server, "routed", source)):
        owns = np.stack([np.arange(2) * (r + 1) % 7 + r for r in range(3)])
        assert np.array_equal(found["all_gather_into_a_stack"], owns)
        for sender, arrived in enumerate(found["all_to_all_uneven"]):
            assert arrived.tolist() == [sender] * (rank + 1)
