"""Draft trees of drafters that read hidden states (EAGLE-1 to 3, Clover-2, DFlash), with their layers in vLLM's blocks.

A drafter's layers are layers of the model to vLLM: it plans their blocks, and a request's block table is theirs too.
So preemption and prefix caching need nothing more. A cached block's last pair has the next token of the request that
wrote it; that may cost an accepted draft, never a right token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.drafting.base import POST_NORM, DraftRows
from specmemo_kernels.drafting.feature_drafter import feature_drafter
from specmemo_kernels.drafting.published import PublishedDrafter, check_target
from specmemo_kernels.drafting.vocabulary import TargetVocabulary
from specmemo_kernels.integrations.vllm.backend import TreeAttentionBackend
from specmemo_kernels.integrations.vllm.options import Options, given_tree
from specmemo_kernels.integrations.vllm.pages import block_pages
from specmemo_kernels.integrations.vllm.step import CommittedRows
from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor


class DraftLayer(torch.nn.Module, AttentionLayerBase):
    """A drafter's layer as vLLM's block planning sees it.

    Attributes:
        kv_cache: bound by vLLM, ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]``.
    """

    kv_cache: Tensor

    def __init__(self, sizes: LayerKV, num_qo_heads: int) -> None:
        super().__init__()
        self._sizes, self.num_heads = sizes, num_qo_heads

    def get_attn_backend(self) -> type[TreeAttentionBackend]:
        return TreeAttentionBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> FullAttentionSpec:
        sizes = self._sizes
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=sizes.num_kv_heads,
            head_size=sizes.head_dim,
            head_size_v=sizes.v_head_dim,
            dtype=sizes.dtype,
        )


@dataclass(frozen=True)
class DrafterPool:
    """What a drafter uses of a page pool: its layers' pages, by layer index; never quantised."""

    k_pages: dict[int, Tensor]
    v_pages: dict[int, Tensor]
    k_scales: dict[int, None]
    v_scales: dict[int, None]
    device: torch.device


class FeatureTrees:
    """A drafter that reads hidden states.

    Args:
        published: its files.
        options: of the user.
        vllm_config, model: vLLM's. model: with the embedding and lm_head that the drafter uses.
        nodes: of a tree, the root included.
    """

    def __init__(self, published: PublishedDrafter, options: Options, vllm_config: Any, model: Any, nodes: int) -> None:
        config, layers = vllm_config.model_config, get_layers_from_vllm_config(vllm_config, Attention)
        check_target(published, config.get_hidden_size(), config.get_vocab_size())
        tensors = published.read(config.dtype, next(model.parameters()).device, options.head_bits)
        vocabulary = _vocabulary(model, config)
        self._first, self._model = len(layers), model
        self._drafter = feature_drafter(published.config, tensors, vocabulary, len(layers), options.backend)
        self._tree: Trees
        if options.tree is None:
            self._tree = self._drafter.spec.budget(nodes, self._drafter.max_depth)
        else:
            self._tree = given_tree(options.tree, nodes, self._drafter.max_depth)
        self.max_nodes = self._tree.size
        self.layers, self.num_qo_heads = self._drafter.layers, self._drafter.num_qo_heads
        read = self._drafter.feature_ids
        self.aux_layers = tuple(sorted({index for index in read if index != POST_NORM}))  # the order of vLLM's list
        self._features = [POST_NORM if index == POST_NORM else self.aux_layers.index(index) for index in read]

    def propose(self, rows: CommittedRows, drafting: list[int]) -> list[tuple[list[int], DraftTree]]:
        batch = rows.chunk_batch()
        pool: Any = self._pool(rows.draft_caches)
        states = self._drafter.advance(batch, rows.features(self._features), batch.qo_indptr[1:].long() - 1, pool)
        if not drafting:
            return []
        index = torch.tensor(drafting, device=states.device)
        seq_lens = batch.seq_lens + batch.qo_indptr[1:] - batch.qo_indptr[:-1]
        drafted = self._drafter.draft(
            DraftRows(
                pool,
                rows.roots[index],
                states[index],
                seq_lens[index],
                batch.block_table[index],
                batch.max_seq_len + batch.max_qo_len,
            ),
            self._tree,
        )
        tokens, parents = drafted.tokens[:, 1:].clamp(min=0).tolist(), drafted.parents.tolist()
        ranks = (0,) * drafted.tokens.shape[1]
        return [(own, DraftTree(tuple(above), ranks)) for own, above in zip(tokens, parents, strict=True)]

    def _pool(self, caches: list[Tensor]) -> DrafterPool:
        pages = {self._first + i: block_pages(cache) for i, cache in enumerate(caches)}
        none = dict.fromkeys(pages)
        keys, values = {i: k for i, (k, _) in pages.items()}, {i: v for i, (_, v) in pages.items()}
        return DrafterPool(keys, values, none, none, caches[0].device)


def _vocabulary(model: Any, config: Any) -> TargetVocabulary:
    compute: Callable[[Tensor], Tensor] = model.compute_logits

    def top_log_probs(hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, tokens = compute(hidden).float().log_softmax(dim=-1).topk(k, dim=-1)
        return values, tokens

    return TargetVocabulary(model.embed_input_ids, top_log_probs, config.get_vocab_size(), config.dtype)
