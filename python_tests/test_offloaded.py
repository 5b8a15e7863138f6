"""Models whose layers are on several devices (accelerate's ``device_map``), without GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import specmemo_kernels
from specmemo_kernels import MedusaHeads
from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.cache.paged_kv import PagedKVPool

LAYERS = ["model.layers.0", "model.layers.1", "model.norm", "lm_head"]


def heads(own: bool) -> MedusaHeads:
    torch.manual_seed(5)
    made = MedusaHeads(32, VOCAB, 3, own_lm_head=own)
    for parameter in made.parameters():
        parameter.data.normal_(std=0.3)
    return made


def load(folder: Path, on_disk: list[str]) -> PreTrainedModel:
    places = {
        name: "disk" if name in on_disk else "cpu" for name in ["model.embed_tokens", "model.rotary_emb", *LAYERS]
    }
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=folder / "offloaded", dtype=torch.float32, local_files_only=True
    ).eval()


@pytest.mark.parametrize("on_disk", [LAYERS[1:2], LAYERS[:2], LAYERS], ids=["one layer", "layers", "lm_head too"])
def test_layers_that_are_fetched_from_disk_write_the_same(tmp_path: Path, on_disk: list[str]) -> None:
    """accelerate's hooks load a layer's weights when it runs; its pages are on its compute device."""
    whole = tiny_model("llama")
    whole.save_pretrained(tmp_path)
    model = load(tmp_path, on_disk)
    assert {name for name, p in model.named_parameters() if p.is_meta}
    ids = torch.randint(3, VOCAB, (3, 17), generator=torch.Generator().manual_seed(1))
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    expected = whole.generate(ids, **arguments)
    own = "lm_head" in on_disk
    if own:
        with pytest.raises(specmemo_kernels.UnsupportedModel, match="share the lm_head of LlamaForCausalLM, which"):
            specmemo_kernels.patch(model, heads(False), tree=6)
    with specmemo_kernels.patch(model, heads(own), tree=6) as handle:
        assert torch.equal(model.generate(ids, **arguments), expected)
        assert {layer.device.type for layer in handle.facts.layers} == {"cpu"}
        assert sum(handle.stats.accepted_at_depth) > 0
        assert handle.pool is not None
        handle.pool.check_integrity()


def test_each_layers_pages_lie_on_its_device() -> None:
    """Pages and scratch are on their layers' devices; all share one block table."""
    devices = [torch.device("cpu"), torch.device("meta")]
    layers = [LayerKV(2, 8, 8, torch.float32, devices[i // 2]) for i in range(4)]
    pool = PagedKVPool(layers, num_pages=5, page_size=4, max_sequences=2, max_nodes=6)
    for i, layer in enumerate(layers):
        for tensor in (pool.k_pages[i], pool.v_pages[i], pool.k_scratch[i], pool.v_scratch[i]):
            assert tensor.device == layer.device
    assert [group.layers for group in pool.groups] == [(0, 1), (2, 3)]
    assert pool.page_bytes == sum(g.k_pages.nbytes + g.v_pages.nbytes for g in pool.groups)
    pool.resize_scratch(3)
    assert [group.k_scratch.device for group in pool.groups] == devices
