"""Clover-2 (arXiv 2408.00264): two decoder layers over the target's states, then a recurrent head per drafted token.

A drafted node's state is one vector, so drafting needs no keys and values.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import DraftRows
from specmemo_kernels.drafting.decoder_layer import Attention
from specmemo_kernels.drafting.growth import grow_recurrent
from specmemo_kernels.drafting.published_config import CloverConfig
from specmemo_kernels.drafting.tensor_drafter import TensorDrafter
from specmemo_kernels.forward.batch import DraftedTrees, TreeBatch
from specmemo_kernels.forward.step_attention import StepAttention
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor


class CloverDrafter(TensorDrafter[CloverConfig]):
    """Clover-2. Implements :class:`specmemo_kernels.drafting.base.FeatureDrafter`.

    Arguments as of :class:`TensorDrafter`.
    """

    def _feature_ids(self, target_layers: int) -> tuple[int, ...]:
        return (target_layers,)  # before the final norm

    def advance(self, batch: TreeBatch, features: Tensor, keep: Tensor, pool: PagedKVPool) -> Tensor:
        return self.run(batch.tokens, features, batch.positions, StepAttention(pool, batch, self.backend), keep)

    def run(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attention: Attention, keep: Tensor | None
    ) -> Tensor:
        """The states ``[K, hidden_size]`` of pairs; ``keep`` ``[K]``: rows, ``None`` for all."""
        kernels = self.kernels
        hidden = self._regress("clover_head_mlp_rnn", features, self._embed(tokens))
        rotary = self.rotary(positions, hidden.dtype)
        for layer in self.decoder:
            x = layer.norm(kernels, "input_layernorm", hidden)
            hidden = layer(kernels, x, hidden, rotary, attention, keep if layer is self.decoder[-1] else None)
        return self.norm("clover_norm", hidden)

    def draft(self, rows: DraftRows, tree: Trees) -> DraftedTrees:
        def predict(width: int) -> tuple[Tensor, Tensor]:
            return self.vocabulary.top_log_probs(self.first(rows.states), width)

        def step(_: int, __: Tensor, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            states, hidden = self.following(states, tokens)
            return states, *self.vocabulary.top_log_probs(hidden, tree.width)

        return grow_recurrent(rows.roots, rows.states, tree, predict, step)

    def first(self, states: Tensor) -> Tensor:
        """The lm_head's input for the first drafted token behind each state."""
        return self.norm("clover_head_norm", self.linear("clover_head_mlp", states))

    def following(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The states of drafted ``tokens`` ``[N]`` behind ``states``, and the lm_head's inputs for the tokens after."""
        embedded = self._embed(tokens)
        states = self._regress("clover_head_mlp_rnn2", states, embedded)
        mixed = self.linear("clover_head_mlp2", torch.cat([states, embedded], dim=1))
        return states, self.norm("clover_head_norm", mixed)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding("clover_embed_tokens", tokens)

    def _regress(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """The regressive block: ``x + cos(q(norm(x)), k(y)) v(y)``, with a cosine per head."""
        shape = len(x), self.num_qo_heads, -1
        query = self.linear(f"{name}.q", self.norm(f"{name}.input_layernorm", x)).view(shape)
        key, value = (self.linear(f"{name}.{part}", y).view(shape) for part in "kv")
        share = functional.cosine_similarity(query, key, dim=-1, eps=self.eps)
        return x + (share[..., None] * value).flatten(1)
