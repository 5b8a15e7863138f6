"""Published drafters: files written key by key in every format load with the right sizes; wrong ones are refused."""

from __future__ import annotations

import json
import pickle
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import LAYOUTS, as_pickle, as_safetensors, medusa_state, serve_hub
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from selection import examples

from specmemo_kernels.drafting import head_files
from specmemo_kernels.drafting.published import PublishedDrafter, check_target, open_drafter
from specmemo_kernels.drafting.published_config import CloverConfig, DFlashConfig, Eagle3Config, EagleConfig, LayerSpec
from specmemo_kernels.drafting.source_files import HeadsError

HIDDEN, TARGET, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, DRAFT_VOCAB = 8, 10, 12, 4, 2, 6, 21, 9
Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]

LAYER: Config = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rope_theta": 500000.0,
    "vocab_size": VOCAB,
}
SPEC = LayerSpec(
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_qo_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    attention_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope={"rope_type": "default", "rope_theta": 500000.0},
    max_position_embeddings=64,
)


def fill(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(len(shapes))
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def layer_tensors(prefix: str, inputs: int = HIDDEN, norms: tuple[str, ...] = ()) -> Tensors:
    return fill(
        {
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, inputs),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            **{f"{prefix}.{norm}.weight": (HIDDEN,) for norm in norms},
        }
    )


def attention_biases(prefix: str, parts: str = "qkvo") -> Tensors:
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "o": HIDDEN}
    return fill({f"{prefix}.self_attn.{part}_proj.bias": (sizes[part],) for part in parts})


def eagle3_tensors(prefix: str = "midlayer", target: int = HIDDEN, num_aux: int = 3) -> Tensors:
    """As EAGLE's trainer writes them, with every tensor that is ignored."""
    tensors = layer_tensors(prefix, 2 * HIDDEN, ("input_layernorm", "hidden_norm"))
    tensors |= fill(
        {"fc.weight": (HIDDEN, num_aux * target), "norm.weight": (HIDDEN,), "lm_head.weight": (DRAFT_VOCAB, HIDDEN)}
    )
    mapped = torch.tensor([0, 1, 2, 5, 6, 11, 12, 19, 20])
    tensors["d2t"] = mapped - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, mapped, True)
    return tensors | {f"{prefix}.self_attn.rotary_emb.inv_freq": torch.ones(3)}


def eagle3(**options: Any) -> tuple[Config, Tensors]:
    """EAGLE-3 as SafeAILab and SpecForge publish it."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB, **LAYER, **options}
    return config, eagle3_tensors()


def speculators(**options: Any) -> tuple[Config, Tensors]:
    """EAGLE-3 as vLLM's speculators publish it."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]},
        "transformer_layer_config": {"model_type": "llama", "tie_word_embeddings": True, **LAYER},
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": None,
        **options,
    }
    return config, eagle3_tensors("layers.0") | fill({"embed_tokens.weight": (VOCAB, HIDDEN)})


def eagle(**options: Any) -> tuple[Config, Tensors]:
    config = {"architectures": ["LlamaForCausalLM"], **LAYER, "num_hidden_layers": 2, **options}
    tensors = layer_tensors("layers.0") | layer_tensors("layers.1", norms=("input_layernorm",))
    return config, tensors | fill(
        {"embed_tokens.weight": (VOCAB, HIDDEN), "fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)}
    )


def clover(**options: Any) -> tuple[Config, Tensors]:
    sizes = {"num_heads": 5, "num_layers": 2, "heads_coefficient": 1.0, "decay_coefficient": 0.7}
    config = {"architectures": ["LlamaForCausalLM"], **LAYER, "num_hidden_layers": 32, "clover": sizes, **options}
    tensors: Tensors = {}
    for index in range(2):
        tensors |= layer_tensors(f"layers.{index}", norms=("input_layernorm",))
    shapes: dict[str, tuple[int, ...]] = {"clover_embed_tokens.weight": (VOCAB, HIDDEN)}
    for block in ("clover_head_mlp_rnn", "clover_head_mlp_rnn2"):
        shapes[f"{block}.input_layernorm.weight"] = (HIDDEN,)
        for name in "qkv":
            shapes |= {f"{block}.{name}.weight": (HIDDEN, HIDDEN), f"{block}.{name}.bias": (HIDDEN,)}
    shapes |= {"clover_head_mlp.weight": (HIDDEN, HIDDEN), "clover_head_mlp.bias": (HIDDEN,)}
    shapes |= {"clover_head_mlp2.weight": (HIDDEN, 2 * HIDDEN), "clover_head_mlp2.bias": (HIDDEN,)}
    return config, tensors | fill(shapes | {"clover_norm.weight": (HIDDEN,), "clover_head_norm.weight": (HIDDEN,)})


def dflash(**options: Any) -> tuple[Config, Tensors]:
    nested = {"target_layer_ids": [1, 5], "mask_token_id": VOCAB - 1}
    config = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16, "num_target_layers": 9}
    config |= {**LAYER, "num_hidden_layers": 2, "dflash_config": nested, **options}
    tensors = fill({"fc.weight": (HIDDEN, 2 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)})
    for index in range(2):
        tensors |= layer_tensors(f"layers.{index}", norms=("input_layernorm",))
        tensors |= fill({f"layers.{index}.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"})
    return config, tensors


