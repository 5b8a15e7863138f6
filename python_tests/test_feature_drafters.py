"""Published drafters that read hidden states: their trees equal independent implementations, node by node, in any
chunk, page, batch and kind of step; tokens are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_oracles import (
    PlainClover2,
    PlainDFlash,
    PlainDrafter,
    PlainEagle1,
    PlainEagle3,
    ddtree,
    eagle2_tree,
    write_clover2,
    write_dflash,
    write_eagle1,
    write_eagle3,
)
from selection import EXHAUSTIVE, covering, examples, sample
from test_families import batch, greedy
from tiny_models import VOCAB, tiny_model
from transformers import PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting import dflash, growth
from specmemo_kernels.drafting.base import POST_NORM, DraftRows, FeatureDrafter
from specmemo_kernels.forward import batch as layouts
from specmemo_kernels.forward.batch import DraftedTrees, TreeBatch
from specmemo_kernels.integrations.hf.feature_drafter import count_draft_results, measure_draft
from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import TreeBudget, Trees

Tensor = torch.Tensor
LAYERS = 6
#: name: writer, plain implementation, options.
KINDS: dict[str, tuple[Callable[..., Any], type[PlainDrafter], dict[str, Any]]] = {
    "eagle3": (write_eagle3, PlainEagle3, {}),
    "eagle3, reduced vocabulary": (write_eagle3, PlainEagle3, {"draft_vocab": 40}),
    "eagle3, speculators": (write_eagle3, PlainEagle3, {"layout": "speculators", "layers": 2, "draft_vocab": 50}),
    "eagle3, norm of all": (write_eagle3, PlainEagle3, {"norm_before_fc": True, "norm_output": True}),
    "eagle3, norms": (write_eagle3, PlainEagle3, {"fc_norm": True}),
    "eagle3, residual": (write_eagle3, PlainEagle3, {"norm_before_residual": True, "attention_bias": True}),
    "eagle3, scaled": (write_eagle3, PlainEagle3, {"logit_scale": 0.5, "tie_word_embeddings": True}),
    "eagle3, pickle": (write_eagle3, PlainEagle3, {"pickle": True, "own_embedding": True, "rope_theta": 500.0}),
    "eagle": (write_eagle1, PlainEagle1, {}),
    "eagle, no bias": (write_eagle1, PlainEagle1, {"bias": False, "layers": 2}),
    "clover2": (write_clover2, PlainClover2, {}),
    "dflash": (write_dflash, PlainDFlash, {"num_target_layers": LAYERS, "target_layer_ids": (1, 4), "block_size": 6}),
}
MAIN = ("eagle3", "eagle", "clover2", "dflash")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=LAYERS, max_position_embeddings=2048)


class Recorder:
    """Records a drafter's trees."""

    def __init__(self, drafter: FeatureDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[DraftRows, Trees, DraftedTrees]] = []
        draft = drafter.draft

        def recording(rows: DraftRows, tree: Trees) -> DraftedTrees:
            trees = draft(rows, tree)
            copy = DraftRows(rows.pool, rows.roots.clone(), rows.states, rows.seq_lens.clone(), rows.block_table, 0)
            self.calls.append((copy, tree, trees))
            return trees

        monkeypatch.setattr(drafter, "draft", recording, raising=False)


