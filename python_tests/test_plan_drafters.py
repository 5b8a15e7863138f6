"""Plans for published drafters and prompt lookup: sizes from files, against loaded drafters and real runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from drafter_oracles import write_clover2, write_dflash, write_eagle1, write_eagle3
from selection import covering, sample
from test_cli_plan import plan_json, run
from test_predicted_memory import close, small_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.drafting import head_files
from specmemo_kernels.drafting.base import FeatureDrafter
from specmemo_kernels.drafting.published import open_drafter
from specmemo_kernels.drafting.published_spec import drafter_spec
from specmemo_kernels.forward.batch import DraftedTrees
from specmemo_kernels.integrations.hf.feature_drafter import measure_advance, measure_draft
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.cost import prefill_seconds
from specmemo_kernels.planning.device import GIB, DeviceProfile
from specmemo_kernels.planning.drafter_spec import DrafterSpec, Drafts, DraftWork, HeadsSpec, PromptLookupSpec
from specmemo_kernels.planning.feature_drafter_spec import FeatureDrafterSpec
from specmemo_kernels.planning.footprint import StepSize, fixed_parts, page_parts
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.planner import plan_memory
from specmemo_kernels.planning.predicted_shape import predicted_shape
from specmemo_kernels.tree.acceptance import (
    DEFAULT_ACCURACY,
    RECURRENT_ACCURACY,
    best_first_paths,
    deepened,
    expected_tokens_per_step,
    extrapolated,
)
from specmemo_kernels.tree.tree_budget import most_nodes

LAYERS, VOCAB = 8, 2000
#: kind: writer, options, and the name that plans show.
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "eagle3": (write_eagle3, {"draft_vocab": 40}, "EAGLE-3"),
    "eagle": (write_eagle1, {}, "EAGLE"),
    "clover2": (write_clover2, {}, "Clover-2"),
    "dflash": (write_dflash, {"block_size": 8, "num_target_layers": LAYERS, "target_layer_ids": (1, 3, 5)}, "DFlash"),
}
#: Layouts whose rows hold something else.
OTHERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "two layers": (write_eagle3, {"layout": "speculators", "layers": 2, "own_embedding": True}),
    "normed": (write_eagle3, {"fc_norm": True, "tie_word_embeddings": True}),
    "two EAGLE layers": (write_eagle1, {"layers": 2, "own_embedding": True}),
}
#: Sizes of drafters for :func:`small_model`. The MLP is narrow: what an operator holds inside isn't measured.
SMALL = {"vocab": VOCAB, "hidden": 256, "intermediate": 128, "heads": 4, "kv_heads": 2, "head_dim": 64}
TOY_DEVICE = DeviceProfile("toy device", GIB, 1e9, {"float32": 2e9}, 2e-6, overlaps=False)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return small_model(num_hidden_layers=LAYERS)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The folder of a model that the drafters of default sizes fit."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    folder = tmp_path / "model"
    CONFIG_MAPPING["llama"](**sizes, vocab_size=61, max_position_embeddings=512, dtype="float32").save_pretrained(
        folder
    )
    return folder


def written(kind: str, folder: Path) -> FeatureDrafterSpec:
    """Write a drafter for :func:`small_model`; its sizes."""
    writer, options = ({name: entry[:2] for name, entry in KINDS.items()} | OTHERS)[kind]
    writer(folder, **SMALL | options)
    published = open_drafter(folder)
    assert published is not None
    return drafter_spec(published.config, published.elements, VOCAB)


def only_offsets(entry: head_files.Entry) -> torch.Tensor:
    """In place of ``Entry.read``: the only tensor whose values plans check."""
    assert entry.name == "d2t", "weights were read"
    return torch.zeros(entry.shape, dtype=torch.int64)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sample(KINDS, ["eagle3"]))
def test_a_folder(kind: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind and bytes are those of the file, no weight is read, and the acceptance is named as assumed."""
    writer, options, name = KINDS[kind]
    _, tensors = writer(tmp_path / "drafter", **options)
    monkeypatch.setattr(head_files.Entry, "read", only_offsets)
    arguments = ("--model", config, "--device", "h100", "--context", 256, "--heads", tmp_path / "drafter")
    plan = plan_json(*arguments)["plan"]
    assert (plan["drafter"], plan["heads"], plan["head_bits"]) == (name, None, None)
    assert plan["parts"]["heads"] == sum(tensor.nbytes for key, tensor in tensors.items() if key != "t2d")
    assert plan["tree"].keys() == {"size", "max_depth", "width"}
    assert 1 <= plan["tree"]["max_depth"] < plan["tree"]["size"] <= 64
    assumed = (
        "published accuracies on Vicuna-7B, the last row" if kind == "dflash" else "74% of the guesses behind right"
    )
    assert any(assumed in reason for reason in plan["reasons"])
    size, depth, _ = plan["tree"].values()
    table = extrapolated(deepened(DEFAULT_ACCURACY if kind == "dflash" else RECURRENT_ACCURACY, depth), 10)
    assert plan["tokens_per_step"] == pytest.approx(expected_tokens_per_step(best_first_paths(table, size - 1), table))
    shown = run("plan", *arguments).output
    for text in (name, f"dynamic, {plan['tree']['size']} nodes, depth {plan['tree']['max_depth']}", "heads/depth"):
        assert text in shown