EAGLE3 = Eagle3Config(
    layer=SPEC, num_layers=1, target_hidden_size=HIDDEN, vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB, num_aux=3,
    aux_layer_ids=None, norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False,
    logit_scale=1.0, own_embedding=False, own_lm_head=True,
)  # fmt: skip
#: A checkpoint of each format, the configuration that it has, and the keys that it may lack.
KINDS: dict[str, tuple[Callable[..., tuple[Config, Tensors]], Any, set[str]]] = {
    "eagle3": (eagle3, EAGLE3, set()),
    "speculators": (
        speculators,
        replace(EAGLE3, norm_before_residual=True, own_embedding=True),
        {"embed_tokens.weight"},
    ),
    "eagle": (
        eagle,
        EagleConfig(layer=SPEC, num_layers=2, vocab_size=VOCAB, fc_bias=True, own_embedding=True),
        {"embed_tokens.weight", "fc.bias"},
    ),
    "clover2": (clover, CloverConfig(layer=SPEC, num_layers=2, num_heads=5, vocab_size=VOCAB), set()),
    "dflash": (
        dflash,
        DFlashConfig(
            layer=LayerSpec(**{**SPEC.__dict__, "qk_norm": True}),
            num_layers=2,
            block_size=16,
            target_layer_ids=(2, 6),
            mask_token_id=VOCAB - 1,
            vocab_size=VOCAB,
        ),
        set(),
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def write_shards(folder: Path, tensors: Tensors, kind: str) -> None:
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    weight_map: dict[str, str] = {}
    for number in range(2):
        name = f"{stem}-{number + 1:05}-of-00002.{suffix}"
        shard = dict(list(tensors.items())[number::2])
        save_file(shard, folder / name) if kind == "safetensors" else torch.save(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))


FILES: dict[str, Callable[[Path, Tensors], Any]] = {
    "safetensors": as_safetensors("model.safetensors"),
    "bin": as_pickle("pytorch_model.bin"),
    "old bin": lambda f, t: torch.save(t, f / "pytorch_model.bin", _use_new_zipfile_serialization=False),
    "safetensors shards": lambda f, t: write_shards(f, t, "safetensors"),
    "bin shards": lambda f, t: write_shards(f, t, "bin"),
}


def write(folder: Path, config: Config | None, tensors: Tensors, files: str = "safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    FILES[files](folder, tensors)
    return folder


def opened(folder: Path, config: Config | None, tensors: Tensors, files: str = "safetensors") -> PublishedDrafter:
    drafter = open_drafter(write(folder, config, tensors, files))
    assert drafter is not None
    return drafter


def internal(tensors: Tensors) -> Tensors:
    """The tensors by internal key, without the ignored ones."""
    kept = {key: tensor for key, tensor in tensors.items() if not key.endswith(("t2d", "inv_freq"))}
    return {re.sub(r"^(model\.)?midlayer\.|^model\.", _renamed, key): tensor for key, tensor in kept.items()}


def _renamed(match: re.Match[str]) -> str:
    return "layers.0." if "midlayer" in match[0] else ""


def assert_tensors(drafter: PublishedDrafter, tensors: Tensors, dtype: torch.dtype = torch.float64) -> None:
    expected = internal(tensors)
    read = drafter.read(dtype, "cpu")
    assert read.keys() == drafter.names.keys() == expected.keys()
    for key, tensor in read.items():
        kind = torch.int64 if key == "d2t" else dtype
        assert tensor.dtype == kind
        assert tensor.is_contiguous()
        assert torch.equal(tensor, expected[key].to(kind)), key
    assert drafter.nbytes(dtype.itemsize) == sum(tensor.nbytes for tensor in read.values())


def refused(folder: Path, config: Config | None, tensors: Tensors, *parts: str, files: str = "safetensors") -> str:
    """The message of the error, which contains every one of ``parts``."""
    with pytest.raises(HeadsError) as caught:
        open_drafter(write(folder, config, tensors, files))
    message = str(caught.value)
    for part in (str(folder), *parts):
        assert part in message
    return message


@each_kind
@pytest.mark.parametrize("files", FILES)
def test_published_files(kind: str, files: str, tmp_path: Path) -> None:
    make, expected, _ = KINDS[kind]
    config, tensors = make()
    drafter = opened(tmp_path, config, tensors, files)
    assert drafter.kind == ("eagle3" if kind == "speculators" else kind)
    assert drafter.config == expected
    assert drafter.where.startswith(str(tmp_path))
    assert drafter.accuracy is None
    for dtype in (torch.float64, torch.bfloat16):
        assert_tensors(drafter, tensors, dtype)
    check_target(drafter, HIDDEN, VOCAB)


@each_kind
def test_key_prefix_and_single_files(kind: str, tmp_path: Path) -> None:
    make, expected, _ = KINDS[kind]
    config, tensors = make()
    prefixed = {f"model.{key}": tensor for key, tensor in tensors.items()}
    for name in ("model.safetensors", "mine.safetensors", "mine.pt"):
        write(tmp_path, config, {})
        (as_safetensors if name.endswith("safetensors") else as_pickle)(name)(tmp_path, prefixed)
        drafter = open_drafter(tmp_path / name)
        assert drafter is not None
        assert drafter.config == expected
        assert_tensors(drafter, prefixed)
    norm = next(key for key in tensors if "norm" in key)
    both = {f"model.{norm}": tensors[norm], **tensors}
    refused(tmp_path, config, both, f"model.{norm} and {norm} would both be", files="bin")


class TestEagle3:
    @pytest.mark.parametrize("make", [eagle3, speculators])
    @pytest.mark.parametrize("place", ["top", "eagle_config"])
    def test_flags(self, make: Callable[..., tuple[Config, Tensors]], place: str, tmp_path: Path) -> None:
        norms = {
            "norm_before_fc": {"input_norm.weight": (3 * HIDDEN,)},
            "fc_norm": {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)},
        }
        for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output"):
            for value in (False, True):
                config, tensors = make(**({flag: value} if place == "top" else {"eagle_config": {flag: value}}))
                attribute = "fc_norm" if flag == "use_aux_norm" else flag
                extra = fill(norms.get(attribute, {}))
                drafter = opened(tmp_path, config, tensors | (extra if value else {}))
                assert getattr(drafter.config, attribute) is value
                assert_tensors(drafter, tensors | (extra if value else {}))
                if extra and value:
                    refused(tmp_path, config, tensors, f"missing keys {next(iter(extra))}")
                elif extra:
                    refused(tmp_path, config, tensors | extra, f"unknown keys {next(iter(extra))}")
        config, tensors = make(norm_output=True, eagle_config={"norm_output": False})
        refused(tmp_path, config, tensors, "norm_output has the values [True, False]; leave one")
        config, tensors = make(norm_before_fc=True, fc_norm=True)
        refused(tmp_path, config, tensors, "norm_before_fc is True", "false with fc_norm")

    @pytest.mark.parametrize(("make", "offset"), [(eagle3, 1), (speculators, 0)])
    def test_explicit_layers(self, make: Callable[..., tuple[Config, Tensors]], offset: int, tmp_path: Path) -> None:
        name = "eagle_aux_hidden_state_layer_ids"
        for options in ({name: [0, 4]}, {"eagle_config": {name: [0, 4], "use_aux_hidden_state": True}}):
            config, tensors = make(**options)
            tensors["fc.weight"] = torch.ones(HIDDEN, 2 * HIDDEN)
            drafter = opened(tmp_path, config, tensors)
            assert isinstance(drafter.config, Eagle3Config)
            assert (drafter.config.num_aux, drafter.config.aux_layer_ids) == (2, (offset, 4 + offset))
        refused(tmp_path, make(**{name: [1, 2, 3], "num_aux_hidden_states": 2})[0], tensors, name, "[1, 2, 3]")
        refused(tmp_path, make(num_aux_hidden_states=2)[0], tensors, name, "missing", "a list of 2 layers")
        for wrong in ([], [-1], [1.0], [True], "12", 3, [10000]):
            refused(tmp_path, make(**{name: wrong})[0], tensors, name, "integers from 0 to 9999")
        refused(tmp_path, make(eagle_config={"use_aux_hidden_state": False})[0], tensors, "use_aux_hidden_state")

    def test_target_of_another_width(self, tmp_path: Path) -> None:
        config, _ = eagle3(target_hidden_size=TARGET, fc_norm=True)
        tensors = eagle3_tensors(target=TARGET) | fill({f"fc_norm.{i}.weight": (TARGET,) for i in range(3)})
        refused(tmp_path, config, tensors, "embed_tokens.weight is missing", "target_hidden_size 10")
        drafter = opened(tmp_path, config, tensors | fill({"embed_tokens.weight": (VOCAB, HIDDEN)}))
        assert isinstance(drafter.config, Eagle3Config)
        assert drafter.config.target_hidden_size == TARGET
        check_target(drafter, TARGET, VOCAB)
        with pytest.raises(HeadsError, match=r"fc\.weight has shape \[8, 30\], but \[8, 24\] is needed.* 8, .* 21;"):
            check_target(drafter, HIDDEN, VOCAB)

    @pytest.mark.parametrize("make", [eagle3, speculators])
    def test_whole_vocabulary(self, make: Callable[..., tuple[Config, Tensors]], tmp_path: Path) -> None:
        for size, tied in ((None, False), (VOCAB, True)):
            config, tensors = make(draft_vocab_size=size)
            offsets, lm_head = tensors.pop("d2t"), torch.ones(VOCAB, HIDDEN)
            drafter = opened(tmp_path, config, tensors | {"lm_head.weight": lm_head})
            assert isinstance(drafter.config, Eagle3Config)
            assert (drafter.config.draft_vocab_size, drafter.config.own_lm_head) == (VOCAB, True)
            zeros = torch.zeros(VOCAB, dtype=torch.int64)
            assert_tensors(opened(tmp_path, config, tensors | {"lm_head.weight": lm_head, "d2t": zeros}),
                           tensors | {"lm_head.weight": lm_head, "d2t": zeros})  # fmt: skip
            del tensors["lm_head.weight"]
            config["tie_word_embeddings"] = tied
            if not tied:
                refused(tmp_path, config, tensors, "lm_head.weight is missing", "tie_word_embeddings")
                continue
            drafter = opened(tmp_path, config, tensors)
            assert isinstance(drafter.config, Eagle3Config)
            assert not drafter.config.own_lm_head
            config["draft_vocab_size"] = DRAFT_VOCAB
            refused(tmp_path, config, tensors | {"d2t": offsets}, "draft_vocab_size is 9", "21 without lm_head.weight")

    def test_d2t(self, tmp_path: Path) -> None:
        config, tensors = eagle3()
        shuffled = torch.tensor([20, 0, 7, 3, 4, 1, 2, 5, 6]) - torch.arange(DRAFT_VOCAB)
        for dtype in (torch.int64, torch.int32, torch.int8):
            good = tensors | {"d2t": shuffled.to(dtype)}
            assert_tensors(opened(tmp_path, config, good), good)
        for offset in (-1, VOCAB, 2**63 - 1, -(2**63)):
            wrong = tensors | {"d2t": tensors["d2t"].clone()}
            wrong["d2t"][1] = offset - 1 if abs(offset) < 2**62 else offset
            value = int(wrong["d2t"][1])
            refused(tmp_path, config, wrong, f"d2t has offset {value} in row 1", "from 0 to 20")
        refused(tmp_path, config, tensors | {"d2t": -torch.arange(DRAFT_VOCAB)}, "d2t", "unique")
        for length in (DRAFT_VOCAB - 1, DRAFT_VOCAB + 1):
            zeros = torch.zeros(length, dtype=torch.int64)
            refused(tmp_path, config, tensors | {"d2t": zeros}, "d2t", f"[{length}]", "[9]")
        for dtype in (torch.float32, torch.bool):
            refused(tmp_path, config, tensors | {"d2t": torch.zeros(DRAFT_VOCAB, dtype=dtype)}, "d2t", "integers")

    def test_several_layers(self, tmp_path: Path) -> None:
        config, tensors = speculators()
        config["transformer_layer_config"]["num_hidden_layers"] = 2
        refused(tmp_path, config, tensors, "missing keys layers.1.self_attn.q_proj.weight")
        tensors |= layer_tensors("layers.1", norms=("input_layernorm",))
        drafter = opened(tmp_path, config, tensors)
        assert drafter.config.num_layers == 2
        assert_tensors(drafter, tensors)

    @pytest.mark.parametrize(
        "mark", [{"speculators_model_type": "eagle3"}, {"architectures": ["Eagle3Speculator"]}, {}]
    )
    def test_layer_names_of_either_format_with_any_mark(self, mark: Config, tmp_path: Path) -> None:
        config = {"draft_vocab_size": DRAFT_VOCAB, **LAYER, "transformer_layer_config": LAYER, **mark}
        for prefix in ("layers.0", "midlayer"):
            drafter = opened(tmp_path, config, eagle3_tensors(prefix))
            assert isinstance(drafter.config, Eagle3Config)
            assert drafter.config.norm_before_residual is ("speculators_model_type" in mark)

    def test_qk_norm_and_logit_scale(self, tmp_path: Path) -> None:
        config, tensors = speculators(logit_scale=0.5)
        tensors |= fill({f"layers.0.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"})
        drafter = opened(tmp_path, config, tensors)
        assert isinstance(drafter.config, Eagle3Config)
        assert drafter.config.layer.qk_norm
        assert drafter.config.logit_scale == 0.5

    def test_speculators_without_sizes(self, tmp_path: Path) -> None:
        for value in (None, {}, 3):
            config, tensors = speculators(transformer_layer_config=value)
            refused(tmp_path, config, tensors, "transformer_layer_config", "object")


class TestEagle:
    def test_bias_and_embedding(self, tmp_path: Path) -> None:
        for bias in (None, False, True):
            config, tensors = eagle(bias=bias)
            del tensors["embed_tokens.weight"]
            drafter = opened(tmp_path, config, tensors)
            assert drafter.config == EagleConfig(SPEC, 2, VOCAB, fc_bias=True, own_embedding=False)
            del tensors["fc.bias"]
            if bias:
                refused(tmp_path, config, tensors, "fc.bias is missing, but bias is true")
            else:
                assert opened(tmp_path, config, tensors).config == EagleConfig(SPEC, 2, VOCAB, False, False)

    def test_layer_0_has_no_input_norm(self, tmp_path: Path) -> None:
        config, tensors = eagle()
        tensors["layers.0.input_layernorm.weight"] = torch.ones(HIDDEN)
        refused(tmp_path, config, tensors, "unknown keys layers.0.input_layernorm.weight")


class TestDFlash:
    def test_block_size_and_vocabulary(self, tmp_path: Path) -> None:
        nested = {"target_layer_ids": [1, 5], "mask_token_id": VOCAB, "block_size": 4, "causal": False}
        config, tensors = dflash(block_size=None, vocab_size=None, dflash_config=nested)
        drafter = opened(tmp_path, config, tensors)
        assert isinstance(drafter.config, DFlashConfig)
        assert (drafter.config.block_size, drafter.config.vocab_size) == (4, None)
        check_target(drafter, HIDDEN, VOCAB + 1)
        with pytest.raises(HeadsError, match=r"mask_token_id is 21, but the target has hidden_size 8, vocab_size 21"):
            check_target(drafter, HIDDEN, VOCAB)

    def test_wrong_options(self, tmp_path: Path) -> None:
        nested = {"target_layer_ids": [1, 5], "mask_token_id": 3}
        cases: list[tuple[Config, str]] = [
            ({"target_layer_ids": None}, "target_layer_ids is missing"),
            ({"target_layer_ids": []}, "target_layer_ids is []"),
            ({"mask_token_id": None}, "mask_token_id is missing, it must be an integer from 0 to 20"),
            ({"mask_token_id": VOCAB}, "mask_token_id is 21"),
            ({"mask_token_id": True}, "mask_token_id is True of type bool"),
            ({"causal": True}, "causal is True"),
            ({"block_size": 8}, "block_size has the values [16, 8]"),
            ({"selector_rank": 8}, "dflash_config has selector_rank; only block_size, causal"),
        ]
        for change, message in cases:
            config, tensors = dflash(dflash_config=nested | change)
            refused(tmp_path, config, tensors, message)
        config, tensors = dflash(block_size=1)
        refused(tmp_path, config, tensors, "block_size is 1 of type int, it must be an integer from 2 to 1024")


class TestLayer:
    def test_defaults(self, tmp_path: Path) -> None:
        config, _ = eagle(num_hidden_layers=1, hidden_size=24, intermediate_size=INNER)
        for name in ("num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "rope_theta"):
            config[name] = None
        shapes = {f"layers.0.self_attn.{name}_proj.weight": (24, 24) for name in "qkvo"}
        shapes |= {"layers.0.mlp.gate_proj.weight": (INNER, 24), "layers.0.mlp.up_proj.weight": (INNER, 24)}
        shapes |= {"layers.0.mlp.down_proj.weight": (24, INNER), "fc.weight": (24, 48), "fc.bias": (24,)}
        shapes["layers.0.post_attention_layernorm.weight"] = (24,)
        layer = opened(tmp_path, config, fill(shapes)).config.layer
        assert (layer.num_qo_heads, layer.num_kv_heads, layer.head_dim) == (HEADS, HEADS, 6)
        assert (layer.rms_norm_eps, layer.hidden_act) == (1e-6, "silu")
        assert layer.rope == {"rope_type": "default", "rope_theta": 10000.0}

    @pytest.mark.parametrize("make", [eagle3, speculators])
    def test_biases(self, make: Callable[..., tuple[Config, Tensors]], tmp_path: Path) -> None:
        config, tensors = make()
        sizes = config.get("transformer_layer_config", config)
        prefix = "layers.0" if "transformer_layer_config" in config else "midlayer"
        whole, partial = attention_biases(prefix), attention_biases(prefix, "qkv")
        for option, biases in (("attention_bias", whole), ("qkv_bias", partial), (None, partial), (None, whole)):
            sizes |= {"attention_bias": None, "qkv_bias": None} | ({} if option is None else {option: True})
            drafter = opened(tmp_path, config, tensors | biases)
            assert drafter.config.layer.attention_bias
            assert_tensors(drafter, tensors | biases)
            if option is not None:
                refused(tmp_path, config, tensors, "proj.bias")
            for key in partial:
                short = {name: tensor for name, tensor in biases.items() if name != key}
                if ".q_proj" not in key or option is not None:
                    refused(tmp_path, config, tensors | short, f"missing keys {key}")
        sizes |= {"attention_bias": True}
        refused(tmp_path, config, tensors | partial, "attention_bias is true, but o_proj.bias of layer 0 is missing")
        mlp = {"gate": INNER, "up": INNER, "down": HIDDEN}
        biases = fill({f"{prefix}.mlp.{name}_proj.bias": (size,) for name, size in mlp.items()})
        sizes |= {"attention_bias": False}
        refused(tmp_path, config, tensors | biases, "unknown keys")
        sizes |= {"mlp_bias": True}
        refused(tmp_path, config, tensors, f"missing keys {prefix}.mlp.gate_proj.bias")
        drafter = opened(tmp_path, config, tensors | biases)
        assert drafter.config.layer.mlp_bias
        assert_tensors(drafter, tensors | biases)

    def test_activations(self, tmp_path: Path) -> None:
        for stored, name in {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}.items():
            assert opened(tmp_path, *eagle(hidden_act=stored)).config.layer.hidden_act == name
        for wrong in ("gelu", 3, ["silu"]):
            refused(tmp_path, *eagle(hidden_act=wrong), "hidden_act", "one of silu, swish")

    @pytest.mark.parametrize(
        ("stored", "expected"),
        [
            ({"rope_scaling": None}, {"rope_type": "default"}),
            ({"rope_theta": 7}, {"rope_type": "default", "rope_theta": 7.0}),
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
            ({"rope_scaling": {"type": "mrope", "rope_type": "default"}}, {"rope_type": "default"}),
            (
                {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5.0}},
                {"rope_type": "linear", "factor": 2, "rope_theta": 5.0},
            ),
            (
                {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}},
                {"rope_type": "default", "rope_theta": 5.0},
            ),
            (
                {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "attention_factor": None}},
                {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "original_max_position_embeddings": 64},
            ),
            (
                {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
                {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 16},
            ),
        ],
    )  # fmt: skip
    def test_rotary_embedding(self, stored: Config, expected: Config, tmp_path: Path) -> None:
        from transformers import LlamaConfig

        for make in (eagle3, speculators):
            config, tensors = make()
            config.get("transformer_layer_config", config).update(stored)
            rope = opened(tmp_path, config, tensors).config.layer.rope
            assert rope == {"rope_theta": 500000.0} | expected
        if rope["rope_type"] != "default":
            reference = LlamaConfig(**{**LAYER, **stored}).rope_parameters
            assert rope == {key: value for key, value in reference.items() if key != "type" and value is not None}

    def test_wrong_rotary_embedding(self, tmp_path: Path) -> None:
        cases: list[tuple[Config, str]] = [
            ({"rope_theta": 0}, "rope_theta is 0"),
            ({"rope_theta": "1e4"}, "rope_theta is '1e4'"),
            ({"rope_scaling": [1]}, "rope_scaling is [1] of type list, it must be an object"),
            ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn'"),
            ({"rope_scaling": {"type": "mrope"}}, "type is 'mrope'"),
            ({"rope_scaling": {"rope_type": 3}}, "rope_type is 3"),
            ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
            ({"rope_scaling": {"type": "linear", "factor": True}}, "factor is True"),
            ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": "x"}}, "beta_fast is 'x'"),
            ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -3}}, "beta_slow is 1.0"),
            ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 0}}, "above 0 and below beta_fast, 32"),
            ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "rope_theta is 1.0"),
            (
                {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
                "low_freq_factor is 4.0",
            ),
            ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type is 'dynamic'"),
            ({"rope_parameters": {"rope_type": "longrope"}}, "one of default, linear, yarn, llama3"),
            ({"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}}, "sliding_attention is"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
            ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 2}}, "partial_rotary_factor is 2"),
        ]
        for change, message in cases:
            refused(tmp_path, *eagle(**change), message)

    def test_sliding_windows(self, tmp_path: Path) -> None:
        full = {"layer_types": ["full_attention", "full_attention", "sliding_attention"], "sliding_window": 4}
        assert opened(tmp_path, *dflash(**full)).config.num_layers == 2
        for change in ({"layer_types": ["sliding_attention"] * 2}, {"layer_types": "x"}, {"use_sliding_window": True}):
            refused(tmp_path, *dflash(**change), next(iter(change)), "full_attention in every layer")


