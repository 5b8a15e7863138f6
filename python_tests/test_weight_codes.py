"""Matrices in 4-bit codes: the error bound of packing, and the lm_head over codes on every available backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import CODE_CASES, LmHeadCase, lm_head_code_inputs, lm_head_inputs

from specmemo_kernels import ops
from specmemo_kernels.backends import _cpu
from specmemo_kernels.ops.weight_codes import check_bits, pack, packed_bytes, unpack

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = ("reference", *_cpu.isas())


@pytest.fixture(params=WAYS)
def backend(request: pytest.FixtureRequest) -> Any:
    """The reference, or the C++ kernels with one instruction set."""
    if request.param == "reference":
        yield request.param
        return
    before = _cpu.isa()
    _cpu.use_isa(request.param)
    yield "cpu"
    _cpu.use_isa(before)


def best_tokens(logits: Tensor, k: int) -> Tensor:
    """The k best of each row, ties to the lower token."""
    return torch.argsort(logits, dim=1, descending=True, stable=True)[:, :k]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CODE_CASES, ids=lambda case: case.name)
def test_exact_on_integers(backend: str, case: LmHeadCase, dtype: torch.dtype) -> None:
    """Sums are exact in every dtype, so order and ties are determined; invalid codes behind the last column."""
    plain, inputs = lm_head_inputs(case, torch.float64), lm_head_code_inputs(case, dtype)
    logits = torch.nn.functional.linear(*plain.values())  # type: ignore[arg-type]
    wanted = best_tokens(logits, case.k)
    values, tokens = ops.lm_head_topk(**inputs, k=case.k, backend=backend)  # type: ignore[arg-type]
    assert (values.dtype, tokens.dtype) == (dtype, torch.int64)
    assert torch.equal(tokens, wanted)
    assert torch.equal(values.double(), logits.gather(1, wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (3, 200), (9, 1000)])
def test_on_real_numbers(backend: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Values are the float64 logits of the dequantised weights, after float32 sums and one rounding (the reference also
    rounds the dequantised weights).
    """
    g = torch.Generator().manual_seed(rows)
    hidden, weight = torch.randn(rows, columns, generator=g).to(dtype), torch.randn(501, columns, generator=g) / 30
    codes, scales = pack(weight)
    stored = unpack(codes, scales, columns).double()
    exact = hidden.double() @ stored.T
    eps, single = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    magnitude = (hidden.double().abs() @ stored.abs().T).max()
    rounded = eps * magnitude if backend == "reference" else 0
    error = float(eps * exact.abs().max() + columns * single * magnitude + rounded)
    values, tokens = ops.lm_head_topk(hidden, codes, k=20, scales=scales, backend=backend)
    assert float((values.double() - exact.gather(1, tokens)).abs().max()) <= error
    assert float((values.double() - exact.topk(20).values).abs().max()) <= error


def test_rows_that_are_apart(backend: str) -> None:
    g = torch.Generator().manual_seed(0)
    wide, (codes, scales) = torch.randn(6, 3, 70, generator=g), pack(torch.randn(300, 70, generator=g))
    apart = ops.lm_head_topk(wide[:, 1], codes, k=3, scales=scales, backend=backend)
    together = ops.lm_head_topk(wide[:, 1].contiguous(), codes, k=3, scales=scales, backend=backend)
    for a, b in zip(apart, together, strict=True):
        torch.testing.assert_close(a, b)


def test_nothing_behind_the_last_row_is_read(backend: str) -> None:
    """An odd number of groups fills no register; the memory behind them has no effect."""
    g = torch.Generator().manual_seed(1)
    hidden, (codes, scales) = torch.randn(2, 192, generator=g), pack(torch.randn(40, 192, generator=g))
    wanted = ops.lm_head_topk(hidden, codes[:25].clone(), k=4, scales=scales[:25].clone(), backend=backend)
    scales[25:] = float("nan")
    got = ops.lm_head_topk(hidden, codes[:25], k=4, scales=scales[:25], backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 5),
    columns=st.integers(1, 200),
    exponent=st.integers(-30, 12),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_the_error_of_packing(rows: int, columns: int, exponent: int, dtype: torch.dtype, seed: int) -> None:
    """At most half a scale; a whole scale for the negated maximum, which has no code."""
    g = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=g) * 2.0**exponent).to(dtype)
    weight[torch.rand(rows, columns, generator=g) < 0.2] = 0
    codes, scales = pack(weight)
    assert codes.nbytes + scales.nbytes == packed_bytes(rows, columns)
    stored = unpack(codes, scales, columns)
    for row in range(rows):
        for start in range(0, columns, 64):
            given_, kept = weight[row, start : start + 64].double(), stored[row, start : start + 64].double()
            largest = given_[given_.abs().argmax()]
            scale = abs(float(scales[row, start // 64]))
            slack = 8 * max(scale / 2048, 2.0**-25) + 1e-30
            no_code = given_ * -largest.sign() > 7.5 * scale
            off = (given_ - kept).abs()
            assert float(off.masked_fill(no_code, 0).max()) <= scale / 2 + slack
            assert float(off.max()) <= scale + slack
            assert abs(8 * scale - float(largest.abs())) <= slack
            assert (kept[given_ == 0] == 0).all()


def test_packing_is_the_same_in_pieces_and_from_any_layout() -> None:
    """Rows packed a few at a time, a transposed matrix, or one row give the same codes."""
    weight = torch.randn(700, 1000, generator=torch.Generator().manual_seed(3))
    codes, scales = pack(weight)
    for part in (weight.T.contiguous().T, weight[:1], weight[::2]):
        mine = pack(part)
        rows = [0] if len(part) == 1 else slice(None, None, 700 // len(part))
        assert torch.equal(mine[0], codes[rows])
        assert torch.equal(mine[1], scales[rows])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e6])
def test_what_codes_cannot_hold(bad: float) -> None:
    weight = torch.randn(9, 130)
    weight[7, 129] = bad
    with pytest.raises(ValueError, match="not finite or beyond 524000"):
        pack(weight)


@pytest.mark.parametrize("bits", [0, 2, 8, "4"])
def test_other_widths_are_refused(bits: Any) -> None:
    with pytest.raises(ValueError, match=f"head_bits is {bits!r}, expected 4 or None"):
        check_bits(bits)


def test_codes_of_no_inputs(backend: str) -> None:
    codes, scales = pack(torch.zeros(4, 0))
    assert torch.equal(ops.linear(torch.randn(2, 0), codes, scales=scales, backend=backend), torch.zeros(2, 4))
