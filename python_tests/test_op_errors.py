"""Arguments that don't fit are refused before any write, by name, with both values; backends never switch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import AttentionCase, attention_inputs, in_order
from op_cases import (
    LmHeadCase,
    PagedCase,
    VerifyCase,
    append_inputs,
    commit_inputs,
    lm_head_code_inputs,
    lm_head_inputs,
    verify_inputs,
)

from specmemo_kernels import ops
from specmemo_kernels.ops import dispatch

Change = Callable[[torch.Tensor], torch.Tensor]
PAGED = PagedCase("errors", (5, 9), (3, 4), (1, 2), num_kv_heads=2, head_dim=16, page_size=4)
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "attention": (
        ops.tree_attention,
        lambda: attention_inputs(AttentionCase("errors", (5, 9), (3, 4), head_dim=16, sinks=True), torch.float32),
    ),
    "append": (ops.append_paged_kv, lambda: append_inputs(PAGED, torch.float32)),
    "commit": (ops.commit_paged_kv, lambda: commit_inputs(PAGED, torch.float32)),
    "verify": (
        ops.verify_tree_greedy,
        lambda: verify_inputs(VerifyCase("errors", (3, 4), 2)) | {"max_depth": 2},
    ),
    "argmax": (
        ops.lm_head_argmax,
        lambda: lm_head_inputs(LmHeadCase("errors", 3, 9, 6, bias=True), torch.float32),
    ),
    "topk": (
        ops.lm_head_topk,
        lambda: lm_head_inputs(LmHeadCase("errors", 3, 9, 6, bias=True), torch.float32) | {"k": 2},
    ),
    "codes": (
        ops.lm_head_topk,
        lambda: lm_head_code_inputs(LmHeadCase("errors", 3, 9, 70), torch.float32) | {"k": 2},
    ),
}


def half(x: torch.Tensor) -> torch.Tensor:
    return x.half()


def long(x: torch.Tensor) -> torch.Tensor:
    return x.long()


def integer(x: torch.Tensor) -> torch.Tensor:
    return x.int()


def meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def twice(x: torch.Tensor) -> torch.Tensor:
    """The same values, strided: every other element of a row."""
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def cut(*keep: int | None) -> Change:
    """Keep the first elements of each dimension (``None``: all)."""
    return lambda x: x[tuple(slice(n) for n in keep)].contiguous()


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.flatten()


def single(x: torch.Tensor) -> torch.Tensor:
    return x.flatten()[0]


WRONG: tuple[tuple[str, str, Change, str], ...] = (
    ("attention", "q", cut(6), r"q has shape \(6, 4, 16\), expected \[7, \*, 16\]"),
    ("attention", "q", cut(None, None, 8), r"q has shape \(7, 4, 8\), expected \[7, \*, 16\]"),
    ("attention", "q", cut(None, 3), "num_qo_heads 3 is not a multiple of num_kv_heads 2"),
    ("attention", "q", cut(None, 0), "num_qo_heads is 0, it must be at least 1"),
    ("attention", "tree_mask", cut(None, 0), "mask_words is 0, it must be at least 1"),
    ("attention", "q", half, "q has dtype torch.float16, expected torch.float32"),
    ("attention", "q", meta, "q is on meta, expected cpu"),
    ("attention", "q", twice, r"q must have a contiguous last dimension, its strides are \(128, 32, 2\)"),
    ("attention", "k_new", cut(None, 1), r"k_new has shape \(7, 1, 16\), expected \[\*, 2, 16\]"),
    ("attention", "v_new", cut(5), r"v_new has shape \(5, 2, 16\), expected \[7, 2, 16\]"),
    ("attention", "v_pages", half, "v_pages has dtype torch.float16, expected torch.float32"),
    ("attention", "tree_mask", cut(6), r"tree_mask has shape \(6, 1\), expected \[7, \*\]"),
    ("attention", "tree_mask", integer, "tree_mask has dtype torch.int32, expected torch.int64"),
    ("attention", "tree_mask", meta, "tree_mask is on meta, expected cpu"),
    ("attention", "tree_mask", lambda x: x.repeat(1, 2)[:, ::2], r"tree_mask must be contiguous.* \(2, 2\)"),
    ("attention", "sinks", cut(3), r"sinks has shape \(3,\), expected \[4\]"),
    ("attention", "sinks", meta, "sinks is on meta, expected cpu"),
    ("attention", "sinks", twice, r"sinks must be contiguous, its strides are \(2,\)"),
    ("attention", "window", lambda _: 0, "window is 0, it must be positive"),
    ("attention", "softcap", lambda _: -1.5, "softcap is -1.5, it must be positive"),
    ("attention", "max_qo_len", lambda _: 0, "max_qo_len is 0, it must be positive"),
    ("append", "k_pages", flat, r"k_pages has shape \(\d+,\), expected \[\*, \*, \*, \*\]"),
    ("append", "k_pages", cut(None, 0), "page_size is 0, it must be at least 1"),
    ("append", "k_pages", cut(None, None, 0), "num_kv_heads is 0, it must be at least 1"),
    ("commit", "k_pages", cut(None, None, 0), "page_size is 0, it must be at least 1"),
    ("append", "k_pages", twice, r"k_pages must be contiguous, or.* its strides are \(256, 64, 32, 2\)"),
    ("append", "v_pages", cut(None, 3), r"v_pages has shape \(9, 3, 2, 16\), expected \[9, 4, 2, \*\]"),
    ("append", "v_pages", twice, r"v_pages must be contiguous, or.* its strides are \(256, 64, 32, 2\)"),
    ("append", "v_pages", lambda x: in_order(x, by_head=False), "v_pages must be contiguous, or, like all pages"),
    ("commit", "k_pages", lambda x: in_order(x, by_head=False), "k_pages must be contiguous, or, like all pages"),
    ("append", "v_pages", meta, "v_pages is on meta, expected cpu"),
    ("append", "k_new", half, "k_new has dtype torch.float16, expected torch.float32"),
    ("append", "k_new", meta, "k_new is on meta, expected cpu"),
    ("append", "k_new", twice, r"k_new must have a contiguous last dimension, its strides are \(\d+, \d+, 2\)"),
    ("append", "v_new", twice, r"v_new must have a contiguous last dimension, its strides are \(\d+, \d+, 2\)"),
    ("append", "v_new", cut(None, None, 8), r"v_new has shape \(7, 2, 8\), expected \[7, 2, 16\]"),
    ("append", "block_table", cut(1), r"block_table has shape \(1, 6\), expected \[2, \*\]"),
    ("append", "block_table", long, "block_table has dtype torch.int64, expected torch.int32"),
    ("append", "block_table", lambda x: x.T.contiguous().T, r"block_table must be contiguous.* \(1, 2\)"),
    ("append", "block_table", meta, "block_table is on meta, expected cpu"),
    ("append", "seq_lens", single, r"seq_lens has shape \(\), expected \[\*\]"),
    ("append", "seq_lens", long, "seq_lens has dtype torch.int64, expected torch.int32"),
    ("append", "seq_lens", twice, r"seq_lens must be contiguous, its strides are \(2,\)"),
    ("append", "qo_indptr", cut(2), r"qo_indptr has shape \(2,\), expected \[3\]"),
    ("append", "qo_indptr", long, "qo_indptr has dtype torch.int64, expected torch.int32"),
    ("commit", "k_pages", cut(1), r"v_pages has shape \(2, 9, 4, 2, 16\), expected \[1, 9, 4, 2, \*\]"),
    ("commit", "k_pages", flat, r"k_pages has shape \(\d+,\), expected \[\*, \*, \*, \*, \*\]"),
    ("commit", "k_scratch", cut(1), r"k_scratch has shape \(1, 10, 2, 16\), expected \[2, \*, 2, 16\]"),
    ("commit", "v_scratch", cut(None, 9), r"v_scratch has shape \(2, 9, 2, 16\), expected \[2, 10, 2, 16\]"),
    ("commit", "v_scratch", half, "v_scratch has dtype torch.float16, expected torch.float32"),
    ("commit", "v_pages", meta, "v_pages is on meta, expected cpu"),
    ("commit", "k_scratch", twice, r"k_scratch must be contiguous, its strides are \(640, 64, 32, 2\)"),
    ("commit", "accept_index", cut(1), r"accept_index has shape \(1, 5\), expected \[2, \*\]"),
    ("commit", "accept_index", long, "accept_index has dtype torch.int64, expected torch.int32"),
    ("commit", "accept_index", lambda x: x[:, ::2], r"accept_index must be contiguous, its strides are \(5, 2\)"),
    ("commit", "accept_length", cut(1), r"accept_length has shape \(1,\), expected \[2\]"),
    ("commit", "accept_length", single, r"accept_length has shape \(\), expected \[2\]"),
    ("commit", "accept_length", meta, "accept_length is on meta, expected cpu"),
    ("commit", "seq_lens", cut(1), r"block_table has shape \(2, 6\), expected \[1, \*\]"),
    ("verify", "draft_tokens", single, r"draft_tokens has shape \(\), expected \[\*\]"),
    ("verify", "draft_tokens", integer, "draft_tokens has dtype torch.int32, expected torch.int64"),
    ("verify", "target_tokens", cut(6), r"target_tokens has shape \(6,\), expected \[7\]"),
    ("verify", "target_tokens", twice, r"target_tokens must be contiguous, its strides are \(2,\)"),
    ("verify", "parents", long, "parents has dtype torch.int64, expected torch.int32"),
    ("verify", "parents", meta, "parents is on meta, expected cpu"),
    ("verify", "qo_indptr", single, r"qo_indptr has shape \(\), expected \[\*\]"),
    ("verify", "qo_indptr", long, "qo_indptr has dtype torch.int64, expected torch.int32"),
    ("verify", "qo_indptr", twice, r"qo_indptr must be contiguous, its strides are \(2,\)"),
    ("verify", "qo_indptr", meta, "qo_indptr is on meta, expected cpu"),
    ("verify", "max_depth", lambda _: -1, "max_depth is -1, it must be between 0 and 2147483646"),
    ("verify", "max_depth", lambda _: 2**59 - 1, "max_depth is 576460752303423487, it must be between 0"),
    ("argmax", "hidden", flat, r"hidden has shape \(18,\), expected \[\*, \*\]"),
    ("argmax", "hidden", twice, r"hidden must have a contiguous last dimension, its strides are \(12, 2\)"),
    ("argmax", "weight", cut(None, 5), r"weight has shape \(9, 5\), expected \[\*, 6\]"),
    ("argmax", "weight", half, "weight has dtype torch.float16, expected torch.float32"),
    ("argmax", "weight", meta, "weight is on meta, expected cpu"),
    ("argmax", "weight", twice, r"weight must be contiguous, its strides are \(12, 2\)"),
    ("argmax", "bias", cut(8), r"bias has shape \(8,\), expected \[9\]"),
    ("argmax", "bias", half, "bias has dtype torch.float16, expected torch.float32"),
    ("argmax", "bias", meta, "bias is on meta, expected cpu"),
    ("argmax", "bias", twice, r"bias must be contiguous, its strides are \(2,\)"),
    ("topk", "weight", cut(None, 5), r"weight has shape \(9, 5\), expected \[\*, 6\]"),
    ("codes", "weight", cut(None, 32), r"weight has shape \(9, 32\), expected \[\*, 64\] .4-bit codes"),
    ("codes", "weight", integer, "weight has dtype torch.int32, expected torch.uint8"),
    ("codes", "scales", cut(8), r"scales has shape \(8, 2\), expected \[9, 2\]"),
    ("codes", "scales", lambda x: x.float(), "scales has dtype torch.float32, expected torch.float16"),
    ("codes", "scales", twice, r"scales must be contiguous, its strides are \(4, 2\)"),
    ("codes", "scales", meta, "scales is on meta, expected cpu"),
    ("codes", "scales", lambda _: None, r"weight has shape \(9, 64\), expected \[\*, 70\]"),
    ("codes", "hidden", cut(None, 64), r"weight has shape \(9, 64\), expected \[\*, 32\]"),
    ("topk", "k", lambda _: 0, "k is 0, it must be between 1 and 9"),
    ("topk", "k", lambda _: 10, "k is 10, it must be between 1 and 9"),
)


@pytest.mark.parametrize(
    ("call", "name", "change", "message"), WRONG, ids=[f"{w[0]}-{w[1]}-{i}" for i, w in enumerate(WRONG)]
)
def test_refused(call: str, name: str, change: Change, message: str) -> None:
    """The message names the argument, its value and the expected value; the pools don't change."""
    operator, make = CALLS[call]
    inputs, before = make(), make()
    with pytest.raises(ValueError, match=message):
        operator(**inputs | {name: change(inputs[name])})
    for key in {"k_pages", "v_pages"} & inputs.keys():
        assert torch.equal(inputs[key].view(torch.int32), before[key].view(torch.int32))
    operator(**inputs, backend="reference")


