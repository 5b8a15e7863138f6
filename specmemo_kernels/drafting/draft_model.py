"""A smaller model as the drafter: drafts a chain of tokens, with its own paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specmemo_kernels.arguments import integer
from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.cache.paged_kv import OutOfPages, PagedKVPool
from specmemo_kernels.drafting.base import DraftInput
from specmemo_kernels.forward.batch import chunk_batch
from specmemo_kernels.forward.step_attention import StepAttention
from specmemo_kernels.forward.target import TargetModel, TargetOutput

Tensor = torch.Tensor


@dataclass
class _DraftSequence:
    """A sequence in the draft model's own pool.

    Attributes:
        slot: its row of the pool.
        tokens: its tokens in the last ``propose``.
        cached: number of leading tokens whose keys and values are in pages.
        guessed: guesses whose keys and values are in pages behind ``cached``.
    """

    slot: int
    tokens: Sequence[int]
    cached: int
    guessed: list[int]

    def advance(self, tokens: Sequence[int]) -> int:
        """Add accepted guesses to ``cached``, and return it.

        The newest token is never counted, because its successor must be computed. A retried step passes the same
        ``tokens`` again.
        """
        self.cached = min(self.cached, len(tokens) - 1)
        for token in self.guessed:
            if self.cached >= len(tokens) - 1 or tokens[self.cached] != token:
                break
            self.cached += 1
        self.guessed = []
        return self.cached


class DraftModelDrafter:
    """Guesses the greedy continuation of a smaller model with the same vocabulary.

    Each step first computes the missing tokens (a whole prompt in chunks, later the newest one or two), then one token
    at a time. Keys and values of accepted guesses stay in pages; rejected guesses are overwritten.

    Args:
        layers: the shapes of the model's keys and values.
        max_depth: tokens guessed per step.
        weight_bytes: bytes of the model's weights, counted against the budget.
        backend: of the operators.

    Attributes:
        keeps_pages: keep the pages of closed sequences for reuse by sequences with the same prefix.
    """

    prefers_chain = True
    keeps_pages = True

    def __init__(
        self,
        model: TargetModel,
        layers: Sequence[LayerKV],
        *,
        max_depth: int,
        weight_bytes: int,
        backend: str | None = None,
    ) -> None:
        self.max_depth = integer("the draft model's tokens per step", max_depth)
        self.model, self.layers, self.nbytes = model, tuple(layers), weight_bytes
        self.backend, self._prefill_chunk = backend, 0
        self.rows_computed = 0
        self._sizes = (0, 0, 0)
        self._pool: PagedKVPool | None = None
        self._sequences: dict[int, _DraftSequence] = {}

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of the allocated pages; 0 before the first ``propose``."""
        return self._pool.page_bytes if self._pool is not None else 0

    @property
    def num_pages(self) -> int:
        return self._sizes[0]

    def allocate(self, num_pages: int, page_size: int, max_sequences: int, prefill_chunk: int) -> None:
        """Grant pages for as many tokens as the target's pool holds; a draft cache never needs more.

        The first ``propose`` allocates them. If the old pages hold prefixes of closed sequences, this method allocates
        the new pages and copies the prefixes; call :meth:`release` before if both pools don't fit in memory.
        """
        old, self._sequences, self._prefill_chunk = self._pool, {}, prefill_chunk
        self._sizes, self._pool = (num_pages, page_size, max_sequences), None
        if old is not None and old.cached_pages:
            self._ensure_pool().take_cached(old)

    def release(self) -> None:
        """Free the pages and drop all sequences."""
        self._pool, self._sequences, self._sizes = None, {}, (0, 0, 0)

    def _ensure_pool(self) -> PagedKVPool:
        if self._pool is None:
            num_pages, page_size, max_sequences = self._sizes
            if not num_pages:
                raise RuntimeError("the draft model has no pages; call allocate first")
            with torch.inference_mode(False):  # tensors of inference mode can't be written outside of it
                self._pool = PagedKVPool(
                    self.layers, num_pages=num_pages, page_size=page_size, max_sequences=max_sequences, max_nodes=0,
                    keep=self.keeps_pages,
                )  # fmt: skip
        return self._pool

    def close(self, slot: int) -> None:
        sequence = self._sequences.pop(slot, None)
        if sequence is not None:
            assert self._pool is not None
            self._pool.close(sequence.slot, sequence.tokens[: sequence.advance(sequence.tokens)])

    def behind(self, slot: int, tokens: Sequence[int]) -> int:
        """Tokens of a sequence that aren't in pages, without the newest token."""
        if slot in self._sequences:
            cached = self._sequences[slot].advance(tokens)
        else:
            cached = self._pool.cached_prefix_len(tokens) if self._pool is not None else 0
        return len(tokens) - 1 - cached

    def propose(self, inputs: DraftInput) -> Tensor:
        tree, device = inputs.tree, inputs.root_tokens.device
        depth = tree.max_depth
        guesses = torch.full((len(inputs.token_ids), tree.size), -1, device=device)
        if depth == 0:
            return guesses
        pool = self._ensure_pool()
        step = [self._sequence(pool, *item) for item in zip(inputs.slots, inputs.token_ids, strict=True)]
        rows = [row for row, sequence in enumerate(step) if self._reserve(pool, sequence, depth)]
        if not rows:
            return guesses
        sequences = [step[row] for row in rows]
        chain = [self._catch_up(pool, sequences)]
        lengths = [len(sequence.tokens) for sequence in sequences]
        for ahead in range(depth - 1):
            single = list(chain[-1][:, None])
            starts = [length + ahead for length in lengths]
            chain.append(self.model.argmax(self._forward(pool, sequences, single, starts)))
        drafted = torch.stack(chain, dim=1)
        nodes = [node for node, path in enumerate(tree.paths, start=1) if not any(path)]
        depths = [tree.depths[node] - 1 for node in nodes]
        index = torch.tensor(rows, device=device)[:, None], torch.tensor(nodes, dtype=torch.int64, device=device)
        guesses[index] = drafted[:, depths].to(device)
        for sequence, length, tokens in zip(sequences, lengths, drafted[:, :-1].tolist(), strict=True):
            sequence.cached, sequence.guessed = length, tokens
        return guesses

    def _sequence(self, pool: PagedKVPool, slot: int, tokens: Sequence[int]) -> _DraftSequence:
        if slot not in self._sequences:
            row, cached = pool.open_with(tokens)
            self._sequences[slot] = _DraftSequence(row, [], cached, [])
        self._sequences[slot].tokens = tokens
        return self._sequences[slot]

    def _reserve(self, pool: PagedKVPool, sequence: _DraftSequence, depth: int) -> bool:
        """Reserve pages for a sequence's tokens and ``depth - 1`` guesses; ``False`` if too few are free.

        Draft sequences may share fewer prefix pages than the target's sequences, so fewer pages may be free here. A
        sequence without pages gets no guesses until another sequence ends.
        """
        try:
            pool.reserve(sequence.slot, len(sequence.tokens) + depth - 1)
        except OutOfPages:
            return False
        return True

    def _catch_up(self, pool: PagedKVPool, sequences: Sequence[_DraftSequence]) -> Tensor:
        """Prefill the missing tokens of each sequence; returns ``[B]``, the token that follows."""
        token_ids = [sequence.tokens for sequence in sequences]
        done = [sequence.advance(sequence.tokens) for sequence in sequences]
        next_tokens = torch.empty(len(sequences), dtype=torch.int64, device=self.model.device)
        while pending := [i for i, tokens in enumerate(token_ids) if done[i] < len(tokens)]:
            free_rows, picked, chunks = self._prefill_chunk, [], []
            for i in pending:
                if size := min(free_rows, len(token_ids[i]) - done[i]):
                    picked.append(i)
                    chunks.append(torch.tensor(token_ids[i][done[i] : done[i] + size], device=self.model.device))
                    free_rows -= size
            output = self._forward(pool, [sequences[i] for i in picked], chunks, [done[i] for i in picked])
            next_tokens[picked] = self.model.argmax(output)
            for i, chunk in zip(picked, chunks, strict=True):
                done[i] += len(chunk)
        return next_tokens

    def _forward(
        self, pool: PagedKVPool, sequences: Sequence[_DraftSequence], chunks: Sequence[Tensor], starts: Sequence[int]
    ) -> TargetOutput:
        """One forward pass over a chunk of each sequence from its start on; the output has each chunk's last row."""
        slots = torch.tensor([sequence.slot for sequence in sequences], device=pool.device)
        batch = chunk_batch(chunks, starts, pool.block_table[slots])
        self.rows_computed += len(batch.tokens)
        keep = batch.qo_indptr[1:].long() - 1
        return self.model.forward(
            batch, StepAttention(pool, batch, self.backend, self.model.invariant), keep, logits=False
        )
