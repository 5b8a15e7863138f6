"""Every Triton kernel with the arguments and block sizes that its launcher passes for a model's shape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import aot_compile
import torch

from specmemo_kernels.backends import kernel_config as config
from specmemo_kernels.backends.kernel_target import TARGETS
from specmemo_kernels.backends.triton import attention, lm_head, paged, runtime, verify
from specmemo_kernels.ops.weight_codes import GROUP

KV_TYPES = {None: 0, "int8": 1, "fp8": 2}
NO_SCALES = {"k_scales_ptr": None, "v_scales_ptr": None}
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
#: Kernels that must use the target's matrix instructions.
MATRIX_KERNELS = ("tree_attention", "lm_head")


@dataclass(frozen=True)
class Shape:
    """A model's attention and one sequence's nodes."""

    head_dim: int = 128
    nodes: int = 1
    group: int = 4
    dtype: torch.dtype = torch.float16
    page_size: int = 16
    hidden_size: int = 4096
    kv_dtype: str | None = None  # of quantised pages


@dataclass(frozen=True)
class Job:
    """One kernel to compile. ``compile`` takes the name of a target."""

    kernel: str
    shape: Shape
    config: config.KernelConfig
    compile: Callable[[str], aot_compile.Resources]

    def row(self, target: str) -> dict[str, Any]:
        """The shape, block sizes and resources of the kernel on ``target``, and its :func:`problem`."""
        used = self.compile(target)
        shape = {"head_dim": self.shape.head_dim, "nodes": self.shape.nodes, "gqa": self.shape.group}
        return {
            "target": target, "kernel": self.kernel, **shape, "dtype": TYPES[self.shape.dtype],
            "kv_dtype": self.shape.kv_dtype,
            "config": asdict(self.config), **asdict(used), "problem": problem(target, self.kernel, self.shape, used),
        }  # fmt: skip


def problem(target: str, kernel: str, shape: Shape, used: aot_compile.Resources) -> str:
    """The kernel's fault, or "": it spills, exceeds shared memory, or multiplies without matrix instructions."""
    device = TARGETS[target]
    if used.spills or used.stack_bytes:
        return f"{used.stack_bytes} bytes of stack, {used.spills} spills"
    if used.shared_bytes > device.shared_bytes:
        return f"{used.shared_bytes} bytes of shared memory, the limit is {device.shared_bytes}"
    needs_matrix = device.matrix and shape.dtype != torch.float32 and kernel.startswith(MATRIX_KERNELS)
    return "no matrix instructions" if needs_matrix and not used.matrix else ""


def attention_job(target: str, shape: Shape, kernel: str = "tree_attention", **flags: bool) -> Job:
    """The split kernel; ``flags`` override its constexpr switches (``DIRECT``, ``HAS_WINDOW``, ...)."""
    classes = config.attention_configs(
        target, shape.head_dim, shape.head_dim, shape.group, shape.dtype, quantised=shape.kv_dtype is not None
    )
    chosen = next(c for c in classes if shape.nodes <= c.max_nodes)
    return Job(kernel, shape, chosen, lambda name: compile_attention(name, shape, chosen, **flags))


def compile_attention(target: str, shape: Shape, chosen: config.KernelConfig, **flags: bool) -> aot_compile.Resources:
    """Compile the split kernel, once for all node counts with the same block sizes."""
    return _compile_attention(target, replace(shape, nodes=0), chosen, tuple(flags.items()))


