"""The operators as Triton kernels, one source for CUDA and HIP.

The functions have the names and positional arguments of the other backends; shapes and meaning are those of the
package's operators. Importing this package needs triton (``ImportError`` without it). Tensors must be on a GPU,
except in Triton's interpreter (``TRITON_INTERPRET=1``), which runs the same kernels on the CPU.
"""

from specmemo_kernels.backends.triton.attention import kernel_configs, split_workspace, tree_attention
from specmemo_kernels.backends.triton.lm_head import lm_head_argmax, lm_head_topk
from specmemo_kernels.backends.triton.paged import append_paged_kv, commit_paged_kv
from specmemo_kernels.backends.triton.runtime import check_device
from specmemo_kernels.backends.triton.verify import verify_tree_greedy

__all__ = [
    "append_paged_kv",
    "check_device",
    "commit_paged_kv",
    "kernel_configs",
    "lm_head_argmax",
    "lm_head_topk",
    "split_workspace",
    "tree_attention",
    "verify_tree_greedy",
]
