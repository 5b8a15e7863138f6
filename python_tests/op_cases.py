"""Cases of the small operators, shared by the tests of every backend and by the operator benchmark."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cases import in_order, random_parents

from specmemo_kernels.cache.kv_storage import KV_DTYPES
from specmemo_kernels.cache.paged_kv import NO_PAGE


@dataclass(frozen=True)
class PagedCase:
    """One problem for ``append_paged_kv`` and ``commit_paged_kv``.

    ``accept`` -1: the sequence commits nothing. ``vacant``: sequences without pages.
    """

    name: str
    seq_lens: tuple[int, ...]
    nodes: tuple[int, ...]
    accept: tuple[int, ...]
    layers: int = 2
    num_kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None
    page_size: int = 16
    kv_dtype: str | None = None
    by_head: bool = True  # how pages lie in memory
    vacant: tuple[int, ...] = ()


PAGED_CASES = (
    PagedCase("one_token", (37,), (1,), (0,)),
    PagedCase("first_token", (0,), (4,), (3,), layers=1),
    PagedCase("page_edges", (15, 16, 17, 31), (3, 1, 8, 5), (2, 0, 4, 1), by_head=False),
    PagedCase("nobody", (5, 0), (4, 3), (-1, -1)),
    PagedCase("sits_out", (6, 0, 13, 20), (5, 0, 1, 6), (2, -1, 0, 3), layers=3, page_size=7),
    PagedCase("page_1", (9, 2), (4, 7), (3, 5), page_size=1),
    PagedCase("odd_sizes", (1, 33), (9, 11), (4, 6), num_kv_heads=3, head_dim=5, v_head_dim=3, page_size=5),
    PagedCase(
        "by_token", (4, 30), (9, 5), (4, 2), num_kv_heads=3, head_dim=5, v_head_dim=3, page_size=5, by_head=False
    ),
    PagedCase("v_wider", (8,), (6,), (2,), head_dim=24, v_head_dim=40, page_size=4),
    PagedCase("many_pages", (3, 40), (50, 64), (49, 20), num_kv_heads=1, head_dim=8, page_size=4),
    PagedCase("head_dim_128", (20,), (10,), (4,), num_kv_heads=4, head_dim=128, page_size=32),
    PagedCase("vacant", (5, 0, 18, 0), (9, 4, 2, 7), (1, 2, 0, 6), page_size=4, vacant=(1, 3)),
    PagedCase("vacant_by_token", (0, 7), (4, 4), (3, 2), num_kv_heads=3, head_dim=5, by_head=False, vacant=(0,)),
)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random bits, NaN and infinities included, so that any change of a slot shows."""
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return data.view(dtype)


