"""vLLM attention backend: ``tree_attention`` over vLLM's KV blocks, for chunks, single tokens and draft trees.

A request's own rows are read from the layer's output, so only committed tokens are read from blocks. Rows of chunks
are appended to the blocks; rows of draft trees are kept in scratch until the step's acceptance is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from specmemo_kernels import ops
from specmemo_kernels.integrations.vllm.options import Options
from specmemo_kernels.integrations.vllm.pages import block_pages, page_table
from specmemo_kernels.integrations.vllm.step import PackedRequests, StepTrees, TreeScratch

Tensor = torch.Tensor


@dataclass
class TreeAttentionMetadata(AttentionMetadata):
    """What all layers of a KV cache group share in a step.

    Attributes:
        num_tokens: rows of the step, padding excluded.
        block_table: ``[B, max_blocks]`` int32 page ids (:mod:`pages`).
        context_lens: ``[B]`` int32, tokens in blocks before the step.
        qo_indptr: ``[B + 1]`` int32.
        step, scratch: set by the model runner in a step with draft trees.
    """

    num_tokens: int
    block_table: Tensor
    context_lens: Tensor
    qo_indptr: Tensor
    max_query_len: int
    max_seq_len: int
    step: StepTrees | None = None
    scratch: TreeScratch | None = None

    def table_and_lengths(self, requests: PackedRequests) -> tuple[Tensor, Tensor, Tensor]:
        """``block_table``, ``seq_lens`` and ``qo_indptr`` of these requests, for the operators that write pages."""
        return (
            requests.of_requests(self.block_table),
            requests.of_requests(self.context_lens),
            requests.qo_indptr,
        )


class TreeAttentionBackend(AttentionBackend):
    """``--attention-backend CUSTOM``."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]  # the model's

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeAttentionMetadataBuilder]:
        return TreeAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False  # the order inside a block is ours


class TreeAttentionMetadataBuilder(AttentionMetadataBuilder[TreeAttentionMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TreeAttentionMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise ValueError("attention backend CUSTOM (specmemo) is causal; use vLLM's own backend for this model")
        qo_indptr = common.query_start_loc
        return TreeAttentionMetadata(
            num_tokens=int(common.query_start_loc_cpu[-1]),
            block_table=page_table(common.block_table_tensor),
            context_lens=common.seq_lens - (qo_indptr[1:] - qo_indptr[:-1]),
            qo_indptr=qo_indptr,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
        )


class TreeAttentionImpl(AttentionImpl[TreeAttentionMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> None:
        refused = {
            "ALiBi slopes": alibi_slopes is not None,
            f"attention type {attn_type}": attn_type != AttentionType.DECODER,
            f"a KV cache shared with layer {kv_sharing_target_layer_name}": kv_sharing_target_layer_name is not None,
            f"KV cache dtype {kv_cache_dtype}": kv_cache_dtype not in TreeAttentionBackend.supported_kv_cache_dtypes,
            f"arguments {', '.join(unknown)}": bool(unknown),
        }
        for what, asked in refused.items():
            if asked:
                raise NotImplementedError(
                    f"attention backend CUSTOM (specmemo) doesn't support {what}; use vLLM's own backend for this model"
                )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self._backend = Options.of(get_current_vllm_config()).backend
        self._window, self._softcap, self._sinks = sliding_window, logits_soft_cap or None, sinks

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TreeAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Fill ``output`` ``[N, num_heads, head_size]``; query, key and value are ``[N, heads, head_size]``."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("attention backend CUSTOM (specmemo) doesn't quantise its output")
        if attn_metadata is None:  # vLLM's warm-up
            return output.zero_()
        meta, step = attn_metadata, attn_metadata.step
        rows = slice(0, meta.num_tokens)
        query, key, value = query[rows], key[rows], value[rows]
        if value.shape[2] != self.head_size:
            raise NotImplementedError(
                f"attention backend CUSTOM (specmemo) doesn't support values of {value.shape[2]} elements "
                f"beside keys of {self.head_size}; use vLLM's own backend for this model"
            )
        k_pages, v_pages = block_pages(kv_cache)
        kernels = ops.kernels(self._backend, query.device)
        # Appended first: with prefix caching, requests of the same step read blocks that others of them write.
        chunks = None if step is None else step.chunks
        if step is None:
            kernels.append_paged_kv(
                key, value, k_pages, v_pages, meta.block_table, meta.context_lens, meta.qo_indptr, None, None
            )
        elif chunks is not None:
            rows_of = chunks.of_rows
            kernels.append_paged_kv(
                rows_of(key), rows_of(value), k_pages, v_pages, *meta.table_and_lengths(chunks), None, None
            )
        out, _ = kernels.tree_attention(
            query, key, value, k_pages, v_pages, meta.block_table, meta.context_lens, meta.qo_indptr,
            None if step is None else step.tree_mask, self.scale, self._window, self._softcap, self._sinks,
            meta.max_query_len, meta.max_seq_len, False, None, None, None,
        )  # fmt: skip
        output[rows].view_as(out).copy_(out)
        if step is not None:
            assert meta.scratch is not None
            meta.scratch.store(layer.layer_name, step.trees.of_rows(key), step.trees.of_rows(value))
        return output
