"""Heads load from files and repositories of every layout; only needed files are read, and pickles run no code."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import (
    HIDDEN,
    LAYOUTS,
    VOCAB,
    as_pickle,
    as_safetensors,
    assert_same,
    medusa_state,
    serve_hub,
    with_prefix,
    without,
    write_shards,
)
from safetensors.torch import load_file, save_file
from selection import sample

from specmemo_kernels.drafting import head_files, source_files
from specmemo_kernels.drafting.load_heads import HeadsError, describe_heads, load_heads
from specmemo_kernels.drafting.medusa_heads import MedusaHeads


@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize(("heads", "layers"), sample([(1, 1), (3, 1), (2, 3), (11, 2)], [(2, 3)]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, heads: int, layers: int, own: bool, tmp_path: Path) -> None:
    state = medusa_state(heads, layers, own)
    LAYOUTS[layout](tmp_path, state)
    # Published Vicuna heads say 2 and hold 5.
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 7}))
    for source in (tmp_path, str(tmp_path)):
        assert_same(load_heads(source, HIDDEN, VOCAB), state, heads, layers, own)
    facts = describe_heads(tmp_path, HIDDEN, VOCAB)
    sizes = (facts.num_heads, facts.num_layers, facts.own_lm_head, facts.head_bits, facts.accuracy)
    assert sizes == (heads, layers, own, None, None)


class TestFiles:
    def test_safetensors_before_pickle_and_heads_before_models(self, tmp_path: Path) -> None:
        for seed, name in reversed(list(enumerate(source_files.CANDIDATES))):
            state = medusa_state(seed=seed)
            if name.endswith("index.json"):
                write_shards(tmp_path, with_prefix(state), "safetensors" if name.startswith("model") else "bin")
            elif name.endswith("safetensors"):
                save_file(state, tmp_path / name)
            else:
                torch.save(state, tmp_path / name)
            assert_same(load_heads(tmp_path, HIDDEN, VOCAB), state)

    @pytest.mark.parametrize("name", ["mine.safetensors", "mine.pt"])
    def test_a_single_file(self, name: str, tmp_path: Path) -> None:
        state = medusa_state()
        (as_safetensors if name.endswith("safetensors") else as_pickle)(name)(tmp_path, state)
        assert_same(load_heads(tmp_path / name, HIDDEN, VOCAB), state)
        assert_same(MedusaHeads.from_pretrained(str(tmp_path / name)), state)

    @pytest.mark.parametrize("kind", ["safetensors", "bin"])
    def test_only_shards_with_heads_are_opened(self, kind: str, tmp_path: Path) -> None:
        state = medusa_state()
        write_shards(tmp_path, with_prefix(state), kind)
        next(tmp_path.glob("*-00003-of-*")).unlink()
        assert_same(load_heads(tmp_path, HIDDEN, VOCAB), state)
        gone = next(tmp_path.glob("*-00002-of-*"))
        gone.unlink()
        with pytest.raises(HeadsError, match=rf"index\.json: its shard {re.escape(gone.name)} is missing"):
            load_heads(tmp_path, HIDDEN, VOCAB)

    def test_a_key_that_its_shard_lacks(self, tmp_path: Path) -> None:
        write_shards(tmp_path, with_prefix(medusa_state()), "safetensors")
        shard = next(tmp_path.glob("*-00001-of-*"))
        save_file(without("medusa_head.0.0.linear.bias", "medusa_head.0.0.linear.weight")(load_file(shard)), shard)
        with pytest.raises(HeadsError, match=r"has no medusa_head\.0\.0\.linear\.\w+, .*index\.json lists"):
            load_heads(tmp_path, HIDDEN, VOCAB)

    @pytest.mark.parametrize("layout", [name for name in LAYOUTS if "safetensors" in name])
    def test_each_tensor_of_the_heads_is_read_once_and_no_other(
        self, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        state = medusa_state()
        LAYOUTS[layout](tmp_path, state)
        read: list[str] = []
        original = head_files.Entry.read

        def recording(entry: head_files.Entry) -> torch.Tensor:
            read.append(entry.name.removeprefix("medusa_head."))
            return original(entry)

        monkeypatch.setattr(head_files.Entry, "read", recording)
        load_heads(tmp_path, HIDDEN, VOCAB)
        assert sorted(read) == sorted(state)

    @pytest.mark.parametrize(
        "index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"0.0.linear.bias": "../x.safetensors"}}']
    )
    def test_bad_index(self, index: str, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(HeadsError, match=r"index\.json"):
            load_heads(tmp_path, HIDDEN, VOCAB)

    def test_bad_config(self, tmp_path: Path) -> None:
        save_file(medusa_state(), tmp_path / "medusa_lm_head.safetensors")
        for text in ("{", "[1]"):
            (tmp_path / "config.json").write_text(text)
            with pytest.raises(HeadsError, match=r"config\.json"):
                load_heads(tmp_path, HIDDEN, VOCAB)

    @pytest.mark.parametrize("name", source_files.CANDIDATES)
    def test_garbage(self, name: str, tmp_path: Path) -> None:
        for content in (b"", b"\x00" * 100, b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04 cut off"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(HeadsError, match=re.escape(str(tmp_path / name))):
                load_heads(tmp_path, HIDDEN, VOCAB)

    def test_truncated_files(self, tmp_path: Path) -> None:
        for name in ("medusa_lm_head.safetensors", "medusa_lm_head.pt"):
            (as_safetensors if name.endswith("safetensors") else as_pickle)(name)(tmp_path, medusa_state())
            content = (tmp_path / name).read_bytes()
            (tmp_path / name).write_bytes(content[: len(content) // 2])
            with pytest.raises(HeadsError, match=re.escape(name)):
                load_heads(tmp_path / name, HIDDEN, VOCAB)

    def test_pickle_of_something_else(self, tmp_path: Path) -> None:
        torch.save(MedusaHeads(HIDDEN, VOCAB, 1), tmp_path / "module.pt")
        with pytest.raises(
            HeadsError, match=r"module\.pt does not load as plain tensors: .* save a state_dict"
        ) as raised:
            load_heads(tmp_path / "module.pt", HIDDEN, VOCAB)
        assert "\x1b" not in str(raised.value)
        torch.save([torch.ones(2)], tmp_path / "medusa_lm_head.pt")
        with pytest.raises(HeadsError, match=r"medusa_lm_head\.pt holds a list"):
            load_heads(tmp_path, HIDDEN, VOCAB)
        torch.save(medusa_state() | {"0.1.weight": 3}, tmp_path / "medusa_lm_head.pt")
        with pytest.raises(HeadsError, match=r"0\.1\.weight is a int"):
            load_heads(tmp_path, HIDDEN, VOCAB)

    @pytest.mark.parametrize("zipped", [True, False])
    @pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin"])
    def test_a_malicious_pickle_runs_nothing(self, name: str, zipped: bool, tmp_path: Path) -> None:
        touched = tmp_path / "touched"

        class Evil:
            def __reduce__(self) -> Any:
                return Path.touch, (touched,)

        content = medusa_state() | {"9.0.linear.weight": Evil()}
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=zipped)
        with pytest.raises(HeadsError, match=rf"{re.escape(str(tmp_path / name))} does not load as plain tensors"):
            load_heads(tmp_path, HIDDEN, VOCAB)
        (tmp_path / name).write_bytes(pickle.dumps(Evil(), protocol=2))
        with pytest.raises(HeadsError, match=re.escape(str(tmp_path / name))):
            load_heads(tmp_path, HIDDEN, VOCAB)
        assert not touched.exists()
        pickle.loads((tmp_path / name).read_bytes())
        assert touched.exists(), "the pickle was harmless, the test proves nothing"

    def test_loaded_heads_outlive_their_file(self, tmp_path: Path) -> None:
        state = medusa_state()
        for name in ("medusa_lm_head.safetensors", "medusa_lm_head.pt"):
            (as_safetensors if name.endswith("safetensors") else as_pickle)(name)(tmp_path, state)
            loaded = load_heads(tmp_path / name, HIDDEN, VOCAB)
            with (tmp_path / name).open("r+b") as file:
                file.write(b"\xff" * (tmp_path / name).stat().st_size)
                file.truncate(10)
            assert_same(loaded, state)


class TestPlaces:
    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(
            HeadsError, match=r"no file of heads in it; one of medusa_lm_head\.safetensors, .* is needed"
        ):
            load_heads(tmp_path, HIDDEN, VOCAB)
        for source in (tmp_path / "absent", Path("org/name"), str(tmp_path / "absent"), "a/b/c", "../name"):
            with pytest.raises(HeadsError, match=rf"{re.escape(str(source))}: there is no such folder"):
                load_heads(source, HIDDEN, VOCAB)
        with pytest.raises(HeadsError, match="'': there is no such folder"):
            load_heads("", HIDDEN, VOCAB)
        for unreadable in ("a" * 5000, "~no-such-user/x"):
            with pytest.raises(HeadsError, match="can't be looked up"):
                load_heads(unreadable, HIDDEN, VOCAB)
        for wrong in (3, None, [torch.ones(2)]):
            with pytest.raises(HeadsError, match="a folder, a file, a hub id, a module or a dict, not a"):
                load_heads(wrong, HIDDEN, VOCAB)  # type: ignore[arg-type]

    def test_offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub.constants as constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(HeadsError, match=r"'org/heads' is neither a folder or file here nor a hub repository"):
            load_heads("org/heads", HIDDEN, VOCAB)
        repository = tmp_path / "models--org--heads"
        snapshot = repository / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("a" * 40)
        state = medusa_state(own=False)
        torch.save(state, snapshot / "medusa_lm_head.pt")
        (snapshot / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
        assert_same(load_heads("org/heads", HIDDEN, VOCAB), state, own=False)
        assert_same(MedusaHeads.from_pretrained("org/heads"), state, own=False)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_only_needed_files_are_downloaded(
        self, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        remote, cache, state = tmp_path / "remote", tmp_path / "cache", medusa_state()
        remote.mkdir()
        LAYOUTS[layout](remote, state)
        for name in ("config.json", "README.md", "optimizer.pt", "tokenizer.model", "training_args.bin"):
            (remote / name).write_text("{}")

        serve_hub(monkeypatch, "org/heads", remote, cache)
        monkeypatch.chdir(tmp_path)
        assert_same(load_heads("org/heads", HIDDEN, VOCAB), state)
        shards = {file.name for file in remote.glob("*-of-*")}
        weights = {file.name for file in remote.iterdir() if file.name in source_files.CANDIDATES} | {
            name for name in shards if "-00003-of-" not in name
        }
        assert {file.name for file in cache.iterdir()} == weights | {"config.json"}

    def test_a_model_without_heads_is_not_downloaded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

        def snapshot_download(repository: str, allow_patterns: list[str]) -> str:
            assert not any("-of-" in pattern for pattern in allow_patterns)
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        with pytest.raises(HeadsError, match=r"no Medusa heads in it; its keys are model\.norm\.weight"):
            load_heads("org/model", HIDDEN, VOCAB)
