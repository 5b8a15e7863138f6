"""Plain-torch operators: the tests' oracle (in float64) and the fallback on any device, one sequence at a time.

Shapes and meaning: :mod:`specmemo_kernels.ops`.
"""

from __future__ import annotations

import torch

from specmemo_kernels.backends.layers import decompress, gated_mlp, grouped_linear, linear, matrix_of, rms_norm

__all__ = [
    "append_paged_kv",
    "commit_paged_kv",
    "decompress",
    "gated_mlp",
    "grouped_linear",
    "linear",
    "lm_head_argmax",
    "lm_head_log_probs",
    "lm_head_topk",
    "rms_norm",
    "tree_attention",
    "verify_tree_greedy",
]

Tensor = torch.Tensor

#: Tokens of the vocabulary per product.
_SLICE = 8192
#: Largest magnitude of a quantised page's codes.
MAX_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def tree_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    tree_mask: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    max_qo_len: int | None,
    max_seq_len: int | None,
    invariant: bool = False,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    min_qo_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each node over its sequence's pages and its ancestors.

    Raises:
        ValueError: ``invariant`` is true; the rounding of dense products depends on their size.
    """
    if invariant:
        raise ValueError(
            "invariant is True, but the reference backend multiplies whole matrices, whose rounding depends on their "
            "size; use backend='cpu' or 'triton', or invariant=False"
        )
    compute = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape[0], q.shape[1], v_new.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=compute)
    bounds, lengths = qo_indptr.tolist(), seq_lens.tolist()
    for row, length in enumerate(lengths):
        start, end = bounds[row], bounds[row + 1]
        if start == end:
            continue
        old_k = gather_pages(k_pages, block_table[row], length, k_scales).to(compute)
        old_v = gather_pages(v_pages, block_table[row], length, v_scales).to(compute)
        k, v = torch.cat([old_k, k_new[start:end].to(compute)]), torch.cat([old_v, v_new[start:end].to(compute)])
        visible, depth = ancestors(None if tree_mask is None else tree_mask[start:end], end - start, q.device)
        visible = torch.cat([visible.new_ones(end - start, length), visible], dim=1)
        if window is not None:
            key_position = torch.cat([torch.arange(length, device=q.device), length + depth])
            visible &= (length + depth)[:, None] - key_position[None, :] < window
        out[start:end], lse[start:end] = _attend(q[start:end].to(compute), k, v, visible, scale, softcap, sinks)
    return out, lse if q.dtype == torch.float64 else lse.float()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Dense masked attention of one sequence: q [T, Hq, Dk], k [L, Hkv, Dk], v [L, Hkv, Dv], visible [T, L]."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,lhd->htl", q, k.repeat_interleave(group, dim=1)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])[..., : k.shape[0]]
    return _weighted(weights, visible, v.repeat_interleave(group, dim=1)), lse.T


def _weighted(weights: Tensor, visible: Tensor, v: Tensor) -> Tensor:
    """``[T, H, D]``: sums of values ``[L, H, D]`` with weights ``[H, T, L]``; hidden ones don't count, even NaN."""
    finite = v.isfinite()
    sums = torch.einsum("htl,lhd->thd", weights, v.where(finite, 0))
    for key in (~finite).any(2).any(1).nonzero()[:, 0].tolist():
        part = weights[:, :, key].T[:, :, None] * v[key].where(~finite[key], 0)
        sums = sums + part.where(visible[:, key, None, None], 0)
    return sums


