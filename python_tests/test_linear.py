"""Linear layers, gated MLPs and RMS norms against float64, and the bits of a row in passes of several sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import each_isa  # noqa: F401  # the fixture isa
from torch.nn import functional

from specmemo_kernels import ops
from specmemo_kernels.backends import _cpu, cpu
from specmemo_kernels.backends.layers import ACTIVATION_FUNCTIONS
from specmemo_kernels.ops import weight_codes
from specmemo_kernels.planning.resident import peak_of

Tensor = torch.Tensor
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ("reference", "cpu")
#: Rows, outputs and inputs: no whole tile, group, vector or chunk; several of each; more rows than one pass; panels,
#: one and several in a pass, also of several blocks; input that L1 holds in one tile or in several.
SIZES = [
    (1, 1, 1), (1, 3, 16), (2, 7, 33), (3, 25, 15), (4, 100, 64), (5, 64, 130), (8, 256, 257), (9, 29, 2050),
    (16, 31, 4100), (17, 77, 96), (33, 48, 65), (70, 24, 64), (0, 5, 8), (6, 0, 8), (4, 10, 0),
    (56, 1, 1), (64, 96, 128), (61, 101, 131), (127, 193, 300), (64, 5, 0), (44, 13, 40), (48, 96, 77), (79, 7, 300),
    (98, 100, 33), (200, 17, 258), (4, 27, 3080), (7, 29, 1100), (8, 29, 2050), (12, 25, 2050),
    (64, 54, 1100), (48, 53, 1033), (108, 50, 1033), (128, 54, 1100), (129, 7, 40), (172, 13, 77), (256, 5, 520),
]  # fmt: skip
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def product_error(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The exact product and its error budget: float32 sums in any order, then one rounding."""
    wide, matrix = x.double(), weight.double()
    exact = functional.linear(wide, matrix, None if bias is None else bias.double())
    sizes = functional.linear(wide.abs(), matrix.abs(), None if bias is None else bias.double().abs())
    return exact, (x.shape[-1] + 1) * unit(torch.float32) * sizes + 1.01 * unit(dtype) * exact.abs() + 1e-7


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor) -> None:
    assert result.dtype == x.dtype
    assert result.shape == (*x.shape[:-1], weight.shape[0])
    exact, budget = product_error(x, weight, bias, x.dtype)
    assert bool(((result.double() - exact).abs() <= budget).all())


