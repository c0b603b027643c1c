"""One bucket without any ranks: what is copied in and out, compared to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import miniddp.bucket
from miniddp.bucket import LARGE, Bucket

PART_BYTES = 4 * LARGE  # less than the real size, so that these buckets have several parts
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
SIZES = st.sampled_from([0, 1, 3, 64, LARGE - 1, LARGE, LARGE + 5])


@pytest.fixture(autouse=True, scope="module")
def smaller_parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(miniddp.bucket, "PART_BYTES", PART_BYTES)
        yield


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def filled(sizes: list[int | tuple[int, ...]], dtype: torch.dtype) -> Bucket:
    """A bucket whose parameters have gradients outside the buffer."""
    generator = torch.Generator().manual_seed(len(sizes))
    parameters = [torch.zeros(size, dtype=dtype, requires_grad=True) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return Bucket(list(range(10, 10 + len(sizes))), parameters)


@settings(max_examples=60)
@given(st.lists(SIZES, min_size=1, max_size=8), st.sampled_from(DTYPES), st.integers(1, 7))
def test_the_average_is_bitwise_equal_to_multiplying_by_one_over_w(sizes, dtype, divisor):
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
def test_neighbors_are_copied_together_until_their_part_is_full(sizes):
    bucket = filled(sizes, torch.float32)
    parts = sorted(bucket.parts, key=lambda part: part.indices)
    assert [index for part in parts for index in part.indices] == bucket.indices
    for number, part in enumerate(parts, start=1):
        *others, last = [view.nbytes for view in part.views]
        assert sum(others) < PART_BYTES
        assert sum(others) + last >= PART_BYTES or part is parts[-1]
        assert part.flat.nbytes == sum(others) + last
        part.flat.fill_(number)
    for number, part in enumerate(parts, start=1):
        assert all((view == number).all() for view in part.views)


@given(st.lists(st.tuples(SIZES, st.sampled_from(["none", "own", "view"])), min_size=1, max_size=8))
def test_missing_gradients_count_as_zeros_and_views_are_divided_not_multiplied(gradients):
    bucket = filled([size for size, _ in gradients], torch.float64)
    expected = []
    of_slot = zip(gradients, bucket.parameters, bucket.views, strict=True)
    for (_, kind), parameter, view in of_slot:
        own = parameter.grad
        right = {"none": torch.zeros_like(own), "own": torch.mul(own, 1 / 3), "view": own / 3}
        expected.append(right[kind])
        view.copy_(own if kind == "view" else torch.full_like(own, 9))
        parameter.grad = {"none": None, "own": own, "view": view}[kind]
    for part in bucket.parts:
        bucket.copy_in(part, 3, alias=True)
    for (_, kind), parameter, view, quotient in zip(
        gradients, bucket.parameters, bucket.views, expected, strict=True
    ):
        assert torch.equal(view, quotient)
        assert parameter.grad is (None if kind == "none" else view)


def test_another_divisor_takes_effect_at_the_next_copy():
    bucket = filled([LARGE, LARGE, 2, 3], torch.float32)
    assert {part.small for part in bucket.parts} == {False, True}
    for divisor in (2, 5, 1, 2):
        for part in bucket.parts:
            bucket.copy_in(part, divisor, alias=False)
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            assert torch.equal(view, torch.mul(parameter.grad, 1.0 / divisor))


def test_the_default_device_does_not_matter():
    bucket = filled([LARGE, LARGE, 3, 2], torch.float32)
    with torch.device("meta"):
        for part in bucket.parts:
            bucket.copy_in(part, 3, alias=False)
    for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
        assert torch.equal(view, torch.mul(parameter.grad, 1.0 / 3))


@pytest.mark.parametrize("others", [0, 2])
def test_a_gradient_that_is_negated_lazily_is_copied_in_and_out_by_its_value(others):
    bucket = filled([(), *[3] * others], torch.float32)
    first = bucket.parameters[0]
    first.grad = torch.tensor(3 + 4j).conj().imag
    assert first.grad.is_neg()
    for part in bucket.parts:
        bucket.copy_in(part, 2, alias=False)
    assert bucket.views[0].item() == -2.0
    bucket.copy_out(None, alias=False)
    assert first.grad.item() == -2.0


def test_a_gradient_that_replaced_its_view_is_reported_and_a_missing_one_becomes_its_view():
    bucket = filled([2, 3, 4], torch.float32)
    for part in bucket.parts:
        bucket.copy_in(part, 2, alias=True)
    assert bucket.copy_out(None, alias=True) == []
    bucket.parameters[0].grad = None
    bucket.parameters[2].grad = torch.ones(4)
    assert bucket.copy_out(None, alias=True) == [2]
    assert bucket.parameters[0].grad is bucket.views[0]
    assert bucket.copy_out([1], alias=True) == []


@pytest.mark.parametrize("second", ["own", "view", "missing"])
@pytest.mark.parametrize("first", ["own", "view"])
def test_for_a_comm_hook_a_gradient_is_copied_as_it_is(first, second):
    bucket = filled([1, 1], torch.complex64)
    for kind, parameter, view in zip((first, second), bucket.parameters, bucket.views, strict=True):
        value = torch.tensor([complex("inf+1j")])  # times or over 1 + 0j it would have a nan
        parameter.grad = {"own": value, "view": view.copy_(value), "missing": None}[kind]
    bucket.copy_in(bucket.parts[0], 1, alias=False)
    assert bucket.views[0].tolist() == [complex("inf+1j")]
    assert bucket.views[1].tolist() == [0 if second == "missing" else complex("inf+1j")]


@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize("wrong", [0, 1, 3])  # 0 and 1 are in a part of large gradients
def test_gradients_of_another_dtype_are_named_and_the_others_are_copied(wrong, alias):
    bucket = filled([40, 2 * LARGE, 2, 3, 4], torch.bfloat16)
    assert {tuple(part.indices): part.small for part in bucket.parts} == {
        (10, 11): False,
        (12, 13, 14): True,
    }
    bucket.parameters[wrong].grad = None
    bucket.parameters[wrong].grad_dtype = torch.float32
    bucket.parameters[wrong].grad = torch.ones(bucket.parameters[wrong].shape)
    before = [parameter.grad for parameter in bucket.parameters]
    bucket.buffer.fill_(7)
    found = [bucket.copy_in(part, 2, alias) for part in bucket.parts]
    assert sorted(found) == [[], [bucket.indices[wrong]]]
    for slot, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
        if slot == wrong:
            assert parameter.grad is before[slot]
            assert (view == 7).all()
        else:
            assert parameter.grad is (view if alias else before[slot])
            assert torch.equal(view, torch.mul(before[slot], 1 / 2))
