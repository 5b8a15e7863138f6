"""The handle of a patched model: its plan and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import can_offload
from specmemo_kernels.engine.decode import SpecDecoder
from specmemo_kernels.engine.overlap import slots_ahead
from specmemo_kernels.engine.page_demand import slots_to_end
from specmemo_kernels.engine.pressure import DeviceMonitor, MemoryPressureController, levels
from specmemo_kernels.engine.scheduler import Scheduler
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.stats import DecodeStats
from specmemo_kernels.engine.verify import Verifier
from specmemo_kernels.integrations.hf.changes import ModelGuard
from specmemo_kernels.integrations.hf.chat import longest_text
from specmemo_kernels.integrations.hf.checks import without_wrapper
from specmemo_kernels.integrations.hf.compressed import CompressedWeights
from specmemo_kernels.integrations.hf.draft import HFDraftModel, Setup, unregister
from specmemo_kernels.integrations.hf.generate import Generator
from specmemo_kernels.integrations.hf.generation_lock import GenerationLock, Unpatched
from specmemo_kernels.integrations.hf.pool import GraphUse, PoolCache
from specmemo_kernels.integrations.hf.target import HFTarget
from specmemo_kernels.planning.memory_plan import MemoryPlan
from specmemo_kernels.tree.choice import TreeChooser


class SpecMemo:
    """The handle of a patched model, ``model.specmemo``; as a context manager it unpatches at the end.

    Attributes:
        plan: the limits of generation (:class:`MemoryPlan`).
        stats: counters since patching or ``stats.reset()`` (:class:`DecodeStats`).
        drafter: proposes tokens.
        ranks: the rank interface of a tensor parallel model (:class:`SingleRank`).
        backend: name of the operators' backend.
        reuse_prefix: finished sequences' pages stay cached for prompts with the same beginning.
        memory_pressure: the degradation level (``memory_pressure.level``) and its controller.
        chooser: selects the part of the plan's tree that a step verifies; ``None`` if ``patch`` was given a tree.
        graphs: whether steps are captured (on a GPU they also overlap with the host), and the reason if not
            (``graphs.reason``).
            ``stats.eager_reasons`` counts the reasons of single eager steps.
        fused: the modules that operators compute in speculative steps, by name: ``"linear"``, ``"gated_mlp"``,
            ``"grouped_linear"`` (experts) or ``"rms_norm"``.
        compressed: the modules with compressed weights, and the bytes that this saves
            (:class:`CompressedWeights`).
        generation_lock: held by a generation, a release or an undo (:class:`GenerationLock`).
        undo_steps: functions that undo the patch, in order.
    """

    def __init__(
        self,
        setup: Setup,
        plan: MemoryPlan,
        target: HFTarget,
        graphs: GraphUse,
        chooser: TreeChooser | None,
        undo_steps: Sequence[Callable[[], None]],
        *,
        keep_free: int | None,
        reuse_prefix: bool,
    ) -> None:
        self.model, self.facts, self.drafter = setup.model, setup.facts, setup.drafter
        self.ranks, self.backend = setup.ranks, setup.backend
        self.plan, self.target, self.chooser = plan, target, chooser
        self.reuse_prefix, self.undo_steps = reuse_prefix, list(undo_steps)
        all_levels = levels(plan.tree.size, plan.prefill_chunk, plan.max_sequences, can_offload(self.drafter))
        self.memory_pressure = MemoryPressureController(
            # One level with several ranks: a rank can't lower its level without the other ranks.
            all_levels if self.ranks.size == 1 else all_levels[:1],
            monitor=None if keep_free is None else DeviceMonitor({layer.device for layer in self.facts.layers}),
            keep_free=keep_free or 0,
        )
        self.stats = DecodeStats()
        self.generator = Generator(self)
        self._pools = PoolCache(setup, plan, graphs, self.memory_pressure, self.stats, reuse_prefix)
        self._guards = [ModelGuard(self.model, mixers=[mixer.module for mixer in self.facts.mixers.mixers])]
        if isinstance(self.drafter, HFDraftModel):
            self._guards.append(ModelGuard(self.drafter.hf_model, "the draft model", drafts=True))
        self.generation_lock = GenerationLock()

    def scheduler(
        self, sequences: Sequence[SequenceState], verifier: Verifier, *, admitting: bool = False
    ) -> Scheduler:
        """A scheduler for ``sequences``, with a pool and a decoder; the caller submits the sequences.

        ``admitting``: others may be submitted later, so it has all of the plan's rows, and its pages.

        Raises:
            BudgetError: a sequence can never fit the plan.
        """
        plan = self.plan
        growing = plan.max_pages is None
        pool = self._pools.get([slots_to_end(s, self.slots_ahead, growing) for s in sequences], admitting=admitting)
        if admitting:
            longest = [longest_text(self.model) + self.slots_ahead] * plan.max_sequences
            rows, max_pages = plan.max_sequences, plan.max_pages or self.pages_for(longest)
        else:
            rows = min(len(sequences), plan.max_sequences)
            max_pages = self.pages_for([slots_to_end(s, self.slots_ahead, growing=False) for s in sequences])
        decoder = SpecDecoder(
            self.target, self.drafter, plan.tree, pool, verifier,
            prefill_chunk=plan.prefill_chunk, backend=self.backend, stats=self.stats, chooser=self.chooser,
            overlapped=self._pools.overlapped_steps(self.target),
            agree=self.ranks.agree_on_guesses(self.drafter),
        )  # fmt: skip
        return Scheduler(
            decoder,
            rows,
            memory_pressure=self.memory_pressure,
            max_pages=max_pages,
            growing=growing,
        )

    @property
    def fused(self) -> Mapping[str, str]:
        return self.facts.leaves.names

    @property
    def compressed(self) -> CompressedWeights:
        return self.facts.compressed

    @property
    def graphs(self) -> GraphUse:
        return self._pools.graphs

    @property
    def pool(self) -> PagedKVPool | None:
        """The page pool kept from the last call, or ``None``."""
        return self._pools.pool

    @property
    def slots_ahead(self) -> int:
        """KV slots that a sequence may need behind its last token."""
        return slots_ahead(self.plan.tree, self.graphs.in_flight)

    @property
    def max_length(self) -> int | None:
        """The most tokens of one sequence, prompt and new tokens, that the plan holds; ``None``: no limit."""
        return None if self.plan.max_tokens is None else max(0, self.plan.max_tokens - self.slots_ahead)

    def pages_for(self, lengths: Sequence[int]) -> int:
        """Pages for sequences of these lengths, see :meth:`PoolCache.pages_for`."""
        return self._pools.pages_for(lengths)

    def changed(self) -> str:
        """A change since patching that rules out speculative steps, or an empty string."""
        if self.generation_lock.closed:  # the call ends where it takes the lock
            return ""
        leaves = self.facts.leaves
        if leaves.invariant and (change := leaves.change()):
            return f"invariant is True, and {change} since patching; patch the model again"
        return next(filter(None, (guard.reason() for guard in self._guards)), "")

    def release(self) -> None:
        """Free the pages and graphs kept between calls of generate. Waits for another thread's generation.

        Raises:
            RuntimeError: a generation of this thread isn't over.
        """
        # Unpatching has released everything.
        with suppress(Unpatched), self.generation_lock.mutex(), self.generation_lock.owned():
            self._pools.release()

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """Bytes allocated now: heads, pages, scratch, and the graphs' tensors."""
        return self._pools.bytes_by_part

    def record_bytes(self) -> None:
        """Set ``stats.bytes_by_part``."""
        self.stats.bytes_by_part = self.bytes_by_part

    def undo(self) -> None:
        """Restore the model as before patching; a second call does nothing.

        Waits for another thread's generation.

        Raises:
            RuntimeError: a generation of this thread isn't over.
        """
        with suppress(Unpatched), self.generation_lock.mutex(), self.generation_lock.owned():
            self.generation_lock.closed = True  # first, so that calls of other threads don't take it for a change
            try:
                self._pools.release()
                run_steps(self.undo_steps)
                unregister(self)
            except BaseException:  # the next call goes on
                self.generation_lock.closed = False
                raise

    def __enter__(self) -> SpecMemo:
        return self

    def __exit__(self, *_: object) -> None:
        """Unpatch; this thread's open batch is closed first."""
        owner = self.generation_lock.owner
        run = None if owner is None or owner.run is None else owner.run()
        if run is not None:
            run.close()
        self.undo()

    def __repr__(self) -> str:
        return f"SpecMemo({type(self.model).__name__}, {self.plan})"


def handle_of(model: Any) -> SpecMemo | None:
    """The handle of a patched model, also through wrappers that pass attributes on (PEFT's, torch.compile's)."""
    handle = getattr(without_wrapper(model), "specmemo", None)
    return handle if isinstance(handle, SpecMemo) else None


def run_steps(steps: list[Callable[[], None]]) -> None:
    """Run steps in order, and remove those that have run: after an error the next call goes on."""
    while steps:
        steps[0]()
        del steps[0]
