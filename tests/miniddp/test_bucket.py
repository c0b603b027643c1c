"""One bucket without any ranks: what is copied in and out, compared bit for bit.

The core's bucket and the drop-in's, which copies by parts, have to give the same values.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import miniddp.torch_drop_in.fast
from miniddp.bucket import Bucket
from miniddp.torch_drop_in.fast import LARGE, PartedBucket

PART_BYTES = 4 * LARGE  # less than the real size, so that these buckets have several parts
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
SIZES = st.sampled_from([0, 1, 3, 64, LARGE - 1, LARGE, LARGE + 5])
BUCKETS = pytest.mark.parametrize("of_class", [Bucket, PartedBucket])


@pytest.fixture(autouse=True, scope="module")
def smaller_parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(miniddp.torch_drop_in.fast, "PART_BYTES", PART_BYTES)
        yield


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def filled(of_class: type[Bucket], sizes: list, dtype: torch.dtype, as_views=False) -> Bucket:
    """A bucket whose parameters have gradients outside the buffer."""
    generator = torch.Generator().manual_seed(len(sizes))
    parameters = [torch.zeros(size, dtype=dtype, requires_grad=True) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return of_class(list(range(10, 10 + len(sizes))), parameters, as_views)


def all_slots(bucket: Bucket) -> range:
    return range(len(bucket.indices))


@BUCKETS
@settings(max_examples=40)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=8),
    dtype=st.sampled_from(DTYPES),
    divisor=st.integers(2, 7),
)
def test_the_average_is_bitwise_equal_to_multiplying_by_one_over_w(of_class, sizes, dtype, divisor):
    bucket = filled(of_class, sizes, dtype)
    expected = [torch.mul(p.grad, 1.0 / divisor) for p in bucket.parameters]
    bucket.copy_in(divisor)
    for view, product in zip(bucket.views, expected, strict=True):
        assert torch.equal(bits(view), bits(product))
    assert bucket.copy_out(all_slots(bucket)) == []
    for parameter, product in zip(bucket.parameters, expected, strict=True):
        assert torch.equal(bits(parameter.grad), bits(product))


@BUCKETS
@given(
    gradients=st.lists(
        st.tuples(SIZES, st.sampled_from(["none", "own", "view"])), min_size=1, max_size=8
    )
)
def test_missing_gradients_count_as_zeros_and_views_are_divided_not_multiplied(of_class, gradients):
    bucket = filled(of_class, [size for size, _ in gradients], torch.float64, as_views=True)
    expected = []
    of_slot = zip(gradients, bucket.parameters, bucket.views, strict=True)
    for (_, kind), parameter, view in of_slot:
        own = parameter.grad
        right = {"none": torch.zeros_like(own), "own": torch.mul(own, 1 / 3), "view": own / 3}
        expected.append(right[kind])
        view.copy_(own if kind == "view" else torch.full_like(own, 9))
        parameter.grad = {"none": None, "own": own, "view": view}[kind]
    bucket.copy_in(3)
    for (_, kind), parameter, view, quotient in zip(
        gradients, bucket.parameters, bucket.views, expected, strict=True
    ):
        assert torch.equal(view, quotient)
        assert parameter.grad is (None if kind == "none" else view)


@BUCKETS
def test_another_divisor_takes_effect_at_the_next_copy_on_any_default_device(of_class):
    bucket = filled(of_class, [LARGE, LARGE, 2, 3], torch.float32)
    for divisor in (2, 5, 1, 2):
        with torch.device("meta"):
            bucket.copy_in(divisor)
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            assert torch.equal(view, torch.mul(parameter.grad, 1.0 / divisor))


@BUCKETS
@pytest.mark.parametrize("others", [0, 2])
def test_a_gradient_that_is_negated_lazily_is_copied_in_and_out_by_its_value(of_class, others):
    bucket = filled(of_class, [(), *[3] * others], torch.float32)
    first = bucket.parameters[0]
    first.grad = torch.tensor(3 + 4j).conj().imag
    assert first.grad.is_neg()
    bucket.copy_in(2)
    assert bucket.views[0].item() == -2.0
    bucket.copy_out(all_slots(bucket))
    assert first.grad.item() == -2.0


@BUCKETS
def test_a_gradient_that_replaced_its_view_is_reported_and_a_missing_one_becomes_its_view(of_class):
    bucket = filled(of_class, [2, 3, 4], torch.float32, as_views=True)
    bucket.copy_in(2)
    assert bucket.copy_out(all_slots(bucket)) == []
    bucket.parameters[0].grad = None
    bucket.parameters[2].grad = torch.ones(4)
    assert bucket.copy_out(all_slots(bucket)) == [12]
    assert bucket.parameters[0].grad is bucket.views[0]
    assert bucket.copy_out([1]) == []


@BUCKETS
def test_only_the_slots_that_are_written_change_and_a_missing_gradient_gets_its_own_memory(
    of_class,
):
    bucket = filled(of_class, [2, 3, 4], torch.float32)
    bucket.parameters[1].grad = None
    kept = bucket.parameters[2].grad.clone()
    bucket.buffer.fill_(7)
    assert bucket.copy_out([0, 1]) == []
    for slot in (0, 1):
        gradient = bucket.parameters[slot].grad
        assert torch.equal(gradient, torch.full_like(gradient, 7))
        assert gradient.data_ptr() != bucket.views[slot].data_ptr()
    assert torch.equal(bucket.parameters[2].grad, kept)
    assert bucket.copy_out([]) == []


@pytest.mark.parametrize("second", ["own", "view", "missing"])
@pytest.mark.parametrize("first", ["own", "view"])
def test_for_a_comm_hook_a_gradient_is_copied_as_it_is(first, second):
    bucket = filled(PartedBucket, [1, 1], torch.complex64)
    for kind, parameter, view in zip((first, second), bucket.parameters, bucket.views, strict=True):
        value = torch.tensor([complex("inf+1j")])  # times or over 1 + 0j it would have a nan
        parameter.grad = {"own": value, "view": view.copy_(value), "missing": None}[kind]
    bucket.copy_in(1)
    assert bucket.views[0].tolist() == [complex("inf+1j")]
    assert bucket.views[1].tolist() == [0 if second == "missing" else complex("inf+1j")]


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("wrong", [0, 1, 3])  # 0 and 1 are in a part of large gradients
def test_gradients_of_another_dtype_are_named_and_the_others_are_copied(wrong, as_views):
    bucket = filled(PartedBucket, [40, 2 * LARGE, 2, 3, 4], torch.bfloat16, as_views)
    assert {tuple(part.indices): part.small for part in bucket.parts} == {
        (10, 11): False,
        (12, 13, 14): True,
    }
    bucket.parameters[wrong].grad = None
    bucket.parameters[wrong].grad_dtype = torch.float32
    bucket.parameters[wrong].grad = torch.ones(bucket.parameters[wrong].shape)
    before = [parameter.grad for parameter in bucket.parameters]
    bucket.buffer.fill_(7)
    assert bucket.misfits() == [bucket.indices[wrong]]
    found = [bucket.copy_part_in(part, 2) for part in bucket.parts]
    assert sorted(found) == [[], [bucket.indices[wrong]]]
    for slot, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
        if slot == wrong:
            assert parameter.grad is before[slot]
            assert (view == 7).all()
        else:
            assert parameter.grad is (view if as_views else before[slot])
            assert torch.equal(view, torch.mul(before[slot], 1 / 2))