@pytest.mark.parametrize("kind", KINDS)
def test_accuracies_of_a_file(kind: str, config: Path, tmp_path: Path) -> None:
    """They replace the assumption; deeper nodes have the last row."""
    writer, options, _ = KINDS[kind]
    writer(tmp_path / "drafter", **options)
    file = tmp_path / "drafter" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"cumulative_topk_accuracy": [[0.9], [0.8]]}))
    plan = plan_json("--model", config, "--device", "h100", "--context", 256, "--heads", tmp_path / "drafter")["plan"]
    assert not any("assumed" in reason for reason in plan["reasons"])
    depth = plan["tree"]["max_depth"]
    assert depth > 2
    assert plan["tokens_per_step"] == pytest.approx(1 + sum(0.9 * 0.8**d for d in range(depth)))


def test_prompt_lookup(config: Path) -> None:
    """A chain without bytes or work, whose acceptance is assumed."""
    options = ("--model", config, "--device", "h100", "--context", 256)
    data, plain = (plan_json(*options, "--heads", heads) for heads in ("prompt-lookup", 0))
    plan = data["plan"]
    assert (plan["drafter"], plan["heads"], plan["parts"]["heads"]) == ("prompt lookup", None, 0)
    assert plan["tree"] == [[0] * depth for depth in range(1, len(plan["tree"]) + 1)]
    assert plan["tokens_per_step"] == pytest.approx(2 - 0.5 ** len(plan["tree"]))
    assert plan["step_seconds"] == pytest.approx(plain["plan"]["step_seconds"], rel=0.01)
    assert any("assumed: 50% of the guesses" in reason for reason in plan["reasons"])


def test_refused_options(config: Path, tmp_path: Path) -> None:
    """One line each, with the reason."""
    write_clover2(tmp_path / "drafter")
    (tmp_path / "hydra").mkdir()
    torch.save({"0.weight": torch.zeros(1)}, tmp_path / "hydra" / "hydra_lm_head.pt")
    write_eagle1(tmp_path / "wide", hidden=64)
    for arguments, message in (
        (("--heads", tmp_path / "drafter", "--shared-lm-head"), "drafter is Clover-2"),
        (("--heads", tmp_path / "drafter", "--head-bits", 3), "--head-bits is 3, expected 4"),
        (("--heads", "prompt-lookup", "--head-bits", 4), "--head-bits is for Medusa heads and published drafters"),
        (("--heads", "prompt-lookup", "--shared-lm-head"), "--shared-lm-head is for Medusa heads"),
        (("--heads", "mtp"), "has no MTP layers"),
        (("--heads", tmp_path / "hydra"), "hydra drafters aren't supported"),
        (("--heads", tmp_path / "wide"), "the target has hidden_size 32"),
    ):
        result = run("plan", "--model", config, "--device", "h100", *arguments)
        assert result.exit_code == 2
        assert message in result.output
        assert len(result.output.strip().splitlines()) == 1


