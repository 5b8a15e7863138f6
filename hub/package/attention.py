"""``tree_attention_forward``: an attention function of transformers, computed by the operators.

Keys and values are read where the model's cache has them. Each key head of each row of the batch is a sequence of its
own, with one KV head: its keys are contiguous in ``[batch, heads, tokens, head_dim]``, so they are pages as they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specmemo_kernels.ops import tree_attention

Tensor = torch.Tensor
_INSTEAD = "use attn_implementation='sdpa'"


@dataclass(frozen=True)
class _Sequences:
    """The operator's metadata: one sequence per row of the batch and key head.

    Attributes:
        page_size, block_table, seq_lens, qo_indptr: as the operator takes them.
        visible: ``[batch, queries]`` which new tokens are real; ``None``: all of them.
    """

    page_size: int
    block_table: Tensor
    seq_lens: Tensor
    qo_indptr: Tensor
    visible: Tensor | None


def tree_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of the newest tokens over all tokens, for inference.

    Args:
        query: ``[batch, heads, queries, head_dim]``, the last ``queries`` tokens.
        key, value: ``[batch, key_heads, tokens, head_dim]``, the cached tokens and the new ones.
        attention_mask: ``None``, or ``[batch, tokens]``, zero for padding. Shorter than the keys: a static cache that
            isn't full.
        sliding_window, softcap, s_aux: as models pass them; ``s_aux`` has one sink per query head.

    Returns:
        ``[batch, queries, heads, head_dim]``, zeros for padding, and ``None`` for the attention weights.

    Raises:
        ValueError: dropout, gradients, a mask per query, attention that isn't causal, or packed sequences.
    """
    tokens = key.shape[2] if attention_mask is None else _masked_tokens(attention_mask, query, key)
    _check(module, query, key, value, attention_mask, dropout, kwargs)
    batch, heads, queries, head_dim = query.shape
    key_heads = key.shape[1]
    group = heads // key_heads
    sequences = _sequences(attention_mask, query, key, tokens)
    rows = query.reshape(batch, key_heads, group, queries, head_dim).transpose(2, 3)
    k_new, v_new = (_rows(new[:, :, tokens - queries : tokens, None], sequences.visible) for new in (key, value))
    out, lse = tree_attention(
        _rows(rows, sequences.visible),
        k_new,
        v_new,
        _pages(key, sequences.page_size),
        _pages(value, sequences.page_size),
        sequences.block_table,
        sequences.seq_lens,
        sequences.qo_indptr,
        scale=head_dim**-0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        max_qo_len=queries,
        max_seq_len=tokens - queries,
        min_qo_len=queries if sequences.visible is None else None,
    )
    size = (batch, key_heads, queries, group)
    out, lse = (_unpacked(part, size, sequences.visible) for part in (out, lse))
    if s_aux is not None:  # a key of each head's own, without a value: it scales the result
        sinks = s_aux.reshape(1, key_heads, 1, group).to(lse.dtype)
        out = (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype)
    return out.permute(0, 2, 1, 3, 4).reshape(batch, queries, heads, -1), None


def _masked_tokens(mask: Tensor, query: Tensor, key: Tensor) -> int:
    """The number of tokens that a padding mask covers."""
    batch, _, queries, _ = query.shape
    if mask.ndim != 2 or mask.shape[0] != batch or not queries <= mask.shape[1] <= key.shape[2]:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, expected [{batch}, {queries} to {key.shape[2]}] with zeros "
            f"for padding: tree_attention_forward is causal; {_INSTEAD} for other masks"
        )
    return int(mask.shape[1])


