"""Cases and error budgets shared by the tests of every backend and by the operator benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from specmemo_kernels import ops
from specmemo_kernels.backends import reference
from specmemo_kernels.cache.kv_storage import KV_DTYPES


@dataclass(frozen=True)
class AttentionCase:
    """One problem for ``tree_attention``. Lengths are per sequence; ``nodes`` 0: the sequence has no nodes in this
    step.
    """

    name: str
    seq_lens: tuple[int, ...]
    nodes: tuple[int, ...]
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int | None = None
    page_size: int = 16
    tree: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kv_dtype: str | None = None
    by_head: bool = True  # how pages lie in memory


ATTENTION_CASES = (
    AttentionCase("one_token", (37,), (1,)),
    AttentionCase("empty_context", (0,), (5,)),
    AttentionCase("page_edges", (15, 16, 17, 32), (3, 1, 8, 5)),
    AttentionCase("ragged", (1, 100, 0, 63), (7, 0, 12, 1), by_head=False),
    AttentionCase("mha", (50, 19), (9, 4), num_qo_heads=3, num_kv_heads=3),
    AttentionCase("gqa8", (70,), (25,), num_qo_heads=8, num_kv_heads=1, head_dim=128),
    AttentionCase("tree64", (130,), (64,), num_kv_heads=4),
    AttentionCase("wide_mask", (40, 3), (100, 65), num_qo_heads=2, num_kv_heads=1),
    AttentionCase("head_dim_8", (21,), (6,), head_dim=8, page_size=4),
    AttentionCase("head_dim_80", (45,), (11,), head_dim=80, page_size=32, by_head=False),
    AttentionCase("head_dim_96", (45,), (11,), head_dim=96),
    AttentionCase("head_dim_256", (33,), (5,), head_dim=256, num_qo_heads=2, num_kv_heads=1),
    AttentionCase("v_narrower", (29, 44), (6, 10), head_dim=48, v_head_dim=32, num_kv_heads=4),
    AttentionCase("page_1", (9,), (4,), page_size=1),
    AttentionCase("page_7", (20, 14), (4, 9), page_size=7, by_head=False),
    AttentionCase("causal_chunk", (0, 23), (40, 17), tree=False),
    AttentionCase("window", (90, 5), (12, 12), window=20),
    AttentionCase("window_in_tree", (30,), (24,), window=3),
    AttentionCase("window_chunk", (30, 0), (24, 50), window=9, tree=False),
    AttentionCase("softcap", (60,), (10,), softcap=5.0),
    AttentionCase("sinks", (60, 1), (10, 3), sinks=True),
    AttentionCase("all_extras", (75, 8), (14, 20), window=16, softcap=8.0, sinks=True, by_head=False),
    AttentionCase("long", (1500,), (17,), num_qo_heads=8, num_kv_heads=2),
)


# The same problems over quantised pages: any codes, any scales.
QUANTISED_CASES = tuple(
    replace(case, name=f"{case.name}-{kv_dtype}", kv_dtype=kv_dtype)
    for case in ATTENTION_CASES
    for kv_dtype in ("int8", "fp8")
)


def random_parents(nodes: int, generator: torch.Generator) -> torch.Tensor:
    """``[nodes]`` int32: a random tree, parents before children."""
    parents = [-1] + [int(torch.randint(max(0, i - 6), i, (), generator=generator)) for i in range(1, nodes)]
    return torch.tensor(parents[:nodes], dtype=torch.int32)


def mask_words(parents: torch.Tensor, words: int) -> torch.Tensor:
    """``[T, words]`` int64 ancestor words of one tree, set bit by bit (the oracle of ``DraftTree``)."""
    rows: list[int] = []
    for node, parent in enumerate(parents.tolist()):
        rows.append((rows[parent] if parent >= 0 else 0) | (1 << node))
    limit = 1 << 64
    split = [[(row >> (64 * w)) % limit for w in range(words)] for row in rows]
    signed = [[x - limit if x >= limit // 2 else x for x in row] for row in split]
    return torch.tensor(signed, dtype=torch.int64).reshape(len(rows), words)


def attention_inputs(case: AttentionCase, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    """Keyword arguments of ``ops.tree_attention``: shuffled pages, NaN in unused slots, invalid page ids in unused
    entries.
    """
    g = torch.Generator().manual_seed(seed)
    v_dim = case.v_head_dim or case.head_dim
    total = sum(case.nodes)
    counts = [-(-n // case.page_size) for n in case.seq_lens]
    max_pages = max(counts) + 2
    order = torch.randperm(sum(counts) + 3, generator=g).int()
    shape = (len(order), case.page_size, case.num_kv_heads)
    (k_pages, k_scales), (v_pages, v_scales) = (_empty_pages(case, shape, dim, dtype) for dim in (case.head_dim, v_dim))
    block_table = torch.full((len(counts), max_pages), 2**30, dtype=torch.int32)
    used = 0
    for row, (count, length) in enumerate(zip(counts, case.seq_lens, strict=True)):
        block_table[row, :count] = order[used : used + count]
        used += count
        position = torch.arange(length)
        page, slot = block_table[row, position // case.page_size].long(), position % case.page_size
        for pages, scales in ((k_pages, k_scales), (v_pages, v_scales)):
            rows_of_pages = torch.randn(length, *pages.shape[2:], generator=g)
            if scales is None:
                pages[page, slot] = rows_of_pages.to(dtype)
            else:
                pages[page, slot] = _codes(rows_of_pages, pages.dtype)
                # Elements of about one, as without codes, by scales that differ from token to token and head to head.
                spread = 0.5 + torch.rand(length, case.num_kv_heads, generator=g)
                scales[page, slot] = spread / (40 if pages.dtype == torch.int8 else 100)
    words = max(1, -(-max(case.nodes) // 64))
    masks = [mask_words(random_parents(n, g), words) for n in case.nodes if n]

    def rows(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(total, heads, dim, generator=g).to(dtype)

    return {
        "q": rows(case.num_qo_heads, case.head_dim) * 2,
        "k_new": rows(case.num_kv_heads, case.head_dim),
        "v_new": rows(case.num_kv_heads, v_dim),
        "k_pages": k_pages,
        "v_pages": v_pages,
        "block_table": block_table,
        "seq_lens": torch.tensor(case.seq_lens, dtype=torch.int32),
        "qo_indptr": torch.tensor([0, *torch.tensor(case.nodes).cumsum(0).tolist()], dtype=torch.int32),
        "tree_mask": torch.cat(masks) if case.tree else None,
        "scale": case.head_dim**-0.5,
        "window": case.window,
        "softcap": case.softcap,
        "sinks": torch.randn(case.num_qo_heads, generator=g).to(dtype) if case.sinks else None,
        "max_qo_len": max(case.nodes),
        "max_seq_len": max(case.seq_lens),
        "invariant": False,
        "k_scales": k_scales,
        "v_scales": v_scales,
    }


def _empty_pages(
    case: AttentionCase, shape: tuple[int, ...], dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Unwritten pages: NaN, or codes with NaN scales."""
    scales = torch.full(shape, float("nan"))
    if case.kv_dtype is None:
        pages = torch.full((*shape, dim), float("nan"), dtype=dtype)
        return in_order(pages, case.by_head), None
    codes = torch.full((*shape, dim), 127, dtype=torch.uint8).view(KV_DTYPES[case.kv_dtype])  # NaN as fp8
    return in_order(codes, case.by_head), in_order(scales, case.by_head, heads=-1)


