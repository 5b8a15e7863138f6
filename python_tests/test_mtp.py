"""A model's own MTP layer as a drafter: its trees are those of transformers' layer on the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_allocations import failing_everywhere
from hybrid_models import hybrid_model
from mtp_models import FAMILIES, LAYERS, random_mtp, save_with_mtp
from selection import EXHAUSTIVE, covering, sample
from test_cli_plan import plan_json
from test_families import batch, greedy
from test_feature_drafter_engine import Seer, few_pages, prompts, texts
from test_feature_drafters import Recorder, check_trees, texts_of
from test_patch_memory import peak_of
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

import specmemo_kernels as sk
from specmemo_kernels.integrations.hf.cache_argument import CACHE_ARGUMENT
from specmemo_kernels.integrations.hf.mtp import _mtp_settings
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.mtp_spec import mtp_spec

Tensor = torch.Tensor


class PlainMtp:
    """The layer over the whole sequence, with transformers' own attention; see ``drafter_oracles``."""

    def __init__(self, mtp: MtpModel) -> None:
        self.mtp = mtp

    @torch.no_grad()
    def next_log_probs(self, features: Tensor, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        mtp = self.mtp
        for done in range(len(path) + 1):
            row = torch.tensor([[*tokens, *path[:done]]])
            positions = torch.arange(1, row.shape[1] + 1)[None]
            mask = torch.full((row.shape[1], row.shape[1]), -torch.inf).triu(1)[None, None]
            embedded = mtp.embed_tokens(row)
            hidden = mtp.layers[0](
                embedded, features[None], position_embeddings=mtp.rotary_emb(embedded, position_ids=positions),
                attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: None},
            )[0]  # fmt: skip
            features = torch.cat([features, hidden[-1:]])
        return mtp.shared_head(hidden[-1]).log_softmax(-1)


@pytest.mark.parametrize(("family", "graph"), sample(covering(FAMILIES, (False, None)), [("deepseek_v3", False)]))
def test_trees(family: str, graph: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family, **FAMILIES[family])
    inputs, mtp = batch((20, 1, 11)), random_mtp(model)
    expected = greedy(model, inputs, 20)
    with sk.patch(model, mtp, tree=6, page_size=4, prefill_chunk=8, graph=graph) as handle:
        recorder = Recorder(handle.drafter, monkeypatch)
        assert torch.equal(greedy(model, inputs, 20), expected)
        assert handle.stats.graph_steps > 0 or graph is False, handle.stats.eager_reasons
        assert handle.plan.parts["heads"] == sum(p.nbytes for p in mtp.layers.state_dict().values())
    assert all(type(m.config) is type(mtp.config) for m in mtp.layers.modules() if hasattr(m, "config"))
    assert check_trees(model, handle.drafter, PlainMtp(mtp), recorder.calls, texts_of(inputs, expected)) > 6


