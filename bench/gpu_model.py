"""Predicted share of copy bandwidth of tree attention, from its machine code. Nothing here is measured.

Times of one launch, in cycles of a multiprocessor:

- *softmax* of a tile: the longer of issuing its loop's instructions (warps x instructions / issue rate) and of its
  exponentials (at their own pipe's rate).
- *products* of a tile: 4 x M x N x D multiply-adds / 2 at the matrix units' rate.
- A multiprocessor needs softmax + products for a tile, one after the other, and a program waits 200 cycles for barriers
  and dependences, plus the latency of memory if its loads aren't pipelined; r resident programs share these waits.
  (If programs were taken to overlap softmax and products, published kernels would be predicted twice as fast as they
  are: docs/benchmarks/gpu.md.)
- *Waves*: programs fill the multiprocessors' places; all tiles of the places that have most are counted.
- *Memory*: keys, values, queries, results and the splits' states, at the copy bandwidth, or at bytes in flight over the
  latency (Little's law), whichever is longer. A second block of rows finds a tile in the L2 cache, at twice the rate.
- The launch takes the longer of computing and memory, plus a fixed time to start and drain, and the merge (its states
  from L2, and a launch that is overlapped where possible). The tiles with the step's own nodes follow the tokens of the
  last split, which are fewer than those of another split.

The share is the time of copying the keys, values, queries and results once, over the predicted time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from machine_code import Loop

from specmemo_kernels.backends.kernel_config import KernelConfig, num_splits
from specmemo_kernels.backends.kernel_target import TARGETS

#: Cycles of barriers and dependences of a tile; seconds of a kernel's start and end, of a merge's launch, and of the
#: same if it is overlapped with the kernel before.
CHAIN_CYCLES, START_S, MERGE_S, OVERLAPPED_S = 200, 1.5e-6, 3e-6, 1e-6
MEMORY_LATENCY_S = 7e-7


@dataclass(frozen=True)
class Gpu:
    """Rates of a GPU, per multiprocessor and cycle unless stated; from data sheets.

    Attributes:
        copy_bytes_s: of the whole GPU: measured copies, read and written bytes together.
        issue: instructions of warps (wavefronts). exponentials: of threads. matrix_flops: dense, 16 bits.
        registers: of a thread times threads (AMD: of one SIMD, per lane). shared_bytes: per multiprocessor.
    """

    name: str
    target: str
    multiprocessors: int
    ghz: float
    copy_bytes_s: float
    matrix_flops: int
    shared_bytes: int
    issue: float = 4.0
    exponentials: int = 16
    registers: int = 65536
    threads: int = 2048
    simds: int = 4

    def programs(self, registers: int, shared_bytes: int, warps: int) -> int:
        """Programs that a multiprocessor holds at once."""
        reserved = 0 if self.target.startswith("gfx") else 1024
        by_shared = self.shared_bytes // max(1, shared_bytes + reserved)
        if self.target.startswith("gfx"):
            waves = self.registers // max(8, -(-registers // 8) * 8)  # of a SIMD
            return max(1, min(by_shared, self.simds * min(waves, 8) // warps))
        by_registers = self.registers // (max(8, -(-registers // 8) * 8) * warps * 32)
        return max(1, min(by_registers, by_shared, self.threads // (warps * 32), 32))


#: One GPU per target. A CDNA SIMD takes four cycles for an instruction of a wavefront, an RDNA SIMD one.
GPUS = {
    gpu.target: gpu
    for gpu in (
        Gpu("Titan RTX", "sm_75", 72, 1.77, 590e9, 256, 64 << 10, threads=1024),
        Gpu("A100 80 GB", "sm_80", 108, 1.41, 1.70e12, 2048, 164 << 10),
        Gpu("RTX 3090", "sm_86", 82, 1.70, 850e9, 512, 100 << 10, threads=1536),
        Gpu("RTX 4090", "sm_89", 128, 2.52, 920e9, 512, 100 << 10, threads=1536),
        Gpu("H200", "sm_90", 132, 1.98, 4.30e12, 4096, 228 << 10),
        Gpu("MI250X, one die", "gfx90a", 110, 1.70, 1.30e12, 1024, 64 << 10, issue=1.0, registers=512),
        Gpu("MI300X", "gfx942", 304, 2.10, 4.00e12, 2048, 64 << 10, issue=1.0, registers=512),
        Gpu("RX 7900 XTX", "gfx1100", 96, 2.50, 800e9, 512, 64 << 10, issue=2.0, registers=1536, simds=2),
    )
}


@dataclass(frozen=True)
class Case:
    """A batch of equal sequences: ``nodes`` nodes each behind ``tokens`` tokens, with 16-bit or 8-bit pages."""

    batch: int
    tokens: int
    nodes: int
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    kv_bytes: int = 2

    @property
    def useful_bytes(self) -> int:
        """Keys, values and scales, read once; queries, new keys and values, and results."""
        scales = 8 if self.kv_bytes == 1 else 0
        pages = self.tokens * self.kv_heads * (2 * self.head_dim * self.kv_bytes + scales)
        rows = self.nodes * self.kv_heads * self.head_dim * 2 * (2 * self.group + 2)
        return self.batch * (pages + rows)


@dataclass(frozen=True)
class Kernel:
    """A compiled attention kernel: its block sizes, resources, and loops over committed tokens and over nodes."""

    config: KernelConfig
    registers: int
    shared_bytes: int
    committed: Loop
    own: Loop


def bytes_in_flight(kernel: Kernel, gpu: Gpu, case: Case) -> int:
    """Bytes of keys and values that a multiprocessor has requested, while it computes a tile."""
    config = kernel.config
    tile = 2 * config.block_n * case.head_dim * case.kv_bytes
    programs = gpu.programs(kernel.registers, kernel.shared_bytes, config.num_warps)
    return programs * tile * max(1, config.num_stages - 1)


def seconds(kernel: Kernel, gpu: Gpu, case: Case) -> Mapping[str, float]:
    """Predicted seconds of a call by part, and their ``total``."""
    config, hz = kernel.config, 1e9 * gpu.ghz
    blocks = case.batch * math.ceil(case.nodes * case.group / config.block_m)
    splits = num_splits(
        (config,), gpu.multiprocessors, case.batch * case.nodes, case.batch, case.nodes, case.tokens + case.nodes,
        case.group, case.kv_heads,
    )  # fmt: skip
    resident = gpu.programs(kernel.registers, kernel.shared_bytes, config.num_warps)
    # As in the kernel: equal splits of the tokens and nodes, in whole units.
    unit = config.split_size * math.ceil(math.ceil((case.tokens + case.nodes) / config.split_size) / splits)
    splits = math.ceil((case.tokens + case.nodes) / unit)
    programs = blocks * case.kv_heads * splits
    held = min(resident, math.ceil(programs / gpu.multiprocessors))
    waves = math.ceil(programs / (gpu.multiprocessors * held))
    tiles = math.ceil(min(unit, case.tokens) / config.block_n)
    last = max(0, case.tokens - (splits - 1) * unit) / min(unit, case.tokens)
    waits = CHAIN_CYCLES + (MEMORY_LATENCY_S * hz if config.num_stages == 1 else 0)
    cycles = _softmax(kernel.committed, config, gpu) + _products(config.block_n, config, gpu, case) + waits / held
    compute = waves * held * tiles * cycles / hz

    states = 4 * case.batch * case.nodes * case.group * case.kv_heads * splits * (case.head_dim + 2) * (splits > 1)
    repeats = 1 + (math.ceil(case.nodes * case.group / config.block_m) - 1) / 2
    busy = min(1.0, programs / gpu.multiprocessors)
    little = gpu.multiprocessors * busy * bytes_in_flight(kernel, gpu, case) / MEMORY_LATENCY_S
    memory = (case.useful_bytes * repeats + states) / min(gpu.copy_bytes_s, little)

    own = config.nodes_n
    own_cycles = _softmax(kernel.own, config, gpu) + _products(own, config, gpu, case) + CHAIN_CYCLES
    nodes = math.ceil(case.nodes / own) * (own_cycles / hz + MEMORY_LATENCY_S)
    merge = 0.0
    if splits > 1:
        overlapped = TARGETS[gpu.target].overlaps
        merge = states / (2 * gpu.copy_bytes_s) + (OVERLAPPED_S if overlapped else MERGE_S)
    # Of the last wave, programs with the last split have fewer tokens, then the nodes.
    longest = max(compute, memory)
    nodes = max(0.0, nodes - longest * (1 - last) / waves)
    parts = {"compute": compute, "memory": memory, "nodes": nodes, "merge": merge, "start": START_S}
    return parts | {"total": longest + nodes + merge + START_S}


def _softmax(loop: Loop, config: KernelConfig, gpu: Gpu) -> float:
    width = 64 if gpu.target.startswith("gfx9") else 32
    issue = loop.instructions * config.num_warps / gpu.issue
    return max(issue, loop.exponentials * config.num_warps * width / gpu.exponentials)


def _products(keys: int, config: KernelConfig, gpu: Gpu, case: Case) -> float:
    return 4 * config.block_m * keys * case.head_dim / gpu.matrix_flops


def predicted_fraction(kernel: Kernel, gpu: Gpu, case: Case) -> float:
    """The predicted share of the copy bandwidth."""
    return case.useful_bytes / gpu.copy_bytes_s / seconds(kernel, gpu, case)["total"]
