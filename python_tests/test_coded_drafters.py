"""Published drafters with ``head_bits=4``: their trees are those of the dequantised matrices, plans count codes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_oracles import PlainDrafter
from selection import covering, sample
from test_cli_plan import plan_json, run
from test_families import batch, greedy
from test_feature_drafter_engine import NAMES, WIDE
from test_feature_drafters import KINDS, LAYERS, Recorder, check_trees, texts_of
from test_patch_memory import peak_of, wide_model, with_workspace
from test_plan_drafters import config, written  # noqa: F401
from test_predicted_memory import small_model
from tiny_models import VOCAB, tiny_model
from transformers import PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels import ops
from specmemo_kernels.drafting.published import PublishedDrafter, open_drafter
from specmemo_kernels.drafting.source_files import HeadsError
from specmemo_kernels.ops.weight_codes import pack, unpack
from specmemo_kernels.planning.drafter_spec import Drafts
from specmemo_kernels.planning.feature_drafter_spec import FeatureDrafterSpec
from specmemo_kernels.planning.model_spec import ModelSpec

Tensor = torch.Tensor


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=LAYERS, max_position_embeddings=2048)


def dequantised(tensor: Tensor) -> Tensor:
    """What 4-bit codes keep of a matrix; other tensors as they are."""
    return tensor if tensor.ndim != 2 else unpack(*pack(tensor), tensor.shape[1]).to(tensor.dtype)


def write_drafter(kind: str, model: PreTrainedModel, folder: Path) -> PlainDrafter:
    """Write a drafter for ``model``; the plain implementation of its dequantised matrices."""
    writer, plain_class, options = KINDS[kind]
    settings, tensors = writer(folder, vocab=VOCAB, **options)
    tensors = {key: dequantised(tensor) for key, tensor in tensors.items()}
    return plain_class(settings, tensors, model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach())


def published(folder: Path) -> PublishedDrafter:
    found = open_drafter(folder)
    assert found is not None
    return found


FIRST = [("eagle3, scaled", None, "cpu"), ("clover2", None, "cpu"), ("eagle3, pickle", False, "reference")]


@pytest.mark.parametrize(
    ("kind", "graph", "backend"), sample(covering(KINDS, (None, False), ("cpu", "reference"), first=FIRST), FIRST)
)
def test_trees(
    kind: str,
    graph: bool | None,
    backend: str,
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a ragged batch in chunks: node by node those of an independent implementation; tokens are the model's."""
    plain = write_drafter(kind, model, tmp_path)
    inputs = batch((40, 1, 17))
    expected = greedy(model, inputs, 20)
    options = {"tree": 8, "page_size": 4, "prefill_chunk": 16, "graph": graph, "backend": backend}
    with sk.patch(model, str(tmp_path), head_bits=4, **options) as handle:
        recorder = Recorder(handle.drafter, monkeypatch)
        assert torch.equal(greedy(model, inputs, 20), expected)
        assert handle.stats.graph_steps > 0 or graph is False, handle.stats.eager_reasons
        assert handle.plan.head_bits == 4
    assert check_trees(model, handle.drafter, plain, recorder.calls, texts_of(inputs, expected)) > 12


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read_as_codes(kind: str, tmp_path: Path) -> None:
    """All matrices, in any file; vectors and ``d2t`` as without codes."""
    KINDS[kind][0](tmp_path, vocab=VOCAB, **KINDS[kind][2])
    source = published(tmp_path)
    plain, read = source.read(torch.bfloat16, "cpu"), source.read(torch.bfloat16, "cpu", 4)
    stored = source.read(torch.float32, "cpu")
    matrices = {key for key, tensor in plain.items() if tensor.ndim == 2}
    assert matrices
    for key in matrices:
        codes, scales = pack(stored[key])
        stem = key.removesuffix("weight")
        assert torch.equal(read.pop(f"{stem}codes"), codes)
        assert torch.equal(read.pop(f"{stem}scales"), scales)
    assert read.keys() == plain.keys() - matrices
    assert all(torch.equal(tensor, plain[key]) and tensor.dtype == plain[key].dtype for key, tensor in read.items())


