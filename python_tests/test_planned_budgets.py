"""What ``specmemo plan`` lists for a CPU is a budget that ``patch`` accepts, with the same tree, context and batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_models import family_model
from hybrid_models import HYBRIDS, hybrid_model
from selection import sample
from test_cli_plan import plan_json

import specmemo_kernels as sk
from specmemo_kernels.integrations.hf.find_mixers import stateful_modules
from specmemo_kernels.integrations.hf.hybrid_sizes import recurrent_spec
from specmemo_kernels.planning.built_model import activation_tensors
from specmemo_kernels.planning.model_spec import ModelSpec

DEVICE = "cpu, 64GiB, 40GB/s, 1TFLOP/s fp32"
#: Llama-like, with another norm, without a gate, mixtures of experts, compressed attention.
DECODERS = ["llama", "gemma2", "phi", "opt", "mixtral", "deepseek_v3"]
CONTEXT, BATCH = 300, 2


def rows_of(folder: Path, heads: str) -> list[dict[str, Any]]:
    """The plans that ``specmemo plan`` lists, without the baselines."""
    data = plan_json("--model", folder, "--device", DEVICE, "--heads", heads, "--context", CONTEXT, "--batch", BATCH)
    return data["alternatives"][:-2]


def accepts(model: Any, row: dict[str, Any]) -> None:
    """Raises ``BudgetError`` if ``patch`` refuses the row's memory."""
    with sk.patch(
        model, "prompt-lookup", tree=row["nodes"], context=CONTEXT, max_batch_size=BATCH, prefill_chunk=row["chunk"],
        memory_budget=row["generation_bytes"], kv_dtype="int8" if "int8" in row["name"] else None,
    ) as handle:  # fmt: skip
        assert handle.max_length >= CONTEXT


@pytest.mark.parametrize("family", [*sample(DECODERS, ["llama", "phi", "deepseek_v3"]),
                                    *sample(HYBRIDS, ["qwen3_next", "granitemoehybrid"])])  # fmt: skip
def test_each_row(family: str, tmp_path: Path) -> None:
    model = hybrid_model(family) if family in HYBRIDS else family_model(family)
    model.config.save_pretrained(tmp_path)
    rows = rows_of(tmp_path, "prompt-lookup")
    assert {row["name"] for row in rows} >= {"this plan", "least that runs"}
    for row in rows:
        accepts(model, row)


@pytest.mark.parametrize("family", sample(HYBRIDS, ["qwen3_5_text", "jamba"]))
def test_recurrent_sizes_without_weights(family: str, tmp_path: Path) -> None:
    """States and rows as those of the loaded model, and bytes of its layers' passes that grow with the rows."""
    hybrid_model(family).config.save_pretrained(tmp_path)
    spec = recurrent_spec(ModelSpec.load(tmp_path), tmp_path)
    found = stateful_modules(hybrid_model(family))
    assert spec.mixers is not None
    assert spec.mixers.state_bytes == sum(mixer.spec.state_bytes for mixer in found)
    assert spec.mixers.row_bytes == sum(mixer.spec.row_bytes for mixer in found)
    assert 0 < spec.mixers.path.at(1) <= spec.mixers.path.at(8)
    assert 0 < spec.mixers.chunk.at(32) < spec.mixers.chunk.at(512)


@pytest.mark.parametrize(
    ("name", "tensors"), [("silu", 1), ("gelu_new", 3), ("relu2", 2), ("xielu", 5), ("unknown", 0), (None, 0)]
)
def test_tensors_of_activations(name: str | None, tensors: int) -> None:
    """``gelu_new`` holds half of its input, its cube, and their multiples."""
    assert activation_tensors({"hidden_act": name}) == tensors
