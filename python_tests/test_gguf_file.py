"""Sizes of ``.gguf`` files, written here by the format's specification."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.gguf_header import BLOCKS, read_header
from specmemo_kernels.planning.known_models import known_model
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.planner import plan_memory

F32, F16, Q4_K, Q6_K, Q8_0 = 0, 1, 12, 14, 8
#: Bytes per element by llama.cpp's names.
DENSITY = {F32: 4, F16: 2, Q4_K: 144 / 256, Q6_K: 210 / 256, Q8_0: 34 / 32}
LLAMA = {
    "block_count": 2, "embedding_length": 512, "feed_forward_length": 1024, "attention.head_count": 8,
    "attention.head_count_kv": 2, "context_length": 4096,
}  # fmt: skip
Tensors = Mapping[str, tuple[tuple[int, ...], int]]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def metadata_value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list) and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    if isinstance(value, list):
        return struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)
    return struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<If", 6, value)


def write(path: Path, metadata: Mapping[str, Any], tensors: Tensors, version: int = 3) -> Path:
    """A file with a header only; shapes are torch's."""
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    parts += [text(key) + metadata_value(value) for key, value in metadata.items()]
    for name, (shape, kind) in tensors.items():
        parts.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, 0))
    path.write_bytes(b"".join(parts))
    return path


