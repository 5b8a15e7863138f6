"""The drafters' oracles: layers against transformers, every tensor and flag matters, trees against enumeration."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import drafter_oracles as oracles
import pytest
import torch
from safetensors.torch import load_file
from selection import sample
from torch import Tensor
from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

PATHS = ((), (3,), (3, 58))
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
E1, E3, C2, DF = (
    (oracles.write_eagle1, oracles.PlainEagle1, 1),
    (oracles.write_eagle3, oracles.PlainEagle3, 3),
    (oracles.write_clover2, oracles.PlainClover2, 1),
    (oracles.write_dflash, oracles.PlainDFlash, 2),
)
CASES = {
    "eagle3": (*E3, {}),
    "eagle3-small": (*E3, {"draft_vocab": 40, "pickle": True, "norm_before_fc": True, "attention_bias": True}),
    "eagle3-tied": (*E3, {"tie_word_embeddings": True, "eagle_config": {"fc_norm": True}, "head_dim": 6}),
    "eagle3-wide": (*E3, {"hidden": 48, "target_hidden": 32, "norm_before_residual": True, "draft_vocab": 40}),
    "speculators": (*E3, {"layout": "speculators", "layers": 2, "use_aux_norm": True, "norm_output": True}),
    "speculators-own": (*E3, {"layout": "speculators", "own_embedding": True, "draft_vocab": 40, "logit_scale": 0.5}),
    "eagle1": (*E1, {"own_embedding": True}),
    "eagle1-deep": (*E1, {"layers": 2, "bias": False, "pickle": True}),
    "clover2": (*C2, {}),
    "dflash": (*DF, {"attention_bias": True}),
}
Result = Callable[[dict[str, object], dict[str, Tensor]], Tensor]


def read_drafter(folder: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    file = folder / "pytorch_model.bin"
    tensors = torch.load(file) if file.exists() else load_file(folder / "model.safetensors")
    return json.loads((folder / "config.json").read_text()), tensors


def results_of(drafter: type[oracles.PlainDrafter], states: int, dtype: torch.dtype = torch.float32) -> Result:
    """Log-probabilities [3, V] behind PATHS, for a target of hidden size 32 and 61 tokens."""
    generator = torch.Generator().manual_seed(1)
    embed, head = torch.randn(2, 61, 32, generator=generator).to(dtype)
    features = torch.randn(7, states * 32, generator=generator)
    tokens = torch.randint(61, (7,), generator=generator).tolist()

    def results(config: dict[str, object], tensors: dict[str, Tensor]) -> Tensor:
        plain = drafter(config, tensors, embed, head / 32**0.5)
        return torch.stack([plain.next_log_probs(features, tokens, path) for path in PATHS])

    return results


def changed(name: str, tensor: Tensor) -> Tensor:
    if name == "d2t":  # the same target tokens in reverse order
        index = torch.arange(len(tensor))
        return (index + tensor).flip(0) - index
    return tensor + 0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("case", sample(CASES, ["eagle3-small", "eagle1", "clover2", "dflash"]))
def test_every_tensor_matters(case: str, tmp_path: Path) -> None:
    write, drafter, states, options = CASES[case]
    config, tensors = write(tmp_path, **options)
    read_config, read_tensors = read_drafter(tmp_path)
    assert read_config == config
    torch.testing.assert_close(read_tensors, tensors, rtol=0, atol=0)
    results = results_of(drafter, states)
    before = results(config, tensors)
    torch.testing.assert_close(before.exp().sum(1), torch.ones(3))
    assert (before > float("-inf")).sum(1).tolist() == [options.get("draft_vocab", 61)] * 3
    for name in tensors.keys() - {"t2d"}:
        after = results(config, tensors | {name: changed(name, tensors[name])})
        assert (after.exp() - before.exp()).abs().max() > 1e-4, name
    exact = results_of(drafter, states, torch.float64)(config, tensors)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact, before.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("eagle", {"norm_before_residual": True}),
        ("eagle", {"norm_output": True}),
        ("eagle", {"logit_scale": 0.5}),
        ("eagle", {"rope_theta": 50.0}),
        ("eagle", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}}),
        ("eagle", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("speculators", {"norm_before_residual": False}),
    ],
)
def test_flags_without_tensors_matter(layout: str, flags: dict[str, object], tmp_path: Path) -> None:
    results = results_of(oracles.PlainEagle3, 3)
    plain = results(*oracles.write_eagle3(tmp_path / "plain", layout=layout))
    flagged = results(*oracles.write_eagle3(tmp_path / "flagged", layout=layout, **flags))
    assert (plain.exp() - flagged.exp()).abs().max() > 1e-3


def test_layouts_differ_only_in_names_and_defaults(tmp_path: Path) -> None:
    results = results_of(oracles.PlainEagle3, 3)
    flags = {"norm_before_fc": True, "draft_vocab": 40}
    eagle = results(*oracles.write_eagle3(tmp_path / "a", norm_before_residual=True, **flags))
    torch.testing.assert_close(eagle, results(*oracles.write_eagle3(tmp_path / "b", layout="speculators", **flags)))


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default"}, {"rope_type": "llama3", **LLAMA3}], ids=lambda r: r["rope_type"]
)
@pytest.mark.parametrize(("config_class", "model_class"), [(LlamaConfig, LlamaModel), (Qwen3Config, Qwen3Model)])
def test_layers_equal_transformers(config_class: type, model_class: type, rope: dict[str, object]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = rope | {"rope_theta": 100.0}
    config = config_class(
        **sizes, head_dim=6, num_hidden_layers=2, vocab_size=61, attention_bias=True, rope_parameters=rope
    )
    torch.manual_seed(0)
    model = model_class(config).double()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
    embeds = torch.randn(1, 40, 32, dtype=torch.float64)
    plain = oracles.PlainDrafter(config.to_dict(), model.state_dict(), *[model.embed_tokens.weight] * 2)
    h = embeds[0]
    for i in range(2):
        h = plain.layer(f"layers.{i}", h)
    torch.testing.assert_close(
        plain.norm("norm", h), model(inputs_embeds=embeds).last_hidden_state[0], rtol=0, atol=1e-5
    )


def random_log_probs(path: tuple[int, ...], vocab: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(hash(path) % 2**31)
    return (2 * torch.randn(vocab, generator=generator)).log_softmax(0)


@pytest.mark.parametrize("total", [1, 2, 7, 12, 13])
def test_eagle2_tree(total: int) -> None:
    tree = oracles.eagle2_tree(random_log_probs, total, depth=2, top_k=3)
    assert len(tree) == total - 1
    assert all(len(path) == 1 or path[:-1] in tree for path in tree)
    assert all(len(path) <= 3 for path in tree)


def test_eagle2_tree_with_a_wide_beam_is_the_best_of_all_paths() -> None:
    def score(path: tuple[int, ...]) -> float:
        return sum(float(random_log_probs(path[:i], 3)[token]) for i, token in enumerate(path))

    paths = [path for depth in (1, 2) for path in itertools.product(range(3), repeat=depth)]
    best = sorted(paths, key=score, reverse=True)[:8]
    assert oracles.eagle2_tree(lambda path: random_log_probs(path, 3), 9, depth=1, top_k=3) == set(best)


def test_ties() -> None:
    even = torch.full((4,), 0.25).log()
    assert oracles.eagle2_tree(lambda _: even, 6, depth=1, top_k=2) == {(0,), (1,), (0, 0), (0, 1), (1, 0)}
    assert oracles.ddtree(torch.zeros(2, 4), 5, 2) == {(0,), (0, 0), (0, 1), (1,)}


@pytest.mark.parametrize("nodes", [1, 2, 9, 15, 100])
@pytest.mark.parametrize("seed", range(3))
def test_ddtree_equals_enumeration(nodes: int, seed: int) -> None:
    log_probs = (2 * torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))).log_softmax(1)
    values, tokens = log_probs.topk(2)
    ranks = [path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth)]
    ranks.sort(key=lambda path: -sum(float(values[depth, rank]) for depth, rank in enumerate(path)))
    best = {tuple(int(tokens[depth, rank]) for depth, rank in enumerate(path)) for path in ranks[: nodes - 1]}
    tree = oracles.ddtree(log_probs, nodes, 2)
    assert tree == best
    assert len(tree) == min(nodes - 1, 14)
    assert all(len(path) == 1 or path[:-1] in tree for path in tree)


def test_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unknown options"):
        oracles.write_eagle3(tmp_path, norm_befor_fc=True)
    with pytest.raises(ValueError, match="one layer"):
        oracles.write_eagle3(tmp_path, layers=2)
    with pytest.raises(ValueError, match="whole vocabulary"):
        oracles.write_eagle3(tmp_path, tie_word_embeddings=True, draft_vocab=40)
