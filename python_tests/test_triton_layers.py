"""The Triton kernels of norms, rotary embeddings and gated MLPs, and recorded steps with them, in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter import INTERPRETING
from selection import sample
from test_fusion import operators_per_layer, recorded, rotary
from test_linear import check_linear

from specmemo_kernels.backends import reference
from specmemo_kernels.engine import host_capture
from specmemo_kernels.ops import weight_codes

pytest.importorskip("triton")
__all__ = ["recorded"]

DTYPES = sample((torch.float32, torch.float16), [torch.float16, torch.float32])
#: A few roundings of the result's largest element; the interpreter's bfloat16 truncates.
UNIT = {torch.float32: 2.0**-23, torch.float16: 2.0**-10}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, roundings: int) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).abs().max()
    assert float(error) <= roundings * UNIT[found.dtype] * float(expected.double().abs().max())


class TestInterpreter:
    __test__ = INTERPRETING

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("size", "offset", "round_first"), [(70, 0.0, True), (33, 1.0, False), (1100, 0.0, False)])
    def test_rms_norm(self, size: int, offset: float, round_first: bool, dtype: torch.dtype) -> None:
        """Strided rows with NaN between them, and a row of zeros."""
        from specmemo_kernels.backends import triton

        wide = torch.full((2, 3, size + 5), float("nan"), dtype=dtype)
        x = wide[..., :size]
        x.copy_(random(2, 3, size, dtype=dtype))
        x[1, 2] = 0
        weight = random(size, dtype=dtype, seed=1)
        found = triton.rms_norm(x, weight, 1e-6, offset, round_first)
        close(found, reference.rms_norm(x, weight, 1e-6, offset, round_first), 2)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_add_rms_norm(self, dtype: torch.dtype) -> None:
        from specmemo_kernels.backends import triton

        x, residual = (random(1, 4, 90, dtype=dtype, seed=seed) for seed in (0, 1))
        weight = random(90, dtype=dtype, seed=2)
        total, norm = triton.add_rms_norm(x, residual, weight, 1e-5, 0.0, True)
        assert torch.equal(total, x + residual)
        close(norm, reference.rms_norm(total, weight, 1e-5, 0.0, True), 2)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("tokens", "heads", "size"), [(5, 3, 18), (1, 40, 64), (3, 1, 2)])
    def test_rotary(self, tokens: int, heads: int, size: int, dtype: torch.dtype) -> None:
        """The bits of separate operators; heads behind each other or side by side, angles of a wider table."""
        from specmemo_kernels.backends import triton

        table = torch.full((2, tokens, size + 3), float("nan"), dtype=dtype)
        cos, sin = table[0, :, :size], table[1, :, :size]
        cos.copy_(random(tokens, size, dtype=dtype, seed=1))
        sin.copy_(random(tokens, size, dtype=dtype, seed=2))
        for x in (random(tokens, heads, size, dtype=dtype), random(heads, tokens, size, dtype=dtype).transpose(0, 1)):
            found = triton.rotary(x, cos, sin)
            assert found.is_contiguous()
            assert torch.equal(found, rotary(x, cos[:, None], sin[:, None]))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
    def test_gated_mlp(self, activation: str, dtype: torch.dtype) -> None:
        from specmemo_kernels.backends import triton

        x = random(2, 7, 30, dtype=dtype) * 4
        shapes = ((170, 30), (170, 30), (30, 170))
        gate, up, down = (random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))
        biases = (random(170, dtype=dtype), None, random(30, dtype=dtype))
        arguments: Any = (x, gate, up, down, *biases, activation, False)
        close(triton.gated_mlp(*arguments), reference.gated_mlp(*arguments), 4)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        ("shape", "outputs", "bias"), [((5, 72), 50, True), ((2, 9, 130), 33, False), ((64,), 1, True)]
    )
    def test_linear_of_codes(self, shape: tuple[int, ...], outputs: int, bias: bool, dtype: torch.dtype) -> None:
        """Partial groups, with NaN behind the last column of strided rows; partial blocks of rows and outputs."""
        from specmemo_kernels.backends import triton

        wide = torch.full((*shape[:-1], shape[-1] + 7), float("nan"), dtype=dtype)
        x = wide[..., : shape[-1]]
        x.copy_(random(*shape, dtype=dtype))
        codes, scales = weight_codes.pack(random(outputs, shape[-1], dtype=torch.float32, seed=1))
        added = random(outputs, dtype=dtype, seed=2) if bias else None
        matrix = weight_codes.unpack(codes, scales, shape[-1])
        check_linear(x, matrix, added, triton.linear(x, codes, added, scales, False))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        ("shape", "outputs", "bias"),
        [
            ((5, 72), (50,), True),
            ((2, 9, 130), (33, 70), False),
            ((64,), (1, 129, 64), True),
            ((3, 64), (65,) * 5, False),
        ],
    )
    def test_linears(self, shape: tuple[int, ...], outputs: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
        """Each with the bits of a separate call; NaN behind the last column of strided rows, partial blocks."""
        from specmemo_kernels.backends import triton

        wide = torch.full((*shape[:-1], shape[-1] + 7), float("nan"), dtype=dtype)
        x = wide[..., : shape[-1]]
        x.copy_(random(*shape, dtype=dtype))
        weights = [random(size, shape[-1], dtype=dtype, seed=i) for i, size in enumerate(outputs)]
        biases = [random(size, dtype=dtype, seed=i) if bias else None for i, size in enumerate(outputs)]
        found = triton.linears(x, weights, biases)
        assert len(found) == len(outputs)
        for weight, added, result in zip(weights, biases, found, strict=True):
            check_linear(x, weight, added, result)
            assert torch.equal(result, triton.linear(x, weight, added, None, False))

    def test_linears_without_kernel(self) -> None:
        """A transposed matrix is torch's."""
        from specmemo_kernels.backends import triton

        x, weight = random(3, 40, dtype=torch.float32), random(40, 9, dtype=torch.float32, seed=1).T
        (found,) = triton.linears(x, [weight], [None])
        assert torch.equal(found, torch.nn.functional.linear(x, weight))

    @pytest.mark.parametrize(("heads", "others"), [(3, 1), (1, 40)])
    def test_rotary_pair(self, heads: int, others: int) -> None:
        """The bits of two calls."""
        from specmemo_kernels.backends import triton

        x, y = (random(5, count, 18, dtype=torch.float16, seed=count) for count in (heads, others))
        cos, sin = (random(5, 18, dtype=torch.float16, seed=seed) for seed in (1, 2))
        found = triton.rotary_pair(x, y.transpose(0, 1).contiguous().transpose(0, 1), cos, sin)
        assert torch.equal(found[0], triton.rotary(x, cos, sin))
        assert torch.equal(found[1], triton.rotary(y, cos, sin))

    @pytest.mark.parametrize(("heads", "others", "value_size"), [(3, 1, 18), (1, 40, 33)])
    def test_rotary_stored(self, heads: int, others: int, value_size: int) -> None:
        """The bits of :func:`rotary_pair`, and copies of nothing else."""
        from specmemo_kernels.backends import triton

        x, y = (random(5, count, 18, dtype=torch.float16, seed=count) for count in (heads, others))
        cos, sin = (random(5, 18, dtype=torch.float16, seed=seed) for seed in (1, 2))
        v = random(others, 5, value_size, dtype=torch.float16, seed=3).transpose(0, 1)
        keys, values = (torch.full((7, others, size), torch.nan, dtype=torch.float16) for size in (18, value_size))
        found = triton.rotary_stored(x, y, v, cos, sin, keys[1:6], values[1:6])
        expected = triton.rotary_pair(x, y, cos, sin)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.equal(keys[1:6], expected[1])
        assert torch.equal(values[1:6], v)
        assert all(rows.isnan().all() for rows in (keys[0], keys[6], values[0], values[6]))

    def test_nothing_to_do(self) -> None:
        from specmemo_kernels.backends import triton

        assert triton.rms_norm(torch.empty(0, 5), torch.ones(5), 1e-6, 0.0, True).shape == (0, 5)
        codes, scales = weight_codes.pack(torch.ones(3, 5))
        assert triton.linear(torch.empty(0, 5), codes, None, scales, False).shape == (0, 3)
        assert triton.linears(torch.empty(0, 5), [torch.ones(3, 5)], [None])[0].shape == (0, 3)
        assert triton.rotary(torch.empty(0, 2, 4), torch.empty(0, 4), torch.empty(0, 4)).shape == (0, 2, 4)

    def test_invariant_products_are_refused(self) -> None:
        from specmemo_kernels.backends import triton

        matrix = torch.ones(4, 4)
        with pytest.raises(ValueError, match="invariant is True"):
            triton.gated_mlp(matrix, matrix, matrix, matrix, None, None, None, "silu", True)
        with pytest.raises(ValueError, match="invariant is True"):
            triton.linear(matrix, matrix, None, None, True)

    @pytest.mark.slow
    def test_operators_of_a_layer(self, monkeypatch: pytest.MonkeyPatch, recorded: list[str]) -> None:
        """Two calls of projections, rotary embeddings with copies to scratch, attention, gated MLP, two norms."""
        monkeypatch.setattr(host_capture, "dispatcher_active", lambda: False)
        assert operators_per_layer("triton", monkeypatch, recorded, new=6) == 7
        assert {"linears", "rotary_stored", "add_rms_norm", "gated_mlp", "tree_attention"} <= set(recorded)
