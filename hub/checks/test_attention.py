"""``tree_attention_forward`` against float64, and what it refuses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

Tensor = torch.Tensor
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ordinary = pytest.mark.skipif(INTERPRETED, reason="in the other process")
MODULE = torch.nn.Identity()


@dataclass(frozen=True)
class Case:
    """A call; ``mask``: one string of ``1`` (token) and ``.`` (padding) per row of the batch."""

    queries: int
    tokens: int
    heads: int = 4
    key_heads: int = 2
    dim: int = 16
    v_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    mask: tuple[str, ...] = ()


CASES = {
    "decode": Case(1, 70),
    "chunk": Case(9, 40),
    "prompt": Case(33, 33),
    "first_token": Case(1, 1),
    "mha": Case(3, 20, heads=3, key_heads=3),
    "mqa": Case(5, 21, heads=8, key_heads=1),
    "values": Case(4, 17, v_dim=8),
    "window": Case(6, 50, window=7),
    "softcap": Case(4, 30, softcap=2.0),
    "sinks": Case(4, 30, sinks=True),
    "extras": Case(12, 40, window=9, softcap=3.0, sinks=True),
    "left": Case(1, 8, mask=("11111111", "...11111")),
    "left_prompt": Case(8, 8, mask=("11111111", "...11111", ".......1")),
    "left_extras": Case(3, 9, mask=("..1111111", "111111111"), window=4, softcap=3.0, sinks=True),
    "right_prompt": Case(6, 6, mask=("111111", "1111..")),
    "holes": Case(3, 9, mask=("11..11.11", "1.1.1.11.")),
    "no_new_token": Case(2, 6, mask=("1111..", "111111")),
    "static_cache": Case(2, 12, mask=("11111111", ".1111111")),
    "static_cache_full_rows": Case(2, 12, mask=("11111", "11111")),
}


def problem(case: Case, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the function; slots behind the mask are NaN."""
    g = torch.Generator().manual_seed(1)
    batch = len(case.mask) or 2
    query = torch.randn(batch, case.heads, case.queries, case.dim, generator=g)
    key = torch.randn(batch, case.key_heads, case.tokens, case.dim, generator=g)
    value = torch.randn(batch, case.key_heads, case.tokens, case.v_dim, generator=g)
    mask = torch.tensor([[c == "1" for c in row] for row in case.mask]) if case.mask else None
    if mask is not None:
        key[:, :, mask.shape[1] :] = value[:, :, mask.shape[1] :] = float("nan")
        dead = ~torch.nn.functional.pad(mask, (0, case.tokens - mask.shape[1]))
        key.masked_fill_(dead[:, None, :, None], float("nan"))
        value.masked_fill_(dead[:, None, :, None], float("nan"))
    sinks = torch.randn(case.heads, generator=g).to(dtype) if case.sinks else None
    options = {"scaling": 0.3, "sliding_window": case.window, "softcap": case.softcap, "s_aux": sinks}
    return (MODULE, query.to(dtype), key.to(dtype), value.to(dtype), mask), options


