"""Clover-2 (arXiv 2408.00264): two decoder layers over the target's states, then a recurrent head per drafted token.

A drafted node's state is one vector, so drafting needs no keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import DraftRows
from specmemo_kernels.drafting.growth import Children, grow
from specmemo_kernels.drafting.published_config import CloverConfig
from specmemo_kernels.drafting.tensor_drafter import TensorDrafter
from specmemo_kernels.drafting.vocabulary import TargetVocabulary
from specmemo_kernels.forward.batch import DraftedTrees, TreeBatch
from specmemo_kernels.forward.step_attention import StepAttention
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor


class CloverDrafter(TensorDrafter):
    """Clover-2. Implements :class:`specmemo_kernels.drafting.base.FeatureDrafter`.

    Arguments as of :class:`TensorDrafter`.
    """

    def __init__(
        self,
        config: CloverConfig,
        tensors: Mapping[str, Tensor],
        vocabulary: TargetVocabulary,
        target_layers: int,
        backend: str | None,
    ) -> None:
        super().__init__(config, tensors, vocabulary, target_layers, backend)
        self.feature_ids = (target_layers,)  # before the final norm

    def advance(self, batch: TreeBatch, features: Tensor, keep: Tensor, pool: PagedKVPool) -> Tensor:
        kernels, attention = self.kernels, StepAttention(pool, batch, self.backend)
        hidden = self._regress("clover_head_mlp_rnn", features, self._embed(batch.tokens))
        rotary = self.rotary(batch.positions, hidden.dtype)
        for layer in self.decoder:
            x = layer.norm(kernels, "input_layernorm", hidden)
            hidden = layer(kernels, x, hidden, rotary, attention, keep if layer is self.decoder[-1] else None)
        return self.norm("clover_norm", hidden)

    def draft(self, rows: DraftRows, tree: Trees) -> DraftedTrees:
        states = rows.states[:, None]  # of the last depth's nodes

        def first(width: int) -> Children:
            return self._children("clover_head_mlp", rows.states, width, 1)

        def expand(_: int, parent: Tensor, tokens: Tensor) -> Children:
            nonlocal states
            nodes = parent.shape[1]
            above = states.gather(1, parent[..., None].expand(-1, -1, self.state_size)).flatten(0, 1)
            embedded = self._embed(tokens.flatten().clamp(min=0))
            state = self._regress("clover_head_mlp_rnn2", above, embedded)
            states = state.view(-1, nodes, self.state_size)
            return self._children("clover_head_mlp2", torch.cat([state, embedded], dim=1), tree.width, nodes)

        return grow(rows.roots, tree, first, expand)

    def _embed(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.tensors["clover_embed_tokens.weight"])

    def _regress(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """The regressive block: ``x + cos(q(norm(x)), k(y)) v(y)``, with a cosine per head."""
        shape = len(x), self.num_qo_heads, -1
        query = self.linear(f"{name}.q", self.norm(f"{name}.input_layernorm", x)).view(shape)
        key, value = (self.linear(f"{name}.{part}", y).view(shape) for part in "kv")
        share = functional.cosine_similarity(query, key, dim=-1, eps=self.eps)
        return x + (share[..., None] * value).flatten(1)

    def _children(self, name: str, x: Tensor, width: int, nodes: int) -> Children:
        """The best tokens by the head ``name``, ``[B, nodes, width]``."""
        hidden = self.norm("clover_head_norm", self.linear(name, x))
        log_p, tokens = self.vocabulary.top_log_probs(hidden, width)
        return log_p.view(-1, nodes, width), tokens.view(-1, nodes, width)
