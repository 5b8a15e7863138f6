"""Tensor parallel models: vocabulary, heads and pages sharded over ranks.

Each rank runs the same program (``torchrun``) and holds its share of the model's heads, of the vocabulary and of the
pages, and at least one key/value head (:mod:`key_heads`). Every decision of a step follows from data that is
bit-identical on all ranks:

- Scheduling: each rank admits, preempts and retires sequences by the same rules, from the same sequences and free
  pages. Ranks compare a checksum of both before each step, and of the tokens at the end of a call.
- Tokens: the best candidates of each rank's vocabulary rows are gathered, 16 bytes per row and candidate. Each rank
  selects from all candidates by value, then by the lower token (:meth:`TensorParallel.topk`), as one process would.
  Medusa heads' guesses are computed in the same way.
- Sampling: up to :data:`LOGIT_ROWS` rows of logits at a time are gathered; all ranks use rank 0's generator state.
- Results that differ between ranks (measured times, stopping criteria, aborted requests, a draft model's guesses) are
  rank 0's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from specmemo_kernels import ops
from specmemo_kernels.arguments import positive_number
from specmemo_kernels.drafting.medusa_heads import MedusaHeads
from specmemo_kernels.forward.target import TargetOutput
from specmemo_kernels.integrations.distributed.key_heads import ReplicatedKVHeads
from specmemo_kernels.integrations.distributed.rank_group import RankGroup
from specmemo_kernels.integrations.distributed.ranks import SingleRank
from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.target import HFTarget, ModelFacts, lm_head

Tensor = torch.Tensor


class TensorParallel(RankGroup):
    """The ranks of a tensor parallel model.

    Args:
        model: a model with distributed parameters.
        mesh: their device mesh.
        timeout: see :class:`RankGroup`.

    Attributes:
        rows: this rank's part ``[first, last)`` of the vocabulary.

    Raises:
        UnsupportedModel: the model is not on all ranks.
    """

    def __init__(self, model: Any, mesh: Any, timeout: float) -> None:
        group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
        ranks = len(dist.get_process_group_ranks(group))
        if ranks != dist.get_world_size():
            raise UnsupportedModel(
                f"the model is on {ranks} of {dist.get_world_size()} ranks; only tensor parallel over all of them can "
                "be patched"
            )
        rows = lm_head(model)[0].shape[0]
        self._sharded = rows != model.get_output_embeddings().weight.shape[0]
        super().__init__(group, timeout)
        try:
            counts = self.exchange(rows)
        except BaseException:
            self.close()
            raise
        if not self._sharded:
            share = -(-rows // self.size)
            counts = [max(0, min(share, rows - i * share)) for i in range(self.size)]
        self._counts = counts
        self.rows = sum(counts[: self.rank]), sum(counts[: self.rank + 1])

    def replicate_kv_heads(self, model: Any) -> Callable[[], None]:
        heads = ReplicatedKVHeads()
        heads.install(model, self.rank, self.size)
        return heads.undo

    def lm_head(self, model: Any) -> tuple[Tensor, Tensor | None]:
        weight, bias = lm_head(model)
        if self._sharded:
            return weight, bias
        rows = slice(*self.rows)
        return weight[rows], None if bias is None else bias[rows]

    def topk(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, k: int,
        scales: Tensor | None = None, backend: str | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        kernels, count = ops.kernels(backend, hidden.device), min(k, weight.shape[0])
        best = kernels.lm_head_topk(hidden, weight, bias, count, scales) if count else ()
        values, tokens = best_of_ranks(self._gather(self._candidates(hidden, k, *best)), self._counts, k)
        return values.to(hidden.dtype), tokens

    def top_log_probs(
        self, hidden: Tensor, k: int, weight: Tensor, bias: Tensor | None, backend: str | None
    ) -> tuple[Tensor, Tensor]:
        kernels, count = ops.kernels(backend, hidden.device), min(k, weight.shape[0])
        best: tuple[Tensor, ...] = ()
        total = hidden.new_full((len(hidden), 1, 2), -torch.inf, dtype=torch.float64)  # of a rank without rows
        if count:
            log_p, tokens, lse = kernels.lm_head_log_probs(hidden, weight, bias, count, None)
            best, total = (log_p + lse[:, None], tokens), lse.double()[:, None, None].expand(-1, 1, 2)
        gathered = self._gather(torch.cat([self._candidates(hidden, k, *best), total], dim=1))
        values, tokens = best_of_ranks(gathered[:, :, :k], self._counts, k)
        return (values - gathered[:, :, k, 0].logsumexp(dim=0)[:, None]).float().clamp(max=0), tokens

    def _candidates(self, hidden: Tensor, k: int, *best: Tensor) -> Tensor:
        """``[N, k, 2]``: this rank's best values and tokens. All ranks send the same size; padding isn't read."""
        local = hidden.new_zeros((len(hidden), k, 2), dtype=torch.float64)  # holds any value and any token exactly
        if best:
            values, tokens = best
            local[:, : values.shape[1], 0] = values.double()
            local[:, : values.shape[1], 1] = (tokens + self.rows[0]).double()
        return local

    def gather_rows(self, part: Tensor) -> Tensor:
        """``[R, V]`` from all ranks' parts of the rows."""
        padded = part.new_zeros(len(part), max(self._counts))
        padded[:, : part.shape[1]] = part
        parts = zip(self._gather(padded), self._counts, strict=True)
        return torch.cat([rows[:, :count] for rows, count in parts], dim=1)

    def _gather(self, local: Tensor) -> Tensor:
        """``[size, ...]`` on the model's device."""
        gathered = local.new_empty(self.size, *local.shape)
        self.bytes_sent += local.nbytes
        with self.guarded():
            dist.all_gather(list(gathered.unbind(0)), local.contiguous(), group=self._group)
        return gathered

    def shard(self, heads: MedusaHeads, device: torch.device) -> MedusaHeads:
        return heads.part(*self.rows, device)

    def target(self, model: nn.Module, facts: ModelFacts, backend: str) -> HFTarget:
        return _ShardedTarget(model, facts, backend, self)


