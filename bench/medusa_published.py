"""Medusa as published (arXiv 2401.10774), written from its description as a baseline.

What determines its memory is kept:

- one contiguous cache for the model's full context, allocated up front, with slots for the candidates;
- a dense tree mask, ``[nodes, context + nodes]``;
- the logits of the model and of every head at every position of the prompt, and at every node of a step;
- these logits gathered along every path of the tree (retrieve indices).

Other overheads of the published code are left out. Here the model's dtype is used throughout, attention is fused, all
heads' logits are written to one tensor, prefill logits are freed once the last row is taken, and the last token needs
no forward pass. The memory of the published code is in ``specmemo_kernels.planning.baselines.medusa_parts``.

:class:`Savings` switches parts of this memory off, for ``ablation.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from transformers import Cache

from specmemo_kernels import MedusaHeads, ops
from specmemo_kernels.integrations.hf.cache_argument import CACHE_ARGUMENT
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor

#: Maps ``candidates`` ``[leaves, depth + 1]`` and the model's ``logits`` ``[leaves, depth + 1, V]``, or its tokens
#: ``[leaves, depth + 1]``, to the best path and the number of its accepted drafts.
Accept = Callable[[Tensor, Tensor], tuple[int, int]]


def greedy_accept(candidates: Tensor, logits: Tensor) -> tuple[int, int]:
    """The first path with the longest prefix of the model's own greedy tokens."""
    tokens = logits if logits.dim() == 2 else logits.argmax(-1)
    agree = candidates[:, 1:] == tokens[:, :-1]
    lengths = agree.long().cumprod(dim=1).sum(dim=1)
    best = lengths.argmax()
    path, count = torch.stack([best, lengths[best]]).tolist()
    return path, count


@dataclass(frozen=True)
class Savings:
    """What a :class:`MedusaPublished` doesn't allocate.

    Attributes:
        cache: slots beyond the prompt, the new tokens and a tree; each call allocates its own cache.
        last_row: logits of the prompt but for its last row.
        streamed: logits of a step's nodes, and of paths; heads run on the accepted row only.
    """

    cache: bool = False
    last_row: bool = False
    streamed: bool = False


AS_PUBLISHED = Savings()


