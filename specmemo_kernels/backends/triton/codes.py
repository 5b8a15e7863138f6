"""Quantised pages: conversion from and to 8-bit codes with one float32 scale per token and head.

fp8 pages (e4m3) are passed as bytes: not every target has the type, and CDNA3 uses the fnuz encoding.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specmemo_kernels.backends.triton.primitives import load_rows

#: Values of the kernels' constexpr ``KV``: pages in q's dtype, int8 codes; any other value is e4m3 codes.
SAME = 0
INT8 = tl.constexpr(1)
SMALLEST_SCALE = tl.constexpr(2.0**-126)
# 1.5 * 2^23: adding it to a float32 rounds to the nearest even integer.
ROUND = tl.constexpr(12582912.0)


def kv_type(k_scales: torch.Tensor | None, pages: torch.Tensor) -> int:
    """The constexpr ``KV`` for ``pages``."""
    if k_scales is None:
        return SAME
    return 1 if pages.dtype == torch.int8 else 2


def as_codes(pages: torch.Tensor) -> torch.Tensor:
    """``pages``, fp8 viewed as bytes."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


@triton.jit
def code_values(code, KV: tl.constexpr):
    """Codes as float32, before their scale."""
    if KV == INT8:
        value = code.to(tl.float32)
    else:
        # e4m3 bits shifted into a half are the value over 256, also for subnormals.
        wide = code.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return value


@triton.jit
def load_codes(
    row_ptr, scale_ptr, valid, like, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MASKED: tl.constexpr,
    KV: tl.constexpr,
):  # fmt: skip
    """[R, BLOCK_DIM] dequantised elements of R rows in ``like``'s dtype; zeros in invalid rows and behind ``DIM``."""
    codes = load_rows(row_ptr, valid, DIM, BLOCK_DIM, MASKED)
    if MASKED:  # noqa: SIM108 - compiled for one branch
        scales = tl.load(scale_ptr, mask=valid, other=0.0)
    else:
        scales = tl.load(scale_ptr)
    return (code_values(codes, KV) * scales[:, None]).to(like.dtype)


@triton.jit
def fp8_code(x):
    """e4m3 bytes of |x| <= 448, to nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Subnormals are multiples of 2^-9; the smallest normal number is 8 of them.
    small = ((magnitude.to(tl.float32, bitcast=True) * 512.0 + ROUND) - ROUND).to(tl.int32)
    rounded = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    code = tl.where(magnitude < 0x3C800000, small, rounded)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantise(x, KV: tl.constexpr):
    """Codes [R, BLOCK_DIM] and scales [R] of float32 rows, bit-identical with the reference backend's."""
    limit = 127.0 if KV == INT8 else 448.0
    # Compared as integers, because a maximum of floats drops NaN.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    inverse_limit = 1.0 / 127.0 if KV == INT8 else 1.0 / 448.0
    scale = largest.to(tl.float32, bitcast=True) * inverse_limit
    scale = tl.where(scale < SMALLEST_SCALE, 0.0, scale)
    usable = (scale > 0.0) & (largest < 0x7F800000)
    one = tl.full(scale.shape, 1.0, tl.float32)
    inverse = tl.div_rn(one, tl.where(usable, scale, 1.0))
    scaled = tl.where(usable[:, None], x * inverse[:, None], 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -limit), limit)
    if KV == INT8:  # noqa: SIM108 - compiled for one branch; their types differ
        codes = ((scaled + ROUND) - ROUND).to(tl.int8)
    else:
        codes = fp8_code(scaled)
    return codes, scale


@triton.jit
def quantise_token(
    source_ptr, stride_h, target_ptr, scale_ptr, next_head, num_heads, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    HEADS: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Quantise one token's heads, ``HEADS`` at a time. Heads are ``stride_h`` elements apart in the source,
    ``next_head`` rows in the target."""
    column = tl.arange(0, BLOCK_DIM)
    for first in range(0, num_heads, HEADS):
        head = first + tl.arange(0, HEADS)
        valid = head < num_heads
        inside = valid[:, None] & (column < DIM)[None, :]
        start = head.to(tl.int64) * stride_h
        x = tl.load(source_ptr + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        codes, scale = quantise(x, KV)
        row = head * next_head
        tl.store(target_ptr + row[:, None] * DIM + column[None, :], codes, mask=inside)
        tl.store(scale_ptr + row, scale, mask=valid)
