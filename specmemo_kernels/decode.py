"""The speculative loop: draft a tree, verify it in one forward pass, commit what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from specmemo_kernels import ops
from specmemo_kernels.batch import TreeBatch, chunk_batch, tree_batch
from specmemo_kernels.drafting.base import Drafter, DraftInput
from specmemo_kernels.paged_kv import PagedKVPool
from specmemo_kernels.stats import DecodeStats
from specmemo_kernels.step_attention import StepAttention
from specmemo_kernels.tree import DraftTree

Tensor = torch.Tensor


@dataclass
class SequenceState:
    """One sequence being generated.

    Attributes:
        prompt: its tokens, padding excluded; at least one.
        max_new_tokens: where it ends at the latest.
        eos_token_ids: emitting one of these ends it (they may occur in the prompt).
        stop: asked after each new token; gets all tokens so far, ``True`` ends the sequence.
        index: the caller's name for it (a row of the batch).
    """

    prompt: list[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop: Callable[[list[int]], bool] | None = None
    index: int = 0
    slot: int = -1
    tokens: list[int] = field(init=False)
    finished: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return len(self.prompt) + self.max_new_tokens - len(self.tokens)

    def take(self, emitted: Sequence[int]) -> int:
        """Append tokens until one ends the sequence; returns how many were taken."""
        for count, token in enumerate(emitted, start=1):
            self.tokens.append(token)
            stopped = self.stop is not None and self.stop(self.tokens)
            if stopped or token in self.eos_token_ids or self.remaining <= 0:
                self.finished = True
                return count
        return len(emitted)


@dataclass(frozen=True)
class TargetOutput:
    """Of the kept rows: the lm_head's input ``[K, hidden_size]``, and the logits ``[K, V]`` if the model made them."""

    hidden: Tensor
    logits: Tensor | None


class TargetModel(Protocol):
    """The model whose tokens count."""

    device: torch.device
    vocab_size: int

    def forward(self, batch: TreeBatch, attention: StepAttention, keep: Tensor | None, logits: bool) -> TargetOutput:
        """Run all layers on the batch's nodes; ``keep`` (``[K]`` int64, default all) are the rows wanted.

        ``logits``: :meth:`row_logits` will be asked for.
        """

    def argmax(self, output: TargetOutput) -> Tensor:
        """The target's token ``[K]`` int64 for each row of ``forward``'s output."""

    def row_logits(self, output: TargetOutput, row: int) -> Tensor:
        """The logits ``[V]`` of one row of ``forward``'s output."""


@dataclass(frozen=True)
class Verdict:
    """What a step accepted (see :func:`ops.verify_tree_greedy`) and, on the host, the tokens it emits per sequence."""

    accept_index: Tensor
    accept_length: Tensor
    bonus_token: Tensor
    emitted: list[list[int]]


class Verifier(Protocol):
    """Decides which nodes are accepted. ``needs_logits``: it asks for rows of logits, not for the best tokens alone."""

    needs_logits: bool

    def __call__(self, batch: TreeBatch, sequences: Sequence[SequenceState], output: TargetOutput) -> Verdict: ...


class GreedyVerifier:
    """Accepts the path that greedy decoding would have written."""

    needs_logits = False

    def __init__(self, target: TargetModel, backend: str | None) -> None:
        self.target, self.backend = target, backend

    def __call__(self, batch: TreeBatch, sequences: Sequence[SequenceState], output: TargetOutput) -> Verdict:
        assert batch.parents is not None, "a prefill chunk has no tree to verify"
        target_tokens = self.target.argmax(output)
        index, length, bonus = ops.verify_tree_greedy(
            batch.tokens, target_tokens, batch.parents, batch.qo_indptr, max_depth=batch.max_depth, backend=self.backend
        )
        # One transfer to the host: the path's own tokens are what the target wrote at each accepted node.
        node = (batch.qo_indptr[:-1, None] + index.clamp(min=0)).long()
        rows = torch.cat([target_tokens[node], length[:, None].long()], dim=1).tolist()
        return Verdict(index, length, bonus, [row[: row[-1] + 1] for row in rows])


