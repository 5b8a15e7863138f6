"""Acceptance of draft trees: by argmax, or by vLLM's own sampler along each request's path.

A draft is accepted if it is the token that vLLM would have emitted at its parent. So tokens, seeds, log-probabilities,
penalties and the other sampling parameters are vLLM's own; the tree decides which rows are sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor

from specmemo_kernels import ops
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor


@dataclass(frozen=True)
class LogitRows:
    """The rows of a step that have logits: of each request its tree, or one row.

    Attributes:
        trees: of each request; ``None``: only its first row counts.
        begins: of each request's rows, and the number of all rows.
        draft_tokens: ``[N]`` int64, the token of each row.
    """

    trees: tuple[DraftTree | None, ...]
    begins: tuple[int, ...]
    draft_tokens: Tensor


@dataclass(frozen=True)
class Accepted:
    """
    Attributes:
        output: tokens ``[B, depth + 1]`` int32 padded with -1, and log-probabilities in the same order.
        nodes: ``[B, depth + 1]`` int32, the accepted nodes of each request's tree, root first, padded with -1.
        lengths: ``[B]`` int32, accepted drafts.
    """

    output: SamplerOutput
    nodes: Tensor
    lengths: Tensor

    def paths(self) -> list[list[int]]:
        """The accepted nodes of each request; reads the device."""
        pairs = zip(self.nodes.tolist(), self.lengths.tolist(), strict=True)
        return [nodes[: length + 1] for nodes, length in pairs]


def needs_sampler(metadata: Any) -> bool:
    """Whether argmax of the model's logits isn't enough for some request of the batch."""
    return (
        not metadata.all_greedy
        or not metadata.no_penalties
        or metadata.max_num_logprobs is not None
        or bool(metadata.logprob_token_ids)
        or bool(metadata.bad_words_token_ids)
        or metadata.allowed_token_ids_mask is not None
        or thinking(metadata)
        or any(_active(processor) for processor in metadata.logitsprocs.non_argmax_invariant)
    )


def thinking(metadata: Any) -> bool:
    """Whether a request has a budget of thinking tokens, which vLLM counts once per step."""
    holder = metadata.thinking_budget_state_holder
    return holder is not None and bool(holder.has_tracked_requests())


def _active(processor: Any) -> bool:
    if type(processor) is MinTokensLogitsProcessor:
        return bool(processor.min_toks)
    if type(processor) is LogitBiasLogitsProcessor:
        return bool(processor.biases)
    return True


def accept_greedy(rows: LogitRows, targets: Tensor) -> Accepted:
    """The longest path of each tree that equals ``targets`` ``[N]`` int64, the argmax of each row."""
    device = targets.device
    parents: list[int] = []
    for tree, begin, end in zip(rows.trees, rows.begins, rows.begins[1:], strict=False):
        parents += tree.parents if tree is not None else [-1] * (end - begin)
    depth = max(tree.max_depth if tree is not None else 0 for tree in rows.trees)
    begins = torch.tensor(rows.begins, device=device)
    nodes, lengths, bonus = ops.verify_tree_greedy(
        rows.draft_tokens,
        targets,
        torch.tensor(parents, dtype=torch.int32, device=device),
        begins.to(torch.int32),
        max_depth=depth,
    )
    path_rows = begins[:-1, None] + nodes.clamp(min=0)
    tokens = torch.full(nodes.shape, -1, dtype=torch.int32, device=device)
    tokens[:, :-1] = rows.draft_tokens[path_rows[:, 1:]].to(torch.int32)
    column, last = torch.arange(depth + 1, device=device), lengths.long()[:, None]
    tokens = tokens.where(column < last, -1).scatter(1, last, bonus.to(torch.int32)[:, None])
    return Accepted(SamplerOutput(tokens, None), nodes, lengths)


def accept_sampled(
    rows: LogitRows, logits: Tensor, sampler: Any, metadata: Any, output_tokens: Sequence[list[int]]
) -> Accepted:
    """Sample at each request's root, then at the node that has the sampled token, until there is none.

    All requests are sampled together, one depth after the other. A request draws from its generator once per emitted
    token, as without drafts.

    Args:
        logits: ``[N, V]``. sampler: vLLM's. metadata: its ``SamplingMetadata``.
        output_tokens: vLLM's lists of emitted tokens, which penalties and logits processors read. They have the
            tokens of the path while a later depth is sampled, and are as before when this function returns.
    """
    drafts = rows.draft_tokens.tolist()
    paths = [[0] for _ in rows.trees]
    emitted: list[list[int]] = [[] for _ in rows.trees]
    log_probs: list[LogprobsTensors | None] = []
    active = list(range(len(rows.trees)))
    try:
        while active:
            if log_probs:
                for processor in metadata.logitsprocs.all:
                    processor.update_state(None)
            current = torch.tensor([begin + path[-1] for begin, path in zip(rows.begins, paths, strict=False)])
            generators = {b: metadata.generators[b] for b in active if b in metadata.generators}
            output = sampler(logits[current.to(logits.device)], replace(metadata, generators=generators))
            log_probs.append(output.logprobs_tensors)
            tokens = output.sampled_token_ids[:, 0].tolist()
            still = []
            for b in active:
                emitted[b].append(tokens[b])
                output_tokens[b].append(tokens[b])
                child = _child(rows.trees[b], paths[b][-1], drafts[rows.begins[b] : rows.begins[b + 1]], tokens[b])
                if child is not None:
                    paths[b].append(child)
                    still.append(b)
            active = [] if thinking(metadata) else still
    finally:
        for own, new in zip(output_tokens, emitted, strict=False):
            del own[len(own) - len(new) :]
    return _accepted(paths, emitted, _flat(log_probs), logits.device)


def _child(tree: DraftTree | None, node: int, drafts: Sequence[int], token: int) -> int | None:
    """The first child of ``node`` with ``token``."""
    if tree is None:
        return None
    children = range(node + 1, tree.size)
    return next((child for child in children if tree.parents[child] == node and drafts[child] == token), None)


def _accepted(
    paths: Sequence[Sequence[int]],
    emitted: Sequence[Sequence[int]],
    log_probs: LogprobsTensors | None,
    device: torch.device,
) -> Accepted:
    width = max(map(len, emitted))
    paths = [path[: len(new)] for path, new in zip(paths, emitted, strict=True)]

    def padded(values: Sequence[Sequence[int]]) -> Tensor:
        rows_ = [[*row, *[-1] * (width - len(row))] for row in values]
        return torch.tensor(rows_, dtype=torch.int32, device=device)

    return Accepted(
        SamplerOutput(padded(emitted), log_probs),
        padded(paths),
        torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32, device=device),
    )


def _flat(steps: Sequence[LogprobsTensors | None]) -> LogprobsTensors | None:
    """One row per request and depth, the order in which vLLM reads those of several tokens."""
    if steps[0] is None:
        return None
    fields = zip(*(step[:3] for step in steps if step is not None), strict=True)
    return LogprobsTensors(*(torch.stack(field, dim=1).flatten(0, 1) for field in fields))
