"""Fingerprints tell tensors apart, are equal on all ranks, and take little memory."""

from typing import Any

import pytest
import torch
from doctor.journals import numbers
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_doctor.facts import fingerprints
from ddp_doctor.facts.fingerprints import checksum, projection

LARGE = 5_000_000


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor with memory of its own that anything makes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.count = max(self.count, result.numel())
        return result


def test_the_hash_of_a_large_tensor_on_a_device_is_computed_in_blocks() -> None:
    """On a device only; here the same lines run on a CPU."""
    one = torch.arange(LARGE, dtype=torch.float32)
    with Largest() as largest:
        first = fingerprints.hash_on_device(one)
    assert largest.count <= fingerprints.BLOCK
    assert fingerprints.hash_on_device(one.clone()) == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_a_change_of_the_last_bit_anywhere_changes_the_hash_on_a_device(dtype: torch.dtype) -> None:
    one = torch.randn(3 * fingerprints.BLOCK // 2, generator=torch.Generator().manual_seed(0))
    one = one.to(dtype)
    before = one.clone()
    first = fingerprints.hash_on_device(one)
    for at in (0, fingerprints.BLOCK - 1, fingerprints.BLOCK, len(one) - 1):
        other = one.clone()
        other[at : at + 1].view(torch.uint8)[0] ^= 1
        assert fingerprints.hash_on_device(other) != first
    swapped = one.clone()
    swapped[0], swapped[1] = one[1], one[0]
    assert fingerprints.hash_on_device(swapped) != first
    assert torch.equal(before, one)


def test_a_bounded_hash_of_a_tensor_that_is_not_contiguous_copies_only_what_it_reads() -> None:
    columns = torch.arange(LARGE, dtype=torch.float32).view(5, -1).t()
    with Largest() as largest:
        first = checksum(columns, 4096)
    assert largest.count <= 2048
    assert first == checksum(columns[:205].contiguous(), 4096)
    assert first == checksum(columns.contiguous(), 4096)


def test_a_sparse_tensor_that_is_too_large_to_read_has_no_projection() -> None:
    small = torch.sparse_coo_tensor([[1]], [2.0], (8,))
    large = torch.sparse_coo_tensor([[1]], [2.0], (1 << 24,))
    assert numbers(small) == numbers(small.to_dense())
    assert projection(large) is None
    assert checksum(large) == 0


def test_projections_are_linear_and_their_fixed_vector_is_kept_once() -> None:
    gen = torch.Generator().manual_seed(0)
    for count in (1, 7, 1000, fingerprints.SAMPLED + 1):
        one, other = torch.randn(2, count, generator=gen, dtype=torch.float64)
        parts = zip(numbers(one), numbers(other), strict=True)
        assert numbers(one + other) == pytest.approx([sum(of) for of in parts])
        assert len(numbers(one)) == min(count, 4)
    assert fingerprints._weights.cache_info().currsize == 1


def test_the_result_of_a_collective_that_torch_has_not_waited_for_is_read() -> None:
    data = torch.arange(12.0)
    pending = AsyncCollectiveTensor(data)
    assert checksum(pending) == checksum(data) != 0
    assert numbers(pending) == numbers(data)