class TestWrongConfig:
    @each_kind
    def test_values(self, kind: str, tmp_path: Path) -> None:
        names = ["hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings", "vocab_size"]
        if kind != "clover2":
            names.append("num_hidden_layers")
        for name in names:
            for value in (None, 0, -1, 2**40, True, "8", 8.0, [8], {}):
                config, tensors = KINDS[kind][0]()
                sizes = config.get("transformer_layer_config", config)
                sizes[name] = value
                if (kind, name, value) != ("dflash", "vocab_size", None):
                    actual = "missing" if value is None else repr(value)
                    refused(tmp_path, config, tensors, "config.json", f"{name} is {actual}", "an integer from 1 to")

    def test_other_values(self, tmp_path: Path) -> None:
        cases: list[tuple[Config, str]] = [
            ({"num_key_value_heads": 3}, "num_key_value_heads is 3 of type int, it must be a divisor"),
            ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
            ({"head_dim": None, "num_attention_heads": 6}, "num_attention_heads is 6"),
            ({"head_dim": 5}, "head_dim is 5 of type int, it must be even"),
            ({"head_dim": 0}, "head_dim is 0"),
            ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
            ({"rms_norm_eps": True}, "rms_norm_eps is True"),
            ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
            ({"attention_bias": 1}, "attention_bias is 1 of type int, it must be true or false"),
            ({"mlp_bias": "no"}, "mlp_bias is 'no'"),
            ({"norm_before_residual": 0}, "norm_before_residual is 0"),
            ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size is 22 of type int, it must be an integer from 1 to 21"),
            ({"target_hidden_size": False}, "target_hidden_size is False"),
            ({"logit_scale": float("inf")}, "logit_scale is inf"),
            ({"logit_scale": 10**400}, "logit_scale is 1000"),
            ({"eagle_config": [1]}, "eagle_config is [1] of type list, it must be an object"),
            ({"num_aux_hidden_states": 0}, "num_aux_hidden_states is 0"),
        ]
        for change, message in cases:
            refused(tmp_path, *eagle3(**change), message)
        for change, message in (
            ({"clover": 3}, "clover is 3"),
            ({"clover": {"num_layers": 2}}, "num_heads is missing"),
            ({"clover": {"num_layers": 0, "num_heads": 5}}, "num_layers is 0"),
        ):
            refused(tmp_path, *clover(**change), message)

    def test_accuracy(self, tmp_path: Path) -> None:
        rows = [[0.5, 0.75], [0, 1]]
        assert opened(tmp_path, *eagle(cumulative_topk_accuracy=rows)).accuracy == ((0.5, 0.75), (0.0, 1.0))
        for wrong in ([], [[]], [0.5], [[1.5]], [[-0.1]], [[True]], [["x"]], 3, {}, [[float("nan")]], [[0.5, 0.4]]):
            refused(tmp_path, *eagle(cumulative_topk_accuracy=wrong), "cumulative_topk_accuracy is", "from 0 to 1")

    def test_files(self, tmp_path: Path) -> None:
        config, tensors = eagle3()
        refused(tmp_path, None, tensors, "config.json is missing")
        for text in ("{", "[1]", "[" * 100000, "\udcff"):
            write(tmp_path, config, tensors)
            (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
            with pytest.raises(HeadsError, match=r"config\.json"):
                open_drafter(tmp_path)

    @settings(max_examples=examples(200), deadline=None)
    @given(data=st.data())
    def test_any_json_value_gives_a_drafter_or_an_error(self, data: st.DataObject) -> None:
        config, tensors = KINDS[data.draw(st.sampled_from(list(KINDS)))][0]()
        json_value = st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
            max_leaves=4,
        )
        objects = [config, *(value for value in config.values() if isinstance(value, dict))]
        chosen = data.draw(st.sampled_from(objects))
        names = [*chosen, "rope_parameters", "rope_scaling", "layer_types", "eagle_config", "speculators_model_type"]
        chosen[data.draw(st.sampled_from(names))] = data.draw(json_value)
        with tempfile.TemporaryDirectory() as folder:
            try:
                drafter = open_drafter(write(Path(folder), config, tensors))
            except HeadsError:
                return
            assert drafter is not None
            assert_tensors(drafter, tensors)


