"""Resources of the Triton kernels, compiled ahead of time without a GPU: no spills, matrix instructions.

A few kernels on five targets; ``bench/aot.py`` compiles all of them on all targets.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from selection import covering, sample

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter doesn't compile")

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("sm_75", "sm_80", "sm_90", "gfx90a", "gfx942")


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The benchmark's list of kernels, compiled into this session's cache."""
    import triton  # type: ignore[import-untyped,unused-ignore]

    triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
    bench = str(ROOT / "bench")
    sys.path.insert(0, bench)
    try:
        return importlib.import_module("aot_kernels")
    finally:
        sys.path.remove(bench)


def check(job: Any, target: str) -> None:
    row = job.row(target)
    assert not row["problem"], row
    assert row["registers"] > 0


@pytest.mark.parametrize(
    ("target", "nodes"), sample(covering(TARGETS, (1, 25), first=[("sm_75", 25)]), [("sm_75", 25)])
)
def test_attention(kernels: ModuleType, target: str, nodes: int) -> None:
    check(kernels.attention_job(target, kernels.Shape(head_dim=128, nodes=nodes, group=4)), target)


PREDICTED = [("sm_80", 1), ("sm_80", 25), ("sm_90", 8), ("sm_90", 25), ("gfx942", 8), ("gfx942", 64)]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "nodes"), PREDICTED)
def test_the_prediction_is_the_committed_one(kernels: ModuleType, target: str, nodes: int) -> None:
    """The predicted share of copy bandwidth of Llama-3-8B's attention is that of ``bench/results/aot.json``."""
    rows = json.loads((ROOT / "bench" / "results" / "aot.json").read_text())["rows"]
    setup = {"target": target, "kernel": "tree_attention", "nodes": nodes, "head_dim": 128, "gqa": 4}
    (committed,) = (row for row in rows if all(row[name] == value for name, value in setup.items()))
    row = kernels.attention_job(target, kernels.Shape(nodes=nodes, dtype=torch.bfloat16)).row(target)
    # Another Triton may compile a few instructions more.
    assert row["predicted_fraction"] >= committed["predicted_fraction"] - 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "column", "least"),
    [("sm_90", "predicted_fraction", 0.85), ("sm_90", "predicted_alone", 0.6), ("gfx942", "predicted_fraction", 0.75)],
)
def test_the_prediction_for_25_nodes(kernels: ModuleType, target: str, column: str, least: float) -> None:
    """Llama-3-8B's attention over 8,192 tokens in bfloat16, eight sequences or one."""
    row = kernels.attention_job(target, kernels.Shape(nodes=25, dtype=torch.bfloat16)).row(target)
    assert row[column] >= least


