"""bench/ablation.py: both ends of the ablation equal the package's formulas; measured memory falls where it must."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_bench_frontier import TREE, greedy, noisy_heads
from tiny_models import VOCAB, tiny_model

from specmemo_kernels.planning.baselines import Workload, medusa_parts
from specmemo_kernels.planning.cost import medusa_speed
from specmemo_kernels.planning.drafter_spec import HeadsSpec
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.planning.search import PlanRequest, fastest, parts_of

#: Model, device, number of devices, and the workload.
CASES = [
    ("Vicuna-7B", "titan-rtx", 1, Workload(512)),
    ("Vicuna-7B", "titan-rtx", 1, Workload(2048, prompt=1900)),  # attention scores are the peak
    ("Vicuna-7B", "a100", 1, Workload(300, batch=2)),
    ("Llama-2-70B", "a100", 4, Workload(512)),
]


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, ModuleType]]:
    """The benchmark's modules by name; they aren't part of the package."""
    folder = str(Path(__file__).resolve().parents[1] / "bench")
    sys.path.insert(0, folder)
    try:
        names = ("ablation_paper", "ablation_sensitivity", "medusa_published", "shapes", "ablation_runs", "ablation")
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(folder)


def request_of(bench: dict[str, ModuleType], model: str, device: str, tp: int, work: Workload) -> PlanRequest:
    sensitivity = bench["ablation_sensitivity"]
    request: PlanRequest = sensitivity.request_of(sensitivity.Scale(model, device, tp), work.context)
    return replace(request, workload=work)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_savings_the_bytes_are_those_of_medusa(bench: dict[str, ModuleType], case: tuple) -> None:
    paper, request = bench["ablation_paper"], request_of(bench, *case)
    found = paper.predict(paper.NONE, request, paper.chosen(request))
    assert found.nbytes == sum(medusa_parts(request.spec, request.workload, tp=request.tp).values())
    assert (found.loaded_heads, found.nodes) == (5, 64)


def test_without_savings_the_time_is_medusas_and_that_of_its_tensors(bench: dict[str, ModuleType]) -> None:
    """Each logit and attention score is written and read once; the device is the limit, not the host."""
    paper, request = bench["ablation_paper"], request_of(bench, *CASES[0])
    found = paper.predict(paper.NONE, request, paper.chosen(request))
    device = request.device
    known = medusa_speed(request.spec, device, request.workload, HeadsSpec(), 64, found.tokens_per_step)
    logits = 32000 * 2 * (64 * (1 + 2 * 5) + 42 * 5 * (1 + 5))
    scores = 32 * 32 * 64 * (256 + 128 + 64) * (4 + 2 * 2)
    assert found.step_seconds == pytest.approx(known.step_seconds + 2 * (logits + scores) / device.read_rate)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_savings_give_the_planners_own_bytes_and_speed(bench: dict[str, ModuleType], case: tuple) -> None:
    paper = bench["ablation_paper"]
    request = replace(paper.coded(request_of(bench, *case)), kv_dtype="int8")
    plan = paper.chosen(request)
    found = paper.predict(paper.ALL, request, plan)
    parts = parts_of(request, plan)
    assert found.nbytes == sum(parts.values()) - parts["weights"] == plan.total_bytes - parts["weights"]
    assert found.tokens_per_second == pytest.approx(plan.speed.tokens_per_second, rel=1e-12)
    assert found.tokens_per_step == pytest.approx(plan.tokens_per_step, rel=1e-12)
    assert found.rejected_bytes == 0


def test_what_each_saving_is_about(bench: dict[str, ModuleType]) -> None:
    paper, request = bench["ablation_paper"], request_of(bench, *CASES[0])
    plan = paper.chosen(paper.coded(request))
    steps = {name: paper.predict(on, request, plan) for name, on in paper.cumulative()}
    found = list(steps.values())
    names = [f.name for f in fields(paper.Savings)]
    assert len(found) == len(names) + 1
    before, after = dict(zip(names, found, strict=False)), dict(zip(names, found[1:], strict=True))
    token = 512 << 10  # keys and values in float16
    pages = -(-(512 + 64) // plan.page_size) * plan.page_size
    assert before["pages"].parts["kv_cache"] == 2048 * token
    assert after["pages"].parts["kv_pages"] == pages * token
    # The same slots in another place, but no rejected candidate is written to a page.
    assert before["scratch"].rejected_bytes == round((64 - before["scratch"].tokens_per_step) * token)
    assert after["scratch"].parts["tree_scratch"] == 64 * token
    assert "logits" not in after["streamed"].parts
    assert after["pruned"].nodes == plan.tree_size
    assert after["fewer_heads"].parts["heads"] * 5 == before["fewer_heads"].parts["heads"] * plan.heads
    assert after["coded_heads"].nbytes < before["coded_heads"].nbytes
    assert after["int8_pages"].parts["kv_pages"] * 2 < before["int8_pages"].parts["kv_pages"] * 1.1


def test_no_saving_of_heads_or_pages_is_free_to_leave_out(bench: dict[str, ModuleType]) -> None:
    paper, request = bench["ablation_paper"], request_of(bench, *CASES[0])
    plan = paper.chosen(paper.coded(request))
    (_, complete), *others = [(name, paper.predict(on, request, plan)) for name, on in paper.left_out()]
    more = {name for name, found in others if found.nbytes > complete.nbytes}
    titles = paper.NAMES
    assert {f"without {titles[n]}" for n in ("pages", "last_row", "streamed", "pruned", "fewer_heads")} <= more
    assert len(others) == len(titles) - 1


def test_a_plan_without_heads_is_refused(bench: dict[str, ModuleType]) -> None:
    paper, request = bench["ablation_paper"], request_of(bench, *CASES[0])
    plan = paper.chosen(request)
    with pytest.raises(ValueError, match="the ablation is of Medusa heads"):
        paper.predict(paper.NONE, request, replace(plan, heads=0))
    with pytest.raises(ValueError, match="decodes 1 of 2 sequences"):
        paper.predict(paper.NONE, replace(request, workload=Workload(512, batch=2)), plan)


def test_sensitivity_is_the_fastest_plan_of_each_value(bench: dict[str, ModuleType]) -> None:
    sensitivity = bench["ablation_sensitivity"]
    scale = sensitivity.SCALES[1]
    rows = sensitivity.sensitivity(scale, nodes=(1, 8), contexts=(256,))
    by = {(row["axis"], row["value"], row["kv_dtype"]): row for row in rows}
    request = sensitivity.request_of(scale, 256)
    choices = [c for c in sensitivity.candidates(request) if c.tree_size == 8]
    best = fastest(choices, float("inf"))
    assert best is not None
    assert by["nodes", 8, "float16"]["tokens_per_s"] == best.speed.tokens_per_second
    assert by["nodes", 1, "float16"]["tokens_per_step"] == 1
    assert all(by["heads", n, "float16"]["heads"] == n for n in range(5))
    assert by["kv", 256, "int8"]["generation_bytes"] < by["kv", 256, "float16"]["generation_bytes"]


@pytest.mark.slow
def test_medusa_with_savings_writes_the_same_tokens_in_less_memory(bench: dict[str, ModuleType]) -> None:
    model = tiny_model("llama", seed=3, max_position_embeddings=512)
    model.set_attn_implementation("sdpa")
    heads, prompt = noisy_heads(model, own=True), [i % VOCAB for i in range(100)]
    savings = bench["medusa_published"].Savings
    peaks = []
    for without in (savings(), savings(True), savings(True, True), savings(True, True, True)):
        medusa = bench["medusa_published"].MedusaPublished(model, heads, TREE, without)
        with MemoryTracker() as tracker:
            tokens = medusa.generate(prompt, 24)
        assert tokens == greedy(model, prompt, 24)
        assert medusa.steps < 23, "no draft was accepted"
        peaks.append(tracker.peak)
    assert peaks[0] > peaks[1] > peaks[2] >= peaks[3]
    slots = 100 + 24 + TREE.size
    assert medusa.cache.max_length == slots
    assert medusa.cache.data.nbytes == slots * 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, bytes


def test_systems_that_write_other_tokens_are_detected(bench: dict[str, ModuleType]) -> None:
    runs, model = bench["ablation_runs"], tiny_model("llama", seed=3, max_position_embeddings=128)
    other = tiny_model("llama", seed=4, max_position_embeddings=128)
    systems = [
        runs.MedusaSystem(str(i), each, noisy_heads(each, own=True), TREE) for i, each in enumerate((model, other))
    ]
    talk = runs.Conversation(0, ((1, 2, 3), (4, 5)))
    runs.check_tokens(systems[:1] * 2, talk, 8)
    with pytest.raises(AssertionError, match="1 writes other tokens than 0"):
        runs.check_tokens(systems, talk, 8)


@pytest.mark.slow
def test_measured_memory_falls_where_it_must(
    bench: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny shape: every system runs, tokens and steps agree, and each switch has its effect."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    sizes |= {"vocab_size": 800, "max_position_embeddings": 512}
    monkeypatch.setitem(bench["shapes"].SHAPES, "tiny", sizes)
    monkeypatch.setattr(sys, "argv", ["ablation.py"])
    setting = {"shape": "tiny", "dtype": "fp32", "published": None, "prompt": 96, "new_tokens": 8, "chunk": 16}
    bench["ablation"].memory(**setting, planned="2,8", json_=tmp_path / "memory.json")
    bench["ablation"].speed(
        **setting, count=1, planned="2,8", rounds=1, seconds=0, json_=tmp_path / "speed.json"
    )  # fmt: skip
    result = json.loads((tmp_path / "memory.json").read_text())
    assert (result["planned_heads"], result["planned_nodes"]) == (2, 8)
    rows = {row["system"]: row for row in result["rows"]}
    peaks = {name: row["peak_generation_bytes"] for name, row in rows.items()}
    assert all(sum(row["bytes_by_part"].values()) == row["peak_generation_bytes"] for row in rows.values())
    order = list(bench["ablation_runs"].MEDUSA)
    assert [peaks[name] for name in order] == sorted((peaks[name] for name in order), reverse=True)
    names = list(peaks)
    for falls in ("chunked prefill", "pruned tree", "fewer heads", "heads in 4 bits", "int8 pages (not lossless)"):
        place = names.index(f"+ {falls}")
        assert peaks[names[place]] < peaks[names[place - 1]], falls
    assert rows["+ fewer heads"]["bytes_by_part"]["heads"] * 5 == rows[order[0]]["bytes_by_part"]["heads"] * 2
    assert rows["without pruned tree"]["nodes"] > 8
    speeds = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert [row["system"] for row in speeds] == names
    assert all(row["tokens_per_s"] > 0 and 1 <= row["tokens_per_step"] <= 5 for row in speeds)


def test_conversations_are_numbered_as_the_published_questions(bench: dict[str, ModuleType]) -> None:
    runs = bench["ablation_runs"]
    published = runs.Published(TREE, {(81, 0): 2.0, (81, 1): 2.1, (99, 0): 2.0, (99, 1): 2.0})
    talks = runs.conversations(published, 2, 10, VOCAB)
    assert [talk.question for talk in talks] == [81, 99]
    assert all(len(turn) == 10 and max(turn) < VOCAB for talk in talks for turn in talk.turns)
    assert torch.tensor(talks[0].turns).ne(torch.tensor(talks[1].turns)).any()
