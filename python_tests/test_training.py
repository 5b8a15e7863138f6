"""Training of drafters: what is minimised, by independent implementations; data; resuming; memory; what is saved."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from drafter_oracles import PlainClover2, PlainDrafter, PlainEagle3
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from selection import examples, sample
from test_feature_drafters import features_of
from tiny_models import VOCAB, tiny_model
from transformers import PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.drafting.load_heads import load_heads
from specmemo_kernels.drafting.published import open_drafter
from specmemo_kernels.planning.memory_plan import BudgetError
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.training.distillation import Teacher, distillation, greedy_tokens, ranks
from specmemo_kernels.training.loop import Schedule, Training
from specmemo_kernels.training.memory import pass_bytes, windows_within
from specmemo_kernels.training.objective import HeldOut, Objective, evaluate
from specmemo_kernels.training.recipes import (
    DrafterSizes,
    feature_ids,
    final_norm,
    frequent_tokens,
    least_parameters,
    new_drafter,
)
from specmemo_kernels.training.run import Recipe, train_drafter
from specmemo_kernels.training.saved import save_drafter
from specmemo_kernels.training.target_states import FrozenTarget
from specmemo_kernels.training.trainable import Trainable
from specmemo_kernels.training.windows import Windows, cut_windows

Tensor = torch.Tensor
LAYERS, DEPTH = 6, 3
KINDS = {
    "medusa": DrafterSizes(DEPTH, 2),
    "clover2": DrafterSizes(DEPTH, 2, 40),
    "eagle3": DrafterSizes(DEPTH, 1),
    "eagle3, own vocabulary": DrafterSizes(DEPTH, 2, 40, 30, (0, 3, LAYERS)),
}
#: Fewer tokens than the ranks whose accuracy is measured.
FEW = {"eagle3, four tokens": DrafterSizes(DEPTH, 1, 40, 4, (0, 3, LAYERS))}


class Silent:
    """A reporter without a screen."""

    def phase(self, name: str, total: int, done: int = 0) -> None:
        self.done = done

    def advance(self, note: str = "") -> None:
        pass


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=LAYERS)


def text(windows: int, length: int, seed: int = 0) -> Tensor:
    """Random tokens, of which some are more frequent."""
    source = random.Random(seed)
    rows = [
        [min(source.randrange(3, VOCAB), source.randrange(3, VOCAB)) for _ in range(length)] for _ in range(windows)
    ]
    return torch.tensor(rows, dtype=torch.int32)


def made(model: PreTrainedModel, kind: str, seed: int = 0) -> tuple[FrozenTarget, Trainable]:
    """A drafter with random weights in every place."""
    name = kind.split(",")[0]
    sizes = (KINDS | FEW)[kind]
    target = FrozenTarget(model, feature_ids(name, sizes, LAYERS))
    drafter = new_drafter(name, target, sizes, text(4, 40), seed)
    torch.manual_seed(seed)
    for parameter in drafter.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return target, drafter


def oracle_log_probs(model: PreTrainedModel, kind: str, drafter: Trainable, tokens: list[int], folder: Path) -> Any:
    """A function of a row and a depth: log-probabilities [V] of token ``row + 2 + depth``, from the saved files."""
    save_drafter(drafter, folder, evaluate_nothing(drafter), "model")
    head = model.lm_head.weight.detach().double()
    if kind == "medusa":
        heads = load_heads(folder, model.config.hidden_size, VOCAB).double()
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0].double()
        return lambda row, depth: (heads.features(hidden[row], depth) @ head.T).log_softmax(-1)
    config = json.loads((folder / "config.json").read_text())
    tensors = {
        key: t.double() if t.is_floating_point() else t for key, t in load_file(folder / "model.safetensors").items()
    }
    plain_type: type[PlainDrafter] = PlainClover2 if kind == "clover2" else PlainEagle3
    if kind == "eagle3":
        config["tie_word_embeddings"] = False  # the target's lm_head, which isn't tied to its embedding
    plain: Any = plain_type(config, tensors, model.model.embed_tokens.weight.double(), head)
    features = features_of(model, drafter.target.taps.ids, tokens).double()

    def log_probs(row: int, depth: int) -> Tensor:
        path = tokens[row + 2 : row + 2 + depth]
        result: Tensor = plain.next_log_probs(features[: row + 1], tokens[1 : row + 2], path)
        return result

    return log_probs


def evaluate_nothing(drafter: Trainable) -> Any:
    return HeldOut((0.0,) * drafter.depth, ((0.5, 0.75),) * drafter.depth, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_unrolled_predictions_equal_the_plain_drafters(model: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    """At every row and depth, what is trained is what the saved drafter predicts when it drafts."""
    target, drafter = made(model, kind)
    windows = text(2, 14, seed=3).long()
    with torch.no_grad():
        tensors = drafter.cast()
        unrolled = drafter.unrolled(target.states(windows), tensors)
        weight, _ = drafter.matrix(tensors)
    assert [hidden.shape[:2] for hidden in unrolled] == [(2, drafter.rows(14))] * DEPTH
    for window, tokens in enumerate(windows.tolist()):
        expected = oracle_log_probs(model, kind, drafter, tokens, tmp_path / str(window))
        for depth, hidden in enumerate(unrolled):
            for row in (0, 4, drafter.rows(14) - 1):
                found = (hidden[window, row].double() @ weight.double().T).log_softmax(-1)
                wanted = expected(row, depth)
                if drafter.tokens is not None:
                    assert wanted.isfinite().nonzero().flatten().tolist() == drafter.tokens.tolist()
                    wanted = wanted[drafter.tokens]
                assert (found - wanted).abs().max() < 2e-5


def teacher_and_predictions(draft_vocab: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(DEPTH, 70, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(draft_vocab, 16, dtype=dtype, requires_grad=True)
    places, head = torch.randn(70, 16, dtype=dtype), torch.randn(draft_vocab, 16, dtype=dtype)
    bias, counted = torch.randn(draft_vocab, dtype=dtype), (torch.rand(70) < 0.8).to(dtype)
    return hidden, weight, places, head, bias, counted


def test_distillation_equals_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients, in parts of odd sizes, against torch's own in float64."""
    monkeypatch.setattr("specmemo_kernels.training.distillation._LOGITS", 37 * 33)
    hidden, weight, places, head, bias, counted = teacher_and_predictions(33, torch.float64)
    scales = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    target = (places @ head.T + bias).softmax(-1)
    each = -(target * (hidden @ weight.T).log_softmax(-1)).sum(-1) * counted
    expected = (each.mean(dim=1) * scales).sum()
    expected_grads = torch.autograd.grad(expected, (hidden, weight))
    single = [x.detach().float().requires_grad_(x.requires_grad) for x in (hidden, weight)]
    teacher = Teacher(places.float(), head.float(), bias.float())
    loss, losses = distillation(*single, None, scales.float(), counted.float(), teacher)
    (3 * loss).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses.double(), each.mean(dim=1), rtol=1e-5, atol=1e-6)
    for found, wanted in zip(single, expected_grads, strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad.double(), 3 * wanted, rtol=1e-4, atol=1e-6)