@pytest.mark.slow
@pytest.mark.parametrize("target", sample(("sm_90", "gfx942"), ["sm_90"]))
def test_attention_bfloat16(kernels: ModuleType, target: str) -> None:
    check(kernels.attention_job(target, kernels.Shape(nodes=25, group=8, dtype=torch.bfloat16)), target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_lm_head(kernels: ModuleType, target: str) -> None:
    shape = kernels.Shape(nodes=25)
    log_probs = kernels.lm_head_job(target, shape, 10, log_probs=True)
    for job in (kernels.lm_head_job(target, shape, 10), log_probs, kernels.reduce_job(shape, 10)):
        check(job, target)


@pytest.mark.parametrize("target", sample(("sm_75", "sm_90", "gfx90a", "gfx942", "gfx1100"), ["gfx90a"]))
def test_lm_head_of_codes(kernels: ModuleType, target: str) -> None:
    """One row, as in a step, and a batch."""
    for nodes in (1, 25):
        check(kernels.lm_head_job(target, kernels.Shape(nodes=nodes), 10, group=64), target)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_75", "gfx90a"])
def test_small_kernels(kernels: ModuleType, target: str) -> None:
    shape = kernels.Shape()
    several = (*kernels.paged_jobs(shape), *kernels.layer_jobs(shape))
    for job in (kernels.merge_job(shape), kernels.verify_job(shape), *several):
        check(job, target)


@pytest.mark.slow
def test_keys_are_loaded_ahead(kernels: ModuleType) -> None:
    """More stages take more shared memory, so page ids don't prevent the pipelining of key and value loads."""
    from dataclasses import replace

    shape = kernels.Shape(head_dim=128, nodes=1, group=4)
    job = kernels.attention_job("sm_80", shape)
    two, three = (
        kernels.compile_attention("sm_80", shape, replace(job.config, num_stages=stages)).shared_bytes
        for stages in (2, 3)
    )
    tile = 2 * 2 * job.config.block_n * shape.head_dim
    assert three - two >= tile - 256, "less than a tile, but for what alignment takes"


def test_bfloat16_on_turing_is_refused() -> None:
    from specmemo_kernels.backends.kernel_config import attention_configs

    with pytest.raises(ValueError, match="sm_75 has no bfloat16"):
        attention_configs("sm_75", 128, 128, 4, torch.bfloat16)


@pytest.mark.parametrize(
    ("target", "head_dim", "dtype", "reason"),
    [
        ("sm_75", 128, torch.bfloat16, "sm_75 has no bfloat16"),
        ("gfx1100", 256, torch.float16, r"head_dim is 256 .* limit on gfx1100 in torch.float16 is 128"),
        ("gfx1100", 160, torch.float32, r"head_dim is 256 .* is 128: .*backend='reference'"),
        ("gfx942", 300, torch.float32, r"head_dim is 512 .* is 256"),
    ],
)
def test_refusals_come_with_the_plan(
    target: str, head_dim: int, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks before any allocation name the GPU, the limit and the remedy."""
    from specmemo_kernels import ops
    from specmemo_kernels.backends.triton import attention
    from specmemo_kernels.cache.kv_storage import LayerKV

    monkeypatch.setattr(attention, "target_of", lambda _: target)
    with pytest.raises(ValueError, match=reason):
        ops.fixed_workspace("triton", LayerKV(2, head_dim, 64, dtype, torch.device("cuda", 0)), 8)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gfx1100", "sm_75"])
def test_attention_float32(kernels: ModuleType, target: str) -> None:
    """Float32 multiply-adds fit the registers too, with all extras."""
    shape = kernels.Shape(head_dim=128, nodes=25, dtype=torch.float32)
    extras = {"HAS_WINDOW": True, "HAS_SOFTCAP": True, "HAS_SINKS": True, "DIRECT": True}
    check(kernels.attention_job(target, shape, **extras), target)


@pytest.mark.slow
def test_attention_wide_heads(kernels: ModuleType) -> None:
    check(kernels.attention_job("sm_80", kernels.Shape(head_dim=256, nodes=25)), "sm_80")


def test_cpu_tensors_are_refused() -> None:
    from specmemo_kernels.backends import triton

    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        triton.lm_head_argmax(torch.ones(1, 16), torch.ones(3, 16), None)


def test_devices_find_their_rule() -> None:
    from specmemo_kernels.backends.kernel_target import target_for_arch, target_for_capability

    capabilities = {
        (7, 5): "sm_75",
        (8, 0): "sm_80",
        (8, 7): "sm_86",
        (8, 9): "sm_89",
        (9, 0): "sm_90",
        (12, 0): "sm_89",
    }
    assert {c: target_for_capability(*c) for c in capabilities} == capabilities
    assert target_for_arch("gfx90a:sramecc+:xnack-") == "gfx90a"
    assert target_for_arch("gfx1101") == "gfx1100"
    with pytest.raises(ValueError, match=r"7\.5 or newer"):
        target_for_capability(7, 0)
    with pytest.raises(ValueError, match="gfx803"):
        target_for_arch("gfx803")


def test_kernels_wait_first() -> None:
    """Every kernel waits for the kernels before it, in its first statement."""
    folder, found = ROOT / "specmemo_kernels" / "backends" / "triton", []
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.append(node.name)
                assert ast.unparse(node.body[1]) == "wait_for_inputs(OVERLAPPED)", f"{path.name}: {node.name}"
    assert len(found) >= 13


CODED = (("sm_80", "int8"), ("sm_80", "fp8"), ("sm_90", "fp8"), ("gfx942", "fp8"), ("gfx1100", "int8"))


@pytest.mark.slow
@pytest.mark.parametrize(("pages", "sizes"), covering(CODED, ((128, 25), (64, 1))))
def test_quantised_pages(kernels: ModuleType, pages: tuple[str, str], sizes: tuple[int, int]) -> None:
    """Codes are dequantised in registers, without spills; fp8 also on targets without it (sm_80)."""
    target, kv_dtype = pages
    shape = kernels.Shape(*sizes, kv_dtype=kv_dtype)
    for job in (kernels.attention_job(target, shape), *kernels.paged_jobs(shape)):
        check(job, target)
