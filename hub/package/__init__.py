"""Kernels for speculative decoding over a paged KV cache: Triton on GPUs, C++ on a CPU, plain torch anywhere.

``tree_attention_forward`` is an attention function of transformers. The operators take a step's trees packed in one
row; their docstrings have shapes and meaning. ``unavailable(backend)`` says why a backend can't run here.
"""

from __future__ import annotations

from specmemo_kernels.ops import (
    BackendUnavailable,
    append_paged_kv,
    backend_name,
    commit_paged_kv,
    decompress,
    gated_mlp,
    grouped_linear,
    linear,
    lm_head_argmax,
    lm_head_log_probs,
    lm_head_topk,
    rms_norm,
    tree_attention,
    unavailable,
    verify_tree_greedy,
    weight_codes,
)
from specmemo_kernels.tree.draft_tree import DraftTree

from . import layers
from .attention import tree_attention_forward

#: transformers 5.20 to 5.24 refuses a kernel without a function of this name, then takes the one that was asked for.
flash_attn_forward = tree_attention_forward

__all__ = [
    "BackendUnavailable",
    "DraftTree",
    "append_paged_kv",
    "backend_name",
    "commit_paged_kv",
    "decompress",
    "gated_mlp",
    "grouped_linear",
    "layers",
    "linear",
    "lm_head_argmax",
    "lm_head_log_probs",
    "lm_head_topk",
    "rms_norm",
    "tree_attention",
    "tree_attention_forward",
    "unavailable",
    "verify_tree_greedy",
    "weight_codes",
]
