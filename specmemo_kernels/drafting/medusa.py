"""Medusa heads as a drafter: one hidden state in, a tree of guesses out."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from specmemo_kernels import ops
from specmemo_kernels.drafting.base import DraftInput
from specmemo_kernels.drafting.medusa_heads import MedusaHeads
from specmemo_kernels.tree import DraftTree


class MedusaDrafter:
    """Fills a tree with the heads' best candidates; never makes a ``[B, V]`` tensor.

    Args:
        heads: on the device and in the dtype of the model's hidden states.
        lm_head: the model's own, used by heads that share it: ``(weight [V, hidden_size], bias [V] or None)``.
        backend: of :func:`specmemo_kernels.ops.lm_head_topk`.
    """

    def __init__(
        self, heads: MedusaHeads, lm_head: tuple[torch.Tensor, torch.Tensor | None], backend: str | None = None
    ) -> None:
        self.heads, self.backend = heads, backend
        self._lm_head = lm_head
        self._weights, self._biases = _stack_blocks(heads)

    @property
    def max_depth(self) -> int:
        return self.heads.num_heads

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.heads.parameters())

    def propose(self, inputs: DraftInput) -> torch.Tensor:
        batch, tree = len(inputs.root_tokens), inputs.tree
        depth = tree.max_depth
        if depth == 0:
            return inputs.root_tokens[:, None]
        candidates = self._candidates(inputs.hidden, depth, tree.width)
        choices = torch.cat([inputs.root_tokens[:, None], candidates], dim=1)
        return choices[:, _columns(tree, inputs.hidden.device)].reshape(batch, tree.size)

    def _candidates(self, hidden: torch.Tensor, depth: int, width: int) -> torch.Tensor:
        """``[B, depth * width]`` int64: ``width`` tokens of each of the first ``depth`` heads, best first."""
        x = hidden.expand(depth, *hidden.shape)
        for weight, bias in zip(self._weights, self._biases, strict=True):
            x = x + nn.functional.silu(torch.baddbmm(bias[:depth], x, weight[:depth].transpose(1, 2)))
        shared, shared_bias = self._lm_head
        if self.heads.own_lm_head:
            own = [self.heads.lm_head_weight(head, shared).detach() for head in range(depth)]
            rows = [ops.lm_head_topk(x[h], own[h], k=width, backend=self.backend)[1] for h in range(depth)]
            return torch.cat(rows, dim=1)
        tokens = ops.lm_head_topk(x.flatten(0, 1), shared, shared_bias, k=width, backend=self.backend)[1]
        return tokens.view(depth, len(hidden), width).transpose(0, 1).flatten(1)


def _stack_blocks(heads: MedusaHeads) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each layer's matrices of all heads as one ``[num_heads, H, H]``, so that a step makes one product per layer.

    The module's parameters become views of the stack: nothing is held twice.
    """
    weights, biases = [], []
    for layer in range(heads.num_layers):
        linears = [heads.linear(head, layer) for head in range(heads.num_heads)]
        weight = torch.stack([linear.weight.data for linear in linears])
        bias = torch.stack([linear.bias.data for linear in linears])[:, None]
        for h, linear in enumerate(linears):
            linear.weight.data, linear.bias.data = weight[h], bias[h, 0]
        weights.append(weight)
        biases.append(bias)
    return weights, biases


# The memory plan counts this many (footprint.KEPT_LAYOUTS).
@lru_cache(maxsize=8)
def _columns(tree: DraftTree, device: torch.device) -> torch.Tensor:
    """Where each node's token stands in ``[root, head 0's candidates, head 1's, ...]``."""
    columns = [0] + [1 + (d - 1) * tree.width + r for d, r in zip(tree.depths[1:], tree.ranks[1:], strict=True)]
    return torch.tensor(columns, device=device)