def test_topk_limit() -> None:
    """k is at most 64, however large the vocabulary."""
    hidden, weight = torch.zeros(1, 4), torch.zeros(100, 4)
    assert ops.lm_head_topk(hidden, weight, k=64, backend="reference")[1].tolist() == [list(range(64))]
    with pytest.raises(ValueError, match="k is 65, it must be between 1 and 64"):
        ops.lm_head_topk(hidden, weight, k=65, backend="reference")


@pytest.fixture
def fresh_dispatch() -> Iterator[None]:
    """Clear dispatch's caches before and after the test."""
    caches = (dispatch._load, dispatch._default, dispatch.implementation)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_an_explicit_backend_never_falls_back(monkeypatch: pytest.MonkeyPatch, fresh_dispatch: None) -> None:
    """Without the C++ extension, ``backend="cpu"`` raises with build instructions; the default is the reference."""
    monkeypatch.setitem(dispatch.BACKENDS, "cpu", "specmemo_kernels.backends.not_built")
    hidden, weight = torch.zeros(1, 4), torch.zeros(3, 4)
    with pytest.raises(ops.BackendUnavailable, match=r"backend 'cpu' can't be imported.*C\+\+17 compiler"):
        ops.lm_head_argmax(hidden, weight, backend="cpu")
    assert ops.backend_name(None, torch.device("cpu")) == "reference"
    assert ops.lm_head_argmax(hidden, weight).tolist() == [0]


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ModuleNotFoundError("No module named 'triton'", name="triton"), "; pip install triton"),
        (ModuleNotFoundError("No module named 'triton.knobs'", name="triton.knobs"), ""),
        (ImportError("libtriton.so: undefined symbol"), ""),
        (AttributeError("module 'triton' has no attribute 'knobs'"), ""),
    ],
)
def test_triton_that_is_not_there_or_broken(
    error: Exception, hint: str, monkeypatch: pytest.MonkeyPatch, fresh_dispatch: None
) -> None:
    """The error for a missing triton says to install it; that of a broken triton is its own."""

    def fail(_: str) -> None:
        raise error

    monkeypatch.setattr(dispatch, "_load", fail)
    assert ops.unavailable("triton") == f"backend 'triton' can't be imported ({type(error).__name__}: {error}){hint}"


def test_unknown_backend() -> None:
    with pytest.raises(ops.BackendUnavailable, match="unknown backend 'fast'; there are reference, cpu, triton"):
        ops.backend_name("fast", torch.device("cpu"))
    assert ops.unavailable("reference") is None


def test_cpu_backend_needs_cpu_tensors() -> None:
    with pytest.raises(ValueError, match="'cpu' needs tensors on the CPU, these are on cuda:0"):
        ops.backend_name("cpu", torch.device("cuda", 0))
    assert ops.backend_name("cpu", torch.device("cpu")) == "cpu"
    assert ops.backend_name(None, torch.device("cpu")) == "cpu"


def test_reference_refuses_what_it_cannot_promise() -> None:
    """``invariant``: dense products depend on the number of nodes."""
    inputs = attention_inputs(AttentionCase("invariant", (5,), (3,)), torch.float32)
    with pytest.raises(ValueError, match=r"invariant is True.*reference.*use backend='cpu' or 'triton'"):
        ops.tree_attention(**inputs | {"invariant": True}, backend="reference")
