"""Attention of a drafter's layers over windows of text whose drafts are unrolled.

Row t is the pair of position t, from which tokens t + 2, t + 3, ... are drafted. In the first step all rows are the
target's. In step i, row t is the drafted pair of position t + i: it attends to the target's rows up to t and to its own
earlier steps (EAGLE-3's training-time test, arXiv 2503.01840).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from specmemo_kernels.forward.step_attention import AttentionParams

Tensor = torch.Tensor


class UnrolledAttention:
    """Implements :class:`specmemo_kernels.drafting.decoder_layer.Attention`, with gradients.

    Args:
        windows: number of windows, of equally many rows.
    """

    def __init__(self, windows: int) -> None:
        self._windows = windows
        self._steps: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, params: AttentionParams) -> Tensor:
        queries, keys, values = (self._by_head(x, k.shape[1]) for x in (q, k, v))
        steps = self._steps.setdefault(layer, [])
        steps.append((keys, values))
        (first_keys, first_values), own = steps[0], steps[1:]
        shape = queries.shape[0], -1, *queries.shape[3:]
        if not own:
            out = functional.scaled_dot_product_attention(
                queries.reshape(shape), first_keys[:, :, 0], first_values[:, :, 0], is_causal=True, scale=params.scale,
                enable_gqa=True,
            )  # fmt: skip
        else:
            rows = q.shape[0] // self._windows
            behind = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
            scores = (queries @ first_keys.mT).float().masked_fill(behind, -torch.inf)
            alone = [(queries * own_keys).sum(dim=-1, keepdim=True).float() for own_keys, _ in own]
            weights = (torch.cat([scores, *alone], dim=-1) * params.scale).softmax(dim=-1).to(v.dtype)
            out = weights[..., :rows] @ first_values
            for i, (_, own_values) in enumerate(own):
                out = out + weights[..., rows + i : rows + i + 1] * own_values
            out = out.reshape(shape)
        return out.transpose(1, 2).reshape(q.shape[0], q.shape[1], v.shape[2])

    def _by_head(self, x: Tensor, kv_heads: int) -> Tensor:
        """``[B * R, heads, D]`` -> ``[B, kv_heads, heads / kv_heads, R, D]``."""
        return x.view(self._windows, -1, kv_heads, x.shape[1] // kv_heads, x.shape[2]).permute(0, 2, 3, 1, 4)