def in_order(pages: torch.Tensor, by_head: bool, *, heads: int = -2) -> torch.Tensor:
    """The same pages, or scales (``heads`` -1), in head-major or in token-major memory order."""
    return pages.transpose(heads - 1, heads).contiguous().transpose(heads - 1, heads) if by_head else pages.contiguous()


def _codes(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Normally distributed codes that include the largest and the smallest code."""
    if dtype == torch.int8:
        return (rows * 40).round().clamp(-127, 127).to(dtype)
    codes = (rows * 100).clamp(-448, 448).to(dtype)
    codes.view(torch.uint8)[..., ::5] &= 0x87  # subnormal ones
    return codes


def dequantised(inputs: dict[str, object]) -> dict[str, object]:
    """The same problem with dequantised pages, exactly, in float64."""
    plain = dict(inputs) | {"k_scales": None, "v_scales": None}
    for side in ("k", "v"):
        scales = inputs[f"{side}_scales"]
        if torch.is_tensor(scales):
            plain[f"{side}_pages"] = inputs[f"{side}_pages"].double() * scales.double()[..., None]  # type: ignore[attr-defined]
    return plain


def in_float64(inputs: dict[str, object]) -> dict[str, object]:
    """The same problem, exactly, in float64."""
    plain = dequantised(inputs)
    return {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in plain.items()}


@dataclass(frozen=True)
class Budget:
    """The float64 result and the largest allowed absolute difference of a kernel in a given dtype."""

    out: torch.Tensor
    lse: torch.Tensor
    out_error: float
    lse_error: float


@cache
def case_budget(case: AttentionCase, dtype: torch.dtype) -> Budget:
    """The budget of a case, cached: it is the same for each backend and instruction set."""
    return attention_budget(attention_inputs(case, dtype), dtype)


def attention_budget(inputs: dict[str, object], dtype: torch.dtype) -> Budget:
    """Twice the error of the low-precision reference (weights and dequantised elements rounded to ``dtype``), plus one
    rounding of the output.
    """
    exact, exact_lse = ops.tree_attention(**in_float64(inputs), backend="reference")  # type: ignore[arg-type]
    if not exact.numel():
        return Budget(exact, exact_lse, 0.0, 0.0)
    rough, rough_lse = _eager(inputs, dtype)
    eps = torch.finfo(dtype).eps
    error = float((rough.double() - exact).abs().max())
    lse_scale = max(1.0, float(exact_lse.abs().max()))
    return Budget(
        exact,
        exact_lse,
        out_error=2 * (error + eps * float(exact.abs().max())),
        lse_error=2 * float((rough_lse.double() - exact_lse).abs().max())
        + 64 * torch.finfo(torch.float32).eps * lse_scale,
    )


def _eager(inputs: dict[str, object], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain eager attention in ``dtype``: softmax in float32, its weights rounded, then the product."""
    plain = dequantised(inputs)  # of quantised pages, rounded to what a kernel multiplies
    single = {k: v.to(dtype).float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in plain.items()}

    class Rounding(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = _in_order(*args) if func is torch.einsum else func(*args, **(kwargs or {}))
            return result.to(dtype).float() if func is torch.exp else result

    with Rounding():
        out, lse = reference.tree_attention(**single)  # type: ignore[arg-type]
    return out.to(dtype), lse


def _in_order(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """An einsum with one summed index, added one by one: the error of a library depends on the machine."""
    operands, result = equation.split("->")
    first, second = operands.split(",")
    (summed,) = set(first) & set(second) - set(result)
    step = equation.replace(summed, "")
    slices = zip(a.unbind(first.index(summed)), b.unbind(second.index(summed)), strict=True)
    return sum(torch.einsum(step, *each) for each in slices)  # type: ignore[return-value]


def one_sequence(inputs: dict[str, Any], index: int) -> dict[str, Any]:
    """The ``tree_attention`` problem of one sequence of the batch, with its own bounds."""
    start, end = inputs["qo_indptr"][index : index + 2].tolist()
    alone = dict(inputs)
    for name in ("q", "k_new", "v_new", "tree_mask"):
        alone[name] = None if inputs[name] is None else inputs[name][start:end]
    for name in ("block_table", "seq_lens"):
        alone[name] = inputs[name][index : index + 1]
    alone["qo_indptr"] = torch.tensor([0, end - start], dtype=torch.int32)
    alone["max_qo_len"], alone["max_seq_len"] = end - start, int(inputs["seq_lens"][index])
    return alone
