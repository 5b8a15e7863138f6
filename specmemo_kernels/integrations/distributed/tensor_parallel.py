"""Tensor parallel models: the vocabulary, the heads and the pages divided over ranks.

Each rank runs the same program (``torchrun``) and holds its share of the model's heads, of the vocabulary and of the
pages; of key/value heads at least one (:mod:`key_heads`). A step's decisions follow from data that every rank has in
the same bits:

- Scheduling: each rank admits, preempts and retires by the same rules, from the same sequences and free pages. Before
  each step the ranks compare a checksum of both, and at the end of a call of what was written.
- Tokens: each rank's best candidates over its rows of the vocabulary go to every rank, which picks from all of them by
  value, then by the lower token (:meth:`TensorParallel.topk`): the order in which one process would find them. That is
  16 bytes per row and candidate, whatever the vocabulary. Medusa heads' guesses are found in the same way.
- Sampling: one row of logits at a time, of which every rank gets all parts; rank 0's generator state is everybody's.
- What only one rank can know (a measured time, what a stopping criterion says, who is aborted, what a draft model
  guesses) is rank 0's.
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
from specmemo_kernels.integrations.distributed.ranks import SingleRank
from specmemo_kernels.integrations.distributed.team import RankGroup
from specmemo_kernels.integrations.hf.attention import UnsupportedModel
from specmemo_kernels.integrations.hf.target import HFTarget, ModelFacts, lm_head
from specmemo_kernels.tree.choice import TreeChooser
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor


class TensorParallel(RankGroup):
    """The ranks that hold one tensor parallel model.

    Args:
        model: some of its parameters are distributed tensors.
        mesh: of these.
        timeout: as of :class:`RankGroup`.

    Attributes:
        rows: this rank's part ``[first, last)`` of the vocabulary.

    Raises:
        UnsupportedModel: the model is divided in another way as well.
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

    def whole_heads(self, model: Any) -> Callable[[], None]:
        heads = ReplicatedKVHeads()
        heads.install(model, self.rank, self.size)
        return heads.undo

    def lm_head(self, model: Any) -> tuple[Tensor, Tensor | None]:
        weight, bias = lm_head(model)
        if self._sharded:
            return weight, bias
        mine = slice(*self.rows)
        return weight[mine], None if bias is None else bias[mine]

    def topk(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, k: int,
        scales: Tensor | None = None, backend: str | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        here = min(k, weight.shape[0])
        # float64 holds any value and any token exactly. Ranks send tensors of one size; the rest of them isn't read.
        mine = hidden.new_zeros((len(hidden), k, 2), dtype=torch.float64)
        if here:
            values, tokens = ops.kernels(backend, hidden.device).lm_head_topk(hidden, weight, bias, here, scales)
            mine[:, :here, 0] = values.double()
            mine[:, :here, 1] = (tokens + self.rows[0]).double()
        values, tokens = best_of_ranks(self._gather(mine), self._counts, k)
        return values.to(hidden.dtype), tokens

    def whole_row(self, part: Tensor) -> Tensor:
        """All ranks' parts of a row ``[V]``."""
        padded = part.new_zeros(max(self._counts))
        padded[: len(part)] = part
        everybody = self._gather(padded)
        return torch.cat([row[:count] for row, count in zip(everybody, self._counts, strict=True)])

    def _gather(self, mine: Tensor) -> Tensor:
        """``[size, ...]`` on the model's device."""
        everybody = mine.new_empty(self.size, *mine.shape)
        self.bytes_sent += mine.nbytes
        with self.guarded():
            dist.all_gather(list(everybody.unbind(0)), mine.contiguous(), group=self._group)
        return everybody

    def shard(self, heads: MedusaHeads, device: torch.device) -> MedusaHeads:
        return heads.part(*self.rows, device)

    def target(self, model: nn.Module, facts: ModelFacts, backend: str) -> HFTarget:
        return _ShardedTarget(model, facts, backend, self)

    def chooser(self, *args: Any) -> TreeChooser:
        return _TeamChooser(self, *args)


class _ShardedTarget(HFTarget):
    """This rank's share of the model."""

    def __init__(self, model: nn.Module, facts: ModelFacts, backend: str, team: TensorParallel) -> None:
        super().__init__(model, facts, backend)
        self.team = team

    def argmax(self, output: TargetOutput) -> Tensor:
        if output.logits is not None:
            return super().argmax(output)
        return self.team.topk(output.hidden, *self.team.lm_head(self.model), k=1, backend=self.backend)[1][:, 0]

    def row_logits(self, output: TargetOutput, row: int) -> Tensor:
        if output.logits is not None:
            return super().row_logits(output, row)
        weight, bias = self.team.lm_head(self.model)
        return self.team.whole_row(nn.functional.linear(output.hidden[row : row + 1], weight, bias)[0])


class _TeamChooser(TreeChooser):
    """Learns from rank 0's clock."""

    def __init__(self, team: RankGroup, *args: Any) -> None:
        super().__init__(*args)
        self._team = team

    def stepped(
        self,
        tree: DraftTree,
        last: Sequence[int],
        seconds: float | None = None,
        drafting: float | None = None,
        behind: int = 0,
    ) -> None:
        seconds, drafting = (None if own is None else self._team.broadcast_scalar(own) for own in (seconds, drafting))
        super().stepped(tree, last, seconds, drafting, behind)


def best_of_ranks(candidates: Tensor, counts: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` best candidates of all ranks, as one process would find them: NaN is the largest, ties go to the lower
    token.

    Args:
        candidates: ``[ranks, N, k, 2]`` float64 values and tokens, each rank's best first.
        counts: tokens of each rank's vocabulary rows; a rank of fewer than ``k`` has as many candidates.

    Returns:
        values ``[N, k]`` float64 and tokens ``[N, k]`` int64.
    """
    found = torch.cat([part[:, : min(k, count)] for part, count in zip(candidates, counts, strict=True)], dim=1)
    # Later ranks hold higher tokens, so a stable order leaves ties to the lower token.
    order = found[..., 0].argsort(dim=1, descending=True, stable=True)[:, :k]
    best = found.gather(1, order[..., None].expand(-1, -1, 2))
    return best[..., 0], best[..., 1].long()


def ranks_of(model: Any, timeout: float) -> SingleRank:
    """The team that holds ``model``, or one process if its parameters aren't distributed.

    Raises:
        TypeError, ValueError: ``timeout`` isn't a positive number of seconds.
        UnsupportedModel: as of :class:`TensorParallel`.
        RankError: the others aren't there.
    """
    timeout = positive_number("rank_timeout", timeout, hint=" (seconds)")
    if not (dist.is_available() and dist.is_initialized()):
        return SingleRank()
    from torch.distributed.tensor import DTensor

    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    return SingleRank() if mesh is None or mesh.size() == 1 else TensorParallel(model, mesh, timeout)
