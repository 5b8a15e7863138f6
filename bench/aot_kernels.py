"""Every Triton kernel with the arguments and block sizes that its launcher passes for a model's shape."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import aot_compile
import torch
from gpu_model import GPUS, Case, Kernel, bytes_in_flight, predicted_fraction

from specmemo_kernels.backends import kernel_config as config
from specmemo_kernels.backends.kernel_target import TARGETS
from specmemo_kernels.backends.triton import attention, layers, lm_head, paged, products, runtime, verify
from specmemo_kernels.ops.weight_codes import GROUP

KV_TYPES = {None: 0, "int8": 1, "fp8": 2}
NO_SCALES = {"k_scales_ptr": None, "v_scales_ptr": None}
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
#: Kernels that must use the target's matrix instructions.
MATRIX_KERNELS = ("tree_attention", "lm_head", "linear")


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
    """One kernel to compile. ``compile`` takes the name of a target; ``softcap``: scores have two exponentials."""

    kernel: str
    shape: Shape
    config: config.KernelConfig
    compile: Callable[[str], aot_compile.Resources]
    softcap: bool = False

    def row(self, target: str) -> dict[str, Any]:
        """The shape, block sizes and resources of the kernel on ``target``, and its :func:`problem`."""
        used = self.compile(target)
        shape = {"head_dim": self.shape.head_dim, "nodes": self.shape.nodes, "gqa": self.shape.group}
        row = {
            "target": target, "kernel": self.kernel, **shape, "dtype": TYPES[self.shape.dtype],
            "kv_dtype": self.shape.kv_dtype, "page_size": self.shape.page_size,
            "config": asdict(self.config), **asdict(used),
        }  # fmt: skip
        del row["loops"]
        if self.kernel.startswith("tree_attention"):
            row |= attention_columns(target, self.shape, self.config, used)
            row["exp_per_score"] /= 1 + self.softcap
        return row | {"problem": problem(target, self.kernel, self.shape, used, row)}


def attention_columns(
    target: str, shape: Shape, chosen: config.KernelConfig, used: aot_compile.Resources
) -> dict[str, Any]:
    """Figures of the loop over committed tokens, and the predicted share of copy bandwidth.

    Of 8 sequences of 8,192 tokens (``predicted_fraction``), and of one (``predicted_alone``).
    """
    gpu, threads = GPUS[target], chosen.num_warps * (64 if target.startswith("gfx9") else 32)
    committed, *others = (loop for loop in used.loops if loop.exponentials)
    own = others[0] if others else committed  # peeled
    case = Case(8, 8192, shape.nodes, 8, shape.group, shape.head_dim, 1 if shape.kv_dtype else shape.dtype.itemsize)
    kernel = Kernel(chosen, used.registers, used.shared_bytes, committed, own)
    # A thread has a whole number of scores, and at least one decay of a row.
    scores = max(1, chosen.block_m * chosen.block_n // threads)
    return {
        "loop_instructions": committed.instructions,
        "exp_per_score": (committed.exponentials - 1) // scores * scores * threads / (chosen.block_m * chosen.block_n),
        "load_bits": committed.load_bits,
        "nodes_load_bits": own.load_bits,
        "programs_per_sm": gpu.programs(used.registers, used.shared_bytes, chosen.num_warps),
        "bytes_in_flight": bytes_in_flight(kernel, gpu, case),
        "predicted_fraction": round(predicted_fraction(kernel, gpu, case), 3),
        "predicted_alone": round(predicted_fraction(kernel, gpu, replace(case, batch=1)), 3),
    }


def problem(target: str, kernel: str, shape: Shape, used: aot_compile.Resources, row: Mapping[str, Any]) -> str:
    """The kernel's fault, or "": it spills, exceeds shared memory, multiplies without matrix instructions, computes
    scores more than once, loads keys in narrow pieces, or fits a multiprocessor less often than its configuration says.
    """
    device = TARGETS[target]
    if used.spills or used.stack_bytes:
        return f"{used.stack_bytes} bytes of stack, {used.spills} spills"
    if used.shared_bytes > device.shared_bytes:
        return f"{used.shared_bytes} bytes of shared memory, the limit is {device.shared_bytes}"
    needs_matrix = device.matrix and shape.dtype != torch.float32 and kernel.startswith(MATRIX_KERNELS)
    if needs_matrix and not used.matrix:
        return "no matrix instructions"
    # gfx1100 has the registers for heads of 128 only if several waves compute the same rows.
    if row.get("exp_per_score", 1) > 1.1 and (device.matrix != "wmma" or shape.head_dim <= 64):
        return f"{row['exp_per_score']:.2f} exponentials per score, the limit is 1.1"
    block, threads = row["config"], row["config"]["num_warps"] * (64 if target.startswith("gfx9") else 32)
    for column, keys in (("load_bits", "block_n"), ("nodes_load_bits", "nodes_n")):
        bits = min(64 if shape.kv_dtype else 128, block[keys] * shape.head_dim * shape.dtype.itemsize * 8 // threads)
        if row.get(column, bits) < bits:
            return f"{column} is {row[column]}, the limit is {bits}"
    if row.get("programs_per_sm", 1) < block["resident"] and not kernel.endswith("direct"):
        return f"{row['programs_per_sm']} programs fit a multiprocessor, the configuration says {block['resident']}"
    return ""


def attention_job(target: str, shape: Shape, kernel: str = "tree_attention", **flags: bool) -> Job:
    """The split kernel; ``flags`` override its constexpr switches (``DIRECT``, ``HAS_WINDOW``, ...)."""
    classes = config.attention_configs(
        target, shape.head_dim, shape.head_dim, shape.group, shape.dtype, quantised=shape.kv_dtype is not None
    )
    chosen = next(c for c in classes if shape.nodes <= c.max_nodes)
    chosen = replace(chosen, block_n=chosen.direct_n if flags.get("DIRECT") else chosen.block_n)
    softcap = flags.get("HAS_SOFTCAP", False)
    return Job(kernel, shape, chosen, lambda name: compile_attention(name, shape, chosen, **flags), softcap)


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
        "NODES_N": chosen.nodes_n,
        "SPLIT_SIZE": chosen.split_size, "FIXED_SPLITS": not chosen.resident, "UPCAST": False,
        "ROUND_BITS": runtime.rounds_by_bits(target, shape.dtype),
        "KV": KV_TYPES[shape.kv_dtype], "OVERLAPPED": TARGETS[target].overlaps, **switches,
    }  # fmt: skip
    constants |= {} if switches["HAS_SINKS"] else {"sinks_ptr": None}
    constants |= NO_SCALES if shape.kv_dtype is None else {}
    constants |= {} if switches["HAS_TREE"] else {"tree_mask_ptr": None}
    options = runtime.compile_options(chosen, target)
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
    types |= dict.fromkeys(counts, "i32")
    constants = {
        "sinks_ptr": None, "DV": shape.head_dim, "BLOCK_DV": config.block_dim(shape.head_dim),
        "BLOCK_S": attention.MERGE_SPLITS, "BLOCK_B": 64, "SPLIT_SIZE": config.SPLIT_UNIT, "FIXED_SPLITS": False,
        "HAS_TREE": True, "HAS_WINDOW": False, "HAS_SINKS": False,
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


def lm_head_job(target: str, shape: Shape, k: int, group: int = 0, log_probs: bool = False) -> Job:
    """The K best tokens of each vocabulary block, and with ``log_probs`` its log-sum-exp.

    ``group``: elements per scale of 4-bit weights, 0: not quantised.
    """
    element = f"*{TYPES[shape.dtype]}"
    chosen = config.lm_head_config(target, shape.nodes, shape.dtype)
    types = {"keys_ptr": "*i64", "lse_ptr": "*fp32", "hidden_ptr": element, "weight_ptr": "*u8" if group else element}
    types |= {"scales_ptr": "*fp16"}
    types |= dict.fromkeys(("stride_hidden", "rows", "vocabulary"), "i32")
    constants = {
        "bias_ptr": None, "HIDDEN": shape.hidden_size, "K": k, "HAS_BIAS": False, "HAS_LSE": log_probs, "GROUP": group,
        "BLOCK_M": chosen.block_m, "BLOCK_V": chosen.block_n, "BLOCK_H": chosen.block_k, "UPCAST": False,
    }  # fmt: skip
    constants |= {} if group else {"scales_ptr": None}
    name = f"lm_head_block{'_codes' if group else ''}{'_log_probs' if log_probs else ''}_top{k}"
    return _simple(name, lm_head.lm_head_block_kernel, shape, chosen, types, constants, frozenset(["stride_hidden"]))


def coded_linear_job(target: str, shape: Shape) -> Job:
    """A linear layer of ``hidden_size`` inputs in 4-bit codes, for ``nodes`` rows."""
    element = f"*{TYPES[shape.dtype]}"
    chosen = config.lm_head_config(target, shape.nodes, shape.dtype)
    chosen = replace(chosen, block_n=min(chosen.block_n, products.CODED_OUTPUT_BLOCK))
    types = dict.fromkeys(("out_ptr", "x_ptr", "bias_ptr"), element) | {"codes_ptr": "*u8", "scales_ptr": "*fp16"}
    types |= dict.fromkeys(("stride_x", "rows", "outputs"), "i32")
    constants = {
        "INPUTS": shape.hidden_size, "HAS_BIAS": True, "GROUP": GROUP, "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n, "UPCAST": False,
    }  # fmt: skip
    kernel = products.coded_linear_kernel
    return _simple("linear_of_codes", kernel, shape, chosen, types, constants, frozenset(["stride_x"]))


def linear_jobs(target: str, shape: Shape) -> Iterator[Job]:
    """Linear layers of one input, and gate and up of an MLP, for ``nodes`` rows where they have kernels."""
    element, strides = f"*{TYPES[shape.dtype]}", frozenset(["stride_x"])
    constants: dict[str, Any] = {"INPUTS": shape.hidden_size, "WHOLE": True, "UPCAST": False}
    constants |= {"BLOCK_N": products.OUTPUT_BLOCK}
    for gated in (False, True):
        kernel = layers.gated_linear_kernel if gated else products.linear_kernel
        biases = {"HAS_GATE_BIAS": False, "HAS_UP_BIAS": False, "ACTIVATION": 0} if gated else {"HAS_BIAS": False}
        types = {name: element if name.endswith("_ptr") else "i32" for name in kernel.arg_names if name.islower()}
        for alone in (False, True):
            chosen = config.linear_config(target, shape.nodes, shape.dtype, alone, gated)
            if chosen is not None and not (gated and alone):  # its blocks are the same
                blocks = {"BLOCK_M": chosen.block_m, "BLOCK_K": chosen.block_k}
                name = "linear_gated" if gated else "linear_alone" if alone else "linear"
                yield _simple(name, kernel, shape, chosen, types, constants | biases | blocks, strides)


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
        options = runtime.compile_options(chosen, target)
        fixed = constants | {"OVERLAPPED": TARGETS[target].overlaps}
        return aot_compile.compile_kernel(kernel, types, fixed, target, options, aligned)

    return Job(name, shape, chosen, compile_for)


def layer_jobs(shape: Shape) -> Iterator[Job]:
    """The kernels between a layer's products, for ``hidden_size`` and heads of ``head_dim``."""
    element, size, half = f"*{TYPES[shape.dtype]}", shape.hidden_size, shape.head_dim // 2
    rows = config.row_config(size)
    types = dict.fromkeys(("out_ptr", "sum_ptr", "x_ptr", "residual_ptr", "weight_ptr"), element)
    types |= {"stride_x": "i32", "eps": "fp32", "offset": "fp32"}
    constants: dict[str, Any] = {"SIZE": size, "BLOCK": rows.block_n, "ROUND_FIRST": True, "HAS_RESIDUAL": True}
    yield _simple("add_rms_norm", layers.rms_norm_kernel, shape, rows, types, constants, frozenset(["stride_x"]))
    kernel = layers.rotary_kernel
    types = {name: element if name.endswith("_ptr") else "i32" for name in kernel.arg_names if name.islower()}
    strides = frozenset(name for name in types if "stride" in name)
    heads = config.row_config(half * 16)
    constants = {"HALF": half, "BLOCK": config.row_config(half).block_n, "BLOCK_H": 16}
    for stored in (False, True):
        copies = {"V": shape.head_dim, "STORED": stored}
        yield _simple(f"rotary{'_stored' * stored}", kernel, shape, heads, types, constants | copies, strides)
    types = {"gate_ptr": element, "up_ptr": element, "count": "i32"}
    constants = {"ACTIVATION": 0, "BLOCK": config.ELEMENTWISE_CONFIG.block_n}
    yield _simple("gate", layers.gate_kernel, shape, config.ELEMENTWISE_CONFIG, types, constants)


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
        for direct in (False, True):
            extras["DIRECT"] = direct
            for count in (nodes[0], nodes[-1]):
                yield attention_job(target, replace(shape, nodes=count), "tree_attention_extras", **extras)
            chunk = replace(shape, nodes=256)
            yield attention_job(target, chunk, "tree_attention_chunk_extras", **extras, HAS_TREE=False)
        for kv_dtype, count in itertools.product(("int8", "fp8"), nodes):
            yield attention_job(target, Shape(head_dim, count, 4, dtype, kv_dtype=kv_dtype), "tree_attention_codes")
        for count in nodes:
            yield attention_job(target, Shape(head_dim, count, 4, dtype, page_size=64), "tree_attention_pages_of_64")
        yield merge_job(shape)
        yield from paged_jobs(shape)
        yield from layer_jobs(shape)
    yield verify_job(Shape(dtype=dtype))
    for rows in (*nodes, 256):
        for k in (1, 10):
            shape = Shape(nodes=rows, dtype=dtype)
            yield from (lm_head_job(target, shape, k), lm_head_job(target, shape, k, GROUP), reduce_job(shape, k))
        yield from (lm_head_job(target, shape, 10, log_probs=True), coded_linear_job(target, shape))
        yield from linear_jobs(target, shape)
