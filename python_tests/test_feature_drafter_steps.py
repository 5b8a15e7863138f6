"""Steps of drafters that read hidden states need no host, so that a GPU can capture them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_oracles import write_clover2, write_dflash, write_eagle1, write_eagle3
from selection import sample
from test_device_step import Watch
from tiny_models import _BASE, FAMILIES, VOCAB
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import specmemo_kernels as sk
from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting import growth
from specmemo_kernels.drafting.clover import CloverDrafter
from specmemo_kernels.drafting.dflash import DFlashDrafter
from specmemo_kernels.drafting.eagle import EagleDrafter
from specmemo_kernels.drafting.published import open_drafter
from specmemo_kernels.engine.device_step import DeviceStep, StepShape, StepState
from specmemo_kernels.forward.batch import tree_layout, uniform_rows
from specmemo_kernels.integrations.distributed.ranks import SingleRank
from specmemo_kernels.integrations.hf.feature_drafter import vocabulary_of
from specmemo_kernels.integrations.hf.features import find_taps
from specmemo_kernels.integrations.hf.target import HFTarget, ModelFacts, attach, step_mask
from specmemo_kernels.tree.tree_budget import Trees

LAYERS = 6
KINDS: dict[str, tuple[Callable[..., Any], Any]] = {
    "eagle3": (partial(write_eagle3, draft_vocab=40), EagleDrafter),
    "eagle": (write_eagle1, EagleDrafter),
    "clover2": (write_clover2, CloverDrafter),
    "dflash": (
        partial(write_dflash, num_target_layers=LAYERS, target_layer_ids=(1, 4), block_size=6),
        DFlashDrafter,
    ),
}
TREES = {"dynamic": sk.TreeBudget(7, 3, 3), "static": sk.DraftTree.from_paths([[0], [1], [0, 0], [0, 0, 0], [1, 0]])}


class WatchCalls(Watch):
    """Records the arguments of our operators as well."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "specmemo":
            self.calls.setdefault(str(func).split(".")[1], []).append(args)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("kind", sample(KINDS, ["dflash"]))
def test_steps_trace_without_values(kind: str, tree: Trees, tmp_path: Path) -> None:
    """With fake tensors everything but the kernels runs; every attention has a lower bound of its rows."""
    write, drafter_class = KINDS[kind]
    write(tmp_path, vocab=VOCAB)
    published = open_drafter(tmp_path)
    assert published is not None
    caches = (uniform_rows, growth._nodes, growth._constants, growth._level, growth._by_depth, tree_layout)
    step_mask(torch.device("cpu"))  # cached; can't be made of a fake tensor
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            config = CONFIG_MAPPING["llama"](**(_BASE | FAMILIES["llama"] | {"num_hidden_layers": LAYERS}))
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
            undo = attach(model.eval())
            layers = (LayerKV(2, 8, 8, torch.float32, torch.device("cpu")),) * LAYERS
            facts = ModelFacts(layers, (4,) * LAYERS, 32, VOCAB, torch.float32, layers[0].device, True, True)
            tensors = {
                key: torch.empty(entry.shape, dtype=torch.int64 if key == "d2t" else torch.float32)
                for key, entry in published.names.items()
            }
            vocabulary = vocabulary_of(model, facts, "triton", SingleRank())
            drafter = drafter_class(published.config, tensors, vocabulary, LAYERS, "triton")
            facts = replace(facts, taps=find_taps(model, drafter.feature_ids))
            pool = PagedKVPool((*layers, *drafter.layers), num_pages=8, page_size=16, max_sequences=3, max_nodes=21)
            state = StepState(3, torch.empty(drafter.state_size, dtype=torch.float32))
            shape = StepShape(2, tree.size, tree.max_depth, tree.width, 128)
            step = DeviceStep(shape, tree, state, HFTarget(model, facts, "triton"), drafter, pool, "triton")
            if isinstance(tree, sk.DraftTree):
                tree_layout(tree, 2, torch.device("cpu"))  # cached by the step before
            with WatchCalls() as watch:
                step.run()
            with pytest.raises(DataDependentOutputException):
                step.emitted.tolist()
            undo()
    finally:
        for cache in caches:  # they hold fake tensors
            cache.cache_clear()
    attention = watch.calls["tree_attention"]
    assert len(attention) > LAYERS or kind == "clover2"
    assert all(isinstance(args[-2], int) for args in attention), "min_qo_len"
