"""Matrices in 4 bits: two codes a byte and one float16 scale per 64 neighbours of a row, 4.25 bits per element.

An element is ``scale * (code - 8)`` with codes 0 to 15. In a group of 64 elements, byte ``i`` of 32 has element ``i``
in its low half and element ``32 + i`` in its high half: a vector of bytes unpacks to two vectors of neighbours. The
last group of a row is padded with zeros.
"""

from __future__ import annotations

import torch

from specmemo_kernels.arguments import as_integer

Tensor = torch.Tensor

#: Elements per scale. 32 would take 4.5 bits per element, 128 would take 4.125 and double the error.
GROUP = 64
#: Bits of a code, as ``head_bits`` names it.
CODE_BITS = 4
_SCALE_BYTES = 2
#: Elements packed at a time; each needs a few dozen bytes of temporary memory.
_CHUNK = 1 << 16


def groups_of(columns: int) -> int:
    """Number of groups in a row of ``columns`` elements."""
    return -(-columns // GROUP)


def packed_bytes(rows: int, columns: int) -> int:
    """Bytes of the codes and scales of a ``[rows, columns]`` matrix."""
    return rows * groups_of(columns) * (GROUP // 2 + _SCALE_BYTES)


def check_bits(bits: int | None) -> None:
    """Raise ``ValueError`` unless ``bits`` is ``None`` or 4."""
    if bits is not None and as_integer(bits) != CODE_BITS:
        raise ValueError(f"head_bits is {bits!r}, expected {CODE_BITS} or None (as stored)")


def pack(weight: Tensor, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """The codes ``[rows, 32 * groups]`` uint8 and scales ``[rows, groups]`` float16 of a ``[rows, columns]`` matrix.

    The element with the largest magnitude of a group becomes -8 times the scale; the other elements are rounded to the
    nearest multiple. The error is at most half a scale, 1/16 of the largest element. Elements of the opposite sign
    within 1/16 of the largest would need code 16: their error is up to one scale. The scale's own rounding error is
    1/2048 of it or, below 2**-14, 2**-25.

    Rows are packed a few at a time on ``device`` (``None``: the weight's), so a mapped matrix is never whole in memory.

    Raises:
        ValueError: an element isn't finite, or its scale exceeds float16 (elements beyond 524000).
    """
    rows, columns = weight.shape
    groups, device = groups_of(columns), weight.device if device is None else device
    codes = torch.empty(rows, groups * GROUP // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(rows, groups, dtype=torch.float16, device=device)
    step = max(1, _CHUNK // max(1, columns))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        codes[part], scales[part] = _pack_rows(weight[part].to(device), groups)
    if not bool(scales.isfinite().all()):
        raise ValueError(
            "an element is not finite or beyond 524000, the limit of 4-bit codes; load these heads without head_bits"
        )
    return codes, scales


def _pack_rows(rows: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    padded = torch.nn.functional.pad(rows.float(), (0, groups * GROUP - rows.shape[1]))
    elements = padded.view(len(rows), groups, GROUP)
    largest = elements.gather(2, elements.abs().argmax(2, keepdim=True))
    scales = (largest / -8).half()
    divisor = scales.float()
    codes = (elements / torch.where(divisor == 0, 1, divisor)).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    low, high = codes[:, :, : GROUP // 2], codes[:, :, GROUP // 2 :]
    return (low | (high << 4)).flatten(1), scales[:, :, 0]


def unpack(codes: Tensor, scales: Tensor, columns: int) -> Tensor:
    """The dequantised matrix, ``[rows, columns]`` float32."""
    halves = codes.view(*scales.shape, GROUP // 2)
    values = torch.cat([halves & 15, halves >> 4], dim=2).float().sub_(8)
    return values.mul_(scales.float()[:, :, None]).flatten(1)[:, :columns]
