"""Block sizes of the Triton kernels, by a written rule from what a target has; needs neither triton nor a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from specmemo_kernels.backends.kernel_target import INTERPRETER, Target, supporting

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class KernelConfig:
    """Block sizes of one kernel for the sequences of ``min_nodes .. max_nodes`` nodes.

    Attributes:
        page_size: tokens per page that the rest was chosen for (0: no pages involved).
        block_m: rows (nodes x query heads of a KV head) of a program.
        block_n: keys of a tile, at most 64; for the lm_head, tokens of a vocabulary block.
        split_size: slots of a split, a multiple of block_n. The same for every sequence of the class, whatever its
            length, so that a result never depends on how many programs there are.
        waves_per_eu: AMD's occupancy hint, 0 for none.
        block_k: hidden elements per step of the lm_head.
    """

    page_size: int
    block_m: int
    block_n: int
    split_size: int
    num_warps: int
    num_stages: int
    waves_per_eu: int = 0
    min_nodes: int = 1
    max_nodes: int = NO_LIMIT
    block_k: int = 0


# Kernels that only move or compare numbers: nothing to choose.
COPY_CONFIG = KernelConfig(page_size=0, block_m=1, block_n=0, split_size=0, num_warps=4, num_stages=1)
MERGE_CONFIG = replace(COPY_CONFIG, num_warps=2)
VERIFY_CONFIG = replace(COPY_CONFIG, num_warps=1)
LM_HEAD_REDUCE_CONFIG = replace(COPY_CONFIG, block_n=1024)

DECODE_ROWS = 16
TREE_NODES = 64


def block_dim(size: int) -> int:
    """The tile that a head dimension or row is padded to: a power of two, 16 at least (the smallest dot)."""
    return max(16, 1 << (size - 1).bit_length())


def attention_configs(
    target: str,
    head_dim: int,
    v_head_dim: int,
    group: int,
    dtype: torch.dtype,
    page_size: int,
    invariant: bool = False,
    quantised: bool = False,
) -> tuple[KernelConfig, ...]:
    """The classes of sequences by their own node count, in order, each with its block sizes (1 to 3 of them).

    A sequence's class depends on nothing but its own nodes, so its result doesn't depend on the batch. ``fast``
    (default): *decode* (nodes x group fit 16 rows), *tree* (up to 64 nodes) and *chunk* (prefill, wide trees).
    ``invariant``: one class for all, so that a node's result doesn't depend on the number of nodes either.

    Args:
        target: a name of ``TARGETS``. group: query heads per KV head. quantised: pages hold codes.

    Raises:
        ValueError: an unknown target, a dtype that it can't compute in, or heads wider than it has registers for.
    """
    return _attention_configs(
        target, max(block_dim(head_dim), block_dim(v_head_dim)), group, dtype, page_size, invariant, quantised
    )


def choose_config(
    target: str,
    head_dim: int,
    v_head_dim: int,
    group: int,
    max_qo_len: int,
    dtype: torch.dtype,
    page_size: int,
    *,
    invariant: bool = False,
    quantised: bool = False,
) -> KernelConfig:
    """The block sizes that serve a sequence of ``max_qo_len`` nodes. Errors as in :func:`attention_configs`."""
    classes = attention_configs(target, head_dim, v_head_dim, group, dtype, page_size, invariant, quantised)
    return next(config for config in classes if max_qo_len <= config.max_nodes)


@functools.cache
def _attention_configs(
    target: str, dim: int, group: int, dtype: torch.dtype, page_size: int, invariant: bool, quantised: bool
) -> tuple[KernelConfig, ...]:
    device = supporting(target, dtype)
    limit = device.head_dim_limit(dtype)
    if dim > limit:
        raise ValueError(
            f"head_dim is {dim} (padded), the triton backend's limit on {target} in {dtype} is {limit}: more would "
            "spill registers; use backend='reference' on this GPU, or another model"
        )

    def config(tile: tuple[int, int, int, int], split: int, least: int, most: int) -> KernelConfig:
        block_m, block_n, warps, stages = tile
        return KernelConfig(page_size, block_m, block_n, split, warps, stages, min_nodes=least, max_nodes=most)

    rule = _tile_of_codes if quantised else _tile
    decode, tree, chunk = (rule(device, dim, dtype, kind) for kind in ("decode", "tree", "chunk"))
    if invariant:
        return (config(tree, 1024, 1, NO_LIMIT),)
    few = DECODE_ROWS // group
    # The states of the splits cost 2 * group * nodes / split_size of the bytes of the keys and values.
    classes = [config(decode, 512, 1, few)] if few else []
    if few < TREE_NODES:
        classes.append(config(tree, 1024, few + 1, TREE_NODES))
    return (*classes, config(chunk, 4096, TREE_NODES + 1, NO_LIMIT))


def _tile(target: Target, dim: int, dtype: torch.dtype, kind: str) -> tuple[int, int, int, int]:
    """``(block_m, block_n, num_warps, num_stages)``: the largest tile that compiles without a spill.

    ``dim`` is the padded head dimension. Found by compiling with Triton 3.6 and 3.9 (``bench/aot.py``); what grows
    with it is the accumulator, ``block_m x dim`` float32, and a tile of keys and values, ``2 x block_n x dim`` per
    stage.
    """
    few = kind == "decode"
    if target.name == INTERPRETER:
        return (16 if few else 32), 32, 4, 1  # few programs, tiles small enough to be exact in float32
    if dim > 256 or dtype == torch.float32:
        # Multiply-adds on most targets: registers go first.
        if target.matrix == "wmma" and dim == 128:
            return 16, 16, 16, 1
        wide = dim > 256 or target.matrix == "wmma" or (dim == 256 and target.matrix != "wgmma")
        wide |= dim == 128 and target.matrix is None
        return 16, 16, 8 if wide else 4, 1
    if target.matrix is None:
        if dim >= 128:
            return 16, 16, 8, 1
        return (16, 32, 4, 1) if few else (32, 32, 8, 1)
    if target.matrix == "wmma":
        # 256 registers a thread, and both halves of a wave hold each fragment: 16 keys a tile, or spills.
        if few:
            return 16, 16, 4, 1
        return (64, 32, 8, 1) if dim <= 64 else (32, 16, 8, 1)
    if target.matrix == "mfma":
        if dim == 256:
            return (16, 32, 4, 1) if few else (64, 32, 4, 1)
        if few:
            return 16, 64, 4, 2
        # Eight wavefronts leave each thread 256 of the 512 registers.
        return (128, 64, 8, 1) if kind == "chunk" and dim <= 64 else (64, 64, 4, 1)
    if dim == 256:
        return (16, 32, 8, 2) if few else (32, 32, 8, 2)
    if few:
        return (16, 64, 8, 3) if dim <= 64 and target.matrix == "mma" else (16, 64, 4, 3)
    if target.matrix == "wgmma":
        return (64, 64, 8, 3) if kind == "tree" else (128, 64, 8, 3)
    if dim <= 64:
        return (64, 64, 4, 3) if kind == "tree" else (128, 64, 8, 3)
    return 64, 64, 8, 2


def _tile_of_codes(target: Target, dim: int, dtype: torch.dtype, kind: str) -> tuple[int, int, int, int]:
    """As :func:`_tile` for quantised pages, whose codes and scales take registers beside what they become."""
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
    """The classes that a step may have members of, and the most splits that one of its sequences can have.

    ``max_slots`` bounds a sequence's committed tokens and nodes. With every sequence at the bound (``rows`` says so)
    only one class has members; the host knows that without asking the device. ``replayed``: the launch is being
    captured and will meet other node counts within the same bounds, so every class may have members that has any
    between ``min_nodes`` and ``max_nodes``.
    """
    least = max_nodes if rows == batch * max_nodes and not replayed else min_nodes
    launched = tuple(c for c in classes if c.min_nodes <= max_nodes and c.max_nodes >= least)
    return launched, max(-(-max_slots // c.split_size) for c in launched)


def split_state_bytes(rows: int, num_qo_heads: int, v_head_dim: int, splits: int) -> int:
    """Transient bytes of ``tree_attention``: the float32 states of the splits (one split needs none)."""
    return 4 * rows * num_qo_heads * splits * (v_head_dim + 2) if splits > 1 else 0


@functools.cache
def lm_head_config(target: str, rows: int, dtype: torch.dtype) -> KernelConfig:
    """Block sizes of the lm_head for ``rows`` hidden states: one block of rows if possible, so weights are read once.

    Raises:
        ValueError: as in :func:`attention_configs`.
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
    return KernelConfig(0, block_m, block_v, 0, warps, stages, block_k=block_k)
