"""One bucket without any ranks: what is copied in and out, to the bit, for all sizes and dtypes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniddp.bucket import LARGE, Bucket

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
SIZES = st.sampled_from([0, 1, 3, 64, LARGE - 1, LARGE, LARGE + 5])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def filled(sizes: list[int], dtype: torch.dtype) -> Bucket:
    """A bucket whose parameters have gradients outside the buffer."""
    generator = torch.Generator().manual_seed(len(sizes))
    parameters = [torch.zeros(size, dtype=dtype, requires_grad=True) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return Bucket(list(range(10, 10 + len(sizes))), parameters)


@settings(max_examples=60, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=8), st.sampled_from(DTYPES), st.integers(1, 7))
def test_every_gradient_is_multiplied_by_the_reciprocal_as_a_number(sizes, dtype, divisor):
    bucket = filled(sizes, dtype)
    expected = [torch.mul(p.grad, 1.0 / divisor) for p in bucket.parameters]
    for part in bucket.parts:
        assert bucket.copy_in(part, divisor, alias=False) == []
    for view, product in zip(bucket.views, expected, strict=True):
        assert torch.equal(bits(view), bits(product))
    assert bucket.copy_out(None, alias=False) == []
    for parameter, product in zip(bucket.parameters, expected, strict=True):
        assert torch.equal(bits(parameter.grad), bits(product))


@given(st.lists(SIZES, min_size=1, max_size=12))
def test_a_large_gradient_is_copied_alone_and_the_small_ones_together(sizes):
    bucket = filled(sizes, torch.float32)
    large = [10 + slot for slot, size in enumerate(sizes) if size >= LARGE]
    small = [10 + slot for slot, size in enumerate(sizes) if size < LARGE]
    assert [part.indices for part in bucket.parts] == [[i] for i in large] + [small] * bool(small)
    for part in bucket.parts:
        assert sum(flat.numel() for flat in part.flats) == sum(p.numel() for p in part.parameters)


@settings(deadline=None)
@given(st.lists(st.tuples(SIZES, st.sampled_from(["none", "own", "view"])), min_size=1, max_size=8))
def test_missing_gradients_count_as_zeros_and_views_are_divided_in_place(gradients):
    bucket = filled([size for size, _ in gradients], torch.float64)
    expected = []
    of_slot = zip(gradients, bucket.parameters, bucket.views, strict=True)
    for (_, kind), parameter, view in of_slot:
        own = parameter.grad
        expected.append(torch.zeros_like(own) if kind == "none" else own / 3)
        parameter.grad = {"none": None, "own": own, "view": view.copy_(own)}[kind]
    for part in bucket.parts:
        bucket.copy_in(part, 3, alias=True)
    for (_, kind), parameter, view, quotient in zip(
        gradients, bucket.parameters, bucket.views, expected, strict=True
    ):
        torch.testing.assert_close(view, quotient, rtol=1e-15, atol=0)
        assert parameter.grad is (None if kind == "none" else view)


def test_another_divisor_takes_effect_at_the_next_copy():
    bucket = filled([2, LARGE], torch.float32)
    for divisor in (2, 5, 1, 2):
        for part in bucket.parts:
            bucket.copy_in(part, divisor, alias=False)
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            assert torch.equal(view, torch.mul(parameter.grad, 1.0 / divisor))


def test_the_default_device_does_not_matter():
    bucket = filled([LARGE, 3, 2], torch.float32)
    with torch.device("meta"):
        for part in bucket.parts:
            bucket.copy_in(part, 3, alias=False)
    for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
        assert torch.equal(view, torch.mul(parameter.grad, 1.0 / 3))
