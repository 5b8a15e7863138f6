"""Compressed weights: their bits, and the bits of every operator's result, against the uncompressed matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import each_isa  # noqa: F401  # the fixture isa

from specmemo_kernels import ops
from specmemo_kernels.backends import _cpu, cpu, layers
from specmemo_kernels.ops import decompress
from specmemo_kernels.ops.compressed_weights import compress, row_bytes

Tensor = torch.Tensor
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), 3e38, -3e38, 1e-40, -1e-40]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def with_exceptions(weight: Tensor) -> Tensor:
    """Special values in the first and the last columns of some rows, and at the ends of half blocks in others."""
    weight = weight.clone()
    edges = [column for column in (0, 63, 64, 127, 128, 300, 512, 703, 1024) if column < weight.shape[1]]
    for row in range(1, len(weight), 3):
        for column, value in zip(edges, SPECIAL + SPECIAL[:1], strict=False):
            weight[row, column] = value
    for row in range(0, len(weight), 3):
        for i, value in enumerate(SPECIAL[: min(len(SPECIAL), weight.shape[1])]):
            weight[row, i if i % 2 else -1 - i] = value
    return weight


def compressed(weight: Tensor) -> Tensor:
    result = compress(weight)
    assert result is not None
    return result


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("columns", [0, 1, 15, 31, 32, 127, 128, 129, 255, 300, 768, 2049])
def test_weights_come_back(isa: str, columns: int) -> None:
    weight = with_exceptions(random(13, columns) * 0.02)
    rows = compressed(weight)
    assert rows.shape == (13, row_bytes(columns))
    assert torch.equal(bits(decompress(rows, columns)), bits(weight))
    assert torch.equal(bits(layers.decompress(rows, columns)), bits(weight))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 9), columns=st.integers(1, 400), seed=st.integers(0, 2**31), kinds=st.integers(1, 40),
    isa=st.sampled_from(_cpu.isas()), threads=st.integers(1, 3),
)  # fmt: skip
def test_any_bits_come_back_or_are_refused(
    rows: int, columns: int, seed: int, kinds: int, isa: str, threads: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    high = torch.randint(0, 256, (kinds,), generator=generator)
    chosen = high[torch.randint(0, kinds, (rows, columns), generator=generator)]
    pattern = (chosen << 8) | torch.randint(0, 256, (rows, columns), generator=generator)
    weight = pattern.to(torch.uint16).view(torch.bfloat16)
    before, threads_before = _cpu.isa(), torch.get_num_threads()
    try:
        _cpu.use_isa(isa)
        torch.set_num_threads(threads)
        result = compress(weight)
        counts = [sorted(torch.bincount(row, minlength=256).tolist(), reverse=True)[16:] for row in chosen]
        assert (result is not None) == all(sum(count) <= 11 for count in counts)
        if result is not None:
            assert torch.equal(bits(decompress(result, columns)), bits(weight))
            assert torch.equal(bits(layers.decompress(result, columns)), bits(weight))
    finally:
        _cpu.use_isa(before)
        torch.set_num_threads(threads_before)


#: Rows of one weight row at a time, of one tile, of several, of two passes, and of panels.
ROWS = [1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 48, 64, 70, 127]


@pytest.mark.parametrize("size", [(1, 1), (12, 128), (37, 129), (50, 768), (13, 2079), (7, 5632), (25, 31)], ids=str)
def test_linear_has_the_bits_of_the_uncompressed_matrix(
    isa: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "few_rows", lambda *_: None)  # never torch's product
    weight, bias = with_exceptions(random(*size) * 0.02).nan_to_num(1, 1, 1), random(size[0])
    rows = compressed(weight)
    for count in ROWS:
        x = random(count, size[1])
        for invariant in (False, True):
            expected = ops.linear(x, weight, bias, invariant=invariant, backend="cpu")
            assert torch.equal(bits(ops.linear(x, rows, bias, invariant=invariant, backend="cpu")), bits(expected))


def test_linears_of_compressed_matrices(isa: str) -> None:
    weight = random(40, 300) * 0.02
    rows = compressed(weight)
    for count in (1, 5, 17, 64, 128):
        x = random(count, 300)
        several = cpu.linears(x, [rows, rows[:1], rows], [None, None, None])
        plain = cpu.linears(x, [weight, weight[:1], weight], [None, None, None])
        assert all(map(torch.equal, map(bits, several), map(bits, plain)))


@pytest.mark.parametrize("rows", [1, 7, 40, 64, 70, 128, 175])
def test_gated_mlp_and_lm_head(isa: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "few_rows", lambda *_: None)
    x = random(rows, 200)
    weights = [
        with_exceptions(random(*size) * 0.05).nan_to_num(1, 1, 1) for size in ((300, 200), (300, 200), (90, 300))
    ]
    expected = ops.gated_mlp(x, *weights, activation="silu", backend="cpu")
    assert torch.equal(
        bits(ops.gated_mlp(x, *map(compressed, weights), activation="silu", backend="cpu")), bits(expected)
    )
    head = random(500, 200, seed=1)
    for function, arguments in (
        (ops.lm_head_argmax, {}), (ops.lm_head_topk, {"k": 5}), (ops.lm_head_log_probs, {"k": 3}),
    ):  # fmt: skip
        expected = function(x, head, backend="cpu", **arguments)
        result = function(x, compressed(head), backend="cpu", **arguments)
        pairs = [(result, expected)] if isinstance(result, Tensor) else zip(result, expected, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("size", [(20, 129), (13, 768)], ids=str)
def test_groups_of_rows(isa: str, size: tuple[int, int]) -> None:
    weight = with_exceptions((random(3 * size[0], size[1]) * 0.02).nan_to_num(1, 1, 1)).view(3, *size)
    rows, bias, x = compress(weight), random(3, size[0]), random(41, size[1])
    assert rows is not None
    assert rows.shape == (3, size[0], row_bytes(size[1]))
    for ends in ([1, 1, 40], [0, 20, 41], [9, 25, 26]):
        arguments = bias, torch.tensor(ends)
        expected = ops.grouped_linear(x, weight, *arguments, backend="cpu")
        assert torch.equal(bits(ops.grouped_linear(x, rows, *arguments, backend="cpu")), bits(expected))
        expected = ops.grouped_linear(x, weight, *arguments, backend="reference")
        assert torch.equal(bits(ops.grouped_linear(x, rows, *arguments, backend="reference")), bits(expected))


def test_many_rows_are_torchs_product_of_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "few_rows", lambda *_: 4)
    monkeypatch.setattr(cpu, "_SLICE_BYTES", 5000)
    weight, bias = random(40, 300) * 0.02, random(40)
    for rows in (5, 64, 70):
        x = random(rows, 300)
        for some in (None, bias):
            result = ops.linear(x, compressed(weight), some, backend="cpu")
            exact = torch.nn.functional.linear(x.double(), weight.double(), None if some is None else some.double())
            assert torch.allclose(result.double(), exact, rtol=1e-2, atol=1e-4)
            assert result.shape == exact.shape


def test_the_reference_decompresses() -> None:
    x, weight = random(5, 300), with_exceptions(random(40, 300) * 0.02).nan_to_num(1, 1, 1)
    rows, down = compressed(weight), random(20, 40)
    for call in (
        lambda w, d: ops.linear(x, w, backend="reference"),
        lambda w, d: ops.gated_mlp(x, w, w, d, activation="silu", backend="reference"),
        lambda w, d: ops.lm_head_topk(x, w, k=4, backend="reference")[0],
    ):
        assert torch.equal(bits(call(rows, compressed(down))), bits(call(weight, down)))


def test_a_malformed_head_stays_inside_its_row() -> None:
    """Rows of a file may have any bytes; the memory around them is not read or written."""
    weight = random(4, 256)
    rows = compressed(weight)
    rows[1, 16:64] = 255  # 65535 exceptions in columns 65535
    assert torch.equal(decompress(rows, 256)[[0, 2, 3]], weight[[0, 2, 3]])
    x = random(3, 256)
    assert torch.equal(
        ops.linear(x, rows, backend="cpu")[:, [0, 2, 3]], ops.linear(x, weight, backend="cpu")[:, [0, 2, 3]]
    )


@pytest.mark.parametrize("exceptions", [10, 11, 12])
def test_the_most_exceptions(exceptions: int) -> None:
    high = torch.tensor([byte for byte in range(16) for _ in range(20)] + list(range(100, 100 + exceptions)))
    weight = (high << 8 | 7).to(torch.uint16).view(torch.bfloat16)[None]
    rows = compress(weight)
    assert (rows is None) == (exceptions > 11)
    if rows is not None:
        assert torch.equal(bits(decompress(rows, len(high))), bits(weight))


def test_random_bits_and_wide_rows_stay_as_they_are() -> None:
    noise = torch.randint(0, 1 << 16, (3, 300), generator=torch.Generator().manual_seed(0))
    assert compress(noise.to(torch.uint16).view(torch.bfloat16)) is None
    assert compress(torch.zeros(1, 65537, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compress(random(3, 4).float()), r"weight is torch.float32 \[3, 4\] on cpu, expected contiguous"),
        (lambda: compress(random(3, 4).T), "expected contiguous bfloat16 matrices"),
        (lambda: decompress(compressed(random(3, 4)), 300), r"compressed has shape \(3, 256\), expected \[\*, 640\]"),
        (lambda: ops.linear(random(2, 300), compressed(random(3, 4))), r"\(3, 256\), expected \[\*, 640\]"),
        (lambda: ops.linear(random(2, 4).float(), compressed(random(3, 4))), "weight"),
        (lambda: cpu.linears(random(2, 4), [random(3, 4), compressed(random(3, 4))], [None] * 2), "all compressed"),
        (
            lambda: ops.gated_mlp(
                random(2, 4), compressed(random(3, 4)), compressed(random(3, 4)), random(4, 3), activation="silu"
            ),
            "compress all three or none",
        ),
    ],
    ids=range(7),
)  # fmt: skip
def test_errors(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()
