"""Fingerprints of tensors: a hash for bitwise equality, a projection that is linear in the tensor.

Both only read. Neither draws random numbers.
"""

import ctypes
import zlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

SAMPLED = 1 << 14
LARGEST_SPARSE = 1 << 24  # elements of a sparse tensor that is converted to be read
BLOCK = 1 << 20  # elements that are looked at together: 8 MiB as 64-bit numbers, a few at a time
_SIZES = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def dense(tensor: Tensor) -> Tensor | None:
    """The tensor's own data without a graph, or None if it cannot be read.

    Of a DTensor, this rank's shard. What cannot be read is a meta tensor, or a sparse tensor that
    would take too much memory.
    """
    if tensor.device.type == "meta":
        return None
    tensor = tensor.detach()
    if hasattr(tensor, "placements"):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    if hasattr(tensor, "trigger_wait"):  # the result of a collective that may still run
        tensor = tensor.trigger_wait()
    if tensor.layout != torch.strided:
        return tensor.to_dense() if tensor.numel() < LARGEST_SPARSE else None
    return tensor


def checksum(tensor: Tensor, limit: int | None = None) -> int:
    """A 32-bit hash of the first `limit` bytes of the tensor's data, all of them by default.

    On a CPU a CRC of the bytes, 1 GB/s or more; elsewhere a hash computed on the device. Takes a
    few `BLOCK` of memory, and a copy of a tensor that is not contiguous. A tensor that cannot be
    read (see `dense`) has the hash 0.
    """
    data = dense(tensor)
    if data is None or data.numel() == 0:
        return 0
    with torch.no_grad():
        if limit is not None and data.dim():
            wanted = max(1, limit // data.element_size())
            data = data[: -(-wanted // data[0].numel())]
        data = data.contiguous().view(-1).resolve_conj().resolve_neg()
        if limit is not None:
            data = data[: max(1, limit // data.element_size())]
        if data.device.type != "cpu":
            return hash_on_device(data)
        size = data.numel() * data.element_size()
        return zlib.crc32((ctypes.c_char * size).from_address(data.data_ptr()))


def hash_on_device(flat: Tensor) -> int:
    """A 32-bit hash of the bytes of a contiguous vector; only one number per block is copied.

    Integer sums wrap around instead of rounding: their order, which a device may choose, is
    irrelevant.
    """
    bits = flat.view(_SIZES.get(flat.element_size(), torch.int64))
    blocks, odd = bits.split(BLOCK), _odd(bits.device)
    sums = [(block.to(torch.int64) * odd[: len(block)]).sum() for block in blocks]
    return zlib.crc32(repr(torch.stack(sums).tolist()).encode())


def projection(tensor: Tensor) -> Tensor | None:
    """The dot products with four fixed vectors, over at most `SAMPLED` evenly spaced elements.

    64-bit numbers on the CPU, no more than the tensor has elements. Linear: the projection of a sum
    of gradients is the sum of their projections, and that of a whole tensor the sum over its pieces
    (see `piece_of`). None for what cannot be read.
    """
    data = dense(tensor)
    if data is None:
        return None
    piece = piece_of(tensor)
    begin, numel = (0, data.numel()) if piece is None else (piece[0], tensor.numel())
    every = 1 if numel <= SAMPLED else numel // SAMPLED + 1
    first = -begin % every
    flat = data.reshape(-1)
    if every > 1:
        flat = flat[first::every]
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    weights = _weights(flat.device).narrow(1, (begin + first) // every, flat.numel())
    # As a product of matrices, it would raise on a GPU that has to be deterministic.
    return torch.linalg.vecdot(weights[:numel], flat.to(torch.float64)).cpu()


def piece_of(tensor: Tensor) -> tuple[int, int] | None:
    """Of a tensor that is split by rows over one dimension of a mesh, as fully_shard splits.

    Returns at which element of the whole this rank's shard begins, and how many shards there are;
    None for all other tensors.
    """
    placements = getattr(tensor, "placements", ())
    split = [at for at, placement in enumerate(placements) if not placement.is_replicate()]
    if len(split) != 1 or not placements[split[0]].is_shard(0) or tensor.is_complex():
        return None
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    size, rows = mesh.size(split[0]), tensor.shape[0]
    begin = min(rows, mesh.get_local_rank(split[0]) * -(-rows // size))
    return begin * (tensor.numel() // max(rows, 1)), size


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """The fixed vectors of all projections; twice as long, for complex numbers."""
    with torch.no_grad():
        steps = torch.arange(2 * SAMPLED, dtype=torch.float64, device="cpu")
        rates = (1.6180339887, 2.2360679775, 1.4142135624, 2.7182818285)
        return torch.stack([torch.cos(steps * rate + 0.3) for rate in rates]).to(device)


@lru_cache(maxsize=16)
def _odd(device: torch.device) -> Tensor:
    """Odd factors, one per place in a block: a change of one element changes the sum."""
    with torch.no_grad():
        steps = torch.arange(BLOCK, dtype=torch.int64, device=device)
        return (steps * 0x5851F42D4C957F2D + 0x14057B7EF767814F) | 1
