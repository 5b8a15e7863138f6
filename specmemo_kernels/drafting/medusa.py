"""Medusa heads as a drafter: from one hidden state to a tree of guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from specmemo_kernels import ops
from specmemo_kernels.drafting.base import DraftInput, candidate_columns, fill_tree
from specmemo_kernels.drafting.medusa_heads import MedusaHeads


class MedusaDrafter:
    """Fills a tree with the heads' best candidates, without a ``[B, V]`` tensor.

    Args:
        heads: on the device and in the dtype of the model's hidden states.
        lm_head: the model's ``(weight [V, hidden_size], bias [V] or None)``, used by heads without own lm_heads.
        backend: of :func:`specmemo_kernels.ops.lm_head_topk`.
        topk: replacement for that function, for matrices sharded over ranks.
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
        """A drafter with the first ``num_heads`` heads."""
        return MedusaDrafter(self.heads.truncated(num_heads), self._lm_head, self.backend, self._topk)

    @property
    def max_depth(self) -> int:
        return self.heads.num_heads

    @property
    def nbytes(self) -> int:
        """Bytes on its device: 0 while offloaded."""
        return sum(tensor.nbytes for tensor in self._tensors if tensor.device == self._home)

    @property
    def coded_nbytes(self) -> int | None:
        """Bytes with own vocabulary matrices in 4 bits; ``None`` if there is nothing to pack."""
        coded_bytes = self.heads.coded_bytes()
        if coded_bytes is None:
            return None
        matrix_bytes = sum(self.heads.own_tensors(head)[0].nbytes for head in range(self.heads.num_heads))
        return sum(tensor.nbytes for tensor in self._tensors) - matrix_bytes + coded_bytes

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [*self.heads.parameters(), *self.heads.buffers()]

    @property
    def offloadable(self) -> bool:
        return self._home.type != "cpu"

    def offload(self) -> None:
        """Move the heads' weights to host memory; the caller's module moves too if it shares them."""
        self._move(torch.device("cpu"))

    def restore(self) -> None:
        self._move(self._home)

    def _move(self, device: torch.device) -> None:
        """Move all tensors or none: the old ones are freed after the last copy."""
        if self._weights and self._weights[0].device == device:
            return
        stacks = [[tensor.to(device) for tensor in kind] for kind in (self._weights, self._biases)]
        count = self.heads.num_heads if self.heads.own_lm_head else 0
        lm_heads = [tensor for head in range(count) for tensor in self.heads.own_tensors(head) if tensor is not None]
        moved = [tensor.data.to(device) for tensor in lm_heads]
        for tensor, data in zip(lm_heads, moved, strict=True):
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
        """``[B, depth * width]`` int64: the ``width`` best tokens of each of the first ``depth`` heads."""
        x = hidden.expand(depth, *hidden.shape)
        for weight, bias in zip(self._weights, self._biases, strict=True):
            x = x + nn.functional.silu(torch.baddbmm(bias[:depth], x, weight[:depth].transpose(1, 2)))
        shared, shared_bias = self._lm_head
        if self.heads.own_lm_head:
            rows = []
            for head in range(depth):
                weight, scales = self.heads.own_tensors(head)
                _, tokens = self._topk(x[head], weight.detach(), k=width, scales=scales, backend=self.backend)
                rows.append(tokens)
            return torch.cat(rows, dim=1)
        x = x.flatten(0, 1).to(shared.device)  # the last device of a model on several devices
        tokens = self._topk(x, shared, shared_bias, k=width, backend=self.backend)[1].to(hidden.device)
        return tokens.view(depth, len(hidden), width).transpose(0, 1).flatten(1)


def _stack_blocks(heads: MedusaHeads) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Stack each layer's matrices of all heads to ``[num_heads, H, H]``: a step computes one product per layer.

    The module's parameters become views of the stack, without a second copy.
    """
    weights, biases = [], []
    for layer in range(heads.num_layers):
        linears = [heads.linear(head, layer) for head in range(heads.num_heads)]
        weight = torch.stack([linear.weight.data for linear in linears])
        bias = torch.stack([linear.bias.data for linear in linears])[:, None]
        weights.append(weight)
        biases.append(bias)
        _point_into(heads, weights, biases)  # frees this layer's old matrices before the next stack
    return weights, biases


def _point_into(heads: MedusaHeads, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> None:
    """Make the first layers' parameters views of their stacks."""
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        for head in range(heads.num_heads):
            linear = heads.linear(head, layer)
            linear.weight.data, linear.bias.data = weight[head], bias[head, 0]
