"""Block sizes of the Triton kernels by the limits of a target; needs neither triton nor a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from specmemo_kernels.backends.kernel_target import INTERPRETER, Target, supporting

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class KernelConfig:
    """Block sizes of one kernel for sequences of ``min_nodes .. max_nodes`` nodes.

    Attributes:
        block_m: rows (nodes x query heads of a KV head) of a program.
        block_n: keys of a tile, at most 64; for the lm_head, tokens of a vocabulary block.
        split_size: slots of a split, a multiple of block_n. It doesn't depend on a sequence's length, so results don't
            depend on the number of programs.
        block_k: hidden elements per step of the lm_head.
    """

    block_m: int
    block_n: int
    split_size: int
    num_warps: int
    num_stages: int
    min_nodes: int = 1
    max_nodes: int = NO_LIMIT
    block_k: int = 0


# Kernels that only copy or compare have the same sizes on all targets.
COPY_CONFIG = KernelConfig(block_m=1, block_n=0, split_size=0, num_warps=4, num_stages=1)
MERGE_CONFIG = replace(COPY_CONFIG, num_warps=2)
VERIFY_CONFIG = replace(COPY_CONFIG, num_warps=1)
LM_HEAD_REDUCE_CONFIG = replace(COPY_CONFIG, block_n=1024)

DECODE_ROWS = 16
TREE_NODES = 64


def block_dim(size: int) -> int:
    """The padded size of a head dimension or row: a power of two, at least 16 (the smallest dot)."""
    return max(16, 1 << (size - 1).bit_length())


@functools.cache
def attention_configs(
    target: str,
    head_dim: int,
    v_head_dim: int,
    group: int,
    dtype: torch.dtype,
    invariant: bool = False,
    quantised: bool = False,
) -> tuple[KernelConfig, ...]:
    """The classes of sequences by node count, in order, each with its block sizes (1 to 3 classes).

    The class depends on the sequence's own nodes only, so its result doesn't depend on the batch: *decode* (nodes x
    group fit 16 rows), *tree* (up to 64 nodes) and *chunk* (prefill, wide trees).

    Args:
        target: a name of ``TARGETS``.
        group: query heads per KV head.
        invariant: one class for all sequences, so a node's result doesn't depend on the number of nodes either.
        quantised: pages hold codes.

    Raises:
        ValueError: an unknown target, an unsupported dtype, or a head dimension that would spill registers.
    """
    device, dim = supporting(target, dtype), max(block_dim(head_dim), block_dim(v_head_dim))
    limit = device.head_dim_limit(dtype)
    if dim > limit:
        raise ValueError(
            f"head_dim is {dim} (padded), the triton backend's limit on {target} in {dtype} is {limit}: more would "
            "spill registers; use backend='reference' on this GPU, or another model"
        )

    def config(tile: tuple[int, int, int, int], split: int, min_nodes: int, max_nodes: int) -> KernelConfig:
        block_m, block_n, warps, stages = tile
        return KernelConfig(block_m, block_n, split, warps, stages, min_nodes=min_nodes, max_nodes=max_nodes)

    rule = _tile_of_codes if quantised else _tile
    decode, tree, chunk = (rule(device, dim, dtype, kind) for kind in ("decode", "tree", "chunk"))
    if invariant:
        return (config(tree, 1024, 1, NO_LIMIT),)
    decode_nodes = DECODE_ROWS // group
    # Split states add a share of 2 * group * nodes / split_size to the bytes of 16-bit keys and values.
    classes = [config(decode, 512, 1, decode_nodes)] if decode_nodes else []
    if decode_nodes < TREE_NODES:
        classes.append(config(tree, 1024, decode_nodes + 1, TREE_NODES))
    return (*classes, config(chunk, 4096, TREE_NODES + 1, NO_LIMIT))


def _tile(target: Target, dim: int, dtype: torch.dtype, kind: str) -> tuple[int, int, int, int]:
    """``(block_m, block_n, num_warps, num_stages)``: the largest tile that compiles without a spill.

    ``dim`` is the padded head dimension. Found by compiling with Triton 3.6 and 3.9 (``bench/aot.py``). Registers grow
    with the accumulator, ``block_m x dim`` float32, and keys and values, ``2 x block_n x dim`` per stage.
    """
    decode = kind == "decode"
    if target.name == INTERPRETER:
        return (16 if decode else 32), 32, 4, 1  # few programs, tiles small enough to be exact in float32
    if dim > 256 or dtype == torch.float32:
        # Multiply-adds on most targets: registers are the limit.
        if target.matrix == "wmma" and dim == 128:
            return 16, 16, 16, 1
        wide = dim > 256 or target.matrix == "wmma" or (dim == 256 and target.matrix != "wgmma")
        wide |= dim == 128 and target.matrix is None
        return 16, 16, 8 if wide else 4, 1
    if target.matrix is None:
        if dim >= 128:
            return 16, 16, 8, 1
        return (16, 32, 4, 1) if decode else (32, 32, 8, 1)
    if target.matrix == "wmma":
        # 256 registers a thread, and both halves of a wave hold each fragment: 16 keys a tile, or spills.
        if decode:
            return 16, 16, 4, 1
        return (64, 32, 8, 1) if dim <= 64 else (32, 16, 8, 1)
    if target.matrix == "mfma":
        if dim == 256:
            return (16, 32, 4, 1) if decode else (64, 32, 4, 1)
        if decode:
            return 16, 64, 4, 2
        # Eight wavefronts leave each thread 256 of the 512 registers.
        return (128, 64, 8, 1) if kind == "chunk" and dim <= 64 else (64, 64, 4, 1)
    if dim == 256:
        return (16, 32, 8, 2) if decode else (32, 32, 8, 2)
    if decode:
        return (16, 64, 8, 3) if dim <= 64 and target.matrix == "mma" else (16, 64, 4, 3)
    if target.matrix == "wgmma":
        return (64, 64, 8, 3) if kind == "tree" else (128, 64, 8, 3)
    if dim <= 64:
        return (64, 64, 4, 3) if kind == "tree" else (128, 64, 8, 3)
    return 64, 64, 8, 2


def _tile_of_codes(target: Target, dim: int, dtype: torch.dtype, kind: str) -> tuple[int, int, int, int]:
    """:func:`_tile` for quantised pages: codes and scales need registers besides the dequantised values."""
    plain = _tile(target, dim, dtype, kind)
    if dtype == torch.float32 or dim > 128:
        return plain
    if target.matrix == "mma":
        if kind == "decode":
            return (16, 32, 4, 2) if dim <= 64 else (16, 64, 8, 2)
        return (64, 32, 4, 2) if dim <= 64 else (32, 32, 4, 2)
    if target.matrix == "wgmma" and kind == "decode":
        return (16, 64, 8, 3) if dim > 64 else (16, 64, 4, 2)
    if target.matrix == "mfma" and kind != "decode" and dim == 128:
        return 64, 32, 4, 1
    if target.matrix == "wmma":
        return (16, 16, 4, 1) if dim <= 64 and kind == "decode" else (64 if dim <= 64 else 32, 16, 8, 1)
    return plain


def launched_classes(
    classes: tuple[KernelConfig, ...],
    rows: int,
    batch: int,
    max_nodes: int,
    max_slots: int,
    replayed: bool = False,
    min_nodes: int = 1,
) -> tuple[tuple[KernelConfig, ...], int]:
    """The classes that a step may contain, and the maximum number of splits of a sequence.

    If ``rows == batch * max_nodes``, every sequence has ``max_nodes`` nodes and only one class is launched.

    Args:
        max_slots: bound of a sequence's committed tokens and nodes.
        replayed: the launch is captured in a graph and replayed with other node counts from ``min_nodes`` to
            ``max_nodes``, so all classes of this range are launched.
    """
    fewest = max_nodes if rows == batch * max_nodes and not replayed else min_nodes
    launched = tuple(c for c in classes if c.min_nodes <= max_nodes and c.max_nodes >= fewest)
    return launched, max(-(-max_slots // c.split_size) for c in launched)


def split_state_bytes(rows: int, num_qo_heads: int, v_head_dim: int, splits: int) -> int:
    """Temporary bytes of ``tree_attention``: the float32 states of the splits, 0 for one split."""
    return 4 * rows * num_qo_heads * splits * (v_head_dim + 2) if splits > 1 else 0


@functools.cache
def lm_head_config(target: str, rows: int, dtype: torch.dtype) -> KernelConfig:
    """Block sizes of the lm_head for ``rows`` hidden states: one block of rows if possible, so weights are read once.

    Raises:
        ValueError: an unknown target or an unsupported dtype.
    """
    device = supporting(target, dtype)
    if device.name == INTERPRETER:
        block_m, block_v, block_k, warps, stages = 16, 64, 64, 4, 1
    elif device.matrix is None or dtype == torch.float32:
        block_m, block_v, block_k, warps, stages = 16, 32, 32, 4, 1
    elif rows <= 16:
        block_m, block_v, block_k, warps, stages = 16, 64, 128, 4, 3
    elif rows <= 64:
        block_m, block_v, block_k, warps, stages = 64, 64, 64, 4, 3
    else:
        block_m, block_v, block_k, warps, stages = 128, 64, 64, 8, 3
    if device.hip:
        block_k, stages = min(block_k, 64), min(stages, 1 if device.matrix == "wmma" else 2)
    return KernelConfig(block_m, block_v, 0, warps, stages, block_k=block_k)