# --- sizes against loaded drafters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sample([*KINDS, *OTHERS], ["eagle", "dflash"]))
def test_parts_of_a_loaded_drafter(kind: str, model: PreTrainedModel, tmp_path: Path) -> None:
    """Weights, bytes per token in pages and per node in scratch are those that ``patch`` plans and allocates."""
    predicted = written(kind, tmp_path)
    with sk.patch(model, str(tmp_path), tree=12, memory_budget="64MiB") as handle:
        plan, drafter, facts = handle.plan, handle.drafter, handle.facts
        read, drafted = measure_advance(drafter, facts), measure_draft(drafter, facts, plan.tree)
    assert drafter.spec == predicted
    spec = ModelSpec.from_config(model.config)
    shape = predicted_shape(spec, predicted, plan.tree.max_depth, nodes=plan.tree.size)
    assert shape.head_bytes == drafter.nbytes == plan.parts["heads"]
    assert shape.kv_bytes_per_token * plan.max_tokens == plan.parts["kv_pages"]
    assert shape.node_bytes * plan.max_nodes == plan.parts["tree_scratch"]
    assert predicted.nbytes(spec, 1, tp=4) == drafter.nbytes, "every rank has the whole drafter"
    assert 0.98 * read.per_row <= predicted.row_bytes(spec, 0) <= 1.1 * read.per_row
    assert shape.draft.per_row == pytest.approx(drafted.per_row, rel=0.1)


class Counter(TorchDispatchMode):
    """Counts operators, elements times rows of matrix products, and the rows of each attention."""

    MATRICES: ClassVar[dict[str, slice]] = {
        "linear": slice(1, 2),
        "gated_mlp": slice(1, 4),
        "lm_head_log_probs": slice(1, 2),
    }

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.products = 0
        self.attention: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():  # composite operators aren't decomposed before dispatch
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        self.operators += 1
        name = func.name().removeprefix("specmemo::")
        for matrix in args[self.MATRICES.get(name, slice(0))]:
            self.products += len(args[0]) * matrix.numel()
        if name == "tree_attention":
            self.attention.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def count_calls(drafter: FeatureDrafter, name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Counter]]:
    """The first argument and the counts of each later call of a method."""
    calls: list[tuple[Any, Counter]] = []
    method = getattr(drafter, name)

    def counted(*args: Any) -> Any:
        with Counter() as counter:
            result = method(*args)
            if isinstance(result, DraftedTrees):
                result.layout(args[1].max_depth)
        calls.append((args, counter))
        return result

    monkeypatch.setattr(drafter, name, counted, raising=False)
    return calls