def _paged(case: PagedCase, dtype: torch.dtype, g: torch.Generator, layers: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Pools of random bits, shuffled pages for all nodes of each sequence, and invalid page ids behind them."""
    counts = [-(-(s + n) // case.page_size) for s, n in zip(case.seq_lens, case.nodes, strict=True)]
    order = torch.randperm(sum(counts) + 3, generator=g).int()
    table = torch.full((len(counts), max(counts) + 2), 2**30, dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count], order = order[:count], order[count:]
    table[list(case.vacant)] = NO_PAGE
    pages = (*layers, sum(counts) + 3, case.page_size, case.num_kv_heads)
    stored = dtype if case.kv_dtype is None else KV_DTYPES[case.kv_dtype]
    return {
        "k_pages": in_order(random_bits((*pages, case.head_dim), stored, g), case.by_head),
        "v_pages": in_order(random_bits((*pages, case.v_head_dim or case.head_dim), stored, g), case.by_head),
        "block_table": table,
        "seq_lens": torch.tensor(case.seq_lens, dtype=torch.int32),
        "qo_indptr": _indptr(case.nodes),
    }


def _scales(case: PagedCase, pools: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Random bits for the scales of quantised pools."""
    if case.kv_dtype is None:
        return {"k_scales": None, "v_scales": None}
    g = torch.Generator().manual_seed(9)
    shape = tuple(pools["k_pages"].shape[:-1])
    names = ("k_scales", "v_scales")
    return {name: in_order(random_bits(shape, torch.float32, g), case.by_head, heads=-1) for name in names}


def _indptr(nodes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([sum(nodes[:i]) for i in range(len(nodes) + 1)], dtype=torch.int32)


def append_inputs(case: PagedCase, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor | None]:
    """Arguments of ``append_paged_kv``, in order; new rows are views of ``[1, heads, N, dim]``, as in a model."""
    g = torch.Generator().manual_seed(seed)

    def rows(dim: int) -> torch.Tensor:
        return torch.randn(1, case.num_kv_heads, sum(case.nodes), dim, generator=g).to(dtype)[0].transpose(0, 1)

    new = {"k_new": rows(case.head_dim), "v_new": rows(case.v_head_dim or case.head_dim)}
    pools = _paged(case, dtype, g, ())
    return new | pools | _scales(case, pools)


def commit_inputs(case: PagedCase, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor | None]:
    """Arguments of ``commit_paged_kv``, in order; scratch rows that aren't accepted are NaN."""
    g = torch.Generator().manual_seed(seed)
    pools = _paged(case, dtype, g, (case.layers,))
    index = torch.full((len(case.nodes), max(case.accept) + 3), -1, dtype=torch.int32)
    taken: list[int] = []
    for row, (nodes, accept) in enumerate(zip(case.nodes, case.accept, strict=True)):
        if accept >= 0:
            path = [0, *(torch.randperm(nodes - 1, generator=g)[:accept].sort().values + 1).tolist()]
            index[row, : accept + 1] = torch.tensor(path, dtype=torch.int32)
            taken += [int(pools["qo_indptr"][row]) + node for node in path]

    def scratch(dim: int) -> torch.Tensor:
        shape = (case.layers, sum(case.nodes) + 3, case.num_kv_heads, dim)
        result = torch.full(shape, float("nan"), dtype=dtype)
        result[:, taken] = torch.randn(case.layers, len(taken), *shape[2:], generator=g).to(dtype)
        return result

    new = {"k_scratch": scratch(case.head_dim), "v_scratch": scratch(case.v_head_dim or case.head_dim)}
    accepted = {"accept_index": index, "accept_length": torch.tensor(case.accept, dtype=torch.int32)}
    return new | pools | accepted | _scales(case, pools)


def hard_rows(dtype: torch.dtype, dim: int = 33) -> torch.Tensor:
    """Rows from 1e-30 to 1e30 (as far as ``dtype`` goes), outliers, ties and zeros."""
    g = torch.Generator().manual_seed(5)
    sizes = 10.0 ** torch.arange(-30, 31, 3)
    rows = [torch.randn(len(sizes), dim, generator=g) * sizes[:, None]]
    outlier = torch.randn(4, dim, generator=g)
    outlier[:, 3] = torch.tensor([100.0, 1e4, -3e3, 6e4])
    ties = (torch.arange(dim) - 16) / 2
    ties[0] = 127.0
    # Of fp8's codes for 16 and more, and of its subnormal ones, with a scale of 1.
    fp8_ties = torch.stack([2.0 * torch.arange(dim) + 1, (torch.arange(dim) + 0.5) / 512])
    fp8_ties[:, 0] = 448.0
    rows += [
        fp8_ties,
        outlier,
        ties[None],
        torch.zeros(1, dim),
        torch.full((1, dim), 2.0**-140),
        torch.full((1, dim), -7.0),
    ]
    result = torch.cat(rows).to(dtype)
    return result[result.isfinite().all(1)]


@dataclass(frozen=True)
class VerifyCase:
    """One problem for ``verify_tree_greedy``: trees of ``nodes``; few different ``tokens`` make long paths."""

    name: str
    nodes: tuple[int, ...]
    max_depth: int
    tokens: int = 3


VERIFY_CASES = (
    VerifyCase("root_alone", (1,), 0),
    VerifyCase("one_tree", (25,), 24),
    VerifyCase("ragged", (9, 0, 1, 70, 130), 129),
    VerifyCase("nobody", (0, 0), 4),
    VerifyCase("cut_at_depth", (40, 12), 3, tokens=1),
    VerifyCase("binary", (64, 64, 3), 63, tokens=2),
)


def verify_inputs(case: VerifyCase, seed: int = 0) -> dict[str, torch.Tensor]:
    """Arguments of ``verify_tree_greedy`` except ``max_depth``, with drafts of -1 and equal siblings."""
    g = torch.Generator().manual_seed(seed)
    total = sum(case.nodes)
    return {
        "draft_tokens": torch.randint(-1, case.tokens, (total,), generator=g),
        "target_tokens": torch.randint(0, case.tokens, (total,), generator=g),
        "parents": torch.cat([random_parents(n, g) for n in case.nodes]),
        "qo_indptr": _indptr(case.nodes),
    }


@dataclass(frozen=True)
class LmHeadCase:
    """One problem for ``lm_head_argmax`` and ``lm_head_topk``."""

    name: str
    rows: int
    vocab: int
    hidden_size: int
    k: int = 5
    bias: bool = False


LM_HEAD_CASES = (
    LmHeadCase("one_row", 1, 1000, 64, k=10),
    LmHeadCase("one_token", 3, 1, 16, k=1),
    LmHeadCase("odd", 5, 33, 7, k=33),
    LmHeadCase("bias", 17, 777, 80, bias=True),
    LmHeadCase("most", 4, 131, 65, k=64, bias=True),
    LmHeadCase("wide", 26, 8197, 24),
    LmHeadCase("no_rows", 0, 50, 8),
)


def lm_head_inputs(case: LmHeadCase, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor | None]:
    """``hidden`` (strided rows), ``weight`` and ``bias`` of small integers: sums are exact and many tie."""
    g = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=g).to(dtype)

    hidden = integers(-1, 1, case.rows, case.hidden_size + 3)[:, : case.hidden_size]
    bias = integers(-2, 2, case.vocab) if case.bias else None
    return {"hidden": hidden, "weight": integers(-2, 2, case.vocab, case.hidden_size), "bias": bias}


#: The same problems over weights in 4-bit codes; and rows of one group and of many, full and not.
CODE_CASES = (*LM_HEAD_CASES, LmHeadCase("group", 2, 70, 64), LmHeadCase("groups", 7, 97, 1093, bias=True))


def lm_head_code_inputs(case: LmHeadCase, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor | None]:
    """:func:`lm_head_inputs` with 4-bit weights, scales of 1 and -1, and invalid codes behind the last column."""
    inputs = lm_head_inputs(case, dtype, seed)
    g = torch.Generator().manual_seed(seed + 1)
    weight = inputs["weight"]
    assert weight is not None
    groups = -(-case.hidden_size // 64)
    scales = 1 - 2 * torch.randint(0, 2, (case.vocab, groups), generator=g)
    codes = torch.randint(0, 256, (case.vocab, 32 * groups), generator=g)
    for column in range(case.hidden_size):
        group, place = divmod(column, 64)
        byte, shift = 32 * group + place % 32, 4 * (place // 32)
        code = weight[:, column].long() * scales[:, group] + 8
        codes[:, byte] = codes[:, byte] & (0xF0 >> shift) | code << shift
    return inputs | {"weight": codes.to(torch.uint8), "scales": scales.half()}
