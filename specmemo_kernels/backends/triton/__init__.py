"""The operators as Triton kernels, one source for CUDA and HIP; products of many rows are torch's own.

Names, positional arguments, shapes and meaning are those of the package's operators. Importing this package needs
triton. Tensors must be on a GPU, or on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from specmemo_kernels.backends.layers import decompress, grouped_linear
from specmemo_kernels.backends.triton.attention import fixed_workspace, kernel_configs, tree_attention
from specmemo_kernels.backends.triton.layers import (
    add_rms_norm,
    few_rows,
    gated_mlp,
    rms_norm,
    rotary,
    rotary_pair,
    rotary_stored,
)
from specmemo_kernels.backends.triton.lm_head import lm_head_argmax, lm_head_log_probs, lm_head_topk
from specmemo_kernels.backends.triton.paged import append_paged_kv, commit_paged_kv
from specmemo_kernels.backends.triton.products import linear, linears
from specmemo_kernels.backends.triton.runtime import check_device
from specmemo_kernels.backends.triton.verify import verify_tree_greedy

__all__ = [
    "add_rms_norm",
    "append_paged_kv",
    "check_device",
    "commit_paged_kv",
    "decompress",
    "few_rows",
    "fixed_workspace",
    "gated_mlp",
    "grouped_linear",
    "kernel_configs",
    "linear",
    "linears",
    "lm_head_argmax",
    "lm_head_log_probs",
    "lm_head_topk",
    "rms_norm",
    "rotary",
    "rotary_pair",
    "rotary_stored",
    "tree_attention",
    "verify_tree_greedy",
]