@functools.cache
def _compile_attention(
    target: str, shape: Shape, chosen: config.KernelConfig, flags: tuple[tuple[str, bool], ...]
) -> aot_compile.Resources:
    switches = {"HAS_TREE": True, "HAS_WINDOW": False, "HAS_SOFTCAP": False, "HAS_SINKS": False, "DIRECT": False}
    switches |= dict(flags)
    element = f"*{TYPES[shape.dtype]}"
    types = dict.fromkeys(
        ("out_ptr", "q_ptr", "k_new_ptr", "v_new_ptr", "k_pages_ptr", "v_pages_ptr", "sinks_ptr"), element
    )
    types |= dict.fromkeys(("lse_ptr", "part_total_ptr", "part_peak_ptr", "part_ptr"), "*fp32")
    types |= page_types(shape)
    types |= dict.fromkeys(("block_table_ptr", "seq_lens_ptr", "qo_indptr_ptr"), "*i32")
    types |= {"tree_mask_ptr": "*i64", "scale": "fp32", "softcap": "fp32"}
    strides = [f"stride_{name}" for name in ("qn", "qh", "kn", "kh", "vn", "vh")]
    counts = ["num_kv_heads", "max_pages", "mask_words", "num_splits", "min_nodes", "max_nodes", "window"]
    types |= dict.fromkeys([*strides, *counts], "i32")
    dim = config.block_dim(shape.head_dim)
    constants: dict[str, Any] = {
        "GROUP": shape.group, "DK": shape.head_dim, "DV": shape.head_dim, "BLOCK_DK": dim, "BLOCK_DV": dim,
        "PAGE_SIZE": shape.page_size, "BY_HEAD": True, "BLOCK_M": chosen.block_m, "BLOCK_N": chosen.block_n,
        "SPLIT_SIZE": chosen.split_size, "UPCAST": False, "KV": KV_TYPES[shape.kv_dtype], **switches,
    }  # fmt: skip
    constants |= {} if switches["HAS_SINKS"] else {"sinks_ptr": None}
    constants |= NO_SCALES if shape.kv_dtype is None else {}
    constants |= {} if switches["HAS_TREE"] else {"tree_mask_ptr": None}
    options = runtime.compile_options(chosen)
    return aot_compile.compile_kernel(
        attention.tree_attention_kernel, types, constants, target, options, frozenset(strides)
    )


def page_types(shape: Shape) -> dict[str, str]:
    """Triton's types of the pointers to pages and scales."""
    page = {None: TYPES[shape.dtype], "int8": "i8", "fp8": "u8"}[shape.kv_dtype]
    return {f"{side}_pages_ptr": f"*{page}" for side in "kv"} | {f"{side}_scales_ptr": "*fp32" for side in "kv"}


def merge_job(shape: Shape) -> Job:
    """The kernel that merges splits."""
    types = {"out_ptr": f"*{TYPES[shape.dtype]}", "tree_mask_ptr": "*i64"}
    types |= dict.fromkeys(("lse_ptr", "part_ptr", "part_total_ptr", "part_peak_ptr"), "*fp32")
    types |= dict.fromkeys(("seq_lens_ptr", "qo_indptr_ptr"), "*i32")
    counts = ("num_qo_heads", "batch", "mask_words", "num_splits", "window")
    types |= dict.fromkeys((*counts, "nodes_1", "nodes_2", "split_1", "split_2", "split_3"), "i32")
    constants = {
        "sinks_ptr": None, "DV": shape.head_dim, "BLOCK_DV": config.block_dim(shape.head_dim),
        "BLOCK_S": attention.MERGE_SPLITS, "BLOCK_B": 64, "HAS_TREE": True, "HAS_WINDOW": False, "HAS_SINKS": False,
    }  # fmt: skip
    return _simple("merge_splits", attention.merge_splits_kernel, shape, config.MERGE_CONFIG, types, constants)


def paged_jobs(shape: Shape) -> Iterator[Job]:
    """The kernels of ``append_paged_kv`` and ``commit_paged_kv``."""
    constants: dict[str, Any] = {"PAGE_SIZE": shape.page_size, "BY_HEAD": True, "KV": KV_TYPES[shape.kv_dtype]}
    constants |= paged.copy_blocks(8, shape.head_dim, shape.head_dim)
    constants |= NO_SCALES if shape.kv_dtype is None else {}
    for name, kernel in (("append", paged.append_paged_kv_kernel), ("commit", paged.commit_paged_kv_kernel)):
        types = {}
        for argument in kernel.arg_names:
            metadata = argument.startswith(("block_table", "seq_lens", "qo_indptr", "accept"))
            types[argument] = (
                "i32" if not argument.endswith("_ptr") else "*i32" if metadata else f"*{TYPES[shape.dtype]}"
            )
        types |= page_types(shape)
        extra = {"BLOCK_B": 64} if name == "append" else {}
        yield _simple(f"{name}_paged_kv", kernel, shape, config.COPY_CONFIG, types, constants | extra)