def llama(kinds: tuple[int, int, int] = (Q4_K, Q6_K, Q6_K), **sizes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of a Llama: types of most matrices, of down projections, and of embedding and lm_head."""
    chosen = LLAMA | sizes
    hidden, width, keys = chosen["embedding_length"], chosen["feed_forward_length"], 512 // 8 * 2
    metadata = {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a", "bé"], "llama.rope.freq_base": 1e4}
    metadata |= {f"llama.{key}": value for key, value in chosen.items()}
    most, down, ends = kinds
    tensors = {"token_embd.weight": ((1000, hidden), ends), "output.weight": ((1000, hidden), ends)}
    for layer in range(chosen["block_count"]):
        shapes = {"attn_q": (hidden, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
                  "attn_output": (hidden, hidden), "ffn_gate": (width, hidden), "ffn_up": (width, hidden)}  # fmt: skip
        tensors |= {f"blk.{layer}.{name}.weight": (shape, most) for name, shape in shapes.items()}
        tensors[f"blk.{layer}.ffn_down.weight"] = (hidden, width), down
        tensors |= {f"blk.{layer}.{name}.weight": ((hidden,), F32) for name in ("attn_norm", "ffn_norm")}
    return metadata, tensors | {"output_norm.weight": ((hidden,), F32)}


def stored(tensors: Tensors) -> float:
    return sum(prod(shape) * DENSITY[kind] for shape, kind in tensors.values() if len(shape) > 1)


@pytest.mark.parametrize("kinds", [(Q4_K, Q6_K, Q6_K), (Q8_0, Q8_0, F16), (F16, F16, F16), (F32, F32, Q8_0)])
def test_bytes_of_a_file(kinds: tuple[int, int, int], tmp_path: Path) -> None:
    """Matrices have exactly the file's bytes; sizes are those of the same configuration."""
    metadata, tensors = llama(kinds)
    spec = ModelSpec.load(write(tmp_path / "m.gguf", metadata, tensors))
    assert spec.weight_bytes == stored(tensors) + 4 * spec.vector_weights
    config = {
        "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 1000,
        "num_key_value_heads": 2, "intermediate_size": 1024, "max_position_embeddings": 4096, "dtype": "float32",
    }  # fmt: skip
    assert spec.with_weights(4) == ModelSpec.from_config(config, spec.name, weight_bits=4)


def test_tied_embeddings_and_experts(tmp_path: Path) -> None:
    """A missing output.weight is the embedding; a tensor of experts has all of a layer's."""
    metadata, tensors = llama()
    del tensors["output.weight"]
    metadata |= {"llama.expert_count": 4, "llama.expert_used_count": 2, "llama.attention.head_count_kv": [2, 2]}
    for layer in range(2):
        for name, shape in (("gate", (4, 1024, 512)), ("up", (4, 1024, 512)), ("down", (4, 512, 1024))):
            del tensors[f"blk.{layer}.ffn_{name}.weight"]
            tensors[f"blk.{layer}.ffn_{name}_exps.weight"] = shape, Q4_K
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = (4, 512), F32
    spec = ModelSpec.load(write(tmp_path / "m.gguf", metadata, tensors))
    assert spec.tied
    assert (spec.num_experts, spec.experts_per_token, spec.expert_size) == (4, 2, 1024)
    assert spec.weight_bytes == pytest.approx(stored(tensors) + 4 * spec.vector_weights, abs=1)
    assert spec.quantised.experts.coded == DENSITY[Q4_K]


def test_a_plan_says_what_transformers_does(tmp_path: Path) -> None:
    """It dequantises the file, to float32 by default; --weight-bits plans for another runtime."""
    path = write(tmp_path / "m.gguf", *llama())
    plan = plan_memory(path, "rtx-4060", None, Workload(128))
    assert plan.parts["weights"] == 4 * ModelSpec.load(path).parameters
    half = plan_memory(ModelSpec.load(path).with_dtype("float16"), "rtx-4060", None, Workload(128))
    assert half.parts["weights"] == plan.parts["weights"] / 2
    assert any("dequantises all of them once" in line and "--weight-bits" in line for line in plan.reasons)
    coded = plan_memory(ModelSpec.load(path, weight_bits=4.5), "rtx-4060", None, Workload(128))
    assert coded.parts["weights"] < 0.6 * plan.parts["weights"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"llama.ssm.state_size": 16}, "recurrent layers; give the model's config.json"), ({"split.count": 3}, "one of 3"),
     ({"llama.attention.head_count_kv": [2, 4]}, "layers of different sizes"),
     ({"llama.attention.head_count_kv": 3}, "num_key_value_heads=3, expected a divisor of num_attention_heads=8"),
     ({"llama.expert_count": 4, "llama.expert_used_count": 5}, "num_experts_per_tok=5 and num_experts=4"),
     ({"llama.expert_count": 4}, "num_experts=4, but .*; add num_experts_per_tok"),
     ({"llama.block_count": 1001}, "num_hidden_layers=1001, the limit is 1000"),
     ({"llama.embedding_length": 0}, "hidden_size=0"), ({"llama.block_count": "two"}, "m.gguf has unusual metadata")],
)  # fmt: skip
def test_metadata_that_cannot_be_planned(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    metadata, tensors = llama()
    with pytest.raises(ValueError, match=message):
        ModelSpec.load(write(tmp_path / "m.gguf", metadata | changes, tensors))


def test_other_files(tmp_path: Path) -> None:
    """An encoder, an old version, a type that doesn't exist, no gguf file, no file."""
    metadata, tensors = llama()
    files = {
        "isn't a decoder": write(tmp_path / "a.gguf", metadata, {"blk.0.attn_q.weight": ((8, 8), F16)}),
        "version 1, expected 2 or 3": write(tmp_path / "b.gguf", metadata, tensors, version=1),
        "has type 99": write(tmp_path / "c.gguf", metadata, {"x": ((8, 8), 99)}),
        "isn't a gguf file": tmp_path / "d.gguf",
    }
    files["isn't a gguf file"].write_bytes(b"PK\3\4")
    for message, path in files.items():
        with pytest.raises(ValueError, match=message):
            ModelSpec.load(path)
    with pytest.raises(FileNotFoundError):
        ModelSpec.load(tmp_path / "e.gguf")


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_broken_headers(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A header that is cut, or has other bytes, is read or refused with a ValueError; nothing large is allocated."""
    folder = tmp_path_factory.mktemp("broken")
    content = bytearray(write(folder / "m.gguf", *llama()).read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(4, len(content) - 1))]
    else:
        place = data.draw(st.integers(4, len(content) - 9))
        content[place : place + 8] = data.draw(st.binary(min_size=8, max_size=8))
    (folder / "m.gguf").write_bytes(content)
    with suppress(ValueError):
        assert ModelSpec.load(folder / "m.gguf").num_layers >= 1


def test_against_other_readers(tmp_path: Path) -> None:
    """transformers' table of block sizes, and its reader's tensors."""
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant")
    assert dequant.GGML_BLOCK.items() <= BLOCKS.items()
    reader = importlib.import_module("transformers.integrations.gguf.reader")
    path = write(tmp_path / "m.gguf", *llama())
    theirs = reader.GgufHeader.from_file(str(path)).tensors
    ours = read_header(path).tensors
    assert [(t.name, t.shape, t.kind, t.nbytes) for t in ours] == [
        (t.name, t.shape, t.ggml_type, t.nbytes) for t in theirs
    ]


def test_a_published_size(tmp_path: Path) -> None:
    """Llama-3.1-8B in Q4_K_M's types (Q6_K for half of the value and down projections and the lm_head): 4.6 GiB."""
    config = known_model("llama-3.1-8b") or {}
    metadata, _ = llama()
    hidden, width, keys, layers = 4096, 14336, 1024, 32
    metadata |= {"llama.block_count": layers, "llama.embedding_length": hidden, "llama.feed_forward_length": width,
                 "llama.attention.head_count": 32, "llama.attention.head_count_kv": 8}  # fmt: skip
    tensors: dict[str, Any] = {"token_embd.weight": ((128256, hidden), Q4_K), "output.weight": ((128256, hidden), Q6_K)}
    for layer in range(layers):
        more = Q6_K if layer < 4 or layer >= 28 or layer % 3 == 2 else Q4_K
        shapes = {"attn_q": (hidden, hidden), "attn_k": (keys, hidden), "attn_output": (hidden, hidden),
                  "ffn_gate": (width, hidden), "ffn_up": (width, hidden)}  # fmt: skip
        tensors |= {f"blk.{layer}.{name}.weight": (shape, Q4_K) for name, shape in shapes.items()}
        tensors |= {f"blk.{layer}.attn_v.weight": ((keys, hidden), more)}
        tensors |= {f"blk.{layer}.ffn_down.weight": ((hidden, width), more)}
        tensors |= {f"blk.{layer}.{name}.weight": ((hidden,), F32) for name in ("attn_norm", "ffn_norm")}
    tensors["output_norm.weight"] = (hidden,), F32
    spec = ModelSpec.load(write(tmp_path / "m.gguf", metadata, tensors))
    assert spec.parameters == ModelSpec.from_config(config).parameters
    assert spec.weight_bytes == pytest.approx(4.92e9, rel=0.01), "the published file has 4.92 GB"
