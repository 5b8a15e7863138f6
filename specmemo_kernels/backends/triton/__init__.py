"""The operators as Triton kernels, one source for CUDA and HIP; linear layers and norms are torch's own.

Names, positional arguments, shapes and meaning are those of the package's operators. Importing this package needs
triton. Tensors must be on a GPU, or on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from specmemo_kernels.backends.layers import gated_mlp, linear, rms_norm
from specmemo_kernels.backends.triton.attention import kernel_configs, split_workspace, tree_attention
from specmemo_kernels.backends.triton.lm_head import lm_head_argmax, lm_head_topk
from specmemo_kernels.backends.triton.paged import append_paged_kv, commit_paged_kv
from specmemo_kernels.backends.triton.runtime import check_device
from specmemo_kernels.backends.triton.verify import verify_tree_greedy

__all__ = [
    "append_paged_kv",
    "check_device",
    "commit_paged_kv",
    "gated_mlp",
    "kernel_configs",
    "linear",
    "lm_head_argmax",
    "lm_head_topk",
    "rms_norm",
    "split_workspace",
    "tree_attention",
    "verify_tree_greedy",
]
