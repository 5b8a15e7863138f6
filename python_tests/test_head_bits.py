"""Heads in 4 bits: packed while loading, kept and counted as codes; no token differs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import HIDDEN, VOCAB, as_vllm, medusa_state
from safetensors.torch import load_file, save_file
from test_families import answers, batch, greedy
from test_patch_memory import peak_of, wide_model, with_workspace
from test_planner import TOY, TOY_DEVICE, VICUNA
from tiny_models import VOCAB as TINY_VOCAB
from tiny_models import OracleDrafter, tiny_model

import specmemo_kernels as sk
from specmemo_kernels import ops
from specmemo_kernels.drafting.load_heads import HeadsError, describe_heads, load_heads
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.drafting.medusa_heads import MedusaHeads
from specmemo_kernels.ops import weight_codes
from specmemo_kernels.planning.baselines import Workload, medusa_parts
from specmemo_kernels.planning.cost import Pass, medusa_speed, pass_seconds
from specmemo_kernels.planning.drafter_spec import HeadsSpec
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.planning.planner import plan_memory, plan_request
from specmemo_kernels.planning.predicted_shape import weight_bytes
from specmemo_kernels.planning.search import candidates, tree_paths
from specmemo_kernels.tree.acceptance import expected_tokens_per_step

Tensors = dict[str, torch.Tensor]


def wide_state(dtype: torch.dtype = torch.float32) -> Tensors:
    """Heads whose rows fill one group and a part of the next."""
    return {key: tensor.to(dtype) for key, tensor in medusa_state(3, 2, hidden=72).items()}


def assert_packed(heads: MedusaHeads, state: Tensors) -> None:
    """Each matrix is stored as its codes, biases are unchanged."""
    assert (heads.num_heads, heads.num_layers, heads.head_bits) == (3, 2, 4)
    mine = heads.state_dict()
    for key, matrix in state.items():
        if key.endswith("weight"):
            codes, scales = weight_codes.pack(matrix)
            assert torch.equal(mine.pop(key.replace("weight", "codes")), codes)
            assert torch.equal(mine.pop(key.replace("weight", "scales")), scales)
    assert all(torch.equal(tensor, state[key]) for key, tensor in mine.items())
    assert len(mine) == 6


def unpacked(state: Tensors) -> Tensors:
    """The state with the matrices that its codes stand for."""
    return {
        key: weight_codes.unpack(*weight_codes.pack(tensor), 72) if key.endswith("weight") else tensor
        for key, tensor in state.items()
    }


class TestLoading:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("form", ["dict", "module", "safetensors", "pt", "vllm"])
    def test_from_everywhere(self, form: str, dtype: torch.dtype, tmp_path: Path) -> None:
        state = wide_state(dtype)
        source: Any = state if form == "dict" else load_heads(state, 72, VOCAB)
        if form in ("safetensors", "vllm"):
            save_file(as_vllm(state) if form == "vllm" else state, source := tmp_path / "heads.safetensors")
        elif form == "pt":
            torch.save(state, source := tmp_path / "heads.pt")
        assert_packed(load_heads(source, 72, VOCAB, head_bits=4), state)
        if form == "module":
            assert source.head_bits is None, "the caller's heads stay as they are"
            assert source.get_parameter("0.2.weight").dtype == dtype

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        """Loaded as stored, whatever ``head_bits`` is; the file is smaller by the same bytes."""
        state = wide_state()
        load_heads(state, 72, VOCAB).save_pretrained(tmp_path)
        before = (tmp_path / "medusa_lm_head.safetensors").stat().st_size
        packed = MedusaHeads.from_pretrained(tmp_path, head_bits=4)
        packed.cumulative_topk_accuracy = [[0.5], [0.4], [0.3]]
        packed.save_pretrained(tmp_path)
        saved = 3 * (VOCAB + 2 * 72) * (72 * 4 - 68)
        assert before - (tmp_path / "medusa_lm_head.safetensors").stat().st_size > saved - 3000
        for bits in (None, 4):
            assert_packed(MedusaHeads.from_pretrained(tmp_path, head_bits=bits), state)
        half = load_heads(tmp_path, 72, VOCAB, dtype=torch.float16)
        assert half.get_parameter("0.0.linear.bias").dtype == half.dtype == torch.float16
        assert torch.equal(half.get_buffer("1.2.scales"), packed.get_buffer("1.2.scales"))
        facts = describe_heads(tmp_path, 72, VOCAB)
        assert (facts.num_heads, facts.own_lm_head, facts.head_bits) == (3, True, 4)
        assert facts.accuracy == [[0.5], [0.4], [0.3]]

    def test_what_fits_is_not_copied(self) -> None:
        packed = load_heads(wide_state(), 72, VOCAB, head_bits=4)
        assert load_heads(packed, 72, VOCAB) is packed
        assert load_heads(packed, 72, VOCAB, head_bits=4, dtype=torch.float32) is packed
        moved = packed.to(torch.bfloat16)  # scales too, which the operator would not take
        again = load_heads(moved, 72, VOCAB, dtype=torch.bfloat16)
        assert again.get_buffer("0.2.scales").dtype == torch.float16
        first = again.truncated(2)
        assert first.head_bits == 4
        assert first.get_buffer("1.2.codes") is again.get_buffer("1.2.codes")

    def test_logits_are_those_of_the_codes(self) -> None:
        state, hidden = wide_state(), torch.randn(5, 72)
        packed = load_heads(state, 72, VOCAB, head_bits=4)
        with torch.no_grad():
            wanted = load_heads(unpacked(state), 72, VOCAB).logits(hidden, torch.empty(0))
            assert torch.equal(packed.logits(hidden, torch.empty(0)), wanted)

    def test_one_matrix_at_a_time(self, tmp_path: Path) -> None:
        """Besides the codes, memory holds one matrix of the file, mapped, and a few packed rows."""
        rows, columns = 24_000, 128
        state = {}
        for head in range(2):
            state[f"{head}.0.linear.weight"], state[f"{head}.0.linear.bias"] = torch.zeros(128, 128), torch.zeros(128)
            state[f"{head}.1.weight"] = torch.randn(rows, columns)
        save_file(state, tmp_path / "heads.safetensors")
        with MemoryTracker() as tracker:
            heads = load_heads(tmp_path / "heads.safetensors", columns, rows, head_bits=4)
        held = sum(t.nbytes for t in heads.state_dict().values())
        assert held == 2 * (weight_codes.packed_bytes(rows + 128, columns) + 128 * 4)
        # The tracker also counts the module on the meta device that the codes are put into.
        assert held < tracker.peak < 2 * held + 1.1 * rows * columns * 4

    def test_without_own_lm_heads(self, tmp_path: Path) -> None:
        """The blocks are packed; saved, they load again. So do blocks without biases."""
        state = {key: tensor for key, tensor in wide_state().items() if ".linear." in key}
        packed = load_heads(state, 72, VOCAB, head_bits=4)
        assert_packed(packed, state)
        packed.save_pretrained(tmp_path)
        assert_packed(load_heads(tmp_path, 72, VOCAB), state)
        assert not describe_heads(tmp_path, 72, VOCAB).own_lm_head
        no_bias = {key: tensor for key, tensor in as_vllm(wide_state(torch.bfloat16)).items() if "bias" not in key}
        assert load_heads(no_bias, 72, VOCAB, head_bits=4).dtype == torch.bfloat16

    def test_only_the_lm_heads_are_stored_as_codes(self) -> None:
        """As the first release saved them: the blocks are packed while loading."""
        packed = load_heads(state := wide_state(), 72, VOCAB, head_bits=4).state_dict()
        mixed = {key: tensor for key, tensor in state.items() if ".linear." in key}
        mixed |= {key: tensor for key, tensor in packed.items() if ".linear." not in key}
        assert_packed(load_heads(mixed, 72, VOCAB), state)

    def test_other_numbers_of_bits(self) -> None:
        for load in (lambda: load_heads(medusa_state(), HIDDEN, VOCAB, head_bits=8), lambda: HeadsSpec(head_bits=8)):
            with pytest.raises(ValueError, match="head_bits is 8, expected 4 or None"):
                load()

    @pytest.mark.parametrize(
        ("key", "change", "message"),
        [
            ("1.2.codes", lambda t: t[:, :32].contiguous(), r"1\.2\.codes has shape \[21, 32\].*\[21, 64\]"),
            ("1.2.codes", lambda t: t[:20].contiguous(), r"1\.2\.codes has shape \[20, 64\]"),
            ("1.2.codes", lambda t: t.to(torch.int16), r"1\.2\.codes is I16, heads need uint8"),
            ("1.2.scales", lambda t: t[:, :1].contiguous(), r"1\.2\.scales has shape \[21, 1\].*\[21, 2\]"),
            ("1.2.scales", lambda t: t.to(torch.uint8), r"1\.2\.scales is U8, heads need floating-point"),
            ("1.2.scales", None, r"1\.2\.scales is missing"),
            ("1.0.linear.scales", None, r"1\.0\.linear\.scales is missing"),
            ("1.0.linear.codes", lambda t: t[:40].contiguous(), r"1\.0\.linear\.codes has shape \[40, 64\].*\[72,"),
            ("1.2.codes", None, r"1\.2\.weight is missing"),
            ("1.2.weight", lambda _: torch.zeros(VOCAB, 72), r"unknown keys 1\.2\.weight"),
        ],
    )
    def test_files_that_are_not_right(self, key: str, change: Any, message: str, tmp_path: Path) -> None:
        load_heads(wide_state(), 72, VOCAB, head_bits=4).save_pretrained(tmp_path)
        file = tmp_path / "medusa_lm_head.safetensors"
        state = load_file(file)
        old = state.pop(key, None)
        save_file(state | ({} if change is None else {key: change(old)}), file)
        with pytest.raises(HeadsError, match=message):
            load_heads(tmp_path, 72, VOCAB)

    def test_numbers_that_codes_cannot_hold(self, tmp_path: Path) -> None:
        """Packing refuses such numbers with file and key; stored scales of any value only make bad guesses."""
        state = wide_state()
        state["1.2.weight"][3, 70] = float("inf")
        save_file(state, tmp_path / "heads.safetensors")
        with pytest.raises(HeadsError, match=r"heads\.safetensors: 1\.2\.weight: an element is not finite"):
            load_heads(tmp_path / "heads.safetensors", 72, VOCAB, head_bits=4)
        packed = load_heads(wide_state(), 72, VOCAB, head_bits=4)
        packed.get_buffer("0.2.scales").fill_(float("nan"))
        drafter = MedusaDrafter(packed, (torch.empty(0), None))
        values, tokens = ops.lm_head_topk(torch.randn(2, 72), *packed.own_tensors(0)[:1], k=3,
                                          scales=packed.own_tensors(0)[1])  # fmt: skip
        assert values.isnan().all()
        assert ((tokens >= 0) & (tokens < VOCAB)).all()
        assert drafter.nbytes > 0


def own_heads(model: Any, width: int, layers: int = 1) -> MedusaHeads:
    """Heads that often guess the lm_head's token."""
    heads = MedusaHeads(width, TINY_VOCAB, 3, layers)
    for head in range(3):
        heads.lm_head_weight(head, torch.empty(0)).data = model.get_output_embeddings().weight.data.clone()
    return heads


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_same_tokens(family: str, backend: str) -> None:
    """The unpatched model's tokens, for ragged batches; drafts are accepted, so the codes are read correctly."""
    model = tiny_model(family, seed=3)
    inputs = batch((9, 4, 13))
    wanted = answers(inputs, greedy(model, inputs, 20))
    heads = own_heads(model, model.config.hidden_size)
    with sk.patch(model, heads, tree=8, backend=backend, head_bits=4) as handle:
        assert answers(inputs, greedy(model, inputs, 20)) == wanted
        assert handle.plan.head_bits == 4
        assert handle.stats.tokens_per_step > 1
        assert handle.drafter.heads.head_bits == 4
    assert heads.head_bits is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_memory_is_what_the_plan_says(family: str) -> None:
    """The plan counts heads as codes, to the byte; the peak of everything else is within the plan."""
    model = wide_model(family, seed=20)
    heads = MedusaHeads(128, TINY_VOCAB, 3)
    budget = with_workspace(model, 1_600_000)
    with sk.patch(model, heads, memory_budget=budget, tree=8, max_batch_size=2, head_bits=4) as handle:
        plan = handle.plan
        coded = 3 * (weight_codes.packed_bytes(TINY_VOCAB + 128, 128) + 128 * 4)
        assert handle.bytes_by_part["heads"] == plan.parts["heads"] == handle.drafter.nbytes == coded
        assert sum(plan.parts.values()) <= plan.budget
        longest = min(plan.max_tokens, 400) - 40
        peak = peak_of(handle, batch((longest, longest // 2, 7)), 30)
        assert peak + coded <= sum(plan.parts.values())
    with sk.patch(model, heads, memory_budget=budget, tree=8, max_batch_size=2) as handle:
        rows = TINY_VOCAB + 128
        assert handle.plan.parts["heads"] - coded == 3 * (rows * 128 * 4 - weight_codes.packed_bytes(rows, 128))


def test_a_refusal_names_them_where_they_would_do() -> None:
    """With a budget that is enough with 4-bit heads only; not if they don't suffice or are used already."""
    model = wide_model("llama", seed=20)
    heads = MedusaHeads(128, TINY_VOCAB, 3)

    def least(bits: int | None) -> str:
        with pytest.raises(sk.BudgetError) as refusal:
            sk.patch(model, heads, memory_budget=1000, tree=8, head_bits=bits)
        assert "head_bits" not in str(refusal.value)
        return re.search(r"give at least ([\d.]+ \w+)", str(refusal.value))[1]

    enough = least(4)
    with pytest.raises(sk.BudgetError, match=r"or head_bits=4, with which the drafter takes \d"):
        sk.patch(model, heads, memory_budget=enough, tree=8)
    with sk.patch(model, heads, memory_budget=enough, tree=8, head_bits=4) as handle:
        assert handle.plan.max_pages >= 1
    assert not hasattr(model, "specmemo")


@pytest.mark.parametrize(
    ("heads", "name"),
    [
        (lambda model: "prompt-lookup", "'prompt-lookup'"),
        (lambda model: OracleDrafter([], 0.0), "a OracleDrafter"),
        (lambda model: tiny_model("llama", seed=4), "a LlamaForCausalLM"),
        (lambda model: sk.DraftModel(tiny_model("llama", seed=4)), "a DraftModel"),
    ],
)
def test_other_drafters(heads: Any, name: str) -> None:
    """Refused before anything changes."""
    model = tiny_model("llama", seed=3)
    with pytest.raises(ValueError, match=f"packs Medusa heads and published drafters; heads is {name}"):
        sk.patch(model, heads(model), head_bits=4)
    with pytest.raises(ValueError, match="head_bits is 5, expected 4 or None"):
        sk.patch(model, MedusaHeads(32, TINY_VOCAB, 2), head_bits=5)
    assert not hasattr(model, "specmemo")


@pytest.mark.parametrize("own", [True, False])
def test_the_drafter_counts_codes(own: bool) -> None:
    """Codes, scales and biases; the predicted bytes in 4 bits are those of packed heads."""
    state = {key: tensor for key, tensor in wide_state().items() if own or ".linear." in key}
    plain, coded = (load_heads(state, 72, VOCAB, head_bits=bits) for bits in (None, 4))
    one, other = (MedusaDrafter(heads, (torch.empty(VOCAB, 72), None)) for heads in (plain, coded))
    assert other.nbytes == sum(tensor.nbytes for tensor in coded.state_dict().values())
    assert (one.coded_nbytes, other.coded_nbytes) == (other.nbytes, None)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_guesses_are_those_of_the_codes(backend: str, own: bool) -> None:
    """The best tokens of every head by float64 products with the dequantised matrices; a part of the heads runs."""
    state = {key: tensor for key, tensor in wide_state().items() if own or ".linear." in key}
    shared, hidden = torch.randn(VOCAB, 72), torch.randn(5, 72)
    drafter = MedusaDrafter(load_heads(state, 72, VOCAB, head_bits=4), (shared, None), backend)
    exact = load_heads(unpacked(state), 72, VOCAB).double()
    for depth in (1, 3):
        with torch.no_grad():
            wanted = exact.logits(hidden.double(), shared.double())[:depth].topk(4).indices
        assert torch.equal(drafter.candidates(hidden, depth, 4), wanted.transpose(0, 1).flatten(1))


def test_codes_are_read_in_fewer_bytes() -> None:
    """A step's predicted time falls by the saved bytes of the heads that run, over the read rate."""
    run = Pass(60, 3, 100.0, 60, heads=2, head_rows=3)
    plain, coded = (pass_seconds(TOY, TOY_DEVICE, run, HeadsSpec(3, 1, True, bits)) for bits in (None, 4))
    rows = TOY.vocab_size + TOY.hidden_size
    saved = 2 * (rows * TOY.hidden_size * TOY.dtype_bytes - weight_codes.packed_bytes(rows, TOY.hidden_size))
    assert plain - coded == pytest.approx(saved / TOY_DEVICE.read_rate, rel=1e-9)


def test_plans_with_them() -> None:
    """At the speed of Medusa as published four fifths of its memory are saved; each rank holds a share."""
    work = Workload(512)
    problem = plan_request(VICUNA, "titan-rtx", work, heads=HeadsSpec(head_bits=4))
    medusa = sum(medusa_parts(VICUNA, work).values())
    tokens = expected_tokens_per_step(tree_paths(problem, 4, 64), problem.accuracy)
    wanted = medusa_speed(VICUNA, problem.device, work, HeadsSpec(), 64, tokens).tokens_per_second
    enough = [c for c in candidates(problem) if c.speed.tokens_per_second >= wanted]
    assert min(c.total_bytes for c in enough) - weight_bytes(VICUNA) <= 0.2 * medusa
    plan = plan_memory(VICUNA, "titan-rtx", None, work, heads=HeadsSpec(head_bits=4))
    assert plan.head_bits == 4
    assert plan.parts["heads"] == plan.heads * (4096 * 2 + weight_codes.packed_bytes(36096, 4096))
    half = plan_memory(VICUNA, "titan-rtx", None, work, heads=HeadsSpec(head_bits=4), tp=2)
    assert half.parts["heads"] == half.heads * (4096 * 2 + weight_codes.packed_bytes(20096, 4096))
    shared = plan_memory(VICUNA, "titan-rtx", None, work, heads=HeadsSpec(own_lm_head=False, head_bits=4))
    assert shared.parts["heads"] == shared.heads * (4096 * 2 + weight_codes.packed_bytes(4096, 4096))