def verify_job(shape: Shape) -> Job:
    """The kernel of ``verify_tree_greedy``."""
    types = dict.fromkeys(verify.verify_tree_greedy_kernel.arg_names, "*i32") | {"places": "i32"}
    types |= dict.fromkeys(("bonus_token_ptr", "draft_ptr", "target_ptr"), "*i64")
    kernel = verify.verify_tree_greedy_kernel
    return _simple("verify_tree_greedy", kernel, shape, config.VERIFY_CONFIG, types, {"BLOCK_T": 64})


def lm_head_job(target: str, shape: Shape, k: int, group: int = 0) -> Job:
    """The K best tokens of each vocabulary block; ``group``: elements per scale of 4-bit weights, 0: not quantised."""
    element = f"*{TYPES[shape.dtype]}"
    chosen = config.lm_head_config(target, shape.nodes, shape.dtype)
    types = {"keys_ptr": "*i64", "hidden_ptr": element, "weight_ptr": "*u8" if group else element}
    types |= {"scales_ptr": "*fp16"}
    types |= dict.fromkeys(("stride_hidden", "rows", "vocabulary"), "i32")
    constants = {
        "bias_ptr": None, "HIDDEN": shape.hidden_size, "K": k, "HAS_BIAS": False, "GROUP": group,
        "BLOCK_M": chosen.block_m, "BLOCK_V": chosen.block_n, "BLOCK_H": chosen.block_k, "UPCAST": False,
    }  # fmt: skip
    constants |= {} if group else {"scales_ptr": None}
    name = f"lm_head_block{'_codes' if group else ''}_top{k}"
    return _simple(name, lm_head.lm_head_block_kernel, shape, chosen, types, constants, frozenset(["stride_hidden"]))


def reduce_job(shape: Shape, k: int) -> Job:
    """The kernel that merges the K best tokens of several blocks."""
    element = f"*{TYPES[shape.dtype]}"
    reduce = config.LM_HEAD_REDUCE_CONFIG
    types = {"out_ptr": "*i64", "values_ptr": element, "tokens_ptr": "*i64", "keys_ptr": "*i64", "count": "i32"}
    constants = {"K": k, "BLOCK": reduce.block_n, "LAST": True}
    return _simple(f"reduce_top{k}", lm_head.lm_head_reduce_kernel, shape, reduce, types, constants)


def _simple(
    name: str, kernel: Any, shape: Shape, chosen: config.KernelConfig, types: dict[str, str], constants: dict[str, Any],
    aligned: frozenset[str] = frozenset(),
) -> Job:  # fmt: skip
    def compile_for(target: str) -> aot_compile.Resources:
        options = runtime.compile_options(chosen)
        return aot_compile.compile_kernel(kernel, types, constants, target, options, aligned)

    return Job(name, shape, chosen, compile_for)


def all_jobs(
    target: str, dtype: torch.dtype, head_dims: list[int], nodes: list[int], groups: list[int]
) -> Iterator[Job]:
    """Every kernel for a target, over the given model shapes; a prefill chunk is 256 rows without a tree mask."""
    for head_dim in head_dims:
        for group in groups:
            for count in nodes:
                shape = Shape(head_dim, count, group, dtype)
                yield attention_job(target, shape)
                yield attention_job(target, shape, "tree_attention_direct", DIRECT=True)
            chunk = Shape(head_dim, 256, group, dtype)
            yield attention_job(target, chunk, "tree_attention_chunk", HAS_TREE=False)
        shape = Shape(head_dim, nodes[-1], groups[-1], dtype)
        extras = {"HAS_WINDOW": True, "HAS_SOFTCAP": True, "HAS_SINKS": True, "DIRECT": True}
        for count in (nodes[0], nodes[-1]):
            yield attention_job(target, replace(shape, nodes=count), "tree_attention_extras", **extras)
        chunk = replace(shape, nodes=256)
        yield attention_job(target, chunk, "tree_attention_chunk_extras", **extras, HAS_TREE=False)
        yield merge_job(shape)
        yield from paged_jobs(shape)
    yield verify_job(Shape(dtype=dtype))
    for rows in (*nodes, 256):
        for k in (1, 10):
            shape = Shape(nodes=rows, dtype=dtype)
            yield from (lm_head_job(target, shape, k), lm_head_job(target, shape, k, GROUP), reduce_job(shape, k))