class TestWrongTensors:
    @each_kind
    def test_missing_keys(self, kind: str, tmp_path: Path) -> None:
        make, _, optional = KINDS[kind]
        config, tensors = make()
        for key in tensors:
            rest = {name: tensor for name, tensor in tensors.items() if name != key}
            if key in optional or key == "t2d" or "inv_freq" in key:
                opened(tmp_path, config, rest)
            elif key == "fc.weight" and kind == "eagle":
                refused(tmp_path, config, rest, "whole language model")
            else:
                refused(tmp_path, config, rest, key, "missing")

    @each_kind
    def test_unknown_keys(self, kind: str, tmp_path: Path) -> None:
        config, tensors = KINDS[kind][0]()
        unknown = {f"extra.{i}.weight": torch.ones(2) for i in range(6)}
        refused(tmp_path, config, tensors | unknown, "unknown keys extra.0.weight, extra.1.weight", "and 2 more")

    @each_kind
    def test_dtypes(self, kind: str, tmp_path: Path) -> None:
        config, tensors = KINDS[kind][0]()
        for key in internal(tensors):
            stored = key if key in tensors else key.replace("layers.0", "midlayer")
            wrong = tensors[stored].to(torch.float16 if key == "d2t" else torch.uint8)
            for files in ("safetensors", "bin"):
                refused(tmp_path, config, tensors | {stored: wrong}, f": {stored} is", files=files)

    def test_values_of_a_pickle(self, tmp_path: Path) -> None:
        config, tensors = eagle3()
        key = "midlayer.mlp.up_proj.weight"
        for value in (
            3,
            "x",
            None,
            tensors[key].to("meta"),
            tensors[key].to_sparse(),
            tensors[key].to(torch.complex64),
        ):
            refused(tmp_path, config, tensors | {key: value}, key, files="bin")  # type: ignore[dict-item]
        shared = torch.nn.Parameter(torch.ones(1, 1)).expand(INNER, HIDDEN)
        strided = tensors | {key: shared, "fc.weight": tensors["fc.weight"].T.contiguous().T}
        assert_tensors(opened(tmp_path, config, strided, "bin"), strided)

    @settings(max_examples=examples(400), deadline=None)
    @given(data=st.data())
    def test_any_wrong_shape(self, data: st.DataObject) -> None:
        config, tensors = KINDS[data.draw(st.sampled_from(list(KINDS)))][0]()
        key = data.draw(st.sampled_from([k for k in tensors if k != "t2d" and "inv_freq" not in k]))
        right = tuple(tensors[key].shape)
        shape = data.draw(st.lists(st.integers(0, 40), max_size=3).map(tuple).filter(lambda other: other != right))
        tensors[key] = torch.zeros(shape, dtype=tensors[key].dtype)
        files = data.draw(st.sampled_from(["safetensors", "bin", "safetensors shards"]))
        with tempfile.TemporaryDirectory() as folder:
            refused(Path(folder), config, tensors, f": {key} has shape {list(shape)}", str(list(right)), files=files)


