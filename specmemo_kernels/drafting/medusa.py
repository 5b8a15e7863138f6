"""Medusa heads as a drafter: from one hidden state to a tree of guesses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from specmemo_kernels import ops
from specmemo_kernels.drafting.base import DraftInput, candidate_columns, fill_tree
from specmemo_kernels.drafting.medusa_heads import MedusaHeads, matrix_tensors


@dataclass(frozen=True)
class BlockStack:
    """A layer's residual blocks of all heads.

    Attributes:
        matrices: ``[num_heads, H, H]``, or codes ``[num_heads, H, 32 * G]``.
        scales: of codes, ``[num_heads, H, G]``; else ``None``.
        biases: ``[num_heads, H]``.
    """

    matrices: torch.Tensor
    scales: torch.Tensor | None
    biases: torch.Tensor

    def apply(self, x: torch.Tensor, backend: str | None) -> torch.Tensor:
        """The blocks of the first heads on their inputs ``[heads, B, H]``; one product without codes."""
        heads, batch = slice(len(x)), x.shape[1]
        if self.scales is None and x.device.type == "cpu":  # torch's product packs the matrices
            ends = batch * torch.arange(1, len(x) + 1, device="cpu")
            matrices, biases = self.matrices[heads], self.biases[heads]
            sums = ops.grouped_linear(x.flatten(0, 1), matrices, biases, ends, backend=backend).view(x.shape)
        elif self.scales is None:
            sums = torch.baddbmm(self.biases[heads, None], x, self.matrices[heads].transpose(1, 2))
        else:
            parts = zip(x, self.matrices, self.biases, self.scales, strict=False)
            rows = [ops.linear(own, codes, bias, scales=scales, backend=backend) for own, codes, bias, scales in parts]
            sums = torch.stack(rows)
        return x + nn.functional.silu(sums)

    def to(self, device: torch.device) -> BlockStack:
        scales = None if self.scales is None else self.scales.to(device)
        return BlockStack(self.matrices.to(device), scales, self.biases.to(device))


class MedusaDrafter:
    """Fills a tree with the heads' best candidates, without a ``[B, V]`` tensor.

    Args:
        heads: on the device and in the dtype of the model's hidden states.
        lm_head: the model's ``(weight [V, hidden_size], bias [V] or None)``, used by heads without own lm_heads; or a
            function from its inputs to logits, where there is no such matrix (a quantised lm_head).
        backend: of :func:`specmemo_kernels.ops.lm_head_topk`.
        topk: replacement for that function, for matrices sharded over ranks.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        lm_head: tuple[torch.Tensor, torch.Tensor | None] | Callable[[torch.Tensor], torch.Tensor],
        backend: str | None = None,
        topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] = ops.lm_head_topk,
    ) -> None:
        self.heads, self.backend, self._topk = heads, backend, topk
        self._lm_head = lm_head
        self._blocks = _stack_blocks(heads)
        self._home = self._blocks[0].biases.device

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
        """Bytes with all matrices in 4 bits; ``None`` if they are already."""
        coded_bytes = self.heads.coded_bytes()
        if coded_bytes is None:
            return None
        return coded_bytes + sum(blocks.biases.nbytes for blocks in self._blocks)

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
        if self._blocks[0].biases.device == device:
            return
        blocks = [layer.to(device) for layer in self._blocks]
        count = self.heads.num_heads if self.heads.own_lm_head else 0
        lm_heads = [tensor for head in range(count) for tensor in self.heads.own_tensors(head) if tensor is not None]
        moved = [tensor.data.to(device) for tensor in lm_heads]
        for tensor, data in zip(lm_heads, moved, strict=True):
            tensor.data = data
        self._blocks = blocks
        for layer, stack in enumerate(blocks):
            _point_into(self.heads, layer, stack)

    def propose(self, inputs: DraftInput) -> torch.Tensor:
        tree = inputs.tree
        if tree.max_depth == 0:
            return inputs.root_tokens[:, None]
        candidates = self.candidates(inputs.hidden, tree.max_depth, tree.width)
        return fill_tree(inputs.root_tokens, candidates, candidate_columns(tree, tree.width, inputs.hidden.device))

    def candidates(self, hidden: torch.Tensor, depth: int, width: int) -> torch.Tensor:
        """``[B, depth * width]`` int64: the ``width`` best tokens of each of the first ``depth`` heads."""
        x = hidden.expand(depth, *hidden.shape)
        for blocks in self._blocks:
            x = blocks.apply(x, self.backend)
        if self.heads.own_lm_head:
            rows = []
            for head in range(depth):
                weight, scales = self.heads.own_tensors(head)
                _, tokens = self._topk(x[head], weight.detach(), k=width, scales=scales, backend=self.backend)
                rows.append(tokens)
            return torch.cat(rows, dim=1)
        tokens = self._shared_candidates(x.flatten(0, 1), width).to(hidden.device)
        return tokens.view(depth, len(hidden), width).transpose(0, 1).flatten(1)

    def _shared_candidates(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """``[N, width]``: the best tokens of rows ``[N, hidden_size]`` by the model's lm_head."""
        if not isinstance(self._lm_head, tuple):
            # Fewer rows than a step's nodes, whose logits the plan has: the model computes them too.
            return self._lm_head(x).topk(width, dim=1).indices
        weight, bias = self._lm_head
        x = x.to(weight.device)  # the last device of a model on several devices
        return self._topk(x, weight, bias, k=width, backend=self.backend)[1]


def _stack_blocks(heads: MedusaHeads) -> list[BlockStack]:
    """Stack each layer's matrices of all heads; the module's tensors become views, without a second copy."""
    stacks = []
    for layer in range(heads.num_layers):
        linears = [heads.linear(head, layer) for head in range(heads.num_heads)]
        matrices, scales = zip(*(matrix_tensors(linear) for linear in linears), strict=True)
        stack = BlockStack(
            torch.stack([matrix.data for matrix in matrices]),
            None if scales[0] is None else torch.stack(scales),
            torch.stack([cast(torch.Tensor, linear.bias).data for linear in linears]),
        )
        stacks.append(stack)
        _point_into(heads, layer, stack)  # frees this layer's old matrices before the next stack
    return stacks


def _point_into(heads: MedusaHeads, layer: int, stack: BlockStack) -> None:
    """Make a layer's tensors views of its stack."""
    for head in range(heads.num_heads):
        linear = heads.linear(head, layer)
        matrix, scales = matrix_tensors(linear)
        matrix.data = stack.matrices[head]
        cast(torch.Tensor, linear.bias).data = stack.biases[head]
        if scales is not None and stack.scales is not None:
            scales.data = stack.scales[head]