def gather_pages(pages: Tensor, table: Tensor, length: int, scales: Tensor | None = None) -> Tensor:
    """The first ``length`` tokens of one row of the block table: ``[length, num_kv_heads, head_dim]``.

    With ``scales`` (``[num_pages, page_size, num_kv_heads]`` float32) the pages' codes are dequantised to float32.
    """
    page_ids = table[: -(-length // pages.shape[1])].long()
    tokens = pages[page_ids].flatten(0, 1)[:length]
    return tokens if scales is None else tokens.float() * scales[page_ids].flatten(0, 1)[:length, :, None]


def quantize(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes in ``dtype`` (int8 or float8_e4m3fn) shaped like ``rows`` ``[..., dim]``, and scales ``[...]`` float32.

    ``scale`` is the row's largest magnitude over the largest code, a code is ``element / scale`` to nearest even. If
    the scale is below the smallest normal float32, the row becomes zeros. NaN and infinity are kept in the scale. Each
    step is one rounding in float32, so all backends write the same bits.
    """
    rows, max_code = rows.float(), MAX_CODE[dtype]
    scales = rows.abs().amax(-1) * (1 / max_code)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    usable = (scales > 0) & (scales < float("inf"))
    inverse = torch.where(usable, 1 / scales, 0.0)[..., None]
    scaled = torch.where(usable[..., None], rows * inverse, 0.0).clamp(-max_code, max_code)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def _store(rows: Tensor, pages: Tensor, scales: Tensor | None, index: tuple[Tensor | slice, ...]) -> None:
    """Write rows to ``pages[index]``, quantised if there are ``scales``."""
    if scales is None:
        pages[index] = rows.to(pages.dtype)
    else:
        pages[index], scales[index] = quantize(rows, pages.dtype)


def ancestors(words: Tensor | None, nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Visibility between one sequence's nodes (``[T, T]`` bool), and each node's depth (``[T]`` int64).

    A mask row of zeros (or no mask) is causal: the node sees itself and all earlier rows.
    """
    index = torch.arange(nodes, device=device)
    causal = index[None, :] <= index[:, None]
    if words is None:
        return causal, index
    # There may be more causal rows than mask bits.
    bits = (words[:, (index // 64).clamp(max=words.shape[1] - 1)] >> (index % 64)) & 1
    visible = torch.where((words == 0).all(1, keepdim=True), causal, bits.bool())
    return visible, visible.sum(1) - 1


def append_paged_kv(
    k_new: Tensor,
    v_new: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Append every new row to its sequence's pages."""
    counts = (qo_indptr[1:] - qo_indptr[:-1]).long()
    row = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    position = seq_lens[row] + torch.arange(len(row), device=row.device) - qo_indptr[row]
    page, slot = _locate(block_table, row, position, k_pages.shape[1])
    written = page >= 0
    place = page[written], slot[written]
    _store(k_new[: len(row)][written], k_pages, k_scales, place)
    _store(v_new[: len(row)][written], v_pages, v_scales, place)


def commit_paged_kv(
    k_scratch: Tensor,
    v_scratch: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    accept_index: Tensor,
    accept_length: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Copy the accepted nodes of all layers from scratch to their pages."""
    depths = torch.arange(accept_index.shape[1], device=accept_index.device)
    row, depth = (depths[None, :] <= accept_length[:, None]).nonzero(as_tuple=True)
    node = qo_indptr[row] + accept_index[row, depth]
    page, slot = _locate(block_table, row, seq_lens[row] + depth, k_pages.shape[2])
    written = page >= 0
    node, place = node[written], (slice(None), page[written], slot[written])
    _store(k_scratch[:, node], k_pages, k_scales, place)
    _store(v_scratch[:, node], v_pages, v_scales, place)


def _locate(block_table: Tensor, row: Tensor, position: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    position = position.long()
    return block_table[row, position // page_size].long(), position % page_size


def verify_tree_greedy(
    draft_tokens: Tensor, target_tokens: Tensor, parents: Tensor, qo_indptr: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each tree from its root along the children whose draft is the target's token."""
    batch = qo_indptr.shape[0] - 1
    accept_index = parents.new_full((batch, max_depth + 1), -1)
    accept_length = parents.new_full((batch,), -1)
    bonus_token = target_tokens.new_full((batch,), -1)
    bounds = qo_indptr.tolist()
    for row in range(batch):
        start, end = bounds[row], bounds[row + 1]
        if start == end:
            continue
        draft, target, parent = (x[start:end].tolist() for x in (draft_tokens, target_tokens, parents))
        path = [0]
        while len(path) <= max_depth:
            node = path[-1]
            children = (c for c in range(node + 1, len(parent)) if parent[c] == node and draft[c] >= 0)
            child = next((c for c in children if draft[c] == target[node]), None)
            if child is None:
                break
            path.append(child)
        accept_index[row, : len(path)] = torch.tensor(path, dtype=parents.dtype, device=parents.device)
        accept_length[row] = len(path) - 1
        bonus_token[row] = target[path[-1]]
    return accept_index, accept_length, bonus_token


def lm_head_argmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The best token of each row, by slices of the vocabulary."""
    best = [(*logits.max(dim=1), start) for start, logits in _vocabulary_slices(hidden, weight, bias)]
    values = torch.stack([value for value, _, _ in best])
    tokens = torch.stack([index + start for _, index, start in best])
    # As torch.argmax: NaN is the largest, ties go to the first slice.
    return tokens.gather(0, values.argmax(dim=0, keepdim=True))[0]


def lm_head_topk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The ``k`` best logits of each row and their tokens, best first; ties go to the lower token."""
    values = hidden.new_empty(hidden.shape[0], 0)
    indices = torch.empty(hidden.shape[0], 0, dtype=torch.int64, device=hidden.device)
    for start, logits in _vocabulary_slices(hidden, weight, bias, scales):
        tokens = torch.arange(start, start + logits.shape[1], device=hidden.device).expand(logits.shape[0], -1)
        values, indices = torch.cat([values, logits], 1), torch.cat([indices, tokens], 1)
        order = torch.argsort(values, dim=1, descending=True, stable=True)[:, :k]
        values, indices = values.gather(1, order), indices.gather(1, order)
    return values, indices


def lm_head_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The ``k`` best log-probabilities of each row and their tokens, and the log-sum-exp of all logits."""
    values, tokens = lm_head_topk(hidden, weight, bias, k, scales)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    parts = [logits.to(wide).logsumexp(dim=1) for _, logits in _vocabulary_slices(hidden, weight, bias, scales)]
    lse = torch.stack(parts).logsumexp(dim=0)
    return (values.to(wide) - lse[:, None]).clamp(max=0), tokens, lse


def _vocabulary_slices(  # type: ignore[no-untyped-def]
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None
):
    """First token and logits of each slice, in the model's dtype: its rounding decides ties."""
    for start in range(0, weight.shape[0], _SLICE):
        part = slice(start, start + _SLICE)
        rows = matrix_of(weight[part], None if scales is None else scales[part], hidden)
        yield start, torch.nn.functional.linear(hidden, rows, None if bias is None else bias[part])
