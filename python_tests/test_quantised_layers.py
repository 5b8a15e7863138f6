"""Models with quantised layers, without the packages that make them: tokens, lm_heads, inference mode, memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_layers import KINDS, CodedWeight, quantise
from drafter_oracles import write_eagle1
from selection import covering, sample
from test_families import answers, batch, greedy
from test_resident_memory import MIB, check, measured
from tiny_models import VOCAB, OracleDrafter, random_heads, tiny_model
from torch import nn
from transformers import PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.integrations.hf.coded import coded_modules, plain_weight, tensor_bytes
from specmemo_kernels.planning.resident import peak_of

NEW = 12
ALL = [(lm_head, drafter) for lm_head in (False, True) for drafter in ("prompt-lookup", "own", "shared", "oracle")]
proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is watched through /proc")


def coded_model(kind: str, lm_head: bool = False, **changes: object) -> PreTrainedModel:
    return quantise(tiny_model("llama", seed=5, **changes), kind, lm_head)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("lm_head", "drafter"), sample(ALL, [(True, "shared")]))
def test_tokens(kind: str, lm_head: bool, drafter: str) -> None:
    """The model's own tokens, a ragged batch in chunks, twice; no quantised layer is replaced by an operator."""
    model, inputs = coded_model(kind, lm_head), batch((9, 30))
    expected = greedy(model, inputs, NEW)
    heads: Any = {"own": random_heads(model), "oracle": OracleDrafter(answers(inputs, expected), 0.7)}.get(drafter)
    if drafter == "shared":
        heads = sk.MedusaHeads(model.config.hidden_size, VOCAB, 3, own_lm_head=False)
    with sk.patch(model, heads or drafter, tree=6, max_batch_size=2, prefill_chunk=8) as handle:
        assert torch.equal(greedy(model, inputs, NEW), expected)
        assert torch.equal(greedy(model, inputs, NEW), expected)
        assert handle.stats.steps > 0
        coded = set(coded_modules(model))
        assert not coded & handle.facts.leaves.modules
        assert set(handle.fused.values()) <= {"rms_norm"} | ({"linear"} if not lm_head else set())
        assert handle.facts.plain_lm_head is not lm_head
        assert handle.facts.inference is (kind != "aliased")
    assert len(coded) == 14 + lm_head


def test_shared_heads_guess_by_the_lm_head() -> None:
    """New heads guess the model's own next token: with a quantised lm_head the same as with its matrix."""
    model, inputs = coded_model("codes", True), batch((9,))
    state = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with sk.patch(model, sk.MedusaHeads(32, VOCAB, 2, own_lm_head=False), tree=[[0], [0, 0], [1]]) as handle:
        greedy(model, inputs, NEW)
        candidates = handle.drafter.candidates(state, 2, 2)
    codes, scales = model.lm_head.codes, model.lm_head.scales
    best = (state.double() @ (codes.double() * scales.double()).T).topk(2, dim=1).indices
    assert torch.equal(candidates, torch.cat([best, best], dim=1))


@pytest.mark.parametrize("kind", sample(["codes", "aliased"], ["aliased"]))
def test_feature_drafters(kind: str, tmp_path: Path) -> None:
    """EAGLE's log-probabilities are of the quantised lm_head, in inference mode or not."""
    write_eagle1(tmp_path)
    model, inputs = coded_model(kind, lm_head=True), batch((9, 30))
    expected = greedy(model, inputs, NEW)
    with sk.patch(model, tmp_path, tree=8) as handle:
        assert torch.equal(greedy(model, inputs, NEW), expected)
        assert bool(handle.graphs.reason) is (kind == "aliased")


@pytest.mark.parametrize("kind", sample(KINDS, ["codes"]))
def test_draft_models(kind: str) -> None:
    """A quantised draft model; its weights count by their codes."""
    model, small, inputs = tiny_model("llama", seed=5), coded_model(kind, True, num_hidden_layers=1), batch((9, 30))
    expected = greedy(model, inputs, NEW)
    with sk.patch(model, small) as handle:
        assert torch.equal(greedy(model, inputs, NEW), expected)
        assert handle.stats.steps > 0
        sizes = [2 * 32 * 32, 2 * 16 * 32, 3 * 48 * 32, VOCAB * 32]  # codes of q and o, k and v, mlp, lm_head
        outputs = [32, 32, 16, 16, 48, 48, 32, VOCAB]
        plain = VOCAB * 32 + 3 * 32  # embedding, norms
        own = sum(sizes) + 4 * (sum(outputs) + plain)
        # The rotary embedding's frequencies are buffers; aliased layers hold the same codes twice.
        assert own <= handle.drafter.nbytes <= own * (2 if kind == "aliased" else 1) + 1024


