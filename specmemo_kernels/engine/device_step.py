"""A steady-state step without host reads: draft, run the pass, and update the next step's inputs.

Drafters on the host fill the trees before the step. A step that the host verifies ends with the trees and the hidden
states of their nodes. Tensors that outlive a step keep their address and size, so a GPU can replay the step from a
graph. The same code runs eagerly on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from specmemo_kernels.cache.kv_storage import on_device
from specmemo_kernels.cache.paged_kv import NO_PAGE, PagedKVPool
from specmemo_kernels.drafting.base import (
    AnyDrafter,
    DraftRows,
    FeatureDrafter,
    StaticDrafter,
    candidate_columns,
    fill_tree,
)
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.tree_pass import drafted_batch, only_tokens, tree_pass
from specmemo_kernels.engine.verify import GreedyVerifier
from specmemo_kernels.forward.batch import TreeBatch, TreeLayout, tree_batch, tree_layout
from specmemo_kernels.forward.step_attention import StepAttention
from specmemo_kernels.forward.target import TargetModel
from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step's tensors.

    Attributes:
        sequences, nodes: number of trees, padding included, and of nodes per tree. depth: of the trees, at least.
        width: most candidates per depth; 0 where the host fills trees that it verifies.
        max_seq_len: upper bound of the tokens in pages of any sequence; sizes GPU launches.
        tree: the tree of every step, for drafters whose passes depend on it; ``None``: any tree of these sizes.
        verified: the step verifies its trees; else the host does.
    """

    sequences: int
    nodes: int
    depth: int
    width: int
    max_seq_len: int
    tree: DraftTree | None = None
    verified: bool = True


class StepState:
    """The inputs of the next step, in the first rows of tensors with fixed addresses.

    Args:
        sequences: most sequences per step.
        hidden: ``[..., hidden_size]``, gives size, dtype and device of the states.

    Attributes:
        slots: ``[S]`` int64, rows of the pool's block table. roots: ``[S]`` int64, the newest tokens.
        seq_lens: ``[S]`` int32, tokens in pages. hidden: ``[S, hidden_size]``, the states that predicted the roots.
        vacant: ``[S]`` bool, rows without a sequence: padding of the steps.
    """

    def __init__(self, sequences: int, hidden: Tensor) -> None:
        with torch.inference_mode(False):  # inference tensors can't be written outside of inference mode
            self.slots = torch.zeros(sequences, dtype=torch.int64, device=hidden.device)
            self.roots = torch.zeros_like(self.slots)
            self.seq_lens = torch.zeros_like(self.slots, dtype=torch.int32)
            self.vacant = torch.ones_like(self.slots, dtype=torch.bool)
            self.hidden = torch.zeros(sequences, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)

    @property
    def nbytes(self) -> int:
        tensors = self.slots, self.roots, self.seq_lens, self.hidden, self.vacant
        return sum(tensor.nbytes for tensor in tensors)

    def load(self, sequences: Sequence[SequenceState]) -> None:
        """Copy the host's state of ``sequences`` to the first rows. The others are vacant: they hold no tokens."""
        rows = [[s.slot, s.tokens[-1], len(s.tokens) - 1] for s in sequences]
        numbers = on_device(torch.tensor(rows, device="cpu"), self.hidden.device)
        count = len(sequences)
        for tensor, column in zip((self.slots, self.roots, self.seq_lens), numbers.unbind(1), strict=True):
            tensor[:count].copy_(column)
        self.hidden[:count].copy_(torch.stack([s.hidden for s in sequences if s.hidden is not None]))
        self.vacant[:count].fill_(False)
        self.vacant[count:].fill_(True)
        self.seq_lens[count:].zero_()


