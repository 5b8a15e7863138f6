"""Block sizes of the Triton kernels by the limits of a target; needs neither triton nor a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from specmemo_kernels.backends.kernel_target import INTERPRETER, Target, supporting

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class KernelConfig:
    """Block sizes of one kernel for sequences of ``min_nodes .. max_nodes`` nodes.

    Attributes:
        block_m: rows (nodes x query heads of a KV head) of a program.
        block_n: keys of a tile of committed tokens; for the lm_head, tokens of a vocabulary block.
        split_size: slots of a split, a multiple of block_n: exactly, or the smallest unit if ``resident`` isn't 0.
        resident: programs that a multiprocessor holds, which determines the number of splits, and the registers that
            the compiler may use; 0: splits have a fixed size.
        nodes_n: keys of a tile with the step's own nodes, at most 64; these tiles need most registers.
        direct_n: block_n of a call with one split, which needs registers for writing the result.
        block_k: hidden elements per step of the lm_head.
        instruction_rows: rows of AMD's matrix instructions (16 or 32); 0: the compiler's choice.
    """

    block_m: int
    block_n: int
    split_size: int
    num_warps: int
    num_stages: int
    min_nodes: int = 1
    max_nodes: int = NO_LIMIT
    resident: int = 0
    nodes_n: int = 0
    direct_n: int = 0
    block_k: int = 0
    instruction_rows: int = 0


#: Rows up to which linear layers, and gate and up of an MLP, have kernels of their own.
LINEAR_ROWS, GATED_ROWS = 32, 64
# Kernels that only copy or compare have the same sizes on all targets.
COPY_CONFIG = KernelConfig(block_m=1, block_n=0, split_size=0, num_warps=4, num_stages=1)
MERGE_CONFIG = replace(COPY_CONFIG, num_warps=2)
VERIFY_CONFIG = replace(COPY_CONFIG, num_warps=1)
ELEMENTWISE_CONFIG = replace(COPY_CONFIG, block_n=1024)
LM_HEAD_REDUCE_CONFIG = replace(COPY_CONFIG, block_n=1024)

#: Rows of the tiles of the first two classes of sequences.
DECODE_ROWS, TREE_ROWS = 16, 64
#: Slots: the smallest unit of splits whose number depends on the GPU, and a fixed split.
SPLIT_UNIT, FIXED_SPLIT = 64, 1024
#: Maximum number of programs of a split call, as a multiple of those that run at once.
_MAX_WAVES = 4

#: Target, head dimension, query heads per KV head, dtype, and whether pages hold codes.
TableKey = tuple[str, int, int, torch.dtype, bool]
#: Classes that replace the rules (:mod:`specmemo_kernels.backends.kernel_table`).
_measured: dict[TableKey, tuple[KernelConfig, ...]] = {}


def replace_rules(table: Mapping[TableKey, tuple[KernelConfig, ...]]) -> None:
    """Use the classes of ``table`` instead of the rules, for its keys only."""
    _measured.clear()
    _measured.update(table)
    attention_configs.cache_clear()


#: Tokens per page: of most targets, and of those whose kernels gain by one page id per tile. Predicted for 25 nodes:
#: 0.79 of copying become 0.84 on gfx942; other targets gain at most 0.01, or lose (``bench/aot.py``).
PAGE_SIZE, WIDE_PAGE_SIZE, WIDE_PAGE_TARGETS = 16, 64, frozenset(("gfx942",))
#: Maximum share of a plan's memory that a preferred page size may cost.
WIDE_PAGE_SHARE = 0.01


def preferred_page_size(target: str | None) -> int:
    """Tokens per page with which a target's attention is fastest, as predicted."""
    return WIDE_PAGE_SIZE if target in WIDE_PAGE_TARGETS else PAGE_SIZE


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
    """The classes of sequences by rows (nodes x group), in order, each with its block sizes (1 to 3 classes).

    *decode* (up to 16 rows), *tree* (up to 64) and *chunk* (prefill, large trees): one block of rows reads a sequence's
    keys once, up to 128 rows on most targets.

    Args:
        target: a name of ``TARGETS``.
        group: query heads per KV head.
        invariant: one class with fixed splits for all sequences, so that a node's result depends neither on the batch
            nor on the number of nodes.
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

    measured = _measured.get((target, head_dim, group, dtype, quantised))
    if measured and not invariant and v_head_dim == head_dim:
        return measured
    rule = _tile_of_codes if quantised else _tile
    tiles = {kind: rule(device, dim, dtype, kind) for kind in ("decode", "tree", "chunk")}
    if invariant:
        tile = tiles["tree"]  # a key is in the same tile as a draft and after its commit
        return (KernelConfig(**tile | {"resident": 0, "nodes_n": tile["block_n"]}, split_size=FIXED_SPLIT),)
    # One unit for all classes of a call: the merge has no classes.
    unit = max(SPLIT_UNIT, *(max(tile["block_n"], tile["direct_n"]) for tile in tiles.values()))
    classes, fewest = [], 1
    for kind, rows in (("decode", DECODE_ROWS), ("tree", TREE_ROWS), ("chunk", NO_LIMIT)):
        most = rows if kind == "chunk" else rows // group
        if most >= fewest:
            classes.append(KernelConfig(**tiles[kind], split_size=unit, min_nodes=fewest, max_nodes=most))
            fewest = most + 1
    return tuple(classes)


def _tile(target: Target, dim: int, dtype: torch.dtype, kind: str) -> dict[str, int]:
    """The block sizes with the best predicted speed (``bench/aot.py``) that compile without a spill.

    ``dim`` is the padded head dimension. Compiled with Triton 3.6 and 3.9. Registers grow with the accumulator,
    ``block_m x dim`` float32, and with keys and values, ``2 x block_n x dim`` per stage.
    """
    decode, chunk = kind == "decode", kind == "chunk"
    if target.name == INTERPRETER:
        return _sizes(16 if decode else 32, 32, 4, 1)  # few programs, tiles small enough to be exact in float32
    if dim > 256 or dtype == torch.float32:
        # Multiply-adds on most targets: registers are the limit.
        if target.matrix == "wmma" and dim == 128:
            return _sizes(16, 16, 16, 1)
        wide = dim > 256 or target.matrix == "wmma" or (dim == 256 and target.matrix != "wgmma")
        wide |= dim == 128 and target.matrix is None
        return _sizes(16, 16, 8 if wide else 4, 1)
    if target.matrix is None:
        if dim >= 128:
            return _sizes(16, 16, 8, 1)
        return _sizes(16, 32, 4, 1) if decode else _sizes(32, 32, 8, 1)
    if target.matrix == "wmma":
        # 256 registers a thread, and both halves of a wave hold each fragment. With 128 dimensions only tiles fit whose
        # rows are computed by several waves, each of which loads a part.
        if dim <= 64:
            return _sizes(16, 16, 1, 1, resident=4) if decode else _sizes(64, 32, 4, 1, resident=2)
        return _sizes(16 if decode else 32, 16, 8, 1)
    if target.matrix == "mfma":
        return _mfma_tile(target, dim, kind)
    if dim == 256:
        return _sizes(16, 32, 4, 2) if decode else _sizes(32, 32, 4, 2, nodes_n=16)
    if target.matrix == "wgmma":
        if dim <= 64:
            sizes = {"decode": (16, 64, 4, 4), "tree": (64, 64, 4, 4), "chunk": (128, 64, 8, 4)}[kind]
            return _sizes(*sizes, resident={"decode": 3, "tree": 3, "chunk": 1}[kind])
        if chunk:  # half the barriers and reductions per key of 64 keys
            return _sizes(128, 128, 8, 3, nodes_n=32, direct_n=64)
        return _sizes(16 if decode else 64, 64, 4, 3, resident=2)
    small = target.shared_bytes < 128 << 10
    if dim <= 64:
        if chunk:
            return _sizes(128, 64, 8, 3)
        return _sizes(16 if decode else 64, 64, 8 if decode else 4, 3, resident=2)
    if decode:
        return _sizes(16, 64, 4, 2, resident=2, nodes_n=32) if small else _sizes(16, 64, 4, 3, resident=2)
    return _sizes(128, 64, 8, 2, nodes_n=16, direct_n=32) if chunk else _sizes(64, 64, 8, 2)


def _mfma_tile(target: Target, dim: int, kind: str) -> dict[str, int]:
    """:func:`_tile` for CDNA. With instructions of 32 rows all lanes would compute each exponential twice, and with
    more than one wavefront for 16 rows so would the wavefronts."""
    if dim == 256:
        return _sizes(16, 32, 4, 1) if kind == "decode" else _sizes(64, 32, 4, 1, instruction_rows=16)
    if kind == "decode":
        return _sizes(16, 64 if dim <= 64 else 32, 1, 2, resident=3, instruction_rows=16)
    if kind == "tree":
        return _sizes(64, 64, 4, 1, resident=2, instruction_rows=16)
    nodes_n = 64 if dim <= 64 else 32 if target.name == "gfx942" else 16
    return _sizes(128, 64, 8, 2, nodes_n=nodes_n, instruction_rows=16)


def _sizes(
    block_m: int, block_n: int, num_warps: int, num_stages: int, *, resident: int = 1, nodes_n: int = 0,
    direct_n: int = 0, instruction_rows: int = 0,
) -> dict[str, int]:  # fmt: skip
    return {
        "block_m": block_m, "block_n": block_n, "num_warps": num_warps, "num_stages": num_stages, "resident": resident,
        "nodes_n": nodes_n or block_n, "direct_n": direct_n or block_n, "instruction_rows": instruction_rows,
    }  # fmt: skip


def _tile_of_codes(target: Target, dim: int, dtype: torch.dtype, kind: str) -> dict[str, int]:
    """:func:`_tile` for quantised pages: codes and scales need registers besides the dequantised values."""
    plain = _tile(target, dim, dtype, kind)
    if dtype == torch.float32 or dim > 128:
        return plain
    decode, chunk = kind == "decode", kind == "chunk"
    if target.matrix == "mma":
        if dim <= 64:
            return _sizes(16 if decode else 64, 32, 4, 2, resident=2)
        if decode and target.shared_bytes < 128 << 10:
            return _sizes(16, 32, 4, 2, resident=2)
        if decode:
            return _sizes(16, 64, 4, 2, resident=2)
        return _sizes(128, 32, 8, 2, nodes_n=16) if chunk else _sizes(64, 64, 8, 2)
    if target.matrix == "wgmma":
        if decode:
            return _sizes(16, 32, 4, 2, resident=2) if dim <= 64 else _sizes(16, 64, 4, 3, resident=2)
        if dim <= 64:
            return _sizes(128, 64, 8, 3) if chunk else _sizes(64, 64, 4, 3, resident=2)
        return _sizes(128, 64, 8, 3, nodes_n=16) if chunk else _sizes(64, 64, 4, 3, resident=2, nodes_n=16)
    if target.matrix == "mfma":
        block_n = 64 if dim <= 64 else 32
        if decode:
            return _sizes(16, block_n, 1, 1, resident=4, instruction_rows=16)
        return _sizes(128 if chunk else 64, block_n, 8 if chunk else 4, 1, instruction_rows=16)
    if target.matrix == "wmma":
        return plain if decode else _sizes(32, 16, 2 if dim <= 64 else 8, 1)
    return plain


def launched_classes(
    classes: tuple[KernelConfig, ...], rows: int, batch: int, max_nodes: int, min_nodes: int | None = None
) -> tuple[KernelConfig, ...]:
    """The classes that a step with ``rows`` nodes in ``batch`` sequences may contain.

    Args:
        min_nodes: nodes of the smallest sequence; ``None``: unknown, unless ``rows == batch * max_nodes``.
    """
    if min_nodes is None:
        min_nodes = max_nodes if rows == batch * max_nodes else 1
    return tuple(c for c in classes if c.min_nodes <= max_nodes and c.max_nodes >= min_nodes)


@functools.lru_cache(maxsize=4096)
def num_splits(
    launched: tuple[KernelConfig, ...],
    multiprocessors: int,
    rows: int,
    batch: int,
    max_nodes: int,
    max_slots: int,
    group: int,
    kv_heads: int,
) -> int:
    """Splits of each sequence: as fixed splits demand, or the number with the shortest predicted time.

    A multiprocessor's time is counted in slots: those of the splits that it computes one after the other, and for each
    split ``2 * block_m`` for its state, which is written and read again: a row of it has about a slot's bytes.

    Args:
        max_slots: bound of a sequence's committed tokens and nodes.
    """
    config = launched[-1]
    units = -(-max_slots // config.split_size)
    if not config.resident:
        return units
    blocks = min(batch * -(-max_nodes * group // config.block_m), batch + rows * group // config.block_m)
    programs, places = blocks * kv_heads, multiprocessors * config.resident

    def slots(splits: int) -> int:
        state = 2 * config.block_m if splits > 1 else 0
        return -(-splits * programs // places) * (-(-units // splits) * config.split_size + state)

    return min(range(1, max(1, min(units, _MAX_WAVES * places // programs)) + 1), key=slots)


def max_state_bytes(classes: tuple[KernelConfig, ...], multiprocessors: int, v_head_dim: int) -> int:
    """Maximum temporary bytes of ``tree_attention`` by :func:`num_splits`: the float32 states of all programs' rows."""
    rows = max(c.block_m * _MAX_WAVES * multiprocessors * c.resident for c in classes)
    return 4 * rows * (v_head_dim + 2)