def test_a_model_that_cannot_run_in_inference_mode() -> None:
    """Its passes run without gradients, also within a caller's inference mode; graph=True is refused."""
    model, inputs = coded_model("aliased"), batch((9,))
    with pytest.raises(RuntimeError, match="inference tensor"), torch.inference_mode():
        model(**inputs)
    expected = greedy(model, inputs, NEW)
    with sk.patch(model, random_heads(model)) as handle:
        assert handle.graphs.reason == "its modules can't run in inference mode"
        with torch.inference_mode():
            assert torch.equal(greedy(model, inputs, NEW), expected)
    with pytest.raises(ValueError, match="graph=True, but its modules can't run in inference mode"):
        sk.patch(model, random_heads(model), graph=True)


@pytest.mark.parametrize("kind", sample(["subclass", "aliased"], ["aliased"]))
def test_changes_are_detected(kind: str) -> None:
    """A replaced quantised weight drops the cached pages; without a change a prompt's pages are reused."""
    model, inputs = coded_model(kind), batch((40,))
    with sk.patch(model, "prompt-lookup", page_size=4) as handle:
        first = greedy(model, inputs, NEW)
        assert torch.equal(greedy(model, inputs, NEW), first)
        reused = handle.stats.reused_tokens
        assert reused > 0
        layer = model.model.layers[0].mlp.up_proj
        layer.weight = nn.Parameter(CodedWeight(-layer.weight.codes, layer.weight.scales), requires_grad=False)
        changed = greedy(model, inputs, NEW)
        assert handle.stats.reused_tokens == reused
    assert torch.equal(changed, greedy(model, inputs, NEW))


def test_plain_weight() -> None:
    linear = nn.Linear(8, 4)
    assert plain_weight(linear) is linear.weight
    assert plain_weight(nn.Linear(8, 4, device="meta")) is None
    assert plain_weight(nn.Linear(8, 4).to(torch.float8_e4m3fn)) is None
    for kind in KINDS.values():
        assert plain_weight(kind(nn.Linear(8, 4, bias=False))) is None


def test_bytes_of_tensors() -> None:
    assert tensor_bytes(torch.zeros(3, 4)) == 48
    assert tensor_bytes(CodedWeight(torch.zeros(3, 4, dtype=torch.int8), torch.ones(3, 1))) == 24


@proc
def test_peak_of_a_call() -> None:
    """Memory of torch and of another library, allocated and freed during the call."""

    def call() -> None:
        large = torch.ones(4 * MIB)
        foreign = bytearray(b"x" * 8 * MIB)
        del large, foreign

    device = torch.device("cpu")
    for _ in range(2):  # what was free before counts as well
        assert 24 * MIB <= peak_of(call, device) <= 36 * MIB
    assert peak_of(lambda: None, device) <= MIB


#: Matrices of 4 MiB in float32, in a model whose other activations are small.
WIDE: dict[str, object] = {
    "hidden_size": 512, "intermediate_size": 2048, "head_dim": 64, "vocab_size": 64, "num_hidden_layers": 1
}  # fmt: skip


@pytest.mark.slow
@proc
@pytest.mark.parametrize("kind", ["foreign", "threshold"])
def test_products_are_planned(kind: str) -> None:
    """A budget below a dequantised matrix is refused with the layer's class and the bytes of a product; the plan has
    what torch's tensors don't show.
    """
    model = coded_model(kind, **WIDE)
    with pytest.raises(sk.BudgetError) as refusal:
        sk.patch(model, "prompt-lookup", memory_budget="3MiB", tree=4, prefill_chunk=32)
    layer = KINDS[kind].__name__
    found = re.search(rf"Each product of a {layer} takes up to ([\d.]+) MiB while it runs", str(refusal.value))
    assert found is not None
    assert 4 <= float(found[1]) <= 14
    with sk.patch(model, "prompt-lookup", memory_budget="32MiB", tree=4, prefill_chunk=32) as handle:
        assert 3.5 * MIB <= handle.plan.parts["products"] <= 14 * MIB


@pytest.mark.slow
def test_products_that_torch_shows_are_not_counted_twice() -> None:
    model = coded_model("codes", **WIDE)
    with sk.patch(model, "prompt-lookup", memory_budget="32MiB", tree=4, prefill_chunk=32) as handle:
        assert handle.plan.parts["activations"] >= 4 * MIB
        assert handle.plan.parts["products"] <= 4 * MIB  # MKL packs the matrix
    with sk.patch(tiny_model("llama"), "prompt-lookup") as handle:
        assert "products" not in handle.plan.parts


@proc
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "coded_head"), covering(("codes", "subclass", "foreign", "aliased"), (False, True)))
def test_resident_memory(kind: str, coded_head: bool) -> None:
    sizes = {"hidden": 512, "intermediate": 1536, "layers": 2, "kv_heads": 8, "vocab": 2000, "dtype": "float32"}
    call = {"batch": 4, "budget": 40, "drafter": "heads", "graph": None, "kv_dtype": None, "tree": 4}
    check(measured(1, **sizes, **call, method=kind, coded_head=coded_head))
