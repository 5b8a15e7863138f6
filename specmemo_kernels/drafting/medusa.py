"""Medusa heads as a drafter: one hidden state in, a tree of guesses out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from specmemo_kernels import ops
from specmemo_kernels.drafting.base import DraftInput, candidate_columns, fill_tree
from specmemo_kernels.drafting.medusa_heads import MedusaHeads


class MedusaDrafter:
    """Fills a tree with the heads' best candidates; never makes a ``[B, V]`` tensor.

    Args:
        heads: on the device and in the dtype of the model's hidden states.
        lm_head: the model's own, used by heads that share it: ``(weight [V, hidden_size], bias [V] or None)``.
        backend: of :func:`specmemo_kernels.ops.lm_head_topk`.
        topk: with the arguments of that function; another one where ranks hold parts of the matrices.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        lm_head: tuple[torch.Tensor, torch.Tensor | None],
        backend: str | None = None,
        topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] = ops.lm_head_topk,
    ) -> None:
        self.heads, self.backend, self._topk = heads, backend, topk
        self._lm_head = lm_head
        self._weights, self._biases = _stack_blocks(heads)
        self._home = self._weights[0].device

    def truncated(self, num_heads: int) -> MedusaDrafter:
        """A drafter with the first ``num_heads`` of these heads."""
        return MedusaDrafter(self.heads.truncated(num_heads), self._lm_head, self.backend, self._topk)

    @property
    def max_depth(self) -> int:
        return self.heads.num_heads

    @property
    def nbytes(self) -> int:
        """Bytes on its device: none while it is offloaded."""
        return sum(tensor.nbytes for tensor in self._held if tensor.device == self._home)

    @property
    def coded_nbytes(self) -> int | None:
        """What it would hold with its own vocabulary matrices in 4 bits; ``None`` where that makes no difference."""
        coded = self.heads.coded_bytes()
        if coded is None:
            return None
        own = sum(self.heads.own_tensors(head)[0].nbytes for head in range(self.heads.num_heads))
        return sum(tensor.nbytes for tensor in self._held) - own + coded

    @property
    def _held(self) -> list[torch.Tensor]:
        return [*self.heads.parameters(), *self.heads.buffers()]

    @property
    def offloadable(self) -> bool:
        return self._home.type != "cpu"

    def offload(self) -> None:
        """Move the heads' weights to host memory, in the module that ``patch`` was given too if it holds the same."""
        self._move(torch.device("cpu"))

    def restore(self) -> None:
        self._move(self._home)

    def _move(self, device: torch.device) -> None:
        """All or nothing: everything has arrived before the first old tensor is let go."""
        stacks = [[tensor.to(device) for tensor in kind] for kind in (self._weights, self._biases)]
        count = self.heads.num_heads if self.heads.own_lm_head else 0
        own = [tensor for head in range(count) for tensor in self.heads.own_tensors(head) if tensor is not None]
        moved = [tensor.data.to(device) for tensor in own]
        for tensor, data in zip(own, moved, strict=True):
            tensor.data = data
        self._weights, self._biases = stacks
        _point_into(self.heads, *stacks)

    def propose(self, inputs: DraftInput) -> torch.Tensor:
        tree = inputs.tree
        if tree.max_depth == 0:
            return inputs.root_tokens[:, None]
        candidates = self.candidates(inputs.hidden, tree.max_depth, tree.width)
        return fill_tree(inputs.root_tokens, candidates, candidate_columns(tree, tree.width, inputs.hidden.device))

    def candidates(self, hidden: torch.Tensor, depth: int, width: int) -> torch.Tensor:
        """``[B, depth * width]`` int64: ``width`` tokens of each of the first ``depth`` heads, best first."""
        x = hidden.expand(depth, *hidden.shape)
        for weight, bias in zip(self._weights, self._biases, strict=True):
            x = x + nn.functional.silu(torch.baddbmm(bias[:depth], x, weight[:depth].transpose(1, 2)))
        shared, shared_bias = self._lm_head
        if self.heads.own_lm_head:
            rows = []
            for head in range(depth):
                weight, scales = self.heads.own_tensors(head)
                best = self._topk(x[head], weight.detach(), k=width, scales=scales, backend=self.backend)
                rows.append(best[1])
            return torch.cat(rows, dim=1)
        x = x.flatten(0, 1).to(shared.device)  # of a model on several devices the last one
        tokens = self._topk(x, shared, shared_bias, k=width, backend=self.backend)[1].to(hidden.device)
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
        weights.append(weight)
        biases.append(bias)
        _point_into(heads, weights, biases)  # layer by layer: the old matrices are freed before the next stack is made
    return weights, biases


def _point_into(heads: MedusaHeads, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> None:
    """The first layers' parameters become views of their stacks."""
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        for head in range(heads.num_heads):
            linear = heads.linear(head, layer)
            linear.weight.data, linear.bias.data = weight[head], bias[head, 0]
