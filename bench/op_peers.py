"""Alternatives to ``tree_attention``, on gathered keys and values (their best case)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from specmemo_kernels.backends.reference import ancestors, gather_pages

Tensor = torch.Tensor
Attention = Callable[[Tensor, Tensor], Tensor]  # of keys and values, with the other arguments bound


@dataclass(frozen=True)
class Dense:
    """One problem in SDPA's layout: q ``[B, Hq, T, D]``, k and v ``[B, Hkv, L + T, D]``, mask ``[T, L + T]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    scale: float

    def rows(self, out: Tensor) -> Tensor:
        """``[B, Hq, T, D]`` in the operator's layout ``[B * T, Hq, D]``."""
        return out.transpose(1, 2).flatten(0, 1)


def gather(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Gather keys and values of sequences of equal lengths from the pages: ``[B, Hkv, L + T, D]`` each."""
    lengths, bounds = inputs["seq_lens"].tolist(), inputs["qo_indptr"].tolist()
    sides = []
    for pages, new in ((inputs["k_pages"], inputs["k_new"]), (inputs["v_pages"], inputs["v_new"])):
        rows = [
            torch.cat([gather_pages(pages, inputs["block_table"][b], length), new[bounds[b] : bounds[b + 1]]])
            for b, length in enumerate(lengths)
        ]
        sides.append(torch.stack(rows).transpose(1, 2).contiguous())
    return sides[0], sides[1]


def dense(inputs: dict[str, Any]) -> Dense:
    """The problem with gathered keys; all sequences must have one length and one tree."""
    batch, nodes = len(inputs["seq_lens"]), int(inputs["qo_indptr"][1])
    length = int(inputs["seq_lens"][0])
    k, v = gather(inputs)
    q = inputs["q"].unflatten(0, (batch, nodes)).transpose(1, 2).contiguous()
    seen, _ = ancestors(inputs["tree_mask"][:nodes], nodes, q.device)
    mask = torch.cat([seen.new_ones(nodes, length), seen], dim=1)
    return Dense(q, k, v, mask, inputs["scale"])


def sdpa(problem: Dense) -> Attention:
    """SDPA as usually called: ``enable_gqa`` and a boolean mask."""
    gqa = problem.q.shape[1] != problem.k.shape[1]
    p = problem
    return lambda k, v: F.scaled_dot_product_attention(p.q, k, v, attn_mask=p.mask, scale=p.scale, enable_gqa=gqa)


def sdpa_folded(problem: Dense) -> Attention:
    """SDPA with the query heads of a group folded into the rows, so that keys are read once."""
    batch, heads, nodes, dim = problem.q.shape
    kv_heads = problem.k.shape[1]
    group = heads // kv_heads
    q = problem.q.reshape(batch, kv_heads, group * nodes, dim)
    mask = problem.mask.repeat(group, 1)

    def run(k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=problem.scale)
        return out.view(batch, heads, nodes, dim)

    return run


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def flex(problem: Dense) -> Attention:
    """Compiled FlexAttention with a precomputed block mask."""
    p = problem
    _, heads, nodes, _ = p.q.shape
    mask = p.mask
    block_mask = create_block_mask(
        lambda b, h, q, k: mask[q, k], None, None, nodes, p.k.shape[2], device=str(p.q.device)
    )
    compiled, gqa = _compiled_flex(), heads != p.k.shape[1]
    return lambda k, v: compiled(p.q, k, v, block_mask=block_mask, scale=p.scale, enable_gqa=gqa)  # type: ignore[no-any-return]


PEERS: dict[str, Callable[[Dense], Attention]] = {"sdpa": sdpa, "sdpa_folded": sdpa_folded, "flex": flex}