@pytest.mark.parametrize("kind", sample([*KINDS, *OTHERS], ["dflash"]))
def test_work_of_a_loaded_drafter(
    kind: str, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products, rows of attention and operators of a prompt and of steps are those of the code that runs."""
    predicted, spec = written(kind, tmp_path), ModelSpec.from_config(model.config)
    prompts = torch.randint(3, VOCAB, (2, 40))
    with sk.patch(model, str(tmp_path), tree=24, prefill_chunk=128, graph=False) as handle:
        read, drafted = (count_calls(handle.drafter, name, monkeypatch) for name in ("advance", "draft"))
        model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, do_sample=False)
        tree = handle.plan.tree
    work, (_, counted) = predicted.prompt_work(spec, 80, 2), read[0]
    check_work(work, counted.products, counted.attention, counted.operators, predicted.num_layers)
    work = predicted.step_work(spec, Drafts(2, tree.max_depth, tree.size))
    (_, first), (_, accepted) = drafted[0], read[1]
    assert drafted[0][0][1] == tree
    check_work(
        work, first.products + accepted.products, accepted.attention + first.attention,
        first.operators + accepted.operators, predicted.num_layers,
    )  # fmt: skip


def check_work(work: DraftWork, products: int, attention: Sequence[int], operators: int, layers: int) -> None:
    """Norms and biases count as matrices."""
    assert sum(product.weights * product.rows for product in work.products) == pytest.approx(products, rel=0.02)
    assert [rows for rows in work.attention for _ in range(layers)] == list(attention)
    assert work.operators == pytest.approx(operators, rel=0.15)


#: Changes of the model, sequences, prompt, nodes, chunk, dtype of pages.
GRID = [
    ({}, 1, 300, 16, 64, None),
    ({}, 4, 120, 8, 256, None),
    ({"num_key_value_heads": 4}, 2, 400, 31, 32, None),
    ({"intermediate_size": 300}, 3, 90, 20, 128, None),
    ({}, 3, 200, 12, 64, "int8"),
]


FIRST_GENERATION = [("eagle3", 1), ("dflash", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "case"), covering(KINDS, range(len(GRID)), first=FIRST_GENERATION))
def test_generation(kind: str, case: int, tmp_path: Path) -> None:
    """A whole generate, without the drafter's weights; ``patch`` plans as much from its measurements."""
    changes, batch, prompt, nodes, chunk, kv_dtype = GRID[case]
    model, new, page = small_model(num_hidden_layers=LAYERS, **changes), 24, 16
    predicted, spec = written(kind, tmp_path), ModelSpec.from_config(model.config)
    ids = torch.randint(3, VOCAB, (batch, prompt))
    limits = {"prefill_chunk": chunk, "max_batch_size": batch, "page_size": page, "kv_dtype": kv_dtype}
    with sk.patch(model, str(tmp_path), tree=nodes, fuse=False, graph=False, **limits) as handle:
        model.generate(ids[:, :4], attention_mask=torch.ones_like(ids[:, :4]), max_new_tokens=2, do_sample=False)
        handle.release()
        with MemoryTracker() as tracker:
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        tree, planned = handle.plan.tree, handle.plan.parts
    shape = predicted_shape(spec, predicted, tree.max_depth, nodes=tree.size, kv_dtype=kv_dtype)
    load = StepSize(tree.size, batch, min(chunk, batch * prompt), page)
    fixed, each = fixed_parts(shape, load), page_parts(shape, load)
    pages = batch * -(-(prompt + new + tree.max_depth) // page) * sum(each.values())
    assert close(sum(fixed.values()) - fixed["heads"] + pages, tracker.peak)
    parts = ("tree_scratch", "activations", "metadata")  # the backend's workspace isn't torch's
    assert sum(planned[part] for part in parts) + pages >= tracker.peak


# --- time and sharing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sample(KINDS, ["clover2"]))
def test_prompts_pass_through_the_drafter(kind: str, tmp_path: Path) -> None:
    """Prefill takes longer by the drafter's work, for plans with drafts only; Medusa heads read no prompts."""
    spec, work = ModelSpec.from_config(small_model().config), Workload(200, 2, 150)
    drafter = written(kind, tmp_path)
    plain = prefill_seconds(spec, TOY_DEVICE, work, 2, 512)
    assert prefill_seconds(spec, TOY_DEVICE, work, 2, 512, heads=HeadsSpec()) == plain
    extra = prefill_seconds(spec, TOY_DEVICE, work, 2, 512, heads=drafter) - plain
    products = drafter.prompt_work(spec, 300, 2).products
    seconds = sum(2 * p.weights * p.rows / 2e9 + p.nbytes / 1e9 for p in products)
    assert seconds < extra < 1.5 * seconds, "attention and launches are the rest"
    plans = [plan_memory(spec, TOY_DEVICE, None, work, heads=heads) for heads in (drafter, PromptLookupSpec())]
    assert [plan.drafter for plan in plans] == [KINDS[kind][2], "prompt lookup"]


def test_ranks_share_the_lm_head_only(tmp_path: Path) -> None:
    """Of all products only those with the target's lm_head are divided."""
    spec = ModelSpec.from_config(small_model().config)
    for kind, divided in (("eagle", True), ("eagle3", False)):
        drafter: DrafterSpec = written(kind, tmp_path / kind)
        one, four = (drafter.step_work(spec, Drafts(3, 4, 20), tp) for tp in (1, 4))
        for whole, part in zip(one.products, four.products, strict=True):
            vocabulary = whole.matrices == 1
            assert part.weights == (whole.weights / 4 if divided and vocabulary else whole.weights)
        assert len(four.gathered) == (4 * 2 + 2 if divided else 2)


def test_deeper_nodes_have_the_last_row() -> None:
    assert deepened([[0.5], [0.3]], 4) == [[0.5], [0.3], [0.3], [0.3]]
    assert deepened(DEFAULT_ACCURACY, 2) == list(DEFAULT_ACCURACY[:2])


@pytest.mark.parametrize("size", [1, 2, 7, 500])
def test_the_largest_budget(size: int, tmp_path: Path) -> None:
    """At most as many nodes as a beam creates. The beam is a third of the tree, or all of it where it costs nothing."""
    for write, beam, depth in (
        (write_eagle3, min(10, -(-size // 3)), 3),
        (write_eagle3, min(10, size - 1), 1),
        (write_dflash, min(61, size - 1), 3),
    ):
        write(tmp_path)
        published = open_drafter(tmp_path)
        assert published is not None
        tree = drafter_spec(published.config, published.elements, 61).budget(size, depth)
        depth = min(depth, size - 1)
        most = most_nodes(depth, max(1, beam))
        assert (tree.size, tree.max_depth, tree.width) == (min(size, most), depth, max(1, beam))
