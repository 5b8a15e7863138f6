"""A steady-state step that never asks the host: draft, forward, verify, commit, and what the next step begins with.

Every tensor that outlives a step stays where it is and keeps its size, so a GPU can replay the step from a graph. The
same function runs anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from specmemo_kernels.cache.kv_storage import on_device
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import StaticDrafter, candidate_columns, fill_tree
from specmemo_kernels.engine.propose import only_tokens
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.tree_pass import tree_pass
from specmemo_kernels.engine.verify import GreedyVerifier
from specmemo_kernels.forward.batch import TreeLayout, tree_batch, tree_layout
from specmemo_kernels.forward.target import TargetModel
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor


@dataclass(frozen=True)
class StepShape:
    """What sizes a step's tensors; steps of one shape differ in what these hold.

    Attributes:
        sequences, nodes: how many trees of how many nodes. depth, width: of the trees.
        max_seq_len: no sequence has more tokens in pages; GPU launches are sized by it.
    """

    sequences: int
    nodes: int
    depth: int
    width: int
    max_seq_len: int


class StepState:
    """What one step leaves to the next, in the first rows of tensors that stay where they are.

    Args:
        sequences: the most that step together.
        hidden: ``[..., hidden_size]``, of the states' size, dtype and device.

    Attributes:
        slots: ``[S]`` int64, rows of the pool's block table. roots: ``[S]`` int64, the newest tokens.
        seq_lens: ``[S]`` int32, tokens in pages. hidden: ``[S, hidden_size]``, the states that the roots came from.
    """

    def __init__(self, sequences: int, hidden: Tensor) -> None:
        with torch.inference_mode(False):  # else they couldn't be written outside of inference mode later
            self.slots = torch.zeros(sequences, dtype=torch.int64, device=hidden.device)
            self.roots = torch.zeros_like(self.slots)
            self.seq_lens = torch.zeros_like(self.slots, dtype=torch.int32)
            self.hidden = torch.zeros(sequences, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.slots, self.roots, self.seq_lens, self.hidden))

    def load(self, sequences: Sequence[SequenceState]) -> None:
        """The first rows become what the host knows of ``sequences``, which all take steps."""
        known = [[s.slot, s.tokens[-1], len(s.tokens) - 1] for s in sequences]
        numbers = on_device(torch.tensor(known), self.hidden.device)
        count = len(sequences)
        for mine, column in zip((self.slots, self.roots, self.seq_lens), numbers.unbind(1), strict=True):
            mine[:count].copy_(column)
        self.hidden[:count].copy_(torch.stack([s.hidden for s in sequences if s.hidden is not None]))


class DeviceStep:
    """One step of a shape over ``state``; its trees may change between steps (:meth:`use`).

    Args:
        shape: of ``tree``, whose width may be smaller.
        target: whose ``static`` is true.

    Attributes:
        emitted: ``[sequences, depth + 3]`` int64, the rows of the last :meth:`run` (:class:`DeviceVerdict`).
    """

    def __init__(
        self,
        shape: StepShape,
        tree: DraftTree,
        state: StepState,
        target: TargetModel,
        drafter: StaticDrafter,
        pool: PagedKVPool,
        backend: str | None,
    ) -> None:
        self.shape, self.tree, self.target, self.drafter = shape, tree, target, drafter
        self.pool, self.backend, self.verifier = pool, backend, GreedyVerifier(target, backend)
        count, device = shape.sequences, state.hidden.device
        self._slots, self._roots = state.slots[:count], state.roots[:count]
        self._seq_lens, self._hidden = state.seq_lens[:count], state.hidden[:count]
        with torch.inference_mode(False):
            self._layout = TreeLayout(*(part.clone() for part in self._parts(tree)[1:]))
            self._columns = self._parts(tree)[0].clone()
            self.emitted = torch.zeros(count, shape.depth + 3, dtype=torch.int64, device=device)

    def _parts(self, tree: DraftTree) -> tuple[Tensor, ...]:
        """Where its candidates stand, and its layout."""
        device = self._roots.device
        layout = tree_layout(tree, self.shape.sequences, device)
        return candidate_columns(tree, self.shape.width, device), *(getattr(layout, f.name) for f in fields(layout))

    def _own(self) -> tuple[Tensor, ...]:
        return self._columns, *(getattr(self._layout, f.name) for f in fields(self._layout))

    @property
    def nbytes(self) -> int:
        """Bytes of its own tensors."""
        return sum(tensor.nbytes for tensor in (*self._own(), self.emitted))

    def use(self, tree: DraftTree) -> None:
        """The next steps verify ``tree``, which has this shape."""
        if tree == self.tree:
            return
        for mine, theirs in zip(self._own(), self._parts(tree), strict=True):
            mine.copy_(theirs)
        self.tree = tree

    def run(self) -> None:
        """The step. Whatever fails on the way, ``state`` is as before; pages have changed behind the sequences' ends
        alone."""
        shape = self.shape
        drafts = self._roots[:, None]
        if shape.depth:
            candidates = self.drafter.candidates(self._hidden, shape.depth, shape.width)
            drafts = only_tokens(fill_tree(self._roots, candidates, self._columns), self.target.vocab_size)
        table = self.pool.block_table.index_select(0, self._slots)
        batch = tree_batch(self.tree, drafts, self._seq_lens, table, shape.max_seq_len, self._layout)
        verify = self.verifier.verify_on_device
        verdict, hidden = tree_pass(self.target, self.pool, self.backend, batch, None, verify)
        assert verdict is not None, "the step has trees"
        lengths = self._seq_lens + verdict.accept_length + 1
        # Nothing is allocated below, so no failure leaves the state half changed.
        self.emitted.copy_(verdict.rows)
        self._roots.copy_(verdict.bonus_token)
        self._seq_lens.copy_(lengths)
        self._hidden.copy_(hidden)