def test_a_matrix_that_codes_cannot_hold(model: PreTrainedModel, tmp_path: Path) -> None:
    """The message has the file and the key; the model stays unpatched."""
    writer, _, options = KINDS["eagle"]
    _, tensors = writer(tmp_path, vocab=VOCAB, **options)
    tensors["layers.0.mlp.up_proj.weight"][3, 5] = torch.inf
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(HeadsError, match=r"model.safetensors: layers.0.mlp.up_proj.weight: an element is not finite"):
        sk.patch(model, str(tmp_path), head_bits=4)
    assert not hasattr(model, "specmemo")


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sample(NAMES, ["eagle3"]))
@pytest.mark.parametrize("graph", [True, False])
def test_peak_stays_within_the_budget(kind: str, graph: bool, tmp_path: Path) -> None:
    """Weights are counted as codes, to the byte; the peak of everything else is within the plan."""
    model = wide_model("llama", seed=20, num_hidden_layers=LAYERS)
    writer, _, defaults = KINDS[NAMES[kind]]
    _, tensors = writer(tmp_path, vocab=VOCAB, **(defaults | WIDE))
    sizes = [part.nbytes for key, tensor in tensors.items() if key != "t2d" for part in coded_parts(tensor)]
    options = {"tree": 8, "max_batch_size": 2, "prefill_chunk": 64, "graph": graph}
    total = with_workspace(model, 2 << 20) + sum(sizes)
    with sk.patch(model, str(tmp_path), head_bits=4, memory_budget=total, **options) as handle:
        plan, held = handle.plan, handle.bytes_by_part
        assert held["heads"] == plan.parts["heads"] == handle.drafter.nbytes == sum(sizes)
        assert handle.drafter.coded_nbytes is None
        longest = min(plan.max_tokens * 3 // 4, 600) - 40
        peak = peak_of(handle, batch((longest, longest // 2, 7)), 30)
        assert peak + handle.drafter.nbytes <= plan.total_bytes <= total
    with sk.patch(model, str(tmp_path), **options) as handle:
        assert handle.drafter.coded_nbytes == sum(sizes)


def coded_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return pack(tensor) if tensor.ndim == 2 else (tensor,)


def test_a_refusal_names_codes_where_they_would_do(tmp_path: Path) -> None:
    """With a budget that is enough with 4-bit matrices only."""
    model = wide_model("llama", seed=20, num_hidden_layers=LAYERS)
    writer, _, defaults = KINDS["eagle"]
    writer(tmp_path, vocab=VOCAB, **(defaults | WIDE))

    def refusal(budget: int | str, bits: int | None) -> str:
        with pytest.raises(sk.BudgetError) as error:
            sk.patch(model, str(tmp_path), memory_budget=budget, tree=8, head_bits=bits)
        return str(error.value)

    assert "head_bits" not in refusal(1000, None)
    found = re.search(r"give at least ([\d.]+ \w+)", refusal(1000, 4))
    assert found is not None
    assert "or head_bits=4, with which the drafter takes" in refusal(found[1], None)
    with sk.patch(model, str(tmp_path), memory_budget=found[1], tree=8, head_bits=4) as handle:
        assert handle.plan.max_pages >= 1


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("bits", [None, 4])
def test_workspace_of_its_products_is_planned(kind: str, bits: int | None, tmp_path: Path) -> None:
    """A drafter whose matrices are wider than the model's: what the operators keep for them is in the plan."""
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    writer, _, defaults = KINDS[NAMES[kind]]
    writer(tmp_path, vocab=VOCAB, **(defaults | {"intermediate": 4000}))
    with sk.patch(model, str(tmp_path), head_bits=bits, backend="cpu") as handle:
        least = ops.linear_workspace("cpu", torch.float32, model.config.hidden_size, 4000)
        assert handle.plan.parts["workspace"] >= least > ops.linear_workspace("cpu", torch.float32, 48, 128)


# --- plans -----------------------------------------------------------------------------------------------------------


def in_codes(kind: str, folder: Path) -> tuple[FeatureDrafterSpec, FeatureDrafterSpec]:
    plain = written(kind, folder)
    coded = plain.in_codes()
    assert coded is not None
    assert coded.in_codes() is None
    return plain, coded


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "clover2", "dflash", "two layers", "normed"])
def test_sizes_are_those_of_a_loaded_drafter(kind: str, tmp_path: Path) -> None:
    """A plan's specification equals the loaded drafter's; steps read a quarter of the bytes, plus the lm_head's."""
    model = small_model(num_hidden_layers=8)
    plain, coded = in_codes(kind, tmp_path)
    with sk.patch(model, str(tmp_path), tree=12, head_bits=4) as handle:
        drafter = handle.drafter
    assert drafter.spec == coded
    spec = ModelSpec.from_config(model.config)
    assert coded.nbytes(spec, 2) == drafter.nbytes < 0.15 * plain.nbytes(spec, 2)
    works = [sizes.step_work(spec, Drafts(2, 4, 12)) for sizes in (plain, coded)]
    for before, after in zip(*(work.products for work in works), strict=True):
        own = not (before.matrices == 1 and not plain.vocab_rows)
        share = after.nbytes / before.nbytes if before.nbytes else None
        assert share is None or share == pytest.approx(17 / 128 if own else 1, rel=0.03)
        assert (before.weights, before.rows) == (after.weights, after.rows)


@pytest.mark.parametrize("kind", sample(["eagle3", "eagle", "clover2", "dflash"], ["eagle3"]))
def test_the_command(kind: str, config: Path, tmp_path: Path) -> None:  # noqa: F811
    """``--head-bits 4`` counts codes; without it the plan says what they would change."""
    KINDS[kind][0](tmp_path / "drafter", **({} if kind != "dflash" else {"block_size": 8, "num_target_layers": 8}))
    arguments = ("--model", config, "--device", "h100", "--context", 256, "--heads", tmp_path / "drafter")
    plan = plan_json(*arguments, "--head-bits", 4)["plan"]
    tensors = published(tmp_path / "drafter").read(torch.float32, "cpu", 4)
    assert plan["head_bits"] == 4
    assert plan["parts"]["heads"] == sum(tensor.nbytes for tensor in tensors.values())
    assert ", in 4 bits" in run("plan", *arguments, "--head-bits", 4).output
    alternatives: list[dict[str, Any]] = plan_json(*arguments)["alternatives"]
    assert "drafter in 4 bits" in [row["name"] for row in alternatives]