@pytest.mark.parametrize("family", sample(FAMILIES, ["glm4_moe"]))
def test_layers_of_a_checkpoint(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``heads="mtp"`` loads ``model.layers.{L}.*``, which transformers leaves out of the model."""
    model = tiny_model(family, **FAMILIES[family])
    mtp, inputs = random_mtp(model), batch((20, 7))
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}.*"])
    save_with_mtp(model, mtp, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    loaded.generation_config.eos_token_id = None
    expected = greedy(loaded, inputs, 12)
    with sk.patch(loaded, "mtp", tree=6) as handle:
        assert torch.equal(greedy(loaded, inputs, 12), expected)
        stored = handle.drafter.mtp.layers[0].state_dict()
    for key, value in mtp.layers[0].state_dict().items():
        assert torch.equal(stored[key], value), key


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text", "bailing_hybrid"])
def test_hybrid_models(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their configurations don't describe the layer; it has full attention. Preemption, two turns, right trees."""
    layers: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    layers |= {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]} if family == "bailing_hybrid" else {}
    model = hybrid_model(family, **layers)
    with _mtp_settings(model) as count:
        assert count == 1
        mtp = random_mtp(model)
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [r"^mtp.*"])
    save_with_mtp(model, mtp, tmp_path, qwen=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    loaded.generation_config.eos_token_id = None
    asked = prompts()[:8]
    expected, before = texts(loaded, asked, 24), loaded.config.to_dict()
    with sk.patch(loaded, "mtp", tree=8, page_size=4, prefill_chunk=16) as handle:
        stored = handle.drafter.mtp.layers[0].state_dict()
        if family != "bailing_hybrid":  # its own cache has no keys to find a place by
            see(handle, Seer(loaded, expected, 0.8), monkeypatch)
        for size in (len(asked), 1):  # the second time from few pages
            done = sk.generate_batch(loaded, asked, max_new_tokens=24, eos_token_ids=[])
            assert [[*p, *c.tokens] for p, c in zip(asked, done, strict=True)] == expected, size
            handle.release()
            few_pages(handle, 40)
        assert handle.stats.preemptions > 0
        assert handle.stats.tokens_per_step > (1 if family == "bailing_hybrid" else 2)
    for key, value in mtp.layers[0].state_dict().items():
        assert torch.equal(stored[key], value), key
    assert loaded.config.to_dict() == before


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(sk.HeadsError, match=r"heads is 'mtp', but the config of LlamaForCausalLM has no MTP layers"):
        sk.patch(tiny_model("llama"), "mtp")
    model = tiny_model("deepseek_v3", **FAMILIES["deepseek_v3"])
    with pytest.raises(sk.HeadsError, match="can't be loaded"):
        sk.patch(model, "mtp")
    assert not hasattr(model, "specmemo")


def see(handle: sk.SpecMemo, seer: Seer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees get the right continuation in one of their deepest paths."""
    draft = handle.drafter.draft
    monkeypatch.setattr(handle.drafter, "draft", lambda rows, tree: seer(rows, draft(rows, tree)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "size", "graph"),
    covering(FAMILIES, (1, 8), (False, True), first=[("glm4_moe", 8, True)]),
)
def test_prompts(family: str, size: int, graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of all lengths, greedy and sampled, with few pages: the model's tokens, accepted paths of all lengths."""
    model = tiny_model(family, **FAMILIES[family], max_position_embeddings=2048)
    asked = prompts()[: 12 if size == 1 else 24 if EXHAUSTIVE else 15]
    expected = texts(model, asked, 24)
    requests = [sk.Request(p, 12, [], sk.Sampling(temperature=0.8, top_k=9).with_seed(i)) for i, p in enumerate(asked)]
    with sk.patch(model, "prompt-lookup", tree=1):
        sampled = [completion.tokens for completion in sk.generate_batch(model, requests)]
    known = [*expected, *([*p, *tokens] for p, tokens in zip(asked, sampled, strict=True))]
    mtp, options = random_mtp(model), {"page_size": 4, "prefill_chunk": 16, "max_batch_size": size, "graph": graph}
    with sk.patch(model, mtp, tree=8, **options) as handle:
        if family == "glm4_moe":  # deepseek_v3's own cache has no keys to find a place by
            see(handle, Seer(model, known, 0.8), monkeypatch)
        done = sk.generate_batch(model, asked, max_new_tokens=24, eos_token_ids=[])
        assert [[*p, *c.tokens] for p, c in zip(asked, done, strict=True)] == expected
        assert handle.stats.tokens_per_step > (2 if family == "glm4_moe" else 1)
        assert (handle.stats.graph_steps > 0) == graph
        handle.release()
        few_pages(handle, 40)
        done = sk.generate_batch(model, asked, max_new_tokens=24, eos_token_ids=[])
        assert [[*p, *c.tokens] for p, c in zip(asked, done, strict=True)] == expected
        assert handle.stats.preemptions > 0 or size == 1
        found = [completion.tokens for completion in sk.generate_batch(model, requests)]
        assert found == sampled


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reused prefixes: the trees are those of a layer that saw the whole text."""
    model = tiny_model(family, **FAMILIES[family])
    mtp = random_mtp(model)
    with sk.patch(model, mtp, tree=6, page_size=4, graph=False) as handle:
        recorder = Recorder(handle.drafter, monkeypatch)
        for end in ([], [5], [9, 9, 9], [7, 8, 9, 10, 11]):
            recorder.calls.clear()
            prompt = [*range(3, 23), *end]
            text = prompt + sk.generate_batch(model, [prompt], max_new_tokens=8)[0].tokens
            assert check_trees(model, handle.drafter, PlainMtp(mtp), recorder.calls, [text]) > 4
        assert handle.stats.reused_tokens >= 24


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_failing_allocations_and_an_abort(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = tiny_model(family, **FAMILIES[family]), prompts()[:3]
    expected = [row[len(prompt) :] for row, prompt in zip(texts(model, asked, 8), asked, strict=True)]
    with sk.patch(model, random_mtp(model), tree=6, page_size=4, prefill_chunk=16, graph=False) as handle:
        with sk.stream_batch(model, asked, max_new_tokens=8, eos_token_ids=[]) as run:
            for piece in run:
                if piece.index == 1:
                    run.abort(1)
            done = run.completions()
        assert done[1].finish_reason == "aborted"
        assert [done[0].tokens, done[2].tokens] == [expected[0], expected[2]]
        handle.memory_pressure.levels = handle.memory_pressure.levels[:1] * 10000
        # The sites that both families have fail in one of the two cases.
        with failing_everywhere(monkeypatch, parts=2, part=[*FAMILIES].index(family)) as mode:
            written = sk.generate_batch(model, asked[:1], max_new_tokens=4, eos_token_ids=[])[0].tokens
        assert written == expected[0][:4]
        assert handle.stats.retries == mode.failures > 100


@pytest.mark.slow
@pytest.mark.parametrize(("family", "graph"), covering(FAMILIES, (False, True), first=[("glm4_moe", True)]))
def test_peak_stays_within_the_budget(family: str, graph: bool) -> None:
    sizes: dict[str, object] = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 2048}
    model = tiny_model(family, **(FAMILIES[family] | sizes))
    mtp = random_mtp(model)
    with sk.patch(model, mtp, tree=8) as handle:
        total = handle.plan.total_bytes - handle.plan.parts.get("kv_pages", 0) + (2 << 20)
    options: dict[str, Any] = {"tree": 8, "max_batch_size": 4, "prefill_chunk": 64, "graph": graph}
    with sk.patch(model, mtp, memory_budget=total, **options) as handle:
        plan = handle.plan
        assert plan.max_tokens is not None
        longest = min(plan.max_tokens // 2, 400) - 40
        peak = peak_of(handle, batch((longest, longest // 2, 7, 9)[: plan.max_sequences]), 20)
        assert peak + handle.drafter.nbytes <= plan.total_bytes <= total


@pytest.mark.parametrize("family", sample(FAMILIES, ["deepseek_v3"]))
def test_the_planned_sizes(family: str, tmp_path: Path) -> None:
    """``specmemo plan --heads mtp`` knows the layer's bytes from the configuration."""
    sizes: dict[str, object] = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64}
    model = tiny_model(family, **(FAMILIES[family] | sizes))
    model.config.save_pretrained(tmp_path)
    spec = ModelSpec.load(tmp_path)
    with sk.patch(model, random_mtp(model), tree=8) as handle:
        planned, loaded = mtp_spec(spec), handle.drafter.spec
        assert planned.nbytes(spec, 4) == pytest.approx(handle.drafter.nbytes, rel=0.02)
        assert planned.page_token_bytes(spec, None) == handle.drafter.layers[0].bytes_per_token
    for name in ("kind", "max_depth", "beam", "hidden_size", "num_layers", "num_qo_heads", "num_kv_heads", "head_dim"):
        assert getattr(planned, name) == getattr(loaded, name), name
    data = plan_json("--model", tmp_path, "--device", "h100", "--heads", "mtp", "--context", "64")
    assert data["plan"]["drafter"] == "MTP"
    assert data["plan"]["parts"]["heads"] == planned.nbytes(spec, 4)


def test_a_recurrent_layer_is_refused() -> None:
    """transformers builds an MTP layer of any kind."""
    model = hybrid_model("olmo_hybrid")
    with _mtp_settings(model):
        mtp = MtpModel(model, 1).eval()
    before = type(model), dict(vars(model))
    with pytest.raises(sk.UnsupportedModel, match="can't run a pass over packed nodes"):
        sk.patch(model, mtp, tree=4)
    assert (type(model), dict(vars(model))) == before
