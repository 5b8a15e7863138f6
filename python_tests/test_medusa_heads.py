"""Heads of every source equal the stored tensors; others are refused with key, shape and file."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import HIDDEN, VOCAB, Tensors, as_vllm, assert_same, medusa_state, with_prefix, without
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from specmemo_kernels.drafting.load_heads import HeadsError, load_heads
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.drafting.medusa_heads import MedusaHeads


@pytest.mark.parametrize("seed", range(40))
def test_dicts_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    heads, layers, own = rng.randint(1, 5), rng.randint(1, 3), rng.random() < 0.5
    state = medusa_state(heads, layers, own, seed)
    named = as_vllm(state) if rng.random() < 0.5 else state
    prefix = rng.choice(["", "medusa_head.", "model.medusa_head."])
    keys = rng.sample(list(named), len(named))
    source = {key: named[key] for key in keys}
    loaded = load_heads(with_prefix(source, prefix) if prefix else source, HIDDEN, VOCAB)
    assert_same(loaded, state, heads, layers, own)
    assert list(loaded.state_dict()) == list(MedusaHeads(HIDDEN, VOCAB, heads, layers, own_lm_head=own).state_dict())
    if heads > 1:  # then every key of the first head is missed
        for missing in (key for key in keys if re.findall(r"\d+", key)[0] == "0"):
            with pytest.raises(HeadsError, match=rf"the dict: {re.escape(missing)} is missing"):
                load_heads({key: source[key] for key in keys if key != missing}, HIDDEN, VOCAB)


class TestVllm:
    @pytest.mark.parametrize("extra", ["lm_head", "first", "all", "none"])
    def test_original_lm_head(self, extra: str, tmp_path: Path) -> None:
        state = medusa_state(own=False)
        lm_head = torch.randn(VOCAB, HIDDEN)
        names = {"lm_head": ["lm_head.weight"], "first": ["lm_heads.0.weight"], "none": []}
        names["all"] = [f"lm_heads.{head}.weight" for head in range(3)]
        save_file(as_vllm(state) | {name: lm_head.clone() for name in names[extra]}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"original_lm_head": True, "vocab_size": VOCAB}))
        assert_same(load_heads(tmp_path, HIDDEN, VOCAB), state, own=False)
        assert_same(MedusaHeads.from_pretrained(tmp_path), state, own=False)

    def test_single_lm_head_without_config(self) -> None:
        state = medusa_state(own=False)
        assert_same(
            load_heads(as_vllm(state) | {"lm_head.weight": torch.randn(VOCAB, HIDDEN)}, HIDDEN, VOCAB), state, own=False
        )
        with pytest.raises(HeadsError, match=r"lm_head\.weight has shape \[20, 8\].* \[21, 8\]"):
            load_heads(as_vllm(state) | {"lm_head.weight": torch.randn(VOCAB - 1, HIDDEN)}, HIDDEN, VOCAB)

    def test_no_biases(self, tmp_path: Path) -> None:
        state = medusa_state(layers=2)
        stored = {key: tensor.bfloat16() for key, tensor in as_vllm(state).items() if not key.endswith("bias")}
        save_file(stored, tmp_path / "model.safetensors")
        zeros = {key: torch.zeros_like(t) if key.endswith("bias") else t.bfloat16() for key, t in state.items()}
        loaded = load_heads(tmp_path, HIDDEN, VOCAB)
        assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
        assert_same(loaded, zeros, layers=2)

    def test_one_bias_missing(self) -> None:
        state = as_vllm(medusa_state())
        del state["blocks.1.layers.0.bias"]
        with pytest.raises(HeadsError, match=r"the dict: blocks\.1\.layers\.0\.bias is missing"):
            load_heads(state, HIDDEN, VOCAB)

    def test_token_map(self) -> None:
        kept = torch.tensor([3, 5, 7, 20])
        state = medusa_state()
        assert_same(load_heads(as_vllm(state) | {"token_map": kept}, HIDDEN, VOCAB), state)
        shared = medusa_state(own=False)
        cut = {"token_map": kept, "lm_head.weight": torch.randn(4, HIDDEN)}
        assert_same(load_heads(as_vllm(shared) | cut, HIDDEN, VOCAB), shared, own=False)
        short = {key: t[kept] if "lm_heads" in key else t for key, t in as_vllm(state).items()}
        with pytest.raises(HeadsError, match=r"lm_heads\.0\.weight has shape \[4, 8\].*token_map.*\[21, 8\]"):
            load_heads(short | {"token_map": kept}, HIDDEN, VOCAB)


def _changed(key: str, change: Callable[[torch.Tensor], Any]) -> Callable[[Tensors], Tensors]:
    return lambda state: {k: change(tensor) if k == key else tensor for k, tensor in state.items()}


# In a message "~" stands where the prefix of a whole model's file goes.
BROKEN: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "gap in the heads": (without("1.0.linear.weight", "1.0.linear.bias", "1.1.weight"),
                         r"~1\.0\.linear\.weight is missing \(its keys are of 3"),
    "bias missing": (without("2.0.linear.bias"), r"~2\.0\.linear\.bias is missing"),
    "first weight missing": (without("0.0.linear.weight"), r"~0\.0\.linear\.weight is missing"),
    "one lm_head missing": (without("1.1.weight"), r"~1\.1\.weight is missing .*own lm_heads"),
    "only lm_heads": (lambda s: {k: t for k, t in s.items() if "linear" not in k},
                      r"~0\.0\.linear\.weight is missing"),
    "another layer in one head": (lambda s: s | {"0.1.linear.weight": torch.ones(HIDDEN, HIDDEN)},
                                  r"~0\.1\.linear\.bias is missing"),
    "unknown": (lambda s: s | {"0.0.norm.weight": torch.ones(HIDDEN)}, r"unknown keys ~0\.0\.norm\.weight "),
    "many unknown": (lambda s: s | {f"extra.{i}": torch.ones(1) for i in range(9)},
                     r"unknown keys ~extra\.0, ~extra\.1, ~extra\.2, ~extra\.3 and 5 more"),
    "scales of a quantised file": (lambda s: s | {"0.0.linear.weight_scale": torch.ones(1)}, r"~0\S*weight_scale"),
    "wide bias": (_changed("1.0.linear.bias", lambda t: torch.ones(9)),
                  r"~1\.0\.linear\.bias has shape \[9\], .*\[8\] \(hidden_size 8, vocab_size 21\)"),
    "lm_head of another width": (_changed("0.1.weight", lambda t: torch.ones(VOCAB, 9)),
                                 r"~0\.1\.weight has shape \[21, 9\].*\[21, 8\]"),
    "scalar": (_changed("0.0.linear.weight", lambda t: torch.tensor(1.0)), r"~0\S* has shape \[\].*\[8, 8\]"),
    "int8": (_changed("1.0.linear.weight", lambda t: t.to(torch.int8)), r"~1\.0\.linear\.weight is .*(I8|int8), "),
    "two dtypes": (_changed("2.1.weight", lambda t: t.half()), r"~0\.0\.linear\.weight is .*32.*~2\.1\.weight is .*16"),
}  # fmt: skip


@pytest.mark.parametrize("form", ["dict", "safetensors", "pt", "medusa-2"])
@pytest.mark.parametrize("case", BROKEN)
def test_broken_heads(case: str, form: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    state = change(medusa_state())
    source: Any = tmp_path
    if form == "dict":
        where, source = "the dict", state
    elif form == "pt":
        where = str(tmp_path / "medusa_lm_head.pt")
        torch.save(state, where)
    else:
        where = str(tmp_path / ("model" if form == "medusa-2" else "medusa_lm_head")) + ".safetensors"
        save_file(with_prefix(state) if form == "medusa-2" else state, where)
    message = message.replace("~", r"medusa_head\." if form == "medusa-2" else "")
    with pytest.raises(HeadsError, match=rf"{re.escape(where)}: .*{message}"):
        load_heads(source, HIDDEN, VOCAB)


@pytest.mark.parametrize("state", [{}, {"model.norm.weight": torch.ones(3)}], ids=["empty", "another model"])
def test_no_heads(state: Tensors, tmp_path: Path) -> None:
    save_file(state, tmp_path / "model.safetensors")
    for source in (state, tmp_path):
        with pytest.raises(HeadsError, match=f"no Medusa heads in it; its keys are {next(iter(state), 'none')}"):
            load_heads(source, HIDDEN, VOCAB)


class TestOtherModel:
    @pytest.mark.parametrize("own", [True, False])
    def test_hidden_size(self, own: bool, tmp_path: Path) -> None:
        MedusaHeads(16, VOCAB, 2, own_lm_head=own).save_pretrained(tmp_path)
        file = tmp_path / "medusa_lm_head.safetensors"
        message = rf"{re.escape(str(file))}: 0\.0\.linear\.weight has shape \[16, 16\].*\[8, 8\]"
        with pytest.raises(HeadsError, match=message):
            load_heads(tmp_path, HIDDEN, VOCAB)

    @pytest.mark.parametrize("module", [True, False])
    @pytest.mark.parametrize("own", [True, False])
    def test_vocab_size(self, own: bool, module: bool, tmp_path: Path) -> None:
        heads = MedusaHeads(HIDDEN, 33, 2, own_lm_head=own)
        heads.save_pretrained(tmp_path)
        message = r"0\.1\.weight has shape \[33, 8\].*\[21, 8\]" if own else "vocab_size 33, but the model has 21"
        with pytest.raises(HeadsError, match=message):
            load_heads(heads if module else tmp_path, HIDDEN, VOCAB)

    def test_shared_heads_without_config_fit_any_vocabulary(self, tmp_path: Path) -> None:
        save_file(medusa_state(own=False), tmp_path / "medusa_lm_head.safetensors")
        assert load_heads(tmp_path, HIDDEN, 999).vocab_size == 999


class TestModules:
    def test_a_module_list_of_medusas_own(self) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(HIDDEN, HIDDEN)

        def head() -> nn.Sequential:  # Medusa's own repeats one block
            return nn.Sequential(*([Block()] * 2), nn.Linear(HIDDEN, VOCAB, bias=False))

        theirs = nn.ModuleList(head() for _ in range(3))
        for parameter in theirs.parameters():
            nn.init.normal_(parameter)
        loaded = load_heads(theirs, HIDDEN, VOCAB)
        assert_same(loaded, theirs.state_dict(), layers=2)
        whole = nn.ModuleDict({"base_model": nn.Linear(5, 5), "medusa_head": theirs})
        assert_same(load_heads(whole, HIDDEN, VOCAB), theirs.state_dict(), layers=2)

    def test_repeated_blocks_are_saved(self, tmp_path: Path) -> None:
        state = medusa_state(layers=2)
        state["0.1.linear.weight"] = state["0.0.linear.weight"]
        load_heads(state, HIDDEN, VOCAB).save_pretrained(tmp_path)
        assert_same(load_heads(tmp_path, HIDDEN, VOCAB), state, layers=2)

    def test_what_fits_is_not_copied(self) -> None:
        state = medusa_state()
        loaded = load_heads(state, HIDDEN, VOCAB)
        assert load_heads(loaded, HIDDEN, VOCAB) is loaded
        assert load_heads(loaded, HIDDEN, VOCAB, dtype=torch.float32, device="cpu") is loaded
        for key, tensor in loaded.state_dict().items():
            assert tensor.data_ptr() == state[key].data_ptr()
        half = load_heads(loaded.eval(), HIDDEN, VOCAB, dtype=torch.float16)
        assert half is not loaded
        assert not half.training
        assert {p.dtype for p in loaded.parameters()} == {torch.float32}
        assert {p.dtype for p in half.parameters()} == {torch.float16}

    def test_no_data(self) -> None:
        with torch.device("meta"):
            heads = MedusaHeads(HIDDEN, VOCAB, 2)
        with pytest.raises(HeadsError, match=r"0\.0\.linear\.weight is torch\.float32 without data"):
            load_heads(heads, HIDDEN, VOCAB, device="cpu")

    @pytest.mark.parametrize("form", ["dict", "safetensors", "pt"])
    @pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("wanted", [None, torch.float32, torch.bfloat16])
    def test_dtypes(self, form: str, stored: torch.dtype, wanted: torch.dtype | None, tmp_path: Path) -> None:
        state = {key: tensor.to(stored) for key, tensor in medusa_state().items()}
        source: Any = state
        if form != "dict":
            source = tmp_path / f"heads.{form}"
            save_file(state, source) if form == "safetensors" else torch.save(state, source)
        loaded = load_heads(source, HIDDEN, VOCAB, dtype=wanted)
        for key, tensor in loaded.state_dict().items():
            assert tensor.dtype == (wanted or stored)
            assert torch.equal(tensor, state[key].to(wanted or stored))

    def test_mixed_dtypes_become_the_one_asked_for(self) -> None:
        state = medusa_state()
        mixed = {key: tensor.half() if key.endswith("bias") else tensor for key, tensor in state.items()}
        assert {p.dtype for p in load_heads(mixed, HIDDEN, VOCAB, dtype=torch.float64).parameters()} == {torch.float64}
        with pytest.raises(HeadsError, match=r"dtype is torch\.int8"):
            load_heads(state, HIDDEN, VOCAB, dtype=torch.int8)


class TestPretrained:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
    @pytest.mark.parametrize(("heads", "layers"), [(1, 1), (4, 1), (3, 2)])
    def test_round_trip(self, heads: int, layers: int, own: bool, dtype: torch.dtype, tmp_path: Path) -> None:
        folder = tmp_path / "new" / "folder"
        state = {key: tensor.to(dtype) for key, tensor in medusa_state(heads, layers, own).items()}
        saved = load_heads(state, HIDDEN, VOCAB)
        saved.cumulative_topk_accuracy = [[0.5, 0.75]] * heads
        saved.save_pretrained(folder)
        assert {file.name for file in folder.iterdir()} == {"config.json", "medusa_lm_head.safetensors"}
        loaded = MedusaHeads.from_pretrained(folder)
        assert_same(loaded, state, heads, layers, own)
        assert {p.dtype for p in loaded.parameters()} == {dtype}
        assert loaded.cumulative_topk_accuracy == saved.cumulative_topk_accuracy
        assert {p.dtype for p in MedusaHeads.from_pretrained(folder, dtype=torch.float64).parameters()} == {
            torch.float64
        }
        loaded.save_pretrained(folder)
        assert_same(MedusaHeads.from_pretrained(str(folder)), state, heads, layers, own)

    def test_heads_in_use_are_saved(self, tmp_path: Path) -> None:
        state = medusa_state(layers=2, own=False)
        heads = load_heads(state, HIDDEN, VOCAB)
        MedusaDrafter(heads, (torch.randn(VOCAB, HIDDEN), None))
        heads.save_pretrained(tmp_path)
        assert_same(MedusaHeads.from_pretrained(tmp_path), state, layers=2, own=False)

    def test_a_full_disk_leaves_the_saved_heads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        state = medusa_state(layers=2)
        load_heads(state, HIDDEN, VOCAB).save_pretrained(tmp_path)

        def full(tensors: Tensors, path: Path) -> None:
            path.write_bytes(b"a part")
            raise SafetensorError("I/O error: No space left on device (os error 28)")

        monkeypatch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(OSError, match=r"medusa_lm_head.safetensors can't be written: .*No space left"):
            load_heads(medusa_state(layers=2, seed=1), HIDDEN, VOCAB).save_pretrained(tmp_path)
        assert {file.name for file in tmp_path.iterdir()} == {"config.json", "medusa_lm_head.safetensors"}
        assert_same(MedusaHeads.from_pretrained(tmp_path), state, layers=2)

    def test_shared_heads_need_a_vocabulary(self, tmp_path: Path) -> None:
        state = medusa_state(own=False)
        save_file(state, tmp_path / "medusa_lm_head.safetensors")
        with pytest.raises(HeadsError, match=r"vocabulary's size .*load_heads\("):
            MedusaHeads.from_pretrained(tmp_path)
        save_file(as_vllm(state) | {"lm_head.weight": torch.randn(VOCAB, HIDDEN)}, tmp_path / "vllm.safetensors")
        assert_same(MedusaHeads.from_pretrained(tmp_path / "vllm.safetensors"), state, own=False)

    def test_bad_accuracies(self, tmp_path: Path) -> None:
        MedusaHeads(HIDDEN, VOCAB, 2).save_pretrained(tmp_path)
        wrong: list[Any] = [3, {}, "ab", [[0.5]], [[0.5], []], *([[0.5], row] for row in ([1.5], ["x"], "1", [True]))]
        for rows in (*wrong, {"0": [0.5]}, [[0.5], [10**400]], [[0.5], [0.4, 0.3]], [[0.5], [float("nan")]]):
            (tmp_path / "config.json").write_text(json.dumps({"cumulative_topk_accuracy": rows}))
            with pytest.raises(HeadsError, match="cumulative_topk_accuracy"):
                load_heads(tmp_path, HIDDEN, VOCAB)
            heads = MedusaHeads(HIDDEN, VOCAB, 2)
            heads.cumulative_topk_accuracy = rows
            for use in (lambda: load_heads(heads, HIDDEN, VOCAB), lambda: heads.save_pretrained(tmp_path / "new")):  # noqa: B023
                with pytest.raises(HeadsError, match="cumulative_topk_accuracy"):
                    use()
            assert not list((tmp_path / "new").glob("*"))


class TestTruncated:
    @pytest.mark.parametrize("own", [True, False])
    def test_shares_the_first_heads(self, own: bool) -> None:
        state = medusa_state(4, 2, own)
        heads = load_heads(state, HIDDEN, VOCAB).eval()
        heads.cumulative_topk_accuracy = [[0.4], [0.3], [0.2], [0.1]]
        first = heads.truncated(2)
        assert_same(first, state, 2, 2, own)
        assert not first.training
        assert first.cumulative_topk_accuracy == [[0.4], [0.3]]
        assert heads.num_heads == len(heads) == 4
        mine = dict(heads.named_parameters())
        assert all(parameter is mine[name] for name, parameter in first.named_parameters())
        with torch.no_grad():
            heads.get_parameter("1.0.linear.bias").fill_(3)
        assert first.get_parameter("1.0.linear.bias").eq(3).all()
        assert_same(heads.truncated(4), heads.state_dict(), 4, 2, own)

    @pytest.mark.parametrize("number", [0, -1, 4])
    def test_out_of_range(self, number: int) -> None:
        with pytest.raises(ValueError, match=f"num_heads is {number}, there are 3"):
            MedusaHeads(HIDDEN, VOCAB, 3).truncated(number)


def test_new_heads_repeat_the_lm_head_they_share() -> None:
    heads, hidden, shared = (
        MedusaHeads(HIDDEN, VOCAB, 2, own_lm_head=False),
        torch.randn(5, HIDDEN),
        torch.randn(VOCAB, HIDDEN),
    )
    with torch.no_grad():
        assert torch.equal(heads.logits(hidden, shared), (hidden @ shared.T).expand(2, 5, VOCAB))
        assert heads(hidden).shape == (2, 5, HIDDEN)
    with pytest.raises(ValueError, match="num_layers is 0"):
        MedusaHeads(HIDDEN, VOCAB, 1, 0)
