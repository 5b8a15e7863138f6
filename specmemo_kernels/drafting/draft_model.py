"""A smaller model as the drafter: a chain of tokens, its keys and values kept in pages of its own."""

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
class _Row:
    """A sequence as the draft model knows it: ``slot`` of its own pool, ``known`` of its ``tokens`` whose keys and
    values are in pages, and behind them those of ``guessed`` tokens, of which some may have become real."""

    slot: int
    tokens: Sequence[int]
    known: int
    guessed: list[int]

    def settle(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` are in pages; the newest one never counts, because its successor is asked for.

        The tokens may be those of the last proposal, when its step failed and is tried again.
        """
        self.known = min(self.known, len(tokens) - 1)
        for token in self.guessed:
            if self.known >= len(tokens) - 1 or tokens[self.known] != token:
                break
            self.known += 1
        self.guessed = []
        return self.known


class DraftModelDrafter:
    """Guesses the greedy continuation of a smaller model with the same vocabulary.

    Each step first computes the tokens that it doesn't know yet (a whole prompt in chunks, later the newest one or
    two), then one token at a time. Keys and values of accepted guesses stay; those of others are overwritten.

    Args:
        model: the smaller model; greedy tokens are taken from it.
        layers: what its attention layers store.
        max_depth: tokens guessed per step.
        weight_bytes: what its weights take, counted against the budget.
        backend: of the operators.

    Attributes:
        keeps_pages: what it knows of a closed sequence serves those that begin the same.
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
        self._rows: dict[int, _Row] = {}

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that it keeps per token."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of the pages that it holds: none before it is asked."""
        return self._pool.page_bytes if self._pool is not None else 0

    @property
    def num_pages(self) -> int:
        """Pages that it may use."""
        return self._sizes[0]

    def allocate(self, num_pages: int, page_size: int, max_sequences: int, prefill_chunk: int) -> None:
        """Pages for as many tokens as the target's pool holds: it never knows more of a sequence than the target.

        They are made when it is asked for the first time. What the pages before knew of closed sequences is copied, at
        once; :meth:`release` them first where both don't fit.
        """
        old, self._rows, self._prefill_chunk = self._pool, {}, prefill_chunk
        self._sizes, self._pool = (num_pages, page_size, max_sequences), None
        if old is not None and old.cached_pages:
            self._own_pool().take_cached(old)

    def release(self) -> None:
        """Give the pages back; all sequences are forgotten."""
        self._pool, self._rows, self._sizes = None, {}, (0, 0, 0)

    def _own_pool(self) -> PagedKVPool:
        if self._pool is None:
            num_pages, page_size, max_sequences = self._sizes
            if not num_pages:
                raise RuntimeError("the draft model has no pages; call allocate first")
            with torch.inference_mode(False):  # else it could not be written outside of inference mode later
                self._pool = PagedKVPool(
                    self.layers,
                    num_pages=num_pages,
                    page_size=page_size,
                    max_sequences=max_sequences,
                    max_nodes=0,
                    keep=self.keeps_pages,
                )
        return self._pool

    def close(self, slot: int) -> None:
        row = self._rows.pop(slot, None)
        if row is not None:
            assert self._pool is not None
            self._pool.close(row.slot, row.tokens[: row.settle(row.tokens)])

    def behind(self, slot: int, tokens: Sequence[int]) -> int:
        """How many of a sequence's ``tokens``, the newest one apart, aren't in its pages."""
        if slot in self._rows:
            known = self._rows[slot].settle(tokens)
        else:
            known = self._pool.cached_prefix_len(tokens) if self._pool is not None else 0
        return len(tokens) - 1 - known

    def propose(self, inputs: DraftInput) -> Tensor:
        tree, device = inputs.tree, inputs.root_tokens.device
        depth = tree.max_depth
        guesses = torch.full((len(inputs.token_ids), tree.size), -1, device=device)
        if depth == 0:
            return guesses
        pool = self._own_pool()
        everyone = [self._row(pool, *each) for each in zip(inputs.slots, inputs.token_ids, strict=True)]
        served = [i for i, row in enumerate(everyone) if self._has_room(pool, row, depth)]
        if not served:
            return guesses
        rows = [everyone[i] for i in served]
        chain = [self._catch_up(pool, rows)]
        lengths = [len(row.tokens) for row in rows]
        for ahead in range(depth - 1):
            single = list(chain[-1][:, None])
            starts = [length + ahead for length in lengths]
            chain.append(self.model.argmax(self._forward(pool, rows, single, starts)))
        drafted = torch.stack(chain, dim=1)
        nodes = [node for node, path in enumerate(tree.paths, start=1) if not any(path)]
        depths = [tree.depths[node] - 1 for node in nodes]
        places = torch.tensor(served, device=device)[:, None], torch.tensor(nodes, device=device)
        guesses[places] = drafted[:, depths].to(device)
        for row, length, tokens in zip(rows, lengths, drafted[:, :-1].tolist(), strict=True):
            row.known, row.guessed = length, tokens
        return guesses

    def _row(self, pool: PagedKVPool, slot: int, tokens: Sequence[int]) -> _Row:
        if slot not in self._rows:
            row = self._rows[slot] = _Row(pool.open(), [], 0, [])
            row.known = pool.reuse(row.slot, tokens)
        self._rows[slot].tokens = tokens
        return self._rows[slot]

    def _has_room(self, pool: PagedKVPool, row: _Row, depth: int) -> bool:
        """Whether there are pages for a sequence's tokens and ``depth - 1`` guesses.

        The target's sequences may share the pages of a beginning that was computed here for none of them, or only
        for some. The pages of all then don't suffice, and one without room gets no guesses until another has ended.
        """
        try:
            pool.reserve(row.slot, len(row.tokens) + depth - 1)
        except OutOfPages:
            return False
        return True

    def _catch_up(self, pool: PagedKVPool, rows: Sequence[_Row]) -> Tensor:
        """Compute what isn't in pages of each sequence; ``[B]`` the token that follows."""
        token_ids = [row.tokens for row in rows]
        done = [row.settle(row.tokens) for row in rows]
        first = torch.empty(len(rows), dtype=torch.int64, device=self.model.device)
        while pending := [i for i, tokens in enumerate(token_ids) if done[i] < len(tokens)]:
            room, taken, chunks = self._prefill_chunk, [], []
            for i in pending:
                if size := min(room, len(token_ids[i]) - done[i]):
                    taken.append(i)
                    chunks.append(torch.tensor(token_ids[i][done[i] : done[i] + size], device=self.model.device))
                    room -= size
            output = self._forward(pool, [rows[i] for i in taken], chunks, [done[i] for i in taken])
            first[taken] = self.model.argmax(output)
            for i, chunk in zip(taken, chunks, strict=True):
                done[i] += len(chunk)
        return first

    def _forward(
        self, pool: PagedKVPool, rows: Sequence[_Row], chunks: Sequence[Tensor], starts: Sequence[int]
    ) -> TargetOutput:
        """Compute a chunk of each row from its place on; the output has each chunk's last row."""
        slots = torch.tensor([row.slot for row in rows], device=pool.device)
        batch = chunk_batch(chunks, starts, pool.block_table[slots])
        self.rows_computed += len(batch.tokens)
        keep = batch.qo_indptr[1:].long() - 1
        return self.model.forward(batch, StepAttention(pool, batch, self.backend), keep, logits=False)
