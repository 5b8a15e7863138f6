"""bfloat16 matrices in 12 bits without loss, for the ``cpu`` and ``reference`` backends.

The high byte of a bfloat16 has its sign and seven bits of its exponent. The weights of a trained row have few different
ones, so a row keeps its 16 most frequent high bytes, and a 4-bit code in place of each. The low bytes are kept as they
are. Every operator gives the bits that it gives with the uncompressed matrix. DFloat11 (arXiv 2504.11651) compresses
the same redundancy to 11 bits with a Huffman code; codes of one length are decompressed in registers.

A row is ``[64 + 192 * ceil(columns / 128)]`` uint8. In front are 16 high bytes, the number of exceptions (uint16) and
up to 11 of them: column and bfloat16 bits (uint16 each) of a weight with another high byte. Then come blocks of 128
weights: 128 low bytes, and 64 bytes of codes. Of weight ``i`` of the block's half ``h`` (0 or 1), with ``at =
i % 32 // 8 * 16 + i // 32 * 8 + i % 8``, the low byte is byte ``64 * h + at``, and the code is the low (``h = 0``) or
high half of byte ``128 + at``: interleaved, vectors of low and high bytes are weights in order.
"""

from __future__ import annotations

from typing import Any

import torch

from specmemo_kernels.ops.dispatch import implementation

Tensor = torch.Tensor

_HEAD_BYTES = 64
_BLOCK, _BLOCK_BYTES = 128, 192
#: Columns that an exception can name.
_MOST_COLUMNS = 1 << 16
_CPU = torch.device("cpu")


def row_bytes(columns: int) -> int:
    """Bytes of a compressed row of ``columns`` weights."""
    return _HEAD_BYTES + -(-columns // _BLOCK) * _BLOCK_BYTES


def compress(weight: Tensor, out: Tensor | None = None) -> Tensor | None:
    """The compressed rows ``[..., row_bytes(columns)]`` uint8 of contiguous bfloat16 matrices ``[..., columns]``.

    Args:
        out: contiguous memory for them; ``None``: new memory.

    Returns:
        ``None`` if a row has more than 11 exceptions, as random bits have, or more than 65536 columns.

    Raises:
        BackendUnavailable: without the ``cpu`` backend.
        ValueError: another dtype, device or number of dimensions.
    """
    if weight.dtype != torch.bfloat16 or weight.device != _CPU or weight.ndim < 2 or not weight.is_contiguous():
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)} on {weight.device}, expected contiguous bfloat16 matrices "
            "on cpu"
        )
    if weight.shape[-1] > _MOST_COLUMNS:
        return None
    size = *weight.shape[:-1], row_bytes(weight.shape[-1])
    compressed = torch.empty(size, dtype=torch.uint8, device="cpu") if out is None else out
    if compressed.dtype != torch.uint8 or compressed.shape != size or not compressed.is_contiguous():
        found = f"{compressed.dtype} {list(compressed.shape)}"
        raise ValueError(f"out is {found}, expected contiguous torch.uint8 {list(size)}")
    backend: Any = implementation("cpu", _CPU)
    fits = backend.compress(weight.flatten(0, -2), compressed.flatten(0, -2))
    return compressed if fits else None