def expected(arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """One query and head at a time, in float64; rows of padding are zeros."""
    _, query, key, value, mask = arguments
    query, key, value = query.double(), key.double(), value.double()
    batch, heads, queries, _ = query.shape
    tokens = key.shape[2] if mask is None else mask.shape[1]
    out = torch.zeros(batch, queries, heads, value.shape[3], dtype=torch.float64)
    for b in range(batch):
        slots = [t for t in range(tokens) if mask is None or mask[b, t]]
        for i in range(queries):
            own = tokens - queries + i
            if own not in slots:
                continue
            seen = slots[: slots.index(own) + 1][-(options["sliding_window"] or tokens) :]
            for h in range(heads):
                group = h // (heads // key.shape[1])
                scores = key[b, group, seen] @ query[b, h, i] * options["scaling"]
                if options["softcap"]:
                    scores = options["softcap"] * torch.tanh(scores / options["softcap"])
                sink = [] if options["s_aux"] is None else [options["s_aux"][h].double()[None]]
                out[b, i, h] = torch.cat([scores, *sink]).softmax(0)[: len(seen)] @ value[b, group, seen]
    return out


def check(kernel: ModuleType, case: Case, dtype: torch.dtype = torch.float32) -> None:
    arguments, options = problem(case, dtype)
    with torch.no_grad():
        out, weights = kernel.tree_attention_forward(*arguments, **options, dropout=0.0, use_cache=True)
    assert weights is None
    assert out.dtype == dtype
    error = 8 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    torch.testing.assert_close(out.double(), expected(arguments, options), rtol=error, atol=error)


@ordinary
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention(kernel: ModuleType, case: Case, dtype: torch.dtype) -> None:
    check(kernel, case, dtype)


@ordinary
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_in_plain_torch(plain_kernel: ModuleType, case: Case) -> None:
    check(plain_kernel, case)


@pytest.mark.skipif(not INTERPRETED, reason="test_triton runs it in a process of its own")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_interpreted_attention(plain_kernel: ModuleType, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one token per page, as on a GPU."""
    import sys

    attention = sys.modules[f"{plain_kernel.__name__}.attention"]
    operator = attention.tree_attention
    monkeypatch.setattr(attention, "tree_attention", lambda *a, **k: operator(*a, **k, backend="triton"))
    check(plain_kernel, case)


@ordinary
def test_keys_and_values_are_not_copied(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    attention = sys.modules[f"{kernel.__name__}.attention"]
    operator, seen = attention.tree_attention, []
    monkeypatch.setattr(attention, "tree_attention", lambda *a, **k: seen.append(a[3:5]) or operator(*a, **k))
    for name in ("decode", "left"):
        arguments, options = problem(CASES[name], torch.float32)
        kernel.tree_attention_forward(*arguments, **options)
        assert [pages.data_ptr() for pages in seen[-1]] == [x.data_ptr() for x in arguments[2:4]]


def arguments(**changes: Any) -> dict[str, Any]:
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8)
    given = {"module": MODULE, "query": query, "key": key, "value": key.clone(), "attention_mask": None}
    return given | changes


class NotCausal(torch.nn.Module):
    is_causal = False


class Chunked(torch.nn.Module):
    class config:
        attention_chunk_size = 8


@ordinary
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 0.1}, r"dropout is 0\.1, .*model\.eval\(\)"),
        ({"query": torch.randn(2, 4, 3, 8, requires_grad=True)}, r"requires a gradient.*torch\.no_grad\(\)"),
        (
            {"attention_mask": torch.zeros(2, 1, 3, 9)},
            r"attention_mask has shape \(2, 1, 3, 9\), expected \[2, 3 to 9\]",
        ),
        ({"attention_mask": torch.ones(1, 9)}, r"attention_mask has shape \(1, 9\)"),
        ({"attention_mask": torch.ones(2, 2)}, r"attention_mask has shape \(2, 2\)"),
        ({"attention_mask": torch.ones(2, 10)}, r"attention_mask has shape \(2, 10\)"),
        ({"module": NotCausal()}, "is_causal is False.*attn_implementation='sdpa'"),
        ({"is_causal": False}, "is_causal is False"),
        ({"position_bias": torch.zeros(1)}, "position_bias is given"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "cu_seq_lens_q is given"),
        ({"module": Chunked()}, "attention_chunk_size is 8, below 9 tokens"),
        ({"position_ids": torch.tensor([[5, 6, 0], [6, 7, 8]])}, "position_ids don't increase by 1"),
        ({"position_ids": torch.tensor([[3, 4, 5]])}, "position_ids end at 5, the cache has 9 slots"),
    ],
)
def test_refusals(kernel: ModuleType, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernel.tree_attention_forward(**arguments(**changes))


@ordinary
def test_what_looks_refused_and_is_not(kernel: ModuleType) -> None:
    """Under ``no_grad`` parameters may require gradients; one query sees all keys, causal or not."""
    with torch.no_grad():
        kernel.tree_attention_forward(**arguments(query=torch.randn(2, 4, 3, 8, requires_grad=True)))
    kernel.tree_attention_forward(**arguments(query=torch.randn(2, 4, 1, 8), is_causal=False))
    kernel.tree_attention_forward(**arguments(position_ids=torch.tensor([[6, 7, 8]])))