class ContiguousCache(Cache):
    """A cache ``[2 * num_layers, 1, num_kv_heads, max_length, head_dim]``; passes write behind ``length`` tokens.

    ``max_length``: 0 for the model's context.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device, max_length: int = 0) -> None:
        super().__init__(layers=[])
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers, self.max_length = config.num_hidden_layers, max_length or config.max_position_embeddings
        shape = (2 * layers, 1, config.num_key_value_heads, self.max_length, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Write the new rows of one layer; returns all rows up to their end."""
        end = self.length + key_states.shape[2]
        keys, values = self.data[2 * layer_idx], self.data[2 * layer_idx + 1]
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys that a pass over ``query_length`` rows sees, and the offset of the first."""
        return self.length + query_length, 0

    def keep(self, slots: Tensor) -> None:
        """Move the accepted candidates in ``slots`` (``[n]`` int64, cache indices) behind the committed tokens."""
        end = self.length + len(slots)
        self.data[..., self.length : end, :] = self.data.index_select(3, slots)
        self.length = end


class TreeBuffers:
    """Tensors that depend on the tree only.

    Attributes:
        columns: ``[T]``, each node's index in root and candidates, ``width`` per head.
        depths: ``[T]``.
        mask: ``[T, T]``, 0 where a node sees another, else minus infinity.
        retrieve: ``[leaves, depth + 1]``, the nodes of each path, padded with the root.
        valid: ``[leaves, depth + 1]``, false in the padding.
    """

    def __init__(self, tree: DraftTree, dtype: torch.dtype, device: torch.device) -> None:
        self.width = tree.width
        columns = [0] + [1 + (d - 1) * tree.width + r for d, r in zip(tree.depths[1:], tree.ranks[1:], strict=True)]
        self.columns = torch.tensor(columns, device=device)
        self.depths = torch.tensor(tree.depths, device=device)
        paths = [[*reversed(list(_ancestors(tree, node)))] for node in sorted(_leaves(tree))]
        sees = torch.zeros(tree.size, tree.size, dtype=torch.bool)
        for node in range(tree.size):
            sees[node, list(_ancestors(tree, node))] = True
        self.mask = torch.zeros(tree.size, tree.size, dtype=dtype).masked_fill(~sees, -torch.inf).to(device)
        longest = tree.max_depth + 1
        self.paths = paths
        self.retrieve = torch.tensor([path + [0] * (longest - len(path)) for path in paths], device=device)
        self.valid = torch.tensor([[i < len(path) for i in range(longest)] for path in paths], device=device)


class MedusaPublished:
    """Greedy decoding with Medusa heads, batch 1.

    Args:
        model: a Llama of transformers (its logits are the lm_head's output).
        heads: on the model's device and in its dtype.
        tree: Medusa's ``mc_sim_7b_63`` has 64 nodes.
        without: default: as published.

    Attributes:
        cache: allocated in the first call and kept.
        steps: steps of the last call, without prefill.
    """

    def __init__(self, model: Any, heads: MedusaHeads, tree: DraftTree, without: Savings = AS_PUBLISHED) -> None:
        if tree.max_depth > heads.num_heads:
            raise ValueError(f"the tree is {tree.max_depth} deep, there are {heads.num_heads} heads")
        self.model, self.heads, self.tree, self.without = model, heads, tree, without
        weight = model.get_output_embeddings().weight
        self.lm_head, self.dtype, self.device = weight.detach(), weight.dtype, weight.device
        self.buffers = TreeBuffers(tree, self.dtype, self.device)
        self.cache: ContiguousCache | None = None
        self.steps = 0
        self._root = self._drafts = torch.empty(0)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_new_tokens: int, accept: Accept = greedy_accept) -> list[int]:
        """The new tokens, ``max_new_tokens`` of them.

        Args:
            accept: selects the accepted path; default: greedy.

        Raises:
            ValueError: the context has no room for the prompt, the new tokens and a tree.
        """
        limit, slots = self.model.config.max_position_embeddings, len(prompt) + max_new_tokens + self.tree.size
        if slots > limit:
            raise ValueError(f"{slots} slots for prompt, new tokens and tree; the model's context has {limit}")
        if self.without.cache:
            self.cache = None  # freed before the next one is allocated
            self.cache = ContiguousCache(self.model.config, self.dtype, self.device, slots)
        tokens = [self.start(prompt)]
        while len(tokens) < max_new_tokens:
            tokens += self.step(accept)
        return tokens[:max_new_tokens]

    @torch.inference_mode()
    def start(self, prompt: Sequence[int]) -> int:
        """Compute a prompt; returns the first new token."""
        if self.cache is None:
            self.cache = ContiguousCache(self.model.config, self.dtype, self.device)
        self.cache.length, self.steps = 0, 0
        ids = torch.tensor([prompt], device=self.device)
        hidden = self._hidden(ids, torch.arange(len(prompt), device=self.device), None)
        self.cache.length = len(prompt)
        logits, by_head = self._logits(hidden[-1:] if self.without.last_row else hidden)
        self._root, self._drafts = logits[-1:].argmax(-1), self._guesses(by_head[:, -1])
        return int(self._root)

    @torch.inference_mode()
    def step(self, accept: Accept = greedy_accept) -> list[int]:
        """Verify one tree; returns the new tokens."""
        assert self.cache is not None
        self.steps += 1
        tree, start = self.buffers, self.cache.length
        drafts = torch.cat([self._root, self._drafts])[tree.columns]
        mask = torch.zeros(1, 1, len(drafts), start + len(drafts), dtype=self.dtype, device=self.device)
        mask[..., start:] = tree.mask
        hidden = self._hidden(drafts[None], start + tree.depths, mask)
        candidates = torch.where(tree.valid, drafts[tree.retrieve], -1)
        verify = self._verify_streamed if self.without.streamed else self._verify
        best, count = verify(hidden, candidates, accept)
        with record_function("medusa::commit"):
            self.cache.keep(start + tree.retrieve[best, : count + 1])
        new: list[int] = torch.cat([candidates[best, 1 : count + 1], self._root]).tolist()
        return new

    def _verify(self, hidden: Tensor, candidates: Tensor, accept: Accept) -> tuple[int, int]:
        """The accepted path and its length; sets the next root and drafts."""
        logits, by_head = self._logits(hidden)
        with record_function("medusa::verify"):
            path_logits, path_heads = logits[self.buffers.retrieve], by_head[:, self.buffers.retrieve]
            best, count = accept(candidates, path_logits)
        self._root = path_logits[best, count].argmax(-1, keepdim=True)
        self._drafts = self._guesses(path_heads[:, best, count])
        return best, count

    def _verify_streamed(self, hidden: Tensor, candidates: Tensor, accept: Accept) -> tuple[int, int]:
        """The same with the model's tokens instead of logits, and the heads' logits of one row."""
        retrieve = self.buffers.retrieve
        with record_function("medusa::verify"):
            tokens = ops.lm_head_argmax(hidden, self.lm_head)[retrieve]
            best, count = accept(candidates, tokens)
        self._root = tokens[best, count, None]
        row = hidden[retrieve[best, count, None]]
        self._drafts = self._guesses(self._head_logits(row)[:, 0])
        return best, count

    def _hidden(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """The lm_head's input ``[N, hidden_size]`` for ``ids`` ``[1, N]``."""
        output = self.model.model(
            input_ids=ids, position_ids=positions[None], attention_mask=mask, **{CACHE_ARGUMENT: self.cache}
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The model's logits ``[N, V]`` and all heads' ``[num_heads, N, V]``."""
        by_head = self._head_logits(hidden)  # first: its temporary tensors are freed before the model's logits
        with record_function("medusa::head"):
            return nn.functional.linear(hidden, self.lm_head), by_head

    def _head_logits(self, hidden: Tensor) -> Tensor:
        with record_function("medusa::head"):
            by_head = hidden.new_empty(self.heads.num_heads, len(hidden), len(self.lm_head))
            for head in range(self.heads.num_heads):
                weight = self.heads.lm_head_weight(head, self.lm_head)
                torch.matmul(self.heads.features(hidden, head), weight.t(), out=by_head[head])
            return by_head

    def _guesses(self, by_head: Tensor) -> Tensor:
        """The best candidates of each head, ``[num_heads * width]``."""
        return by_head.topk(self.buffers.width, dim=-1).indices.flatten()


def _ancestors(tree: DraftTree, node: int) -> list[int]:
    """A node and its ancestors, the root last."""
    path = [node]
    while tree.parents[path[-1]] >= 0:
        path.append(tree.parents[path[-1]])
    return path


def _leaves(tree: DraftTree) -> set[int]:
    return set(range(tree.size)) - set(tree.parents)
