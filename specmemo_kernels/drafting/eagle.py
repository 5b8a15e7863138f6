"""EAGLE drafters (arXiv 2401.15077, 2406.16858, 2503.01840): a decoder layer that continues the target's features.

A pair is the feature of position t and the token t + 1. The layer maps it to the next feature, from which the lm_head
predicts token t + 2; while drafting, its own output takes the place of the target's feature.
"""

from __future__ import annotations

from functools import partial

import torch

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting import matrices
from specmemo_kernels.drafting.base import POST_NORM, DraftRows
from specmemo_kernels.drafting.decoder_layer import Attention, BeamAttention, Rotary
from specmemo_kernels.drafting.growth import grow_recurrent
from specmemo_kernels.drafting.published_config import Eagle3Config, EagleConfig
from specmemo_kernels.drafting.source_files import HeadsError
from specmemo_kernels.drafting.tensor_drafter import TensorDrafter
from specmemo_kernels.forward.batch import DraftedTrees, TreeBatch
from specmemo_kernels.forward.step_attention import StepAttention
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor


class EagleDrafter(TensorDrafter[Eagle3Config | EagleConfig]):
    """EAGLE-3, or EAGLE-1 and 2, which differ in their inputs.

    Implements :class:`specmemo_kernels.drafting.base.FeatureDrafter`. Arguments as of :class:`TensorDrafter`.
    """

    def _feature_ids(self, target_layers: int) -> tuple[int, ...]:
        if isinstance(self.config, EagleConfig):
            return (POST_NORM,)
        if self.config.aux_layer_ids is None and target_layers < 3:
            raise HeadsError(
                f"EAGLE-3 reads the inputs of layers 2, L / 2 and L - 3, the target has {target_layers} layers; it "
                "needs at least 3, or eagle_aux_hidden_state_layer_ids in the drafter's config.json"
            )
        return self.config.aux_layer_ids or (2, target_layers // 2, target_layers - 3)

    def advance(self, batch: TreeBatch, features: Tensor, keep: Tensor, pool: PagedKVPool) -> Tensor:
        rotary, attention = self.rotary(batch.positions, features.dtype), StepAttention(pool, batch, self.backend)
        return self.run(batch.tokens, self.combined(features), rotary, attention, keep)

    def draft(self, rows: DraftRows, tree: Trees) -> DraftedTrees:
        attention, angles = BeamAttention(rows, self.backend), self._angles(rows, tree.max_depth)

        def step(depth: int, parent: Tensor, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            attention.descend(parent)
            cos, sin = (x[depth - 1, :, None].expand(*parent.shape, 1, -1).flatten(0, 1) for x in angles)
            states = self.run(tokens, features, (cos, sin), attention, None)
            return states, *self._predict(states, tree.width)

        return grow_recurrent(rows.roots, rows.states, tree, partial(self._predict, rows.states), step)

    def _angles(self, rows: DraftRows, depths: int) -> Rotary:
        """Cosines and sines of the nodes of each depth but the last, ``[max(1, depths - 1), B, 1, head_dim]``."""
        above = torch.arange(max(1, depths - 1), device=self.device)
        positions = rows.seq_lens.long() + above[:, None]
        cos, sin = self.rotary(positions.flatten(), rows.states.dtype)
        shape = (*positions.shape, *cos.shape[1:])
        return cos.view(shape), sin.view(shape)

    def combined(self, features: Tensor) -> Tensor:
        """The target's features ``[N, F]`` as pairs have them, ``[N, hidden_size]``."""
        return (
            self.linear("fc", self._normed(self.config, features))
            if isinstance(self.config, Eagle3Config)
            else features
        )

    def run(
        self, tokens: Tensor, features: Tensor, rotary: Rotary, attention: Attention, keep: Tensor | None
    ) -> Tensor:
        """The next features ``[K, hidden_size]`` of pairs.

        Args:
            rotary: cosines and sines of their positions, as of :class:`RotaryEmbedding`.
            keep: ``[K]``, rows; ``None``: all.
        """
        own = matrices.has_matrix(self.tensors, "embed_tokens")
        embedded = self.embedding("embed_tokens", tokens) if own else self.vocabulary.embed(tokens)
        kernels = self.kernels
        x, hidden = self._inputs(embedded, features)
        for i, layer in enumerate(self.decoder):
            x = layer.norm(kernels, "input_layernorm", hidden) if i else x
            hidden = layer(kernels, x, hidden, rotary, attention, keep if layer is self.decoder[-1] else None)
        return self.norm("norm", hidden) if self._normed_states else hidden

    def _inputs(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input and the residual of the first layer."""
        if isinstance(self.config, EagleConfig):
            hidden = self.linear("fc", torch.cat([embedded, features], dim=1))
            return hidden, hidden
        layer, kernels = self.decoder[0], self.kernels
        normed = layer.norm(kernels, "hidden_norm", features)
        x = torch.cat([layer.norm(kernels, "input_layernorm", embedded), normed], dim=1)
        return x, normed if self.config.norm_before_residual else features

    def _normed(self, config: Eagle3Config, features: Tensor) -> Tensor:
        """EAGLE-3's optional norms of the target's features."""
        if config.norm_before_fc:
            features = self.norm("input_norm", features)
        if config.fc_norm:
            parts = features.chunk(config.num_aux, dim=1)
            features = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], dim=1)
        return features

    @property
    def _lm_head(self) -> str | None:
        """The name of its own vocabulary matrix, or the embedding that is tied to it; ``None``: the target's."""
        if isinstance(self.config, EagleConfig):
            return None
        names = ("lm_head", "embed_tokens")
        return next((name for name in names if matrices.has_matrix(self.tensors, name)), None)

    @property
    def _normed_states(self) -> bool:
        return isinstance(self.config, Eagle3Config) and self.config.norm_output

    def head_input(self, states: Tensor) -> Tensor:
        """The input of the vocabulary matrix for each state."""
        if not isinstance(self.config, Eagle3Config):
            return states
        hidden = states if self._normed_states else self.norm("norm", states)
        return hidden if self.config.logit_scale == 1 else hidden * self.config.logit_scale

    def _predict(self, states: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The best tokens behind each state, ``[N, width]``."""
        hidden = self.head_input(states)
        if self._lm_head is None:
            log_p, tokens = self.vocabulary.top_log_probs(hidden, width)
        else:
            weight, scales = matrices.matrix(self.tensors, self._lm_head)
            log_p, tokens, _ = self.kernels.lm_head_log_probs(hidden, weight, None, width, scales)
        if "d2t" in self.tensors:
            tokens = tokens + self.tensors["d2t"][tokens]
        return log_p, tokens