def _check(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    """Refuse what the operator doesn't compute."""
    if dropout:
        raise ValueError(f"dropout is {dropout}, tree_attention_forward has none; call model.eval(), or {_INSTEAD}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        raise ValueError(
            "query, key or value requires a gradient, tree_attention_forward has none; compute under "
            f"torch.no_grad(), or {_INSTEAD} for training"
        )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if not causal and query.shape[2] > 1:
        raise ValueError(f"is_causal is {causal}, tree_attention_forward is causal; {_INSTEAD}")
    for name in ("position_bias", "cu_seq_lens_q", "cu_seqlens_q", "block_mask", "head_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} is given, tree_attention_forward doesn't support it; {_INSTEAD}")
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if chunk is not None and key.shape[2] > chunk:
        raise ValueError(f"attention_chunk_size is {chunk}, below {key.shape[2]} tokens: not supported; {_INSTEAD}")
    if mask is None:
        _check_positions(kwargs.get("position_ids"), query.shape[2], key.shape[2])


def _check_positions(positions: Tensor | None, queries: int, tokens: int) -> None:
    """Refuse packed sequences, and static caches without a mask: their prompt at the latest.

    The position of a single token on a GPU isn't read, because that would wait for the GPU.
    """
    if positions is None or positions.ndim != 2 or (positions.device.type != "cpu" and queries == 1):
        return
    if queries > 1 and bool((positions.diff(dim=1) != 1).any()):
        raise ValueError(
            "position_ids don't increase by 1: packed sequences are not supported by tree_attention_forward; pad them, "
            f"or {_INSTEAD}"
        )
    last = int(positions.max())
    if last + 1 < tokens:
        raise ValueError(
            f"position_ids end at {last}, the cache has {tokens} slots and attention_mask is None: use the default "
            f"cache instead of a static one, or {_INSTEAD}"
        )


def _sequences(mask: Tensor | None, query: Tensor, key: Tensor, tokens: int) -> _Sequences:
    """Where each row's tokens of each key head are; ``mask`` leaves out padding on any side."""
    queries, sequences, slots = query.shape[2], key.shape[0] * key.shape[1], key.shape[2]
    first = torch.arange(sequences, dtype=torch.int32, device=key.device)[:, None]
    if mask is not None and not bool(mask.all()):
        return _without_padding(mask.bool(), first, slots, queries, key.shape[1])
    # One page per sequence on a CPU. In Triton a page's size is a constant of the compiled kernel: one token per page.
    page_size = slots if key.device.type == "cpu" else 1
    table = first if page_size > 1 else first * slots + _range(max(1, tokens - queries), key)
    seq_lens = torch.full((sequences,), tokens - queries, dtype=torch.int32, device=key.device)
    return _Sequences(page_size, table, seq_lens, queries * _range(sequences + 1, key), None)


def _without_padding(mask: Tensor, first: Tensor, slots: int, queries: int, key_heads: int) -> _Sequences:
    """Pages of one token: a block table names the tokens that ``mask`` leaves. ``first``: ``[sequences, 1]``."""
    stored, visible = mask[:, : mask.shape[1] - queries], mask[:, mask.shape[1] - queries :]
    order = stored.int().argsort(dim=1, descending=True, stable=True).to(torch.int32)
    order = order if order.shape[1] else order.new_zeros(len(order), 1)  # the operator reads no entry of it
    counts = visible.sum(1, dtype=torch.int32).repeat_interleave(key_heads)
    return _Sequences(
        page_size=1,
        block_table=first * slots + order.repeat_interleave(key_heads, dim=0),
        seq_lens=stored.sum(1, dtype=torch.int32).repeat_interleave(key_heads),
        qo_indptr=torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)]),
        visible=visible,
    )


def _range(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=like.device)


def _pages(stored: Tensor, page_size: int) -> Tensor:
    """``[pages, page_size, 1, head_dim]``; a view if ``stored`` is contiguous, as a cache's tensors are."""
    return stored.contiguous().view(-1, page_size, 1, stored.shape[3])


def _rows(rows: Tensor, visible: Tensor | None) -> Tensor:
    """``[batch, key_heads, queries, n, head_dim]`` packed to ``[rows, n, head_dim]``, without padding."""
    if visible is None:
        return rows.reshape(-1, *rows.shape[3:])
    return rows[visible[:, None].expand(rows.shape[:3])]


def _unpacked(rows: Tensor, size: tuple[int, ...], visible: Tensor | None) -> Tensor:
    """The reverse of :func:`_rows`: ``[*size, ...]`` with zeros for padding."""
    if visible is None:
        return rows.reshape(*size, *rows.shape[2:])
    result = rows.new_zeros(*size, *rows.shape[2:])
    result[visible[:, None].expand(size[:3])] = rows
    return result
