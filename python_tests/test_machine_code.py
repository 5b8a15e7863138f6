"""``bench/machine_code.py`` and ``bench/gpu_model.py``: loops of listings, and what the prediction depends on."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specmemo_kernels.backends.kernel_config import KernelConfig

BENCH = str(Path(__file__).resolve().parents[1] / "bench")
sys.path.insert(0, BENCH)
try:
    import gpu_published
    from gpu_model import GPUS, Case, Kernel, bytes_in_flight, predicted_fraction, seconds
    from machine_code import Loop, amd_loops, nvidia_loops
finally:
    sys.path.remove(BENCH)

NVIDIA = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_2:
        /*0020*/              @!P0 LDGSTS.E.BYPASS.128 [R5], [R6.64] ;
        /*0030*/                   LDG.E R7, [R8.64] ;
        /*0040*/                   LDG.E.U16.CONSTANT R7, [R8.64] ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0060*/                   MUFU.EX2 R9, R9 ;
        /*0070*/               @P1 BRA `(.L_x_2) ;
        /*0080*/               @P2 BRA `(.L_x_1) ;
        /*0090*/                   BRA `(.L_x_3) ;
.L_x_3:
        /*00a0*/                   EXIT ;
"""
AMD = """
.LBB0_1:                                ; %loop
\ts_waitcnt vmcnt(0)
\tglobal_load_dwordx4 v[0:3], v[4:5], off
\tbuffer_load_ushort v6, v7, s[0:3], 0 offen
\tv_mfma_f32_16x16x16_bf16_1k a[0:3], v[0:1], v[2:3], a[0:3]
\tv_exp_f32_e32 v8, v8
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
"""
LOOP = Loop(700, 66, 16, ((32, 8), (128, 16)))
KERNEL = Kernel(
    KernelConfig(128, 128, 128, 8, 2, resident=1, nodes_n=32), registers=254, shared_bytes=160 << 10,
    committed=LOOP, own=LOOP,
)  # fmt: skip
CASE, H200 = Case(8, 8192, 25), GPUS["sm_90"]


def test_loops_of_nvidia() -> None:
    """Of nested loops the inner one; a branch forward is no loop."""
    (loop,) = nvidia_loops(NVIDIA)
    assert loop == Loop(6, 1, 1, ((16, 1), (32, 1), (128, 1)))
    assert (loop.load_bits, loop.load_bytes) == (128, 22)


def test_loops_of_amd() -> None:
    (loop,) = amd_loops(AMD)
    assert loop == Loop(6, 1, 1, ((16, 1), (128, 1)))


def test_the_median_byte() -> None:
    assert Loop(1, 0, 0, ((16, 128), (128, 1))).load_bits == 16
    assert Loop(1, 0, 0, ()).load_bits == 0


def test_programs_of_a_multiprocessor() -> None:
    assert H200.programs(254, 160 << 10, 8) == 1
    assert H200.programs(227, 70 << 10, 4) == 2, "registers"
    assert H200.programs(64, 70 << 10, 4) == 3, "shared memory"
    assert GPUS["gfx942"].programs(237, 32 << 10, 8) == 1
    assert GPUS["gfx942"].programs(250, 16 << 10, 1) == 4


def test_what_is_slower_is_predicted_to_be_slower() -> None:
    share = predicted_fraction(KERNEL, H200, CASE)
    assert 0.85 < share < 1
    more = replace(KERNEL, committed=replace(LOOP, instructions=1400))
    assert predicted_fraction(more, H200, CASE) < share - 0.1
    narrow = replace(KERNEL, config=replace(KERNEL.config, block_m=64, num_warps=8))
    assert predicted_fraction(narrow, H200, CASE) < share - 0.1, "keys are read twice"
    assert predicted_fraction(KERNEL, H200, replace(CASE, batch=1)) < share
    assert predicted_fraction(KERNEL, replace(H200, copy_bytes_s=1e12), CASE) > share, "compute no longer matters"
    assert bytes_in_flight(KERNEL, H200, CASE) == 2 * 128 * 128 * 2


def test_nodes_take_the_place_of_tokens() -> None:
    """65 units of tokens and nodes: 13 splits of 5 units hide the nodes; one split per sequence doesn't."""
    hidden = seconds(KERNEL, H200, replace(CASE, batch=1))
    assert hidden["nodes"] == 0
    direct = seconds(KERNEL, H200, replace(CASE, batch=32))
    assert direct["merge"] == 0 < direct["nodes"]


@pytest.mark.parametrize("kv_bytes", [1, 2])
def test_parts_add_up(kv_bytes: int) -> None:
    parts = dict(seconds(KERNEL, H200, replace(CASE, kv_bytes=kv_bytes)))
    total = parts.pop("total")
    assert total == pytest.approx(max(parts.pop("compute"), parts.pop("memory")) + sum(parts.values()))


def test_published_times_are_predicted_as_committed() -> None:
    """Predictions follow from the committed resources; each error is that of its row, and has its source."""
    results = Path(__file__).resolve().parents[1] / "bench" / "results"
    committed = json.loads((results / "gpu_published.json").read_text())["rows"]
    assert list(gpu_published.rows()) == committed, "run bench/gpu_published.py --json again"
    assert len({row["kernel"] for row in committed}) >= 3
    for row in committed:
        assert row["error"] == pytest.approx(row["predicted_us"] / row["measured_us"] - 1, abs=0.01)
        assert row["source"].startswith("https://")
        # No kernel reads faster than its GPU's memory: a wrong shape or GPU would.
        if row["kernel"] == "FlashAttention-3, vLLM's":
            assert row["batch"] * row["tokens"] * 4096 / (row["measured_us"] * 1e-6) < 4.8e12
