"""The page pool, and the captured steps, that are reused from call to call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from specmemo_kernels.cache.paged_kv import PagedKVPool, pages_for
from specmemo_kernels.drafting.base import FeatureDrafter, PagedDrafter, drafts_on_device
from specmemo_kernels.engine.host_capture import HostCapture
from specmemo_kernels.engine.overlap import IN_FLIGHT, OverlappedSteps
from specmemo_kernels.engine.pressure import MemoryPressureController, is_out_of_memory, raise_exhausted
from specmemo_kernels.engine.stats import DecodeStats
from specmemo_kernels.engine.step_graph import Capture, CudaCapture, StepCache
from specmemo_kernels.forward.target import TargetModel
from specmemo_kernels.integrations.hf.changes import ModelSignature
from specmemo_kernels.integrations.hf.checks import rope_limit
from specmemo_kernels.integrations.hf.draft import Setup
from specmemo_kernels.planning.host_allocator import release_host_memory
from specmemo_kernels.planning.memory_plan import BudgetError, MemoryPlan, counted

#: How steps are captured, by type of device; elsewhere they run eagerly.
CAPTURES: dict[str, Callable[..., Capture]] = {"cuda": CudaCapture, "cpu": HostCapture}


@dataclass(frozen=True)
class GraphUse:
    """The outcome of ``patch(graph=...)``.

    Attributes:
        wanted: steps start from device state and are captured where possible; on a GPU they also overlap with the
            host. reason: why not, else empty.
        must: ``graph=True`` was given: a step that can't be captured is an error.
        in_flight: most steps in flight.
        stream: of all captures on a GPU, as libraries keep a workspace for each stream. ``None``: one of each capture.
    """

    wanted: bool = False
    reason: str = ""
    must: bool = False
    in_flight: int = 1
    stream: torch.cuda.Stream | None = None

    def capture_of(self, device: torch.device, plan: MemoryPlan) -> Callable[[], Capture] | None:
        """What makes the capture of steps on ``device``; ``None``: they run eagerly."""
        if not self.wanted or device.type not in CAPTURES:
            return None
        arguments = (plan.pass_bytes, plan.budget is not None) if device.type == "cpu" else (self.stream,)
        return partial(CAPTURES[device.type], device, *arguments)


def graph_use(graph: bool | None, setup: Setup) -> GraphUse:
    """Resolve ``patch(graph=graph)``.

    Raises:
        ValueError: ``graph`` is true, but the model, the drafter or the backend rules out captured steps.
    """
    if graph is False:
        return GraphUse(reason="graph=False was given")
    reason = _impossible(setup)
    if graph and reason:
        raise ValueError(f"graph=True, but {reason}; leave graph out to run steps eagerly")
    alone = reason or not drafts_on_device(setup.drafter)  # the host drafts from a step's tokens
    device = setup.facts.device
    in_flight = 1 if alone else IN_FLIGHT.get(device.type, 1)
    stream = torch.cuda.Stream(device) if device.type == "cuda" and not reason else None  # type: ignore[no-untyped-call]
    return GraphUse(wanted=not reason, reason=reason, must=bool(graph), in_flight=in_flight, stream=stream)


def _impossible(setup: Setup) -> str:
    """Why every step of this model needs the host, or an empty string."""
    model, facts = setup.model, setup.facts
    devices = {layer.device for layer in facts.layers} | {facts.device}
    if not facts.inference:
        return "its modules can't run in inference mode"
    if facts.mixers.mixers:
        return "its recurrent layers take accepted tokens in numbers that the host must know"
    if len(devices) > 1:
        return f"the model is on {len(devices)} devices"
    if facts.device.type == "cuda" and setup.backend == "reference":
        return "backend 'reference' reads lengths on the host"
    if any("_hf_hook" in vars(module) for module in model.modules()):
        return "accelerate moves its weights or inputs in every pass"
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return "the model is sharded over several processes"
    if rope_limit(model.config) is not None:
        return "its rotary embedding reads the positions on the host (dynamic, longrope)"
    return ""


class PoolCache:
    """Keeps the last call's page pool, with the drafter's pages, and replaces it when the next call needs a larger one.

    Attributes:
        pool: the last call's pool, or ``None``.
        steps: the captured steps over this pool, or ``None``.
    """

    def __init__(
        self,
        setup: Setup,
        plan: MemoryPlan,
        graphs: GraphUse,
        memory_pressure: MemoryPressureController,
        stats: DecodeStats,
        reuse_prefix: bool,
    ) -> None:
        self.setup, self.plan, self.graphs, self.stats = setup, plan, graphs, stats
        self.memory_pressure, self.reuse_prefix = memory_pressure, reuse_prefix
        self.pool: PagedKVPool | None = None
        self.steps: StepCache | None = None
        self._signature: ModelSignature | None = None

    def pages_for(self, lengths: Sequence[int]) -> int:
        """Pages for sequences of these lengths, at most the plan's number of sequences at once.

        Raises:
            BudgetError: a sequence can never fit the plan.
        """
        plan = self.plan
        pages = sorted((pages_for(length, plan.page_size) for length in lengths), reverse=True)
        if plan.max_pages is not None and pages[0] > plan.max_pages:
            raise BudgetError(
                f"a prompt and its new tokens may take {max(lengths)} slots, the plan holds {plan.max_tokens} "
                f"({counted(plan.max_pages, 'page')} of {plan.page_size}); shorten the prompt or max_new_tokens, or "
                "patch with a larger memory_budget"
            )
        return min(sum(pages[: plan.max_sequences]), plan.max_pages or sum(pages))

    def get(self, lengths: Sequence[int], *, admitting: bool = False) -> PagedKVPool:
        """A pool of at least :meth:`pages_for` pages; when memory is low, of the longest sequence's pages.

        ``admitting``: with all of the plan's rows and pages, for sequences that come later.

        Returns the last call's pool if it is large enough. Its cached pages stay valid unless the model has changed.

        Raises:
            BudgetError: a sequence can never fit the plan.
        """
        total_pages, sequences = self.pages_for(lengths), min(len(lengths), self.plan.max_sequences)
        if admitting:
            total_pages, sequences = self.plan.max_pages or total_pages, self.plan.max_sequences
        self._clear_if_changed()
        while True:
            level = self.memory_pressure.level
            pages = total_pages if level.spare_pages else pages_for(max(lengths), self.plan.page_size)
            nodes = min(level.max_tree, self.plan.tree.size) * min(sequences, level.max_sequences)
            try:
                if not self._suffices(pages, sequences, nodes):
                    self._replace(pages, sequences, nodes)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if not self.memory_pressure.shrink(sequences):
                    raise_exhausted(error, self.memory_pressure.level)
                self.stats.shrinks += 1
                continue
            assert self.pool is not None
            self.stats.bytes_by_part = self.bytes_by_part
            return self.pool

    def overlapped_steps(self, target: TargetModel) -> OverlappedSteps | None:
        """A decoder's steps over :attr:`pool`; ``None``: all of its steps run from the host."""
        if not self.graphs.wanted:
            return None
        if self.steps is None:
            assert self.pool is not None, "get() allocates it"
            sequences, setup = self.pool.block_table.shape[0], self.setup
            make_capture = self.graphs.capture_of(target.device, self.plan)
            kept, drafter, backend = self.plan.kept_steps, setup.drafter, setup.backend
            self.steps = StepCache(target, drafter, self.pool, sequences, kept, backend, make_capture)
        return OverlappedSteps(self.steps, self.graphs.in_flight, self.graphs.must)

    def _suffices(self, pages: int, sequences: int, nodes: int) -> bool:
        pool = self.pool  # no local name may outlive this call: two pools might not fit at once
        if pool is None or pool.free_pages < pages:
            return False
        return pool.max_nodes >= nodes and pool.fits_sequences(sequences)

    def _replace(self, pages: int, sequences: int, nodes: int) -> None:
        """Allocate a new pool. Cached pages of the old pool are copied if both pools fit the plan at once."""
        self.steps = None
        if self.pool is not None and self.pool.cached_pages and self.memory_pressure.level.spare_pages:
            if self._both_fit(pages, sequences):
                try:
                    return self._allocate(pages, sequences, nodes)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
            elif self.plan.max_pages is not None:  # allocate the plan's maximum: cached pages are dropped only once
                pages = self.plan.max_pages
        self.release()
        self._allocate(pages, sequences, nodes)

    def _both_fit(self, pages: int, sequences: int) -> bool:
        """Whether a new pool fits beside the old pool, while no activations are allocated."""
        plan = self.plan
        if plan.max_pages is None:
            return True
        parts = ("kv_pages", "drafter_pages", "tree_scratch", "states", "activations")
        limit = sum(plan.parts.get(name, 0) for name in parts)
        page_bytes = (plan.parts["kv_pages"] + plan.parts["drafter_pages"]) // plan.max_pages
        scratch_bytes = plan.parts["tree_scratch"] // plan.max_sequences * sequences
        old_bytes, state_bytes = self.bytes_by_part, plan.parts.get("states", 0) // plan.max_sequences * sequences
        new_bytes = pages * page_bytes + scratch_bytes + state_bytes
        return sum(old_bytes.values()) - old_bytes["heads"] + new_bytes <= limit

    def _allocate(self, pages: int, sequences: int, nodes: int) -> None:
        plan, old, drafter = self.plan, self.pool, self.setup.drafter
        with torch.inference_mode(False):  # inference tensors can't be written outside of inference mode
            pool = PagedKVPool(
                (*self.setup.facts.layers, *(drafter.layers if isinstance(drafter, FeatureDrafter) else ())),
                num_pages=pages,
                page_size=plan.page_size,
                max_sequences=sequences,
                max_nodes=nodes,
                kv_dtype=plan.kv_dtype,
                keep=self.reuse_prefix and self.setup.facts.mixers.may_resume,
                mixers=self.setup.facts.mixers.specs,
            )
            if old is not None:
                pool.take_cached(old)
            if isinstance(drafter, PagedDrafter) and self.memory_pressure.level.heads:
                drafter.allocate(pages, plan.page_size, sequences, plan.prefill_chunk)
        self.pool = pool

    def _clear_if_changed(self) -> None:
        """Drop cached pages and graphs if the model has changed since they were made, a damaged pool as a whole."""
        if self.pool is not None and not self.pool.idle:
            self.release()
        if not (self.reuse_prefix or self.graphs.wanted):
            return
        signature = ModelSignature(self.setup.model)
        if self.pool is not None and signature != self._signature:
            self.pool.clear_cache()
            self.steps = None
        self._signature = signature

    def release(self) -> None:
        """Free the pool, the drafter's pages and the graphs."""
        self.steps = None
        self.pool = None
        if isinstance(self.setup.drafter, PagedDrafter):
            self.setup.drafter.release()
        if self.setup.facts.device.type == "cpu":
            release_host_memory()

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """Bytes allocated now: heads, pages, scratch, and the graphs' tensors."""
        pool, drafter = self.pool, self.setup.drafter
        return {
            "heads": drafter.nbytes,
            "kv_pages": pool.page_bytes if pool else 0,
            "drafter_pages": drafter.page_bytes if isinstance(drafter, PagedDrafter) else 0,
            "tree_scratch": pool.scratch_bytes if pool else 0,
            "graphs": 0 if self.steps is None else self.steps.nbytes,
        } | ({} if pool is None or pool.states is None else {"states": pool.states.nbytes})