@functools.cache
def row_config(size: int) -> KernelConfig:
    """Warps for one program over ``size`` elements (``block_n``: padded), 8 to 16 of a thread where warps suffice."""
    block = block_dim(size)
    return replace(COPY_CONFIG, block_n=block, num_warps=max(1, min(16, block // 512)))


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
        block_m, block_v, block_k, warps, stages = 16, 64, 64, 4, 4
    elif rows <= 64:
        block_m, block_v, block_k, warps, stages = 64, 64, 64, 4, 3
    else:
        block_m, block_v, block_k, warps, stages = 128, 64, 64, 8, 3
    if device.hip:
        block_k, stages = min(block_k, 64), min(stages, 1 if device.matrix == "wmma" else 2)
    return KernelConfig(block_m, block_v, 0, warps, stages, block_k=block_k)


@functools.cache
def linear_config(target: str, rows: int, dtype: torch.dtype, alone: bool, gated: bool = False) -> KernelConfig | None:
    """Block sizes of linear layers for ``rows`` rows in one block; ``None``: torch's product.

    Only where they were measured to be faster: on an H200, in bfloat16 (``bench/results/gpu_linear.json``).

    Args:
        alone: a multiprocessor has one program, which may use all of its shared memory.
        gated: two matrices in one program.
    """
    if target == INTERPRETER:
        return KernelConfig(block_dim(rows), 0, 0, 4, 1, block_k=64)
    if target != "sm_90" or dtype == torch.float32 or not 0 < rows <= (GATED_ROWS if gated else LINEAR_ROWS):
        return None
    return KernelConfig(block_dim(rows), 0, 0, 4, 4 if gated else 6, block_k=128 if alone and not gated else 64)