class TestTargets:
    @each_kind
    def test_sizes(self, kind: str, tmp_path: Path) -> None:
        drafter = opened(tmp_path, *KINDS[kind][0]())
        key = "clover_embed_tokens" if kind == "clover2" else "fc"
        with pytest.raises(HeadsError) as caught:
            check_target(drafter, 2 * HIDDEN, VOCAB)
        width = {"eagle3": 3, "speculators": 3, "clover2": 1}.get(kind, 2) * HIDDEN
        rows = VOCAB if kind == "clover2" else HIDDEN
        needed = rows if kind in ("clover2", "eagle3", "speculators") else 2 * HIDDEN
        assert f"{key}.weight has shape [{rows}, {width}], but [{needed}, {2 * width}] is needed" in str(caught.value)
        with pytest.raises(HeadsError) as caught:
            check_target(drafter, HIDDEN, VOCAB + 1)
        message = "vocab_size is 21, but the target has hidden_size 8, vocab_size 22"
        if kind in ("speculators", "eagle", "clover2"):
            message = "embed_tokens.weight has shape [21, 8], but [22, 8] is needed"
        assert message in str(caught.value)
        assert drafter.where.split("/model")[0] in str(caught.value)

    def test_dtype(self, tmp_path: Path) -> None:
        with pytest.raises(HeadsError, match=r"dtype is torch\.int8"):
            opened(tmp_path, *eagle()).read(torch.int8, "cpu")

    @pytest.mark.parametrize("files", FILES)
    def test_read_tensors_outlive_their_file(self, files: str, tmp_path: Path) -> None:
        config, tensors = eagle3()
        loaded = opened(tmp_path, config, tensors, files).read(torch.float32, "cpu")
        for path in tmp_path.iterdir():
            with path.open("r+b") as file:
                file.write(b"\xff" * path.stat().st_size)
                file.truncate(10)
        assert all(torch.equal(loaded[key], tensor) for key, tensor in internal(tensors).items())

    def test_no_weight_is_read_before_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[str] = []
        original = head_files.Entry.read

        def recording(entry: head_files.Entry) -> torch.Tensor:
            read.append(entry.name)
            return original(entry)

        monkeypatch.setattr(head_files.Entry, "read", recording)
        _, tensors = eagle3()
        drafter = opened(tmp_path, *eagle3())
        assert read == ["d2t"]
        read.clear()
        drafter.read(torch.float32, "cpu")
        assert sorted(read) == sorted(k for k in tensors if k != "t2d" and "inv_freq" not in k)


