"""DFlash with DDTree: one pass over a block of masks predicts every depth, from which the best tree is chosen.

The layers' keys and values of accepted tokens are projections of the target's states alone.
"""

from __future__ import annotations

import torch

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import DraftRows
from specmemo_kernels.drafting.decoder_layer import BeamAttention
from specmemo_kernels.drafting.growth import Children, grow
from specmemo_kernels.drafting.published_config import DFlashConfig
from specmemo_kernels.drafting.tensor_drafter import TensorDrafter
from specmemo_kernels.forward.batch import DraftedTrees, TreeBatch
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor


class DFlashDrafter(TensorDrafter[DFlashConfig]):
    """DFlash. Implements :class:`specmemo_kernels.drafting.base.FeatureDrafter`.

    Its distributions don't depend on drafted tokens, so a tree of n nodes from a beam of n - 1 is DDTree's: the n best
    of all sums of log-probabilities. Arguments as of :class:`TensorDrafter`.
    """

    @property
    def state_size(self) -> int:
        """No state: drafts start from the pages and the root."""
        return 0

    def _feature_ids(self, target_layers: int) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def advance(self, batch: TreeBatch, features: Tensor, keep: Tensor, pool: PagedKVPool) -> Tensor:
        kernels = self.kernels
        context = self.norm("hidden_norm", self.linear("fc", features))
        rotary = self.rotary(batch.positions, context.dtype)
        for layer in self.decoder:
            i = layer.index
            kernels.append_paged_kv(
                *layer.key_value(kernels, context, rotary), pool.k_pages[i], pool.v_pages[i], *batch.append_metadata,
                pool.k_scales[i], pool.v_scales[i],
            )  # fmt: skip
        return context.new_empty(len(keep), 0)

    def draft(self, rows: DraftRows, tree: Trees) -> DraftedTrees:
        log_p, tokens = self._predictions(rows, tree)

        def first(width: int) -> Children:
            return log_p[:, :1], tokens[:, :1]

        def expand(depth: int, parent: Tensor, _: Tensor) -> Children:
            shape = -1, parent.shape[1], -1
            return log_p[:, depth : depth + 1].expand(shape), tokens[:, depth : depth + 1].expand(shape)

        return grow(rows.roots, tree, first, expand)

    def _predictions(self, rows: DraftRows, tree: Trees) -> Children:
        """The best ``tree.width`` tokens of each depth, ``[B, max_depth, width]``."""
        sequences, size, depth = len(rows.roots), self.config.block_size, tree.max_depth
        if not depth:
            return rows.states.new_empty(sequences, 0, 1), rows.roots.new_empty(sequences, 0, 1)
        masks = torch.full_like(rows.roots, self.config.mask_token_id)[:, None].expand(-1, size - 1)
        block = torch.cat([rows.roots[:, None], masks], dim=1).flatten()
        positions = (rows.seq_lens.long()[:, None] + torch.arange(size, device=self.device)).flatten()
        hidden, kernels = self.vocabulary.embed(block), self.kernels
        rotary, attention = self.rotary(positions, hidden.dtype), BeamAttention(rows, self.backend, both_ways=True)
        for layer in self.decoder:
            x = layer.norm(kernels, "input_layernorm", hidden)
            hidden = layer(kernels, x, hidden, rotary, attention)
        predicting = hidden.view(sequences, size, -1)[:, 1 : depth + 1].flatten(0, 1)
        log_p, tokens = self.vocabulary.top_log_probs(self.norm("norm", predicting), tree.width)
        return log_p.view(sequences, depth, -1), tokens.view(sequences, depth, -1)