class DeviceStep:
    """One step of a shape over ``state``; the tree may change between steps (:meth:`use`).

    Args:
        shape: of ``tree``, whose width may be smaller.
        target: with ``static`` true.
        drafter: that drafts on the device; ``None``: :meth:`use` gets the drafts.
        nodes: ``[sequences * nodes, hidden_size]``, to which the hidden states of a step are written that the host
            verifies; for drafters that don't read features.
        padded: rows of ``state`` may be vacant. Their trees are computed like others, but their block table has no
            pages, so that nothing is written.

    Attributes:
        emitted: ``[sequences, 2 * depth + 3]`` int64, the rows of the last :meth:`run` (:class:`DeviceVerdict`).
    """

    def __init__(
        self,
        shape: StepShape,
        tree: Trees,
        state: StepState,
        target: TargetModel,
        drafter: AnyDrafter | None,
        pool: PagedKVPool,
        backend: str | None,
        nodes: Tensor | None = None,
        padded: bool = False,
    ) -> None:
        self.shape, self.tree, self.target, self.drafter, self.nodes = shape, tree, target, drafter, nodes
        self._reader = drafter if isinstance(drafter, FeatureDrafter) else None
        self._static = drafter if isinstance(drafter, StaticDrafter) else None
        self.pool, self.backend, self.verifier = pool, backend, GreedyVerifier(target, backend)
        count, device = shape.sequences, state.hidden.device
        self._slots, self._roots = state.slots[:count], state.roots[:count]
        self._seq_lens, self._hidden = state.seq_lens[:count], state.hidden[:count]
        self._vacant = state.vacant[:count] if padded else None
        with torch.inference_mode(False):
            self._buffers, self._complete = tuple(part.clone() for part in self._parts(tree)), True
            self.emitted = torch.zeros(count, 2 * shape.depth + 3, dtype=torch.int64, device=device)
            columns = shape.nodes if drafter is None or nodes is not None else 0
            self._drafts = torch.zeros(count, columns, dtype=torch.int64, device=device)

    def _parts(self, tree: Trees) -> tuple[Tensor, ...]:
        """The tree's layout and candidate columns; nothing for drafters that make both."""
        if self._reader is not None:
            return ()
        assert isinstance(tree, DraftTree), "dynamic trees are for drafters that read features"
        device = self._roots.device
        layout = tree_layout(tree, self.shape.sequences, device)
        parts = tuple(getattr(layout, f.name) for f in fields(layout))
        return parts if self._static is None else (*parts, candidate_columns(tree, self.shape.width, device))

    @property
    def nbytes(self) -> int:
        """Bytes of the step's own tensors."""
        return sum(tensor.nbytes for tensor in (*self._buffers, self.emitted, self._drafts))

    def use(self, tree: Trees, drafts: Tensor | None) -> None:
        """Verify ``tree``, which has this shape, in the next steps.

        ``drafts``: its tokens ``[sequences that run, nodes]``, if a drafter on the host has filled it.
        """
        if drafts is not None:
            self._drafts[: len(drafts)].copy_(drafts)
        if tree == self.tree and self._complete:
            return
        self._complete = False  # an interrupt leaves parts of two trees
        for buffer, part in zip(self._buffers, self._parts(tree), strict=True):
            buffer.copy_(part)
        self.tree, self._complete = tree, True

    def run(self) -> None:
        """Run the step. After a failure ``state`` is unchanged; pages differ only behind the sequences' ends."""
        batch, verify = self._draft(), self.verifier.verify_on_device
        if self.nodes is not None:
            attention = StepAttention(self.pool, batch, self.backend, self.target.invariant)
            self.nodes.copy_(self.target.forward(batch, attention, None, logits=False).hidden)
            if self._static is not None:
                self._drafts.copy_(batch.tokens.view(self._drafts.shape))
            return
        verdict, hidden = tree_pass(self.target, self.pool, self.backend, batch, None, verify, self._reader)
        assert verdict is not None, "the step has trees"
        lengths = self._seq_lens + verdict.accept_length + 1
        if self._vacant is not None:
            lengths = lengths.masked_fill(self._vacant, 0)
        # Nothing is allocated below, so no failure leaves the state half changed.
        self.emitted.copy_(verdict.rows)
        self._roots.copy_(verdict.bonus_token)
        self._seq_lens.copy_(lengths)
        self._hidden.copy_(hidden)

    def _draft(self) -> TreeBatch:
        """The trees to verify."""
        shape, vocab_size = self.shape, self.target.vocab_size
        if self._reader is not None:
            table = self._table()
            rows = DraftRows(self.pool, self._roots, self._hidden, self._seq_lens, table, shape.max_seq_len)
            with torch.inference_mode():
                return drafted_batch(self._reader.draft(rows, self.tree), self.tree, rows, vocab_size)
        drafts = self._drafts
        if not shape.depth:
            drafts = self._roots[:, None]
        elif self._static is not None:
            candidates = self._static.candidates(self._hidden, shape.depth, shape.width)
            drafts = only_tokens(fill_tree(self._roots, candidates, self._buffers[-1]), vocab_size)
        batch = tree_batch(self.tree, drafts, self._seq_lens, self._table(), shape.max_seq_len, self._layout())
        return replace(batch, max_depth=shape.depth)

    def trees(self, sequences: int) -> TreeBatch:
        """The first trees of the last :meth:`run` that the host verifies, until the state changes."""
        drafts, lengths, table = (t[:sequences] for t in (self._drafts, self._seq_lens, self._table()))
        return tree_batch(self.tree, drafts, lengths, table, self.shape.max_seq_len, self._layout().first(sequences))

    def _table(self) -> Tensor:
        """The block table; vacant rows have no pages."""
        table = self.pool.block_table.index_select(0, self._slots)
        return table if self._vacant is None else table.masked_fill(self._vacant[:, None], NO_PAGE)

    def _layout(self) -> TreeLayout:
        return TreeLayout(*self._buffers[: len(fields(TreeLayout))])
