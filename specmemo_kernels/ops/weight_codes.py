"""Matrices in 4 bits: two codes a byte and one float16 scale per 64 neighbours of a row, 4.25 bits per element.

An element is ``scale * (code - 8)``, its code 0 to 15. In each group of 64 elements of a row byte ``i`` of 32 has
element ``i`` in its low half and element ``32 + i`` in its high half, so that a kernel gets runs of neighbours from
runs of bytes. A last group that isn't full is filled with zeros.
"""

from __future__ import annotations

import torch

from specmemo_kernels.arguments import as_integer

Tensor = torch.Tensor

#: Neighbours that share a scale. 32 would take 4.5 bits per element, 128 would take 4.125 and double the error.
GROUP = 64
#: Bits of a code, as ``head_bits`` names it.
CODE_BITS = 4
_SCALE_BYTES = 2
#: Elements that are packed at a time; what that takes beside the result is a few dozen bytes for each.
_CHUNK = 1 << 16


def groups_of(columns: int) -> int:
    """Groups in a row of ``columns`` elements."""
    return -(-columns // GROUP)


def packed_bytes(rows: int, columns: int) -> int:
    """Codes and scales of a ``[rows, columns]`` matrix."""
    return rows * groups_of(columns) * (GROUP // 2 + _SCALE_BYTES)


def check_bits(bits: int | None, name: str = "head_bits") -> None:
    """
    Raises:
        ValueError: neither ``None`` nor 4; ``name`` is the argument's.
    """
    if bits is not None and as_integer(bits) != CODE_BITS:
        raise ValueError(f"{name} is {bits!r}, expected {CODE_BITS} or None (as stored)")


def pack(weight: Tensor, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """The codes ``[rows, 32 * groups]`` uint8 and scales ``[rows, groups]`` float16 of a ``[rows, columns]`` matrix.

    The element of a group that is largest in magnitude becomes -8 times the scale, which is negative where that element
    is positive; the others are rounded to the nearest multiple. So an element is off by half a scale at most, 1/16 of
    the group's largest; only elements of the opposite sign within 1/16 of the largest, whose code would be 16, are off
    by up to a whole one. (The scale itself is rounded, by 1/2048 of it or, below 2**-14, by 2**-25.)

    A few rows are worked on at a time, on ``device`` (``None``: where they are), so a matrix that is mapped from a file
    is never whole in memory.

    Raises:
        ValueError: an element that isn't finite, or whose scale float16 can't hold (beyond 524000).
    """
    rows, columns = weight.shape
    groups, where = groups_of(columns), weight.device if device is None else device
    codes = torch.empty(rows, groups * GROUP // 2, dtype=torch.uint8, device=where)
    scales = torch.empty(rows, groups, dtype=torch.float16, device=where)
    step = max(1, _CHUNK // max(1, columns))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        codes[part], scales[part] = _pack_rows(weight[part].to(where), groups)
    if not bool(scales.isfinite().all()):
        raise ValueError("an element is not finite or beyond 524000: 4-bit codes can't stand for it")
    return codes, scales


def _pack_rows(rows: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    filled = torch.nn.functional.pad(rows.float(), (0, groups * GROUP - rows.shape[1]))
    elements = filled.view(len(rows), groups, GROUP)
    largest = elements.gather(2, elements.abs().argmax(2, keepdim=True))
    scales = (largest / -8).half()
    divisor = scales.float()
    codes = (elements / torch.where(divisor == 0, 1, divisor)).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    low, high = codes[:, :, : GROUP // 2], codes[:, :, GROUP // 2 :]
    return (low | (high << 4)).flatten(1), scales[:, :, 0]


def unpack(codes: Tensor, scales: Tensor, columns: int) -> Tensor:
    """``[rows, columns]`` float32: what the codes stand for."""
    halves = codes.view(*scales.shape, GROUP // 2)
    values = torch.cat([halves & 15, halves >> 4], dim=2).float().sub_(8)
    return values.mul_(scales.float()[:, :, None]).flatten(1)[:, :columns]