def test_ranks_and_greedy_tokens() -> None:
    hidden, weight, places, head, bias, _ = (x.detach() for x in teacher_and_predictions(33, torch.float32))
    tokens = greedy_tokens(places, head, bias)
    assert tokens.tolist() == (places @ head.T + bias).argmax(-1).tolist()
    tokens[5] = -1
    found = ranks(hidden, weight, None, tokens)
    for depth in range(DEPTH):
        order = (hidden[depth] @ weight.T).argsort(dim=1, descending=True).tolist()
        wanted = [33 if t < 0 else row.index(t) for row, t in zip(order, tokens.tolist(), strict=True)]
        assert found[depth].tolist() == wanted


@pytest.mark.parametrize("kind", KINDS | FEW)
def test_the_objective(model: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    """The loss and the accuracies, row by row from log-probabilities of the plain drafters."""
    target, drafter = made(model, kind)
    objective, length = Objective(drafter), 12
    tokens = text(1, length, seed=5).long()
    tokens[0, 6:9] = 0  # several tokens in a row that the model would have written
    for place in range(6, 9):
        tokens[0, place] = model(tokens[:, :place]).logits[0, -1].argmax()
    with torch.no_grad():
        _, losses = objective(target.states(tokens))
        logits = model(tokens).logits[0].double()
    hits, places = objective.hits(target.states(tokens))
    expected = oracle_log_probs(model, kind, drafter, tokens[0].tolist(), tmp_path)
    rows = torch.arange(VOCAB) if drafter.tokens is None else drafter.tokens
    best, count = logits.argmax(-1).tolist(), length - 2 * DEPTH
    for depth in range(DEPTH):
        total = 0.0
        for place in range(DEPTH, DEPTH + count):  # the token behind it is predicted
            if best[place] in rows.tolist():
                goal = logits[place, rows].softmax(-1)
                total -= float((goal * expected(place - 1 - depth, depth)[rows]).sum().detach())
        assert float(losses[depth]) == pytest.approx(total / count, rel=1e-4)
        seen = [row for row in range(drafter.rows(length)) if own(tokens[0].tolist(), best, row, depth)]
        found = [
            (expected(row, depth) > expected(row, depth)[best[row + 1 + depth]]).sum().item()
            for row in seen
            if best[row + 1 + depth] in rows.tolist()
        ]
        assert int(places[depth]) == len(seen)
        assert hits[depth].tolist() == [found.count(rank) for rank in range(10)]
    assert places[1] > 0


def own(tokens: list[int], best: list[int], row: int, depth: int) -> bool:
    """Whether the tokens between a row and the token at a depth are the model's."""
    return all(tokens[row + 2 + d] == best[row + 1 + d] for d in range(depth))


@pytest.mark.parametrize("kind", sample(KINDS, ["medusa"]))
def test_training_lowers_the_loss(model: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    """And all parameters change."""
    target = FrozenTarget(model, feature_ids(kind.split(",")[0], KINDS[kind], LAYERS))
    drafter = new_drafter(kind.split(",")[0], target, KINDS[kind], text(4, 40), 0)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    windows = Windows(text(8, 24), text(2, 24, seed=1))
    training = Training(
        Accelerator(cpu=True), target, Objective(drafter), windows, Schedule(30, 4, 4, 3e-3, 0), tmp_path / "s"
    )
    training.run(lambda _: None)
    losses = training.progress.losses
    assert sum(losses[-1]) < sum(losses[0])
    unchanged = [name for name, p in drafter.named_parameters() if torch.equal(p, before[name])]
    assert not unchanged
    assert [e["step"] for e in training.progress.evaluations] == [4, 8, 11, 15, 19, 22, 26, 30]
    assert all(not p.requires_grad and p.grad is None for p in model.parameters())


def run_steps(
    model: PreTrainedModel, kind: str, state: Path, stops: list[int], micro: int = 3, then: int = 3
) -> dict[str, Tensor]:
    """The weights after 12 steps, interrupted behind each of ``stops``: a checkpoint, then a step that is lost.

    Args:
        micro: windows that fit a pass. then: the same after the first interruption.
    """
    windows = Windows(text(10, 20), text(1, 20, seed=1))
    for start, stop in enumerate([*stops, None]):
        target = FrozenTarget(model, feature_ids(kind.split(",")[0], KINDS[kind], LAYERS))
        drafter = new_drafter(kind.split(",")[0], target, KINDS[kind], windows.training, 0)
        training = Training(
            Accelerator(cpu=True), target, Objective(drafter), windows,
            Schedule(12, 3, then if start else micro, 1e-3, 7), state,
        )  # fmt: skip

        def interrupt(_: list[float], training: Training = training, stop: int | None = stop) -> None:
            if training.progress.step == stop:
                training.save()
            elif stop is not None and training.progress.step == stop + 1:
                raise KeyboardInterrupt

        try:
            training.run(interrupt)
        except KeyboardInterrupt:
            continue
    return {name: p.detach() for name, p in drafter.named_parameters()}


@pytest.mark.parametrize("kind", sample(KINDS, ["eagle3"]))
def test_an_interrupted_run_ends_with_the_same_weights(model: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    plain = run_steps(model, kind, tmp_path / "plain", [])
    resumed = run_steps(model, kind, tmp_path / "resumed", [3, 4, 9])
    assert plain.keys() == resumed.keys()
    assert all(torch.equal(plain[name], resumed[name]) for name in plain)


def test_a_run_resumed_with_less_memory_ends_with_the_same_weights(model: PreTrainedModel, tmp_path: Path) -> None:
    """Its passes have the windows of the first start."""
    plain = run_steps(model, "eagle3", tmp_path / "plain", [])
    resumed = run_steps(model, "eagle3", tmp_path / "resumed", [3, 4], then=1)
    assert all(torch.equal(plain[name], resumed[name]) for name in plain)


@pytest.mark.slow
def test_gradients_are_accumulated(model: PreTrainedModel, tmp_path: Path) -> None:
    """Passes over one window at a time give the same weights, up to rounding."""
    whole, parts = (run_steps(model, "eagle3", tmp_path / str(micro), [], micro) for micro in (3, 1))
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["medusa", "clover2", "eagle3"])
def test_a_drafter_beyond_the_budget_is_not_built(
    model: PreTrainedModel, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, drafter = made(model, kind)
    least = least_parameters(kind, target, KINDS[kind])
    assert 0.1 < least / sum(parameter.numel() for parameter in drafter.parameters()) < 1
    monkeypatch.setattr("specmemo_kernels.training.run.new_drafter", None)
    windows = Windows(text(2, 32), text(1, 32, 1))
    for budget in (None, 1 << 30):
        recipe = Recipe(kind, DrafterSizes(DEPTH, 99_999_999), 64, 64, 1e-3, 0, budget)
        with pytest.raises(BudgetError, match="gradients and moments need at least"):
            train_drafter(model, windows, recipe, tmp_path, tmp_path / "state", "m", Accelerator(cpu=True), Silent())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_budget_holds(model: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    """Fewer windows per pass within a smaller budget; the peak of a run is never above the budget."""
    name, windows = kind.split(",")[0], Windows(text(16, 48), text(2, 48, seed=1))
    target = FrozenTarget(model, feature_ids(name, KINDS[kind], LAYERS))
    objective = Objective(new_drafter(name, target, KINDS[kind], windows.training, 0))
    fixed = 16 * sum(p.numel() for p in objective.parameters()) + objective.copied_bytes + 2 * 8 * 8 * 48
    one, two = (pass_bytes(objective, target.states, count, 48) for count in (1, 2))
    chosen = []
    for count in (1, 2, 5):
        budget = fixed + one + (count - 1) * (two - one) + (two - one) // 2
        recipe = Recipe(name, KINDS[kind], 3 * 8 * 48, 8 * 48, 1e-3, 0, budget)
        folder = tmp_path / str(count)
        folder.mkdir()
        with MemoryTracker() as tracker:
            trained = train_drafter(
                model, windows, recipe, folder, folder / "state", "model", Accelerator(cpu=True), Silent()
            )
        chosen.append(trained.windows)
        assert tracker.peak <= budget
    assert chosen == [1, 2, 5]
    with pytest.raises(BudgetError, match=r"--memory-budget is .*needs .*raise the budget"):
        windows_within(fixed + one // 2, 8, objective, target.states, 48)


@settings(max_examples=examples(60), deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(3, 60), max_size=40), max_size=30),
    length=st.integers(3, 9),
    end=st.none() | st.just(2),
)
@example(documents=[[22, 31, 16, 52, 59, 3, 22, 3, 34, 11, 14, 54]], length=3, end=None)  # held out by its hash
def test_windows_have_every_token_once(documents: list[list[int]], length: int, end: int | None) -> None:
    """Training and held-out windows are disjoint parts of the text, less an incomplete window at each end."""
    total = sum(len(d) + (end is not None) for d in documents)
    try:
        windows = cut_windows(iter(documents), None, length, end)
    except ValueError as error:
        assert "less than a window" in str(error)  # noqa: PT017
        assert total < 3 * length + length
        return
    for part in (windows.training, windows.held_out):
        assert part.shape[1] == length
        assert len(part)
    kept = windows.training.numel() + windows.held_out.numel()
    assert total - 2 * length < kept <= total
    behind = [*(token for d in documents for token in [*d, *([] if end is None else [end])])]
    counts = torch.bincount(torch.tensor(behind), minlength=61)
    found = torch.bincount(torch.cat([windows.training.flatten(), windows.held_out.flatten()]), minlength=61)
    assert (found <= counts).all()


@settings(max_examples=examples(60), deadline=None)
@given(total=st.integers(1, 12), count=st.integers(1, 30), seed=st.integers(0, 3))
def test_an_epoch_has_every_window_once(total: int, count: int, seed: int) -> None:
    windows = Windows(torch.arange(total, dtype=torch.int32)[:, None], torch.zeros(1, 1))
    stream = torch.cat([windows.batch(step, count, seed)[:, 0] for step in range(total)]).tolist()
    epochs = [stream[i : i + total] for i in range(0, len(stream), total)]
    assert all(sorted(epoch) == list(range(total)) for epoch in epochs)
    assert windows.batch(2, count, seed)[:, 0].tolist() == stream[2 * count : 3 * count] or total < 3
    if total > 6 and len(epochs) > 3:
        assert len(set(map(tuple, epochs))) > 1


def test_a_new_drafter_continues_the_targets_states(model: PreTrainedModel) -> None:
    """The fitted norm is the model's own, and a new drafter's first predictions are the model's own."""
    fitted = final_norm(model, text(2, 40))
    assert torch.allclose(fitted.float(), model.model.norm.weight, atol=1e-4)
    target = FrozenTarget(model, (2, LAYERS))
    sizes = DrafterSizes(DEPTH, 1, None, 0, (2, LAYERS))
    drafter = new_drafter("eagle3", target, sizes, text(2, 40), 0)  # its norm begins with ones
    states = target.states(text(2, 20).long())
    with torch.no_grad():
        hidden = drafter.unrolled(states, drafter.cast())[0]
    assert torch.allclose(hidden * fitted.float(), states.hidden[:, : hidden.shape[1]], atol=1e-3)


def test_frequent_tokens() -> None:
    assert frequent_tokens(torch.tensor([[5, 5, 9, 9, 9, 7]]), 2, 11).tolist() == [5, 9]
    assert frequent_tokens(torch.tensor([[5, 5, 9]]), 4, 11).tolist() == [0, 1, 5, 9]


@pytest.mark.parametrize("kind", sample(KINDS, ["medusa"]))
def test_patch_finds_weights_and_accuracy(model: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    """The saved drafter drafts for the model it was trained for, and its accuracy decides the tree."""
    name = kind.split(",")[0]
    recipe = Recipe(name, KINDS[kind], 1000, 200, 3e-3, 0)
    windows = Windows(text(8, 24), text(2, 24, seed=1))
    trained = train_drafter(model, windows, recipe, tmp_path, tmp_path / "state", "m", Accelerator(cpu=True), Silent())
    prompts = [row.tolist() for row in text(2, 9, seed=8)]
    plain = [model.generate(torch.tensor([p]), max_new_tokens=12, do_sample=False)[0, 9:].tolist() for p in prompts]
    with sk.patch(model, tmp_path) as handle:
        written = sk.generate_batch(model, prompts, max_new_tokens=12)
        assert [c.tokens for c in written] == plain
        assert handle.plan.tree.max_depth <= 8
    if name == "medusa":
        accuracy: Any = load_heads(tmp_path, 32, VOCAB).cumulative_topk_accuracy
    else:
        published = open_drafter(tmp_path)
        assert published is not None
        assert published.kind == name
        accuracy = published.accuracy
    assert [list(row) for row in accuracy] == [list(row) for row in trained.held_out.accuracy]


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_saved_drafter_can_be_read_by_whom_the_umask_lets(model: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    """All files; a replaced one keeps its permissions."""
    drafter = made(model, kind)[1]
    umask = os.umask(0o027)
    try:
        save_drafter(drafter, tmp_path, evaluate_nothing(drafter), "model")
        weights = next(tmp_path.glob("*.safetensors"))
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o640}
        weights.chmod(0o604)
        save_drafter(drafter, tmp_path, evaluate_nothing(drafter), "model")
        assert weights.stat().st_mode & 0o777 == 0o604
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(umask)


@pytest.mark.parametrize("kind", sample(["medusa", "eagle3"], ["medusa"]))
def test_held_out_accuracy_is_that_of_generation(model: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    """On text that the model wrote, the share of right first guesses is what the engine accepts with one draft."""
    target, drafter = made(model, kind)
    save_drafter(drafter, tmp_path, evaluate_nothing(drafter), "m")
    prompt, new = [5, 6, 7], 60
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)
    result = evaluate(Objective(drafter), ids.int(), target.states, lambda: None)
    with sk.patch(model, tmp_path, tree=sk.DraftTree.chain(1)) as handle:
        drafts, right = count_first_guesses(model, handle, prompt, new)
    assert drafts > 20
    assert result.accuracy[0][0] == pytest.approx(right / drafts, abs=0.2)


def test_a_depth_without_places_repeats_the_row_before_it(model: PreTrainedModel) -> None:
    """Zeros would drop its heads, although nothing was measured."""
    target, drafter = made(model, "medusa")
    ids = [5]
    for _ in range(20):  # no token is the model's own
        ids.append((int(model(torch.tensor([ids])).logits[0, -1].argmax()) + 1) % VOCAB)
    first = evaluate(Objective(drafter), torch.tensor([ids]).int(), target.states, lambda: None).accuracy
    assert sum(first[0]) > 0
    assert first == (first[0],) * DEPTH


def count_first_guesses(model: PreTrainedModel, handle: Any, prompt: list[int], new: int) -> tuple[int, int]:
    model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)
    return handle.stats.steps, handle.stats.tokens - handle.stats.steps


def test_states_are_the_models(model: PreTrainedModel) -> None:
    """Hidden states and features of whole batches, without logits; hooks are gone afterwards."""
    target = FrozenTarget(model, (2, LAYERS))
    tokens = text(3, 10).long()
    states = target.states(tokens)
    with torch.no_grad():
        expected = model(tokens).logits
    assert torch.allclose(states.hidden @ target.weight.T, expected, atol=1e-5)
    for row in range(3):
        wanted = features_of(model, (2, LAYERS), tokens[row].tolist())
        assert torch.allclose(states.features[row], wanted, atol=1e-6)
    assert not any(m._forward_pre_hooks for m in model.modules())