def features_of(model: PreTrainedModel, ids: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """``[n, F]``: the hidden states that the unpatched model has at ``tokens``."""
    captured: list[Tensor] = []
    with model.model.norm.register_forward_pre_hook(lambda _, args: captured.append(args[0])):
        states = model.model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    by_id = {i: captured[0] if i == LAYERS else state for i, state in enumerate(states)} | {POST_NORM: states[-1]}
    return torch.cat([by_id[i][0] for i in ids], dim=1).detach()


def token_paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The token path of each node but the root."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def check_trees(
    model: PreTrainedModel, drafter: FeatureDrafter, plain: PlainDrafter, calls: list[Any], texts: Sequence[list[int]]
) -> int:
    """Compare recorded trees with those of ``plain``; returns how many were compared."""
    compared = 0
    calls = calls[:: -max(1, len(calls) // (4 if EXHAUSTIVE else 2))]  # the plain implementations take long
    features = [features_of(model, drafter.feature_ids, text) for text in texts]
    for rows, tree, drafted in calls:
        lengths, roots = rows.seq_lens.tolist(), rows.roots.tolist()
        for row, (length, root) in enumerate(zip(lengths, roots, strict=True)):
            found = token_paths(drafted.tokens[row].tolist(), drafted.parents[row].tolist())
            assert drafted.depths[row].tolist()[1:] == [len(path) for path in found]
            matching = [i for i, text in enumerate(texts) if length < len(text) and text[length] == root]
            expected = [expected_tree(plain, features[i][:length], texts[i][1 : length + 1], tree) for i in matching]
            assert set(found) in expected, (length, root, tree)
            assert len(set(found)) == len(found)
            compared += len(found)
    return compared


def expected_tree(plain: PlainDrafter, features: Tensor, tokens: list[int], tree: Trees) -> set[tuple[int, ...]]:
    def log_p(path: tuple[int, ...]) -> Tensor:
        return plain.next_log_probs(features, tokens, path)

    if isinstance(tree, TreeBudget):
        if not tree.max_depth:
            return set()
        if isinstance(plain, PlainDFlash):
            return ddtree(plain.depth_log_probs(features, tokens)[: tree.max_depth], tree.size, tree.width)
        return eagle2_tree(log_p, tree.size, tree.max_depth - 1, tree.width)
    ranked: dict[tuple[int, ...], list[int]] = {}
    token_path: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for path in tree.paths:
        above = token_path[path[:-1]]
        best = ranked.setdefault(above, log_p(above).topk(tree.width).indices.tolist())
        token_path[path] = (*above, best[path[-1]])
    return set(token_path.values()) - {()}


def texts_of(inputs: dict[str, Tensor], output: Tensor) -> list[list[int]]:
    start = inputs["input_ids"].shape[1]
    keep = torch.nn.functional.pad(inputs["attention_mask"], (0, output.shape[1] - start), value=1).bool()
    return [row[mask].tolist() for row, mask in zip(output, keep, strict=True)]


def write_drafter(kind: str, model: PreTrainedModel, folder: Path) -> Any:
    """Write a drafter for ``model``; its plain implementation."""
    writer, plain_class, options = KINDS[kind]
    config, tensors = writer(folder, vocab=VOCAB, **options)
    return plain_class(config, tensors, model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach())


FIRST_TREES = [("eagle3, speculators", None), ("eagle", False), ("clover2", None), ("dflash", False)]


@pytest.mark.parametrize(
    ("kind", "graph"), sample(covering(KINDS, (False, None), first=FIRST_TREES), [("clover2", None), ("dflash", False)])
)
def test_dynamic_trees(
    kind: str, graph: bool | None, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ragged batch in chunks of 16 rows; the trees are those of EAGLE-2's rule or DDTree's, node by node."""
    plain = write_drafter(kind, model, tmp_path)
    inputs = batch((40, 1, 17))
    expected = greedy(model, inputs, 20)
    with sk.patch(model, str(tmp_path), tree=8, page_size=4, prefill_chunk=16, graph=graph) as handle:
        assert isinstance(handle.plan.tree, TreeBudget)
        recorder = Recorder(handle.drafter, monkeypatch)
        assert torch.equal(greedy(model, inputs, 20), expected)
        assert handle.stats.graph_steps > 0 or graph is False, handle.stats.eager_reasons
    assert check_trees(model, handle.drafter, plain, recorder.calls, texts_of(inputs, expected)) > 12


@pytest.mark.parametrize("kind", sample(MAIN, ["eagle", "dflash"]))
def test_static_trees(kind: str, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of rank r has the r-th best token behind its parent; nodes are in any order."""
    plain = write_drafter(kind, model, tmp_path)
    inputs = batch((9, 30))
    expected = greedy(model, inputs, 16)
    paths = [[0], [0, 1], [2], [0, 0], [2, 0], [0, 1, 2], [1], [0, 0, 0]]
    with sk.patch(model, str(tmp_path), tree=paths, page_size=4) as handle:
        recorder = Recorder(handle.drafter, monkeypatch)
        assert torch.equal(greedy(model, inputs, 16), expected)
    assert {type(tree) for _, tree, _ in recorder.calls} == {DraftTree}
    assert check_trees(model, handle.drafter, plain, recorder.calls, texts_of(inputs, expected)) > 12


@pytest.mark.parametrize("kind", sample(MAIN, ["eagle3", "dflash"]))
@pytest.mark.parametrize("tree", [6, [[0], [0, 1], [1]]], ids=["dynamic", "static"])
def test_measured_bytes_ignore_caches(kind: str, tree: Any, model: PreTrainedModel, tmp_path: Path) -> None:
    """Whether a tree's layout is cached already: otherwise a refusal's least budget may be too small."""
    write_drafter(kind, model, tmp_path)
    with sk.patch(model, str(tmp_path), tree=tree) as handle:
        arguments, found = (handle.drafter, handle.facts, handle.plan.tree), []
        for measure in (measure_draft, count_draft_results):
            for function in [*vars(growth).values(), *vars(layouts).values()]:
                getattr(function, "cache_clear", bool)()
            found.append((measure(*arguments), measure(*arguments)))
    assert all(first == second for first, second in found)


@pytest.mark.parametrize("kind", sample(MAIN, ["eagle3"]))
def test_prefix_reuse(kind: str, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts share cached pages, whose last rows also depend on the token behind them."""
    plain = write_drafter(kind, model, tmp_path)
    with sk.patch(model, str(tmp_path), tree=8, page_size=4, graph=False) as handle:
        recorder = Recorder(handle.drafter, monkeypatch)
        for end in ([], [5], [9], [9, 9, 9], [7, 8, 9, 10, 11]):
            recorder.calls.clear()
            prompt = [*range(3, 31), *end]
            output = sk.generate_batch(model, [prompt], max_new_tokens=10)[0].tokens
            text = [prompt + output]
            assert check_trees(model, handle.drafter, plain, recorder.calls, text) > 6
        assert handle.stats.reused_tokens >= 60


@pytest.mark.parametrize("kind", sample(KINDS, ["eagle3"]))
def test_log_probabilities(kind: str, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children's log-probabilities at every depth are the plain implementation's in float64, behind a prompt in chunks
    and accepted tokens: to 1e-5 and twice its own error in float32, which grows with the depth.
    """
    writer, plain_class, options = KINDS[kind]
    config, tensors = writer(tmp_path, vocab=VOCAB, **options)
    matrices = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    plain = plain_class(config, tensors, *matrices)
    wide = {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}
    exact = plain_class(config, wide, *(matrix.double() for matrix in matrices))
    found: list[tuple[int, tuple[int, ...], Tensor, Tensor]] = []  # tokens in pages, path, log-probabilities, tokens

    def recording(roots: Tensor, tree: Trees, first: Callable[[int], Any], expand: Callable[..., Any]) -> DraftedTrees:
        paths: list[tuple[int, ...]] = [()]

        def noted(children: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            log_p, tokens = (part[0] for part in children)
            found.extend(zip([lengths[-1]] * len(paths), paths, log_p.clone(), tokens.clone(), strict=True))
            return children

        def expanding(depth: int, parent: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
            pairs = zip(parent[0].tolist(), tokens[0].tolist(), strict=True)
            paths[:] = [(*paths[above], token) for above, token in pairs]
            return noted(expand(depth, parent, tokens))

        return grow(roots, tree, lambda width: noted(first(width)), expanding)

    lengths: list[int] = []
    prompt = [*range(3, 29)]
    with sk.patch(model, str(tmp_path), tree=8, page_size=4, prefill_chunk=16, graph=False) as handle:
        draft = handle.drafter.draft

        def drafting(rows: DraftRows, tree: Trees) -> DraftedTrees:
            lengths.append(int(rows.seq_lens))
            return draft(rows, tree)

        advance, states = handle.drafter.advance, {}  # the states that it reads, by position

        def advancing(batch: TreeBatch, features: Tensor, keep: Tensor, pool: PagedKVPool) -> Tensor:
            states.update(zip(batch.positions.tolist(), features.clone(), strict=True))
            return advance(batch, features, keep, pool)

        monkeypatch.setattr(handle.drafter, "draft", drafting)
        monkeypatch.setattr(handle.drafter, "advance", advancing)
        grow = growth.grow
        for module in (growth, dflash):
            monkeypatch.setattr(module, "grow", recording)
        text = prompt + sk.generate_batch(model, [prompt], max_new_tokens=10)[0].tokens
        features = torch.stack([states[position] for position in range(max(lengths))])
    unpatched = features_of(model, handle.drafter.feature_ids, text)[: len(features)]
    torch.testing.assert_close(features, unpatched, rtol=2e-3, atol=2e-3)  # rounded otherwise in packed passes
    depths = {len(path) for _, path, _, _ in found}
    assert depths == set(range(max(depths) + 1))
    assert len(depths) >= 5
    for length, path, log_p, tokens in found[:: max(1, len(found) // examples(120))]:
        behind = text[1 : length + 1], path
        expected = exact.next_log_probs(features[:length].double(), *behind)[tokens]
        error = (plain.next_log_probs(features[:length], *behind)[tokens] - expected).abs().max()
        assert float((log_p - expected).abs().max()) <= 1e-5 + 2 * float(error), path
