"""FlashInfer's XQA decode as a peer: its packed mask, and the call, with a stand-in for FlashInfer."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import AttentionCase

BENCH = str(Path(__file__).resolve().parents[1] / "bench")


def bench(name: str) -> ModuleType:
    sys.path.insert(0, BENCH)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(BENCH)


@pytest.mark.parametrize("nodes", [1, 25, 32, 40, 64, 70])
def test_xqa_masks_have_our_bits(nodes: int) -> None:
    case = AttentionCase("mask", (16,) * 2, (nodes,) * 2)
    inputs = bench("bench_gpu").device_inputs(case, torch.float32, "cpu")
    packed = bench("gpu_peers").packed_mask(inputs["tree_mask"], 2, nodes)
    assert (packed.dtype, packed.shape) == (torch.uint16, (2, nodes, 2 * -(-nodes // 32)))
    for key in range(nodes):
        ours = inputs["tree_mask"].view(2, nodes, -1)[:, :, key // 64] >> key % 64 & 1
        assert torch.equal(packed[:, :, key // 16].long() >> key % 16 & 1, ours)


@pytest.mark.parametrize("nodes", [1, 9])
def test_xqa_is_called_with_our_pages(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of all sequences in rows, one head after the other in a page, lengths with the nodes."""
    calls: list[tuple[Any, ...]] = []
    decode = ModuleType("flashinfer.decode")
    decode.xqa_batch_decode_with_kv_cache = lambda *args, **more: calls.append((*args, more)) or args[0]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    case = AttentionCase("call", (20,) * 3, (nodes,) * 3)
    inputs = bench("bench_gpu").device_inputs(case, torch.float32, "cpu")
    run = bench("gpu_peers").PEERS["xqa"](inputs)
    assert torch.equal(run(inputs["k_pages"], inputs["v_pages"]), inputs["q"])
    ((_, (k, v), _, table, lengths, longest, more),) = calls
    assert k.is_contiguous()
    assert v.shape == (6, case.num_kv_heads, 16, 64)
    assert (table.shape, lengths.tolist(), longest) == ((3, 2), [20 + nodes] * 3, 20 + nodes)
    assert ("mask" in more) == (nodes > 1)
    page, slot = table[1, 1], 20 % 16
    assert torch.equal(k[page, :, slot], inputs["k_new"][nodes]), "the root of the second sequence"