class _ShardedTarget(HFTarget):
    """This rank's share of the model."""

    def __init__(self, model: nn.Module, facts: ModelFacts, backend: str, ranks: TensorParallel) -> None:
        super().__init__(model, facts, backend)
        self._ranks = ranks

    def argmax(self, output: TargetOutput) -> Tensor:
        if output.logits is not None:
            return super().argmax(output)
        return self._ranks.topk(output.hidden, *self._ranks.lm_head(self.model), k=1, backend=self.backend)[1][:, 0]

    def row_logits(self, output: TargetOutput, rows: list[int]) -> Tensor:
        if output.logits is not None:
            return super().row_logits(output, rows)
        weight, bias = self._ranks.lm_head(self.model)
        return self._ranks.gather_rows(nn.functional.linear(output.hidden[rows], weight, bias))


def best_of_ranks(candidates: Tensor, counts: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` best candidates of all ranks, in the order of one process: NaN is largest, ties go to the lower token.

    Args:
        candidates: ``[ranks, N, k, 2]`` float64 values and tokens, each rank's best first.
        counts: vocabulary rows per rank; a rank with fewer than ``k`` rows has as many candidates.

    Returns:
        values ``[N, k]`` float64 and tokens ``[N, k]`` int64.
    """
    merged = torch.cat([part[:, : min(k, count)] for part, count in zip(candidates, counts, strict=True)], dim=1)
    # Later ranks hold higher tokens, so a stable order leaves ties to the lower token.
    order = merged[..., 0].argsort(dim=1, descending=True, stable=True)[:, :k]
    best = merged.gather(1, order[..., None].expand(-1, -1, 2))
    return best[..., 0], best[..., 1].long()


def ranks_of(model: Any, timeout: float) -> SingleRank:
    """The ranks of ``model``: one process if its parameters aren't distributed.

    Raises:
        TypeError, ValueError: ``timeout`` isn't a positive number of seconds.
        UnsupportedModel: see :class:`TensorParallel`.
        RankError: other ranks are missing.
    """
    timeout = positive_number("rank_timeout", timeout, hint=" (seconds)")
    if not (dist.is_available() and dist.is_initialized()):
        return SingleRank()
    from torch.distributed.tensor import DTensor

    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    return SingleRank() if mesh is None or mesh.size() == 1 else TensorParallel(model, mesh, timeout)
