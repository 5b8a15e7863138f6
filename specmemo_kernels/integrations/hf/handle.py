"""The handle of a patched model: its plan, its statistics, and the pool that serves from call to call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import Drafter, PagedDrafter
from specmemo_kernels.drafting.placing import can_offload
from specmemo_kernels.engine.decode import SpecDecoder, Verifier
from specmemo_kernels.engine.memory_monitor import DeviceMonitor
from specmemo_kernels.engine.overlap import slots_ahead
from specmemo_kernels.engine.page_demand import first_tokens
from specmemo_kernels.engine.pressure import MemoryPressureController, is_out_of_memory, levels, raise_exhausted
from specmemo_kernels.engine.scheduler import Scheduler
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.stats import DecodeStats
from specmemo_kernels.integrations.distributed.ranks import SingleRank
from specmemo_kernels.integrations.hf.changes import ModelGuard
from specmemo_kernels.integrations.hf.draft import HFDraftModel
from specmemo_kernels.integrations.hf.generate import Generator
from specmemo_kernels.integrations.hf.graph import GraphUse, moving_rope, rope_kinds
from specmemo_kernels.integrations.hf.signature import ModelSignature
from specmemo_kernels.integrations.hf.target import HFTarget, ModelFacts
from specmemo_kernels.planning.host_allocator import release_host_memory
from specmemo_kernels.planning.memory_plan import BudgetError, MemoryPlan
from specmemo_kernels.tree.choice import TreeChooser

if TYPE_CHECKING:
    from specmemo_kernels.integrations.hf.batch import BatchRun


class Unpatched(RuntimeError):
    """The handle's model isn't patched any more."""


class SpecMemo:
    """The handle of a patched model: ``model.specmemo``; also a context manager that unpatches at its end.

    Attributes:
        plan: what generation may use (:class:`MemoryPlan`).
        stats: what was counted since patching or ``stats.reset()`` (:class:`DecodeStats`).
        drafter: what proposes tokens.
        ranks: what the processes of a tensor parallel model tell each other (:class:`SingleRank`).
        backend: name of the operators' backend.
        reuse_prefix: keep the pages of finished sequences for those that begin the same.
        memory_pressure: what of the plan may be used now (``memory_pressure.level``), and when memory is looked at.
        chooser: says how much of the plan's tree a step verifies, where nobody asked for a tree.
        graphs: whether steps run one ahead of the host, from graphs on a GPU, and if not why (``graphs.reason``). Why a
            single step wasn't is in ``stats.eager_reasons``.
        undo_steps: what unpatching does, in order.
    """

    def __init__(
        self,
        model: Any,
        facts: ModelFacts,
        drafter: Drafter,
        plan: MemoryPlan,
        target: HFTarget,
        ranks: SingleRank,
        backend: str,
        graphs: GraphUse,
        keep_free: int | None = None,
        reuse_prefix: bool = True,
    ) -> None:
        self.model, self.facts, self.drafter, self.plan, self.target = model, facts, drafter, plan, target
        self.ranks, self.backend, self.reuse_prefix, self.graphs = ranks, backend, reuse_prefix, graphs
        steps_down = levels(plan.tree.size, plan.prefill_chunk, plan.max_sequences, can_offload(drafter))
        self.memory_pressure = MemoryPressureController(
            # What one rank alone gave up the others would not know of.
            steps_down if ranks.size == 1 else steps_down[:1],
            monitor=None if keep_free is None else DeviceMonitor({layer.device for layer in facts.layers}),
            keep_free=keep_free or 0,
        )
        self.stats = DecodeStats()
        self.chooser: TreeChooser | None = None
        self.generator = Generator(self)
        self._guards = [ModelGuard(model)]
        if isinstance(drafter, HFDraftModel):
            self._guards.append(ModelGuard(drafter.hf_model, "the draft model"))
        self._pool: PagedKVPool | None = None
        self._signature: ModelSignature | None = None
        self.undo_steps: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._generating: int | None = None
        self._run: weakref.ref[BatchRun] | None = None
        self._unpatched = False

    def scheduler(self, sequences: Sequence[SequenceState], verifier: Verifier) -> Scheduler:
        """What runs ``sequences``, none of which is submitted yet.

        Raises:
            BudgetError: one of them can never fit the plan.
        """
        plan = self.plan
        growing = plan.max_pages is None
        lengths = at_once = [len(s.prompt) + s.max_new_tokens + self.slots_ahead for s in sequences]
        if growing:
            at_once = [len(s.prompt) + first_tokens(s.max_new_tokens) + self.slots_ahead for s in sequences]
        pool = self.pool_for(at_once)
        decoder = SpecDecoder(
            self.target, self.drafter, plan.tree, pool, verifier,
            prefill_chunk=plan.prefill_chunk, backend=self.backend, stats=self.stats, chooser=self.chooser,
            overlapped=self.graphs.overlapped_steps(self.target, self.drafter, pool, self.backend),
            agree=self.ranks.agree_on_guesses(self.drafter),
        )  # fmt: skip
        return Scheduler(
            decoder,
            min(len(sequences), plan.max_sequences),
            memory_pressure=self.memory_pressure,
            max_pages=self.pages_for(lengths),
            growing=growing,
        )

    @property
    def slots_ahead(self) -> int:
        """KV slots that a sequence may need behind its last token."""
        return slots_ahead(self.plan.tree, self.graphs.wanted)

    @property
    def max_length(self) -> int | None:
        """The most tokens of one sequence, prompt and new tokens together, that the plan holds; ``None``: no limit."""
        return None if self.plan.max_tokens is None else max(0, self.plan.max_tokens - self.slots_ahead)

    def pages_for(self, lengths: Sequence[int]) -> int:
        """Pages in which sequences of these lengths fit, as many side by side as the plan allows.

        Raises:
            BudgetError: one of them can never fit the plan.
        """
        plan = self.plan
        pages = sorted((-(-length // plan.page_size) for length in lengths), reverse=True)
        if plan.max_pages is not None and pages[0] > plan.max_pages:
            raise BudgetError(
                f"a prompt and its new tokens may take {max(lengths)} slots, the plan holds {plan.max_tokens} "
                f"({plan.max_pages} pages of {plan.page_size}); shorten the prompt or max_new_tokens, or patch with a "
                "larger memory_budget"
            )
        return min(sum(pages[: plan.max_sequences]), plan.max_pages or sum(pages))

    def pool_for(self, lengths: Sequence[int]) -> PagedKVPool:
        """A pool of :meth:`pages_for`, or while memory is scarce of the pages that the longest one alone needs.

        The last call's pool serves again when it is large enough, else a new one takes its place. What it kept of
        finished sequences serves as well, unless the model has changed since.

        Raises:
            BudgetError: one of the sequences can never fit the plan.
        """
        wanted, sequences = self.pages_for(lengths), min(len(lengths), self.plan.max_sequences)
        self._forget_if_changed()
        while True:
            level = self.memory_pressure.level
            pages = wanted if level.spare_pages else -(-max(lengths) // self.plan.page_size)
            nodes = min(level.max_tree, self.plan.tree.size) * min(sequences, level.max_sequences)
            try:
                if not self._pool_serves(pages, sequences, nodes):
                    self._replace_pool(pages, sequences, nodes)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if not self.memory_pressure.shrink(sequences):
                    raise_exhausted(error, self.memory_pressure.level)
                self.stats.shrinks += 1
                continue
            assert self._pool is not None
            self.stats.bytes_by_part = self.bytes_by_part
            return self._pool

    def _pool_serves(self, pages: int, sequences: int, nodes: int) -> bool:
        pool = self._pool  # no name for it may outlive this: the next one might not fit beside it
        if pool is None or pool.free_pages < pages:
            return False
        return pool.max_nodes >= nodes and pool.fits_sequences(sequences)

    def _replace_pool(self, pages: int, sequences: int, nodes: int) -> None:
        """A new pool, into which the kept pages of the old one are copied if both fit the plan at once."""
        self.graphs.clear()
        if self._pool is not None and self._pool.cached_pages and self.memory_pressure.level.spare_pages:
            if self._both_fit(pages, sequences):
                try:
                    return self._new_pool(pages, sequences, nodes)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
            elif self.plan.max_pages is not None:  # all that there may be, so that pages are dropped only once
                pages = self.plan.max_pages
        self._release()
        self._new_pool(pages, sequences, nodes)

    def _both_fit(self, pages: int, sequences: int) -> bool:
        """Whether a new pool fits beside the old one, while no activations are held."""
        plan = self.plan
        if plan.max_pages is None:
            return True
        room = sum(plan.parts[name] for name in ("kv_pages", "drafter_pages", "tree_scratch", "activations"))
        page = (plan.parts["kv_pages"] + plan.parts["drafter_pages"]) // plan.max_pages
        scratch = plan.parts["tree_scratch"] // plan.max_sequences * sequences
        held = self.bytes_by_part
        return sum(held.values()) - held["heads"] + pages * page + scratch <= room

    def _new_pool(self, pages: int, sequences: int, nodes: int) -> None:
        plan, old = self.plan, self._pool
        with torch.inference_mode(False):  # else the pool could not be written outside of inference mode later
            pool = PagedKVPool(
                self.facts.layers,
                num_pages=pages,
                page_size=plan.page_size,
                max_sequences=sequences,
                max_nodes=nodes,
                kv_dtype=plan.kv_dtype,
                keep=self.reuse_prefix,
            )
            if old is not None:
                pool.take_cached(old)
            if isinstance(self.drafter, PagedDrafter) and self.memory_pressure.level.heads:
                self.drafter.allocate(pages, plan.page_size, sequences, plan.prefill_chunk)
        self._pool = pool

    def _forget_if_changed(self) -> None:
        """Drop the kept pages and graphs if the model isn't the one any more that made them."""
        if not (self.reuse_prefix or self.graphs.wanted):
            return
        signature = ModelSignature(self.model)
        if self._pool is not None and signature != self._signature:
            self._pool.clear_cache()
            self.graphs.clear()
        self._signature = signature

    def lock(self, run: BatchRun | None = None) -> None:
        """Wait until no other thread generates, and keep others waiting until :meth:`unlock`.

        Args:
            run: the batch that holds the model meanwhile.

        Raises:
            RuntimeError: this thread itself is in the middle of a generation, for which it would wait forever.
            Unpatched: the model isn't patched any more.
        """
        if self._lock.locked() and self._generating == threading.get_ident():
            raise RuntimeError(
                "this thread's generation with the same model isn't over; finish it first, or close the batch "
                "(BatchRun.close)"
            )
        self._lock.acquire()
        if self._unpatched:
            self._lock.release()
            raise Unpatched("the model was unpatched before this call could start; patch it again")
        self._generating = threading.get_ident()
        self._run = None if run is None else weakref.ref(run)

    def unlock(self) -> None:
        """The end of what :meth:`lock` began."""
        self._generating = self._run = None
        self._lock.release()

    def changed(self) -> str:
        """What has changed or was attached since patching, so that the model must run its own code; or nothing."""
        return next(filter(None, (guard.reason() for guard in self._guards)), "")

    def rope_changes(self, length: int) -> bool:
        """Whether positions are encoded differently beyond a limit that ``length`` tokens cross (dynamic, longrope).

        The candidates of a step lie ahead of the newest token, and would switch it early.
        """
        config = self.model.config.get_text_config()
        if not moving_rope(self.model.config):
            return False
        limits: list[int | None] = [
            getattr(config, "original_max_position_embeddings", None),
            config.max_position_embeddings,
        ]
        limits += [kind.get("original_max_position_embeddings") for kind in rope_kinds(self.model.config)]
        return length + self.plan.tree.max_depth > min(limit for limit in limits if limit)

    def cache_drops(self, length: int) -> bool:
        """Whether the model's own generate forgets tokens of a text this long that its attention mask lets it see."""
        return self.facts.cached_tokens is not None and length > self.facts.cached_tokens

    def release(self) -> None:
        """Free the pages and graphs kept between calls of generate. Waits for the generation of another thread.

        Raises:
            RuntimeError: a generation of this thread isn't over.
        """
        try:
            self.lock()
        except Unpatched:  # which has released everything
            return
        try:
            self._release()
        finally:
            self.unlock()

    def _release(self) -> None:
        self.graphs.clear()
        self._pool = None
        if isinstance(self.drafter, PagedDrafter):
            self.drafter.release()
        if self.facts.device.type == "cpu":
            release_host_memory()

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """Bytes held right now: heads, pages, scratch, and what steps keep from graph to graph."""
        pool = self._pool
        return {
            "heads": self.drafter.nbytes,
            "kv_pages": pool.page_bytes if pool else 0,
            "drafter_pages": self.drafter.page_bytes if isinstance(self.drafter, PagedDrafter) else 0,
            "tree_scratch": pool.scratch_bytes if pool else 0,
            "graphs": self.graphs.nbytes,
        }

    def __enter__(self) -> SpecMemo:
        return self

    def undo(self) -> None:
        """Make the model what it was before patching; the second time nothing happens.

        Waits for the generation of another thread.

        Raises:
            RuntimeError: a generation of this thread isn't over.
        """
        try:
            self.lock()
        except Unpatched:
            return
        try:
            self._release()
            while self.undo_steps:
                self.undo_steps.pop(0)()
            self._unpatched = True
        finally:
            self.unlock()

    def __exit__(self, *_: object) -> None:
        """Unpatch; a batch of this thread that is still open is closed first."""
        run = self._run() if self._run is not None and self._generating == threading.get_ident() else None
        if run is not None:
            run.close()
        self.undo()

    def __repr__(self) -> str:
        return f"SpecMemo({type(self.model).__name__}, {self.plan})"
