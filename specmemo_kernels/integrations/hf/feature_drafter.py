"""Published drafters that read the model's hidden states: how they load for a model, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.cache.paged_kv import PagedKVPool, pages_for
from specmemo_kernels.drafting.base import DraftRows, FeatureDrafter
from specmemo_kernels.drafting.vocabulary import TargetVocabulary
from specmemo_kernels.engine.step_graph import Capture
from specmemo_kernels.forward.batch import continued_batch
from specmemo_kernels.integrations.distributed.ranks import SingleRank, tensors_digest
from specmemo_kernels.integrations.hf.coded import plain_weight
from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.measure import least_seconds
from specmemo_kernels.integrations.hf.target import ModelFacts
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.planning.pass_bytes import PassBytes
from specmemo_kernels.tree.acceptance import Accuracy
from specmemo_kernels.tree.choice import PassSeconds
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor
#: Rows of the measured passes, as in ``measure``.
_MEASURED_ROWS = (8, 16)
_PAGE = 16


def load_feature_drafter(
    source: str | Path, model: Any, facts: ModelFacts, backend: str, ranks: SingleRank, head_bits: int | None = None
) -> tuple[FeatureDrafter, Accuracy] | None:
    """The published drafter in ``source`` and its accuracies; ``None`` if it has Medusa heads.

    ``head_bits``: 4 packs its matrices into 4-bit codes.

    Raises:
        HeadsError: a drafter of another kind, or for another model.
    """
    # Imported here: these modules take 0.3 MiB that models without such a drafter need not have.
    from specmemo_kernels.drafting.feature_drafter import feature_drafter
    from specmemo_kernels.drafting.published import check_target, open_drafter

    published = ranks.run_on_all("opening the drafter", lambda: open_drafter(source))
    if published is None:
        return None
    check_target(published, facts.hidden_size, facts.vocab_size)
    tensors = ranks.run_on_all("loading the drafter", lambda: published.read(facts.dtype, facts.device, head_bits))
    if ranks.size > 1:
        ranks.assert_same(tensors_digest(tensors))
    vocabulary = vocabulary_of(model, facts, backend, ranks)
    drafter = feature_drafter(published.config, tensors, vocabulary, len(facts.layers), backend)
    return drafter, published.accuracy or drafter.spec.assumed_accuracy


def vocabulary_of(model: Any, facts: ModelFacts, backend: str, ranks: SingleRank) -> TargetVocabulary:
    """The embedding and the lm_head of ``model``.

    Raises:
        UnsupportedModel: one of them is offloaded.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if any(getattr(getattr(module, "weight", None), "is_meta", False) for module in (embedding, head)):
        raise UnsupportedModel(
            f"the drafter reads the embedding and the lm_head of {type(model).__name__}, of which one is offloaded; "
            "give both a device in device_map, or use heads with vocabulary matrices of their own"
        )

    matrix = None if plain_weight(head) is None else ranks.lm_head(model)

    def top_log_probs(hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if matrix is None or (not facts.plain_lm_head and ranks.size == 1):  # such as a quantised matrix
            with facts.pass_mode():
                logits = head(hidden if matrix is None else hidden.to(matrix[0].device)).float()
            values, tokens = (logits - logits.logsumexp(dim=1, keepdim=True)).clamp(max=0).topk(k, dim=1)
        else:
            weight, bias = matrix
            values, tokens = ranks.top_log_probs(hidden.to(weight.device), k, weight, bias, backend)
        return values.to(hidden.device), tokens.to(hidden.device)

    def embed(tokens: Tensor) -> Tensor:  # tokens without an embedding are guessed in vain
        rows: Tensor = embedding(tokens if facts.input_tokens is None else tokens.clamp(max=facts.input_tokens - 1))
        return rows

    return TargetVocabulary(embed, top_log_probs, facts.vocab_size, facts.dtype)


def measure_advance(drafter: FeatureDrafter, facts: ModelFacts) -> PassBytes:
    """Transient bytes of :meth:`FeatureDrafter.advance` by a prompt's rows, their features included."""
    traces = [(rows, _trace(drafter, facts, rows)) for rows in _MEASURED_ROWS]
    return PassBytes.fitted(*traces)


def _tracked(run: Callable[[], object]) -> MemoryTracker:
    """The second of two runs: the first one fills caches, whose tensors are a part of the plan's metadata."""
    tracker = MemoryTracker(trace=True)
    with torch.inference_mode():
        run()
        with tracker:
            run()
    return tracker


def _trace(drafter: FeatureDrafter, facts: ModelFacts, rows: int) -> list[int]:
    pool = _pool(drafter, facts, 1, rows)
    lengths = torch.zeros(1, dtype=torch.int32, device=facts.device)
    tokens = torch.zeros(1, rows, dtype=torch.int64, device=facts.device)

    def advance() -> None:
        features = torch.zeros(rows, _feature_size(drafter, facts), dtype=facts.dtype, device=facts.device)
        batch = continued_batch(tokens, lengths, pool.block_table, 0)
        drafter.advance(batch, features, lengths.long(), pool)

    return _tracked(advance).trace


def measure_draft(drafter: FeatureDrafter, facts: ModelFacts, tree: Trees) -> PassBytes:
    """Transient bytes of drafting, and of reading a step's accepted nodes, by the number of sequences."""
    drafting = [(count, _drafting_trace(drafter, facts, tree, count)) for count in (1, 2)]
    reading = [(count, _reading_trace(drafter, facts, tree, count)) for count in (1, 2)]
    return PassBytes.fitted(*drafting).elementwise_max(PassBytes.fitted(*reading))


def _drafting_trace(drafter: FeatureDrafter, facts: ModelFacts, tree: Trees, sequences: int) -> list[int]:
    """Bytes held after each operator of :meth:`FeatureDrafter.draft`."""
    rows = _draft_rows(drafter, facts, sequences)
    return _tracked(lambda: drafter.draft(rows, tree).layout(tree.max_depth)).trace


def count_draft_results(drafter: FeatureDrafter, facts: ModelFacts, tree: Trees) -> int:
    """Number of tensors that the operators of :meth:`FeatureDrafter.draft` allocate."""
    rows = _draft_rows(drafter, facts, 1)
    return _tracked(lambda: drafter.draft(rows, tree)).count


def _reading_trace(drafter: FeatureDrafter, facts: ModelFacts, tree: Trees, sequences: int) -> list[int]:
    """Bytes held after each operator of :meth:`FeatureDrafter.advance` beside the states of all nodes of a step."""
    path, device = tree.max_depth + 1, facts.device
    pool = _pool(drafter, facts, sequences, path)
    tokens = torch.zeros(sequences, path, dtype=torch.int64, device=device)
    last = torch.arange(sequences, device=device)
    size = facts.hidden_size + _feature_size(drafter, facts)

    def read() -> None:
        states = torch.zeros(sequences * tree.size, size, dtype=facts.dtype, device=device)
        features = torch.zeros(tokens.numel(), size - facts.hidden_size, dtype=facts.dtype, device=device)
        batch = continued_batch(tokens, torch.zeros_like(tokens[:, 0]).int(), pool.block_table, 0)
        drafter.advance(batch, features, last, pool)
        del states

    return _tracked(read).trace


def time_draft(
    drafter: FeatureDrafter,
    facts: ModelFacts,
    tree: Trees,
    max_sequences: int,
    agreed: Callable[[float], float] = float,
    capture: Capture | None = None,
) -> PassSeconds:
    """Seconds of drafting per depth, by the number of sequences, without tokens in pages.

    ``agreed`` returns the seconds that all ranks use; ``capture`` records drafting, as the steps that it is part of.
    """
    points = []
    for sequences in sorted({1, max(1, max_sequences // 2), max_sequences}):
        rows = _draft_rows(drafter, facts, sequences)

        def draft(rows: DraftRows = rows) -> Tensor:
            return drafter.draft(rows, tree).layout(tree.max_depth).tree_mask

        seconds = least_seconds(draft, facts, agreed, capture)
        points.append((sequences, seconds / max(1, tree.max_depth)))
    return PassSeconds(tuple(points))


def _draft_rows(drafter: FeatureDrafter, facts: ModelFacts, sequences: int) -> DraftRows:
    pool = _pool(drafter, facts, sequences, 1)
    zeros = torch.zeros(sequences, dtype=torch.int64, device=facts.device)
    states = torch.zeros(sequences, drafter.state_size, dtype=facts.dtype, device=facts.device)
    return DraftRows(pool, zeros, states, zeros.int(), pool.block_table, 0)


def _feature_size(drafter: FeatureDrafter, facts: ModelFacts) -> int:
    return len(drafter.feature_ids) * facts.hidden_size


def _pool(drafter: FeatureDrafter, facts: ModelFacts, sequences: int, tokens: int) -> PagedKVPool:
    """Pages for the drafter's layers alone: the target's are as small as possible."""
    least = LayerKV(1, 1, 1, facts.dtype, facts.device)
    layers = (*[least] * len(facts.layers), *drafter.layers)
    with torch.inference_mode(False):
        pool = PagedKVPool(
            layers,
            num_pages=sequences * pages_for(tokens, _PAGE),
            page_size=_PAGE,
            max_sequences=sequences,
            max_nodes=0,
        )
        for _ in range(sequences):
            pool.reserve(pool.open(), tokens)
    return pool