class SpecDecoder:
    """Generates for a changing set of sequences, all of which take part in every step.

    Args:
        target: the model.
        drafter: fills the tree.
        tree: the widest tree a step may verify.
        pool: pages; every open sequence holds a row of its block table.
        verifier: decides what is accepted.
        prefill_chunk: most prompt tokens per forward pass.
        backend: of the operators.
        stats: counters to add to.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        tree: DraftTree,
        pool: PagedKVPool,
        verifier: Verifier,
        *,
        prefill_chunk: int,
        backend: str | None = None,
        stats: DecodeStats | None = None,
    ) -> None:
        self.target, self.drafter, self.tree, self.pool, self.verifier = target, drafter, tree, pool, verifier
        self.prefill_chunk, self.backend = prefill_chunk, backend
        self.stats = stats if stats is not None else DecodeStats()
        self.sequences: list[SequenceState] = []
        self._seq_lens = torch.empty(0, dtype=torch.int32, device=target.device)
        self._roots = torch.empty(0, dtype=torch.int64, device=target.device)
        self._hidden: Tensor | None = None

    def start(self, sequences: Sequence[SequenceState]) -> None:
        """Prefill new sequences and emit their first token; they join the next steps.

        Raises:
            OutOfPages: a prompt doesn't fit; no sequence of this call was started.
        """
        opened: list[SequenceState] = []
        try:
            for sequence in sequences:
                sequence.slot = self.pool.open()
                opened.append(sequence)
                self.pool.reserve(sequence.slot, len(sequence.prompt))
            self._prefill(sequences)
        except BaseException:
            for sequence in opened:
                self.pool.close(sequence.slot)
            raise
        self._retire()

    def _prefill(self, sequences: Sequence[SequenceState]) -> None:
        """Chunks of at most ``prefill_chunk`` tokens, short prompts together; only last rows reach the lm_head."""
        done = [0] * len(sequences)
        roots: list[int] = []
        hidden: list[Tensor] = []
        while pending := [i for i, s in enumerate(sequences) if done[i] < len(s.prompt)]:
            room, chunk = self.prefill_chunk, []
            for i in pending:
                size = min(room, len(sequences[i].prompt) - done[i])
                if size:
                    chunk.append((i, size))
                    room -= size
            ended, output = self._prefill_chunk(sequences, chunk, done)
            for i, size in chunk:
                done[i] += size
            if ended:
                roots += [emitted[0] for emitted in self._first_tokens(ended, output)]
                hidden.append(output.hidden)
        # Before they join: a stop function that raises leaves nothing of them behind.
        for sequence, root in zip(sequences, roots, strict=True):
            sequence.take([root])
        self.stats.prefill_tokens += sum(done)
        self.stats.slots_written += sum(done)
        device = self.target.device
        joined = [self._hidden, *hidden] if self._hidden is not None else hidden
        self._hidden = torch.cat(joined)
        self._roots = torch.cat([self._roots, torch.tensor(roots, device=device)])
        self._seq_lens = torch.cat([self._seq_lens, torch.tensor(done, dtype=torch.int32, device=device)])
        self.sequences += sequences

    def _prefill_chunk(
        self, sequences: Sequence[SequenceState], chunk: list[tuple[int, int]], done: list[int]
    ) -> tuple[list[SequenceState], TargetOutput]:
        """Run one chunk of ``(sequence, size)``; returns the sequences whose prompt it ends and their last rows."""
        device = self.target.device
        tokens = [torch.tensor(sequences[i].prompt[done[i] : done[i] + size], device=device) for i, size in chunk]
        slots = torch.tensor([sequences[i].slot for i, _ in chunk], device=device)
        batch = chunk_batch(tokens, [done[i] for i, _ in chunk], self.pool.block_table[slots])
        last = batch.qo_indptr[1:].long() - 1
        ends = [done[i] + size == len(sequences[i].prompt) for i, size in chunk]
        keep = last[torch.tensor(ends, device=device)]
        output = self.target.forward(
            batch, StepAttention(self.pool, batch, self.backend), keep, logits=self.verifier.needs_logits
        )
        return [sequences[i] for (i, _), end in zip(chunk, ends, strict=True) if end], output

    def _first_tokens(self, sequences: Sequence[SequenceState], output: TargetOutput) -> list[list[int]]:
        """A prompt's last row is verified like a tree without drafts."""
        device = self.target.device
        roots = torch.tensor([s.prompt[-1] for s in sequences], device=device)[:, None]
        lengths = torch.tensor([len(s.prompt) - 1 for s in sequences], dtype=torch.int32, device=device)
        slots = torch.tensor([s.slot for s in sequences], device=device)
        batch = tree_batch(DraftTree.chain(0), roots, lengths, self.pool.block_table[slots], int(lengths.max()))
        return self.verifier(batch, sequences, output).emitted

    def step(self) -> list[SequenceState]:
        """One verification step of all running sequences; returns those that it finished (their pages are free).

        Raises:
            OutOfPages: the accepted tokens might not fit; nothing was changed.
        """
        tree = self._step_tree()
        for sequence in self.sequences:
            # The newest token isn't in pages yet, so the deepest path needs `tree.max_depth` slots behind it.
            self.pool.reserve(sequence.slot, len(sequence.tokens) + tree.max_depth)
        batch = self._draft(tree)
        output = self.target.forward(
            batch, StepAttention(self.pool, batch, self.backend), None, logits=self.verifier.needs_logits
        )
        verdict = self.verifier(batch, self.sequences, output)
        self._commit(batch, verdict)
        last = batch.qo_indptr[:-1] + verdict.accept_index.gather(1, verdict.accept_length[:, None].long())[:, 0]
        self._hidden = output.hidden[last.long()]
        self._roots = verdict.bonus_token
        self._seq_lens = self._seq_lens + verdict.accept_length + 1
        self.stats.record_step([len(tokens) - 1 for tokens in verdict.emitted], len(batch.tokens))
        for sequence, tokens in zip(self.sequences, verdict.emitted, strict=True):
            self.stats.tokens += sequence.take(tokens)
        return self._retire()

    def _step_tree(self) -> DraftTree:
        """The tree, without nodes deeper than the tokens anybody still wants."""
        return self.tree.truncated(max(s.remaining for s in self.sequences) - 1)

    def _draft(self, tree: DraftTree) -> TreeBatch:
        """Let the drafter fill the tree; what isn't a token becomes -1 for the walk and 0 for the embedding."""
        assert self._hidden is not None
        draft = self.drafter.propose(DraftInput(tree, self._roots, self._hidden, [s.tokens for s in self.sequences]))
        expected = (len(self.sequences), tree.size)
        if tuple(draft.shape) != expected or draft.dtype != torch.int64:
            raise ValueError(
                f"{type(self.drafter).__name__}.propose returned {tuple(draft.shape)} {draft.dtype}, "
                f"expected {expected} torch.int64 (sequences, tree nodes)"
            )
        draft = torch.where((draft < 0) | (draft >= self.target.vocab_size), -1, draft)
        draft[:, 0] = self._roots
        slots = torch.tensor([s.slot for s in self.sequences], device=self.target.device)
        longest = max(len(s.tokens) for s in self.sequences) - 1
        return tree_batch(tree, draft, self._seq_lens, self.pool.block_table[slots], longest)

    def _commit(self, batch: TreeBatch, verdict: Verdict) -> None:
        for group in self.pool.groups:
            device = group.k_pages.device
            there = batch.to(device)
            ops.commit_paged_kv(
                group.k_scratch, group.v_scratch, group.k_pages, group.v_pages,
                there.block_table, there.seq_lens, there.qo_indptr,
                verdict.accept_index.to(device), verdict.accept_length.to(device), backend=self.backend,
            )  # fmt: skip

    def _retire(self) -> list[SequenceState]:
        """Close finished sequences and drop their rows."""
        finished = [s for s in self.sequences if s.finished]
        if finished:
            keep = [i for i, s in enumerate(self.sequences) if not s.finished]
            for sequence in finished:
                self.pool.close(sequence.slot)
            rows = torch.tensor(keep, dtype=torch.int64, device=self.target.device)
            self.sequences = [self.sequences[i] for i in keep]
            self._seq_lens, self._roots = self._seq_lens[rows], self._roots[rows]
            self._hidden = self._hidden[rows] if self._hidden is not None and keep else None
        return finished

    def abort(self) -> None:
        """Close all sequences, whatever state they are in."""
        for sequence in self.sequences:
            sequence.finished = True
        self._retire()