class TestOtherSources:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_medusa_heads(self, layout: str, tmp_path: Path) -> None:
        LAYOUTS[layout](tmp_path, medusa_state())
        assert open_drafter(tmp_path) is None
        (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "num_nextn_predict_layers": 1}))
        assert open_drafter(tmp_path) is None

    def test_medusa_heads_with_unknown_keys(self, tmp_path: Path) -> None:
        for config in ({"medusa_num_heads": 3}, {"model_type": "medusa"}):
            assert open_drafter(write(tmp_path, config, {"some.weight": torch.ones(1)})) is None
        (tmp_path / "medusa_lm_head.pt").write_bytes(b"unread")
        assert open_drafter(tmp_path) is None

    @pytest.mark.parametrize(
        ("kind", "config", "key"),
        [
            ("hydra", {"hydra_num_heads": 4}, "0.0.linear.weight"),
            ("hydra", {}, "hydra_mlp.0.0.linear.weight"),
            ("speculators' peagle", {"speculators_model_type": "peagle"}, "layers.0.mlp.up_proj.weight"),
            ("speculators' dflash", {"speculators_model_type": "dflash"}, "layers.0.mlp.up_proj.weight"),
            ("speculators' 3", {"speculators_model_type": 3}, "layers.0.mlp.up_proj.weight"),
            ("peagle", {"architectures": ["PEagleDraftModel"]}, "midlayer.mlp.up_proj.weight"),
            ("peagle", {"architectures": ["LlamaForCausalLMEagle3"]}, "mask_hidden"),
            ("dspark", {"architectures": ["Qwen3DSparkModel"], "dflash_config": {}}, "fc.weight"),
            ("dspark", {"dspark_config": {}}, "fc.weight"),
            ("dspark", {"dflash_config": {}}, "markov_head.w1"),
            ("dflash2", {"architectures": ["DFlash2DraftModel"], "dflash_config": {}}, "fc.weight"),
            ("domino", {"architectures": ["DominoDraftModel"], "dflash_config": {}}, "fc.weight"),
            ("projector_type 'domino'", {"dflash_config": {"projector_type": "domino"}}, "fc.weight"),
        ],
    )
    def test_unsupported_kinds(self, kind: str, config: Config, key: str, tmp_path: Path) -> None:
        for files in FILES:
            tensors = {key: torch.ones(1), "second.weight": torch.ones(2)}
            message = refused(tmp_path, config, tensors, kind, key, "second.weight", files=files)
            assert "supported are medusa, eagle3, eagle, clover2, dflash" in message

    def test_hydra_file(self, tmp_path: Path) -> None:
        torch.save({"0.0.linear.weight": torch.ones(1)}, tmp_path / "hydra_lm_head.pt")
        for source in (tmp_path, tmp_path / "hydra_lm_head.pt"):
            with pytest.raises(HeadsError, match=r"hydra_lm_head\.pt: hydra .* keys are 0\.0\.linear\.weight; supp"):
                open_drafter(source)

    @pytest.mark.parametrize("files", FILES)
    def test_whole_models(self, files: str, tmp_path: Path) -> None:
        model = {
            f"model.{key}": tensor for key, tensor in layer_tensors("layers.0", norms=("input_layernorm",)).items()
        }
        model |= fill({"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)})
        refused(tmp_path, LAYER, model, "its first keys are ", "model.layers.0.", "DraftModel(...)", files=files)
        for key in ("model.layers.1.eh_proj.weight", "mtp.fc.weight", "model.mtp_layers.0.token_layernorm.weight"):
            config = LAYER | {"num_nextn_predict_layers": 1}
            refused(tmp_path, config, model | {key: torch.ones(1)}, 'heads="mtp"', files=files)
        refused(tmp_path, {}, {"a.b": torch.ones(1)}, "a.b: no known drafter; supported are medusa", files=files)

    def test_shards_of_whole_models_are_not_opened(self, tmp_path: Path) -> None:
        for key, message in (("model.embed_tokens.weight", "DraftModel"), ("medusa_head.0.0.linear.weight", "")):
            index = {"weight_map": {key: "model-00001-of-00001.safetensors"}}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
            if message:
                with pytest.raises(HeadsError, match=message):
                    open_drafter(tmp_path)
            else:
                assert open_drafter(tmp_path) is None


class TestHostileFiles:
    @pytest.mark.parametrize("zipped", [True, False])
    def test_a_malicious_pickle_runs_nothing(self, zipped: bool, tmp_path: Path) -> None:
        touched = tmp_path / "touched"

        class Evil:
            def __reduce__(self) -> Any:
                return Path.touch, (touched,)

        config, tensors = eagle3()
        folder = write(tmp_path / "drafter", config, tensors, "bin shards")
        content = {**tensors, "midlayer.evil": Evil()}
        for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin", "hydra_lm_head.pt"):
            torch.save(content, folder / name, _use_new_zipfile_serialization=zipped)
            with pytest.raises(HeadsError, match=rf"{re.escape(name)} does not load as plain tensors"):
                open_drafter(folder if name != "hydra_lm_head.pt" else folder / name)
        for file in folder.glob("pytorch_model*"):
            file.unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(), protocol=2))
        with pytest.raises(HeadsError, match=r"pytorch_model\.bin"):
            open_drafter(folder)
        assert not touched.exists()
        pickle.loads((folder / "pytorch_model.bin").read_bytes())
        assert touched.exists(), "the pickle was harmless, the test proves nothing"

    @pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
    def test_garbage(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(eagle3()[0]))
        for content in (
            b"",
            b"\x00" * 100,
            b"version https://git-lfs.github.com/spec/v1\n",
            b"PK\x03\x04",
            b"[" * 99999,
        ):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(HeadsError, match=re.escape(str(tmp_path / name))):
                open_drafter(tmp_path)

    def test_shards(self, tmp_path: Path) -> None:
        write(tmp_path, *eagle3(), "safetensors shards")
        shard = tmp_path / "model-00002-of-00002.safetensors"
        stored = load_file(shard)
        key = next(key for key in stored if "midlayer" in key and "inv_freq" not in key)
        save_file({name: tensor for name, tensor in stored.items() if name != key}, shard)
        with pytest.raises(HeadsError, match=rf"has no {re.escape(key)}, although .*index\.json lists it"):
            open_drafter(tmp_path)
        shard.unlink()
        with pytest.raises(HeadsError, match=r"index\.json: its shard model-00002-of-00002\.safetensors is missing"):
            open_drafter(tmp_path)


class TestPlaces:
    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(HeadsError, match=r"no file of heads in it; one of medusa_lm_head\.safetensors, "):
            open_drafter(tmp_path)
        for source in (tmp_path / "absent", "a/b/c"):
            with pytest.raises(HeadsError, match="there is no such folder or file"):
                open_drafter(source)

    def test_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        remote, cache = tmp_path / "remote", tmp_path / "cache"
        serve_hub(monkeypatch, "org/drafter", remote, cache)
        monkeypatch.chdir(tmp_path)
        config, tensors = eagle3()
        write(remote, config, tensors, "safetensors shards")
        (remote / "optimizer.pt").write_text("{}")
        drafter = open_drafter("org/drafter")
        assert drafter is not None
        assert_tensors(drafter, tensors)
        assert {file.name for file in cache.iterdir()} == {f.name for f in remote.iterdir()} - {"optimizer.pt"}
        for file in cache.iterdir():
            file.unlink()
        write(remote, {"hydra_num_heads": 4}, tensors)
        with pytest.raises(HeadsError, match=r"org/drafter: hydra drafters aren't supported"):
            open_drafter("org/drafter")
        assert {file.name for file in cache.iterdir()} == {"config.json"}
