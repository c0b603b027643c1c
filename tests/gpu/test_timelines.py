"""The profiler's trace of a GPU, made up: when gradients are ready, and what was hidden."""

import pytest

from tests.gpu.machine import CannotProveError
from tests.gpu.timelines import hidden, recording_of

SIZES = {"gradient 0.weight": 400, "gradient 1.weight": 400}


def event(kind: str, name: str, begin: float, end: float, **args) -> dict:
    """In µs."""
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "args": args}


def kernel(name: str, number: int, launched: float, begin: float, end: float) -> list[dict]:
    return [
        event("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, correlation=number),
        event("kernel", name, begin, end, correlation=number),
    ]


def a_step(*more: dict) -> dict:
    """The host launches everything within 20 µs, and the GPU computes until 400."""
    events = [
        event("user_annotation", "forward", 0, 8),
        event("gpu_user_annotation", "forward", 10, 100),
        *kernel("gemm", 1, 2, 10, 100),
        event("user_annotation", "backward", 9, 500),
        *kernel("gemm", 2, 10, 100, 200),
        event("user_annotation", "gradient 1.weight", 12, 13),
        *kernel("gemm", 3, 14, 200, 400),
        event("user_annotation", "gradient 0.weight", 16, 17),
        *more,
    ]
    return {"traceEvents": events, "baseTimeNanoseconds": 5_000_000_000}


def gloo(begin: float, end: float) -> dict:
    shapes = {"Input Dims": [[100]], "Input type": ["float"]}
    return event("user_annotation", "gloo:all_reduce", begin, end, **shapes)


def test_a_gradient_is_ready_when_its_kernels_end_and_an_all_reduce_before_the_last_is_hidden():
    one = recording_of(a_step(gloo(201, 390), gloo(401, 480)), SIZES, rank=0, on_gpu=True)
    ready = [(g.parameter, g.ready - one.begin) for g in one.gradients]
    assert ready == [("1.weight", pytest.approx(200e-6)), ("0.weight", pytest.approx(400e-6))]
    assert [(c.bytes, c.after, c.bucket) for c in one.collectives] == [(400, 1, 0), (400, 2, 1)]
    assert hidden(one) == 1
    assert one.exposed_seconds() == pytest.approx(79e-6)
    assert one.end - one.begin == pytest.approx(480e-6)
    [(begin, end)] = one.forwards
    assert (begin - one.begin, end - one.begin) == (pytest.approx(10e-6), pytest.approx(100e-6))


def test_over_nccl_an_all_reduce_ends_with_its_kernel_and_does_not_count_as_computation():
    host = event("user_annotation", "nccl:all_reduce", 13, 15, **gloo(0, 1)["args"])
    device = kernel("ncclDevKernel_AllReduce_Sum_f32", 4, 14, 210, 600)
    one = recording_of(a_step(host, *device), SIZES, rank=0, on_gpu=True)
    assert one.collectives[0].done - one.begin == pytest.approx(600e-6)
    assert one.compute_end() - one.begin == pytest.approx(400e-6)
    assert hidden(one) == 0


def test_a_trace_without_kernels_proves_nothing():
    trace = a_step(gloo(201, 390))
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["cat"] != "kernel"]
    with pytest.raises(CannotProveError, match="no kernels"):
        recording_of(trace, SIZES, rank=0, on_gpu=True)