@each_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_linear_of_every_instruction_set(
    isa: str, size: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "few_rows", lambda *_: None)  # never torch's product
    rows, outputs, inputs = size
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    for bias in (None, random(outputs, dtype=dtype, seed=2)):
        for invariant in (False, True):
            result = ops.linear(x, weight, bias, invariant=invariant, backend="cpu")
            check_linear(x, weight, bias, result)
        assert torch.equal(ops.linear(x[-1:], weight, bias, invariant=True, backend="cpu"), result[-1:])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40), outputs=st.integers(1, 90), inputs=st.integers(1, 200), more=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES), isa=st.sampled_from(_cpu.isas()), threads=st.integers(1, 3),
)  # fmt: skip
def test_a_row_has_the_same_bits_beside_any_rows(
    rows: int, outputs: int, inputs: int, more: int, dtype: torch.dtype, isa: str, threads: int
) -> None:
    before, threads_before = _cpu.isa(), torch.get_num_threads()
    try:
        _cpu.use_isa(isa)
        x, weight = random(rows + more, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
        few = ops.linear(x[:rows], weight, invariant=True, backend="cpu")
        torch.set_num_threads(threads)
        assert torch.equal(ops.linear(x, weight, invariant=True, backend="cpu")[:rows], few)
        scale = random(inputs, dtype=dtype, seed=2)
        norm = ops.rms_norm(x, scale, eps=1e-6, backend="cpu")
        assert torch.equal(ops.rms_norm(x[:rows], scale, eps=1e-6, backend="cpu"), norm[:rows])
    finally:
        _cpu.use_isa(before)
        torch.set_num_threads(threads_before)


@each_dtype
@pytest.mark.parametrize("limit", [9, None])
@pytest.mark.parametrize("biased", [False, True])
def test_more_rows_than_pay_are_torchs_own_product(
    dtype: torch.dtype, limit: int | None, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits a multiple of 32 rows; the rest is ours."""
    monkeypatch.setattr(cpu, "few_rows", lambda *_: limit)
    x, weight = random(2, 35, 400, dtype=dtype), random(30, 400, dtype=dtype)
    bias = random(30, dtype=dtype) if biased else None
    rows = x.view(-1, 400)
    by_torch = {torch.float32: 70}.get(dtype, 64) if limit else 0
    result = ops.linear(x, weight, bias, backend="cpu").view(-1, 30)
    assert torch.equal(result[:by_torch], functional.linear(rows[:by_torch], weight, bias))
    check_linear(rows, weight, bias, result)
    assert torch.equal(result[by_torch:], ops.linear(rows[by_torch:], weight, bias, backend="cpu"))
    few = ops.linear(rows[:9], weight, bias, backend="cpu")
    assert torch.equal(few, ops.linear(rows[:9], weight, bias, invariant=True, backend="cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_numbers_of_rows_leave_no_compiled_kernels(
    dtype: torch.dtype, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN would keep 0.65 MiB for each, where the machine has instructions for the dtype."""
    monkeypatch.setattr(cpu, "few_rows", lambda *_: 32)  # as on a machine whose torch has faster products
    x, weight = random(160, 64, dtype=dtype), random(128, 64, dtype=dtype)
    weight = random(64, 128, dtype=dtype).T if transposed else weight

    def multiply() -> None:
        for rows in range(1, 160):
            ops.linear(x[:rows], weight, backend="cpu")

    assert peak_of(multiply, x.device) < 16 << 20


@pytest.mark.parametrize(
    ("capability", "listed", "bf16", "zen", "expected", "in_float32"),
    [
        ("AVX2", False, False, 0, None, None),
        ("AVX512", True, True, 0, 32, 128),
        ("AVX512", True, True, 4, None, None),
        ("AVX512", True, True, 5, None, None),
        ("AVX512", True, False, 0, None, 128),
        ("DEFAULT", True, False, 0, 32, 128),
    ],
    ids=["avx2", "avx512bf16", "zen4", "zen5", "avx512", "arm"],
)
def test_few_rows(
    capability: str,
    listed: bool,
    bf16: bool,
    zen: int,
    expected: int | None,
    in_float32: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where torch has a fast product, its product of many rows is used."""
    monkeypatch.setattr(cpu._cpu, "zen", lambda: zen)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: listed)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: capability == "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    few_rows = cpu.few_rows.__wrapped__
    assert few_rows(torch.bfloat16) == expected
    assert few_rows(torch.float32) == in_float32
    assert few_rows(torch.float32, transposed=True) == (None if zen == 5 else 32)
    assert few_rows(torch.bfloat16, transposed=True) == (None if expected is None and not zen else 32)
    assert ops.few_rows("reference", torch.float32) == 0


@each_backend
@each_dtype
@pytest.mark.parametrize("shape", [(3, 70), (1, 5, 70), (2, 3, 70), (2, 1, 3, 70), (1, 2, 1, 1, 3, 70), (70,)], ids=str)
def test_leading_dimensions_and_strides(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = random(20, 70, dtype=dtype, seed=1)
    wide = random(*shape[:-1], 2 * shape[-1], dtype=dtype)
    for x in (random(*shape, dtype=dtype), wide[..., ::2], wide[..., : shape[-1]]):
        check_linear(x, weight, None, ops.linear(x, weight, backend=backend))


@each_backend
@each_dtype
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_codes(backend: str, rows: int, dtype: torch.dtype) -> None:
    x = random(rows, 200, dtype=dtype)
    codes, scales = weight_codes.pack(random(50, 200, dtype=torch.float32, seed=1))
    weight, bias = weight_codes.unpack(codes, scales, 200), random(50, dtype=dtype)
    result = ops.linear(x, codes, bias, scales=scales, backend=backend)
    exact, budget = product_error(x, weight, bias, dtype)
    # Dequantised elements are rounded too, by the reference to dtype.
    budget += unit(dtype) * functional.linear(x.double().abs(), weight.double().abs())
    assert bool(((result.double() - exact).abs() <= budget).all())


@each_dtype
@pytest.mark.parametrize("rows", [1, 5, 9, 40, 70])
@pytest.mark.parametrize("outputs", [(50,), (70, 1, 13), (40,) * 6], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_linears(isa: str, rows: int, outputs: tuple[int, ...], biased: bool, dtype: torch.dtype) -> None:
    """Each with the bits of a separate call, from strided rows; several passes, more matrices than one loop has."""
    wide = torch.full((rows, 137), float("nan"), dtype=dtype)
    x = wide[:, :130]
    x.copy_(random(rows, 130, dtype=dtype))
    weights = [random(size, 130, dtype=dtype, seed=i) for i, size in enumerate(outputs)]
    biases = [random(size, dtype=dtype, seed=i) if biased else None for i, size in enumerate(outputs)]
    found = cpu.linears(x, weights, biases)
    for weight, bias, result in zip(weights, biases, found, strict=True):
        check_linear(x, weight, bias, result)
        assert torch.equal(result, cpu.linear(x, weight, bias, None, False))


@each_dtype
@pytest.mark.parametrize("activation", ACTIVATION_FUNCTIONS)
@pytest.mark.parametrize(
    "size", [(1, 16, 24, 16), (5, 33, 50, 31), (40, 64, 96, 70), (60, 35, 130, 29), (172, 20, 530, 17)], ids=str
)
@pytest.mark.parametrize("biased", [False, True])
def test_gated_mlp(
    isa: str,
    size: tuple[int, ...],
    activation: str,
    dtype: torch.dtype,
    biased: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The separate layers' result: activations are rounded after each step, so only sums may differ."""
    monkeypatch.setattr(cpu, "few_rows", lambda *_: None)  # never torch's product
    rows, inputs, middle, outputs = size
    x = random(rows, inputs, dtype=dtype)
    gate, up = (random(middle, inputs, dtype=dtype, seed=seed) * inputs**-0.5 for seed in (1, 2))
    down = random(outputs, middle, dtype=dtype, seed=3) * middle**-0.5
    biases = [random(n, dtype=dtype, seed=4) if biased else None for n in (middle, middle, outputs)]
    result = ops.gated_mlp(x, gate, up, down, *biases, activation=activation, backend="cpu")
    gates, gate_error = product_error(x, gate, biases[0], dtype)
    ups, up_error = product_error(x, up, biases[1], dtype)
    act = ACTIVATION_FUNCTIONS[activation](gates)
    # All three activations have slopes of at most 1.13; each value and the product is rounded once.
    act_error = 1.13 * gate_error + 2 * unit(dtype) * act.abs() + 4e-7
    error = act_error * ups.abs() + up_error * (act.abs() + act_error) + unit(dtype) * (act * ups).abs() * 1.01
    wide = down.double()
    exact = functional.linear(act * ups, wide, None if biases[2] is None else biases[2].double())
    sizes = functional.linear((act * ups).abs() + error, wide.abs())
    budget = functional.linear(error, wide.abs()) + (middle + 1) * unit(torch.float32) * sizes
    budget += 1.01 * unit(dtype) * exact.abs() + 1e-6
    assert bool(((result.double() - exact).abs() <= budget).all())
    one = ops.gated_mlp(x[-1:], gate, up, down, *biases, activation=activation, invariant=True, backend="cpu")
    whole = ops.gated_mlp(x, gate, up, down, *biases, activation=activation, invariant=True, backend="cpu")
    assert torch.equal(one[0], whole[-1])


def test_a_gated_mlp_of_one_input(isa: str) -> None:
    """Its matrices are contiguous with either order of strides."""
    x, column, row = torch.ones(64, 1), torch.ones(24, 1), torch.ones(1, 24)
    for gate, up in ((column, row.T), (row.T, column), (row.T, row.T)):
        result = ops.gated_mlp(x, gate, up, torch.ones(3, 24), activation="relu", backend="cpu")
        assert torch.equal(result, torch.full((64, 3), 24.0))


def test_a_gated_mlp_of_no_activations(isa: str) -> None:
    x, none, down, bias = torch.ones(40, 4), torch.empty(0, 4), torch.empty(5, 0), torch.randn(5)
    result = ops.gated_mlp(x, none, none, down, None, None, bias, activation="silu", backend="cpu")
    assert torch.equal(result, bias.expand(40, 5))


@each_dtype
@pytest.mark.parametrize("activation", ACTIVATION_FUNCTIONS)
def test_activations_of_large_and_missing_numbers(isa: str, activation: str, dtype: torch.dtype) -> None:
    gates = torch.tensor([[-1e30, -100, -20, -1, -1e-6, 0, 1e-6, 1, 20, 100, 1e30, float("nan")]]).clamp(-6e4, 6e4)
    one = torch.eye(gates.shape[1], dtype=dtype)
    ups = torch.zeros_like(one)
    result = ops.gated_mlp(
        gates.to(dtype), one, ups, one, None, torch.ones(len(one), dtype=dtype), activation=activation, backend="cpu"
    )
    # NaN times a zero of the matrices is NaN in every column: compare without it, then alone.
    assert bool(result.isnan().all())
    gates[0, -1] = 0
    result = ops.gated_mlp(
        gates.to(dtype), one, ups, one, None, torch.ones(len(one), dtype=dtype), activation=activation, backend="cpu"
    )
    expected = ACTIVATION_FUNCTIONS[activation](gates.to(dtype).double())
    assert bool(((result.double() - expected).abs() <= 1.01 * unit(dtype) * expected.abs() + 1e-6).all())


@each_dtype
@pytest.mark.parametrize("size", [(1, 1), (3, 7), (5, 64), (2, 100), (300, 768)], ids=str)
@pytest.mark.parametrize(("offset", "round_first"), [(0.0, True), (0.0, False), (1.0, False)])
def test_rms_norm(isa: str, size: tuple[int, int], offset: float, round_first: bool, dtype: torch.dtype) -> None:
    x, weight = 3 * random(*size, dtype=dtype), random(size[1], dtype=dtype, seed=1)
    x[0] *= 0.001  # the epsilon counts
    arguments: dict[str, Any] = {"eps": 1e-5, "offset": offset, "round_first": round_first}
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
    roundings = (2 if round_first else 1) * unit(dtype) * 1.01 + (size[1] + 8) * unit(torch.float32)
    for backend in BACKENDS:
        result = ops.rms_norm(x, weight, **arguments, backend=backend)
        assert bool(((result.double() - exact).abs() <= roundings * exact.abs() + 1e-7).all()), backend
    grouped = x[None, :, None].expand(2, -1, 2, -1)
    assert torch.equal(ops.rms_norm(grouped, weight, **arguments, backend="cpu")[1, :, 1], result)


X, W = torch.ones(2, 8), torch.ones(4, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.linear(X, W[:, :7].contiguous()), r"weight has shape \(4, 7\), expected \[\*, 8\]"),
        (lambda: ops.linear(X, W.half()), "weight has dtype torch.float16, expected torch.float32"),
        (lambda: ops.linear(X, torch.ones(4, 16)[:, ::2]), "weight must be contiguous"),
        (lambda: ops.linear(X, W, torch.ones(5)), r"bias has shape \(5,\), expected \[4\]"),
        (lambda: ops.linear(X, W, scales=torch.ones(4, 1)), "weight has"),
        (lambda: ops.linear(torch.tensor(1.0), W), "x has no dimensions"),
        (lambda: ops.linear(X, W, invariant=True, backend="reference"), "only backend='cpu' has products"),
        (lambda: ops.linear(X.double(), W.double(), backend="cpu"), "backend 'cpu' computes float32"),
        (lambda: ops.gated_mlp(X, W, W[:3], W.T.contiguous(), activation="silu"), r"up has shape \(3, 8\)"),
        (lambda: ops.gated_mlp(X, W, W, W, activation="silu"), r"down has shape \(4, 8\), expected \[\*, 4\]"),
        (lambda: ops.gated_mlp(X, W, W, W.T.contiguous(), activation="mish"), "activation is 'mish', expected one of"),
        (lambda: ops.rms_norm(X, torch.ones(7), eps=1e-5), r"weight has shape \(7,\), expected \[8\]"),
        (lambda: ops.rms_norm(X, torch.ones(8), eps=-1.0), "eps is -1.0, it must be at least 0"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed in /proc")
def test_loops_of_fewer_tasks_keep_all_threads() -> None:
    """libgomp ends the threads that a smaller team doesn't have, and starts others for the next loop."""
    code = """
import os
import torch
from specmemo_kernels import ops
torch.set_num_threads(4)
hidden, few, many = torch.ones(1, 64), torch.ones(100, 64), torch.ones(4000, 64)  # 3 tasks, and more than 4
ops.lm_head_argmax(hidden, many, backend="cpu")
before = set(os.listdir("/proc/self/task"))
assert len(before) >= 4, before
for _ in range(5):
    ops.lm_head_argmax(hidden, few, backend="cpu")
    ops.lm_head_argmax(hidden, many, backend="cpu")
assert set(os.listdir("/proc/self/task")) == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_memory_that_is_kept_is_what_linear_workspace_says() -> None:
    """In a process whose threads have no buffers yet, for fewer and more rows than one pass has."""
    code = """
import torch
from specmemo_kernels import ops
from specmemo_kernels.backends import _cpu, cpu
torch.set_num_threads(2)
cpu.few_rows = lambda *_: None  # never torch's product
for dtype in (torch.bfloat16, torch.float32):
    for rows in (1, 9, 100):
        x, w = torch.ones(rows, 300, dtype=dtype), torch.ones(500, 300, dtype=dtype)
        for invariant in (False, True):
            ops.linear(x, w, invariant=invariant, backend="cpu")
            ops.gated_mlp(x, w, w, w.T.contiguous(), activation="silu", invariant=invariant, backend="cpu")
        ops.lm_head_argmax(x, w, backend="cpu")
        ops.lm_head_log_probs(x, w, k=1, backend="cpu")
        ops.lm_head_topk(x[:8], w, k=10, backend="cpu")
    # Each thread rounds both buffers up to pages.
    limit = max(ops.linear_workspace("cpu", dtype, 300), ops.linear_workspace("cpu", dtype, 300, 500)) + 4 * 4096
    assert 0 < _cpu.arena_bytes() <= limit, (_cpu.arena_bytes(), limit)
    if dtype == torch.bfloat16:
        assert _cpu.arena_bytes() >= limit / 3, (_cpu.arena_bytes(), limit)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
