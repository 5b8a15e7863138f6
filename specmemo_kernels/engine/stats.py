"""Counters of a patched model's generation."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DecodeStats:
    """Counters since the last :meth:`reset`.

    Attributes:
        steps: verification passes (without prefill).
        sequence_steps: the same, counted once per sequence.
        tokens: tokens that these steps emitted (cut at EOS and at the length limit).
        prefill_tokens: prompt tokens computed.
        reused_tokens: prompt tokens found in cached pages.
        recomputed_tokens: tokens computed again after a preemption.
        preemptions: preempted sequences. swaps: preempted sequences that were copied to host memory.
        graph_steps: steps over tensors with fixed addresses (:mod:`specmemo_kernels.engine.overlap`), which are
            captured when they come again; includes discarded steps of finished sequences.
        eager_reasons: where graphs are on, the number of steps run from the host, by reason.
        retries: steps retried after a failed allocation. shrinks, grows: degradation levels lowered and raised
            (:mod:`specmemo_kernels.engine.pressure`).
        drafted: candidate tokens verified.
        accepted_at_depth: entry d: sequence steps that accepted at least d + 1 drafts.
        slots_written: KV slots written to pages (prefill, recomputed tokens and commits).
        bytes_by_part: bytes held by heads, pages, scratch and graphs when the last call ended; during a call, when it
            began.
    """

    steps: int = 0
    sequence_steps: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    graph_steps: int = 0
    eager_reasons: dict[str, int] = field(default_factory=dict)
    retries: int = 0
    shrinks: int = 0
    grows: int = 0
    drafted: int = 0
    accepted_at_depth: list[int] = field(default_factory=list)
    slots_written: int = 0
    bytes_by_part: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> float:
        """Delivered tokens per verification step of one sequence; 0 before the first step."""
        return self.tokens / self.sequence_steps if self.sequence_steps else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of sequence steps whose accepted path reached depth 1, 2, ..."""
        return [count / self.sequence_steps for count in self.accepted_at_depth] if self.sequence_steps else []

    def record_step(self, accept_lengths: list[int], nodes: int) -> None:
        """Count a step over ``len(accept_lengths)`` sequences, with ``nodes`` nodes in all trees."""
        self.steps += 1
        self.sequence_steps += len(accept_lengths)
        self.drafted += nodes - len(accept_lengths)
        for length in accept_lengths:
            self.accepted_at_depth.extend([0] * (length - len(self.accepted_at_depth)))
            for level in range(length):
                self.accepted_at_depth[level] += 1
            self.slots_written += length + 1

    def reset(self) -> None:
        """Set all counters to zero."""
        self.__dict__.update(vars(DecodeStats()))
