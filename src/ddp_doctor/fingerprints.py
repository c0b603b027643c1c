"""Fingerprints of tensors: a hash for bitwise equality, a projection that is linear in the tensor.

Both only read. Neither draws random numbers.
"""

import ctypes
import zlib
from functools import lru_cache

import torch
from torch import Tensor

SAMPLED = 1 << 14


def dense(tensor: Tensor) -> Tensor | None:
    """The tensor's own data without a graph, or None where there is none on this rank to read."""
    if tensor.device.type == "meta" or hasattr(tensor, "placements"):
        return None
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense() if tensor.numel() < 1 << 24 else torch.empty(0)
    return tensor


def checksum(tensor: Tensor, limit: int | None = None) -> int:
    """A 32-bit hash of the first `limit` bytes of the tensor's data, all of them by default.

    On a CPU a CRC of the bytes, 1 GB/s or more; elsewhere a weighted sum on the device. A tensor
    that cannot be read (a DTensor, meta) has the hash 0.
    """
    data = dense(tensor)
    if data is None or data.numel() == 0:
        return 0
    with torch.no_grad():
        data = data.contiguous().view(-1)
        if data.is_conj() or data.is_neg():
            data = data.resolve_conj().resolve_neg()
        if limit is not None:
            data = data[: max(1, limit // data.element_size())]
        if data.device.type != "cpu":
            small = data if data.is_complex() else data.to(torch.float64)
            return zlib.crc32(
                repr(
                    _weighted(torch.view_as_real(small).view(-1) if small.is_complex() else small)
                ).encode()
            )
        size = data.numel() * data.element_size()
        return zlib.crc32((ctypes.c_char * size).from_address(data.data_ptr()))


def projection(tensor: Tensor) -> float | None:
    """The dot product with a fixed vector, over at most `SAMPLED` evenly spaced elements.

    Linear: the projection of a sum of gradients is the sum of their projections. None for what
    cannot be read.
    """
    data = dense(tensor)
    if data is None:
        return None
    if data.numel() == 0:
        return 0.0
    with torch.no_grad():
        flat = data.reshape(-1)
        if flat.numel() > SAMPLED:
            flat = flat[:: flat.numel() // SAMPLED + 1]
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        return _weighted(flat.to(torch.float64))


def _weighted(flat: Tensor) -> float:
    return float(torch.dot(flat, _weights(flat.numel()).to(flat.device)))


@lru_cache(maxsize=256)
def _weights(count: int) -> Tensor:
    with torch.no_grad():
        return torch.cos(
            torch.arange(count, dtype=torch.float64, device="cpu") * 1.6180339887 + 0.3
        )
