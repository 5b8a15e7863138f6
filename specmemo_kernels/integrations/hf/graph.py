"""Whether a patched model's steps overlap with the host, on a GPU from CUDA graphs; the steps reused between calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import Drafter, StaticDrafter
from specmemo_kernels.engine.overlap import OverlappedSteps
from specmemo_kernels.engine.step_graph import CudaCapture, StepCache
from specmemo_kernels.forward.target import TargetModel
from specmemo_kernels.integrations.hf.target import ModelFacts


@dataclass
class GraphUse:
    """The outcome of ``patch(graph=...)``.

    Attributes:
        wanted: steps overlap with the host where possible. reason: why steps don't overlap, else empty.
        must: ``graph=True`` was given: a step that can't be captured is an error.
    """

    wanted: bool = False
    reason: str = ""
    must: bool = False
    _steps: StepCache | None = field(default=None, init=False, repr=False)

    def overlapped_steps(
        self, target: TargetModel, drafter: Drafter, pool: PagedKVPool, backend: str
    ) -> OverlappedSteps | None:
        """A decoder's steps. Graphs of an earlier decoder are reused for the same target, drafter and pool."""
        if not self.wanted or not isinstance(drafter, StaticDrafter):
            return None
        steps = self._steps
        if steps is None or not (steps.pool is pool and steps.target is target and steps.drafter is drafter):
            device = target.device
            capture = partial(CudaCapture, device) if device.type == "cuda" else None
            steps = StepCache(target, drafter, pool, pool.block_table.shape[0], backend, capture)
            self._steps = steps
        return OverlappedSteps(steps, self.must)

    def clear(self) -> None:
        """Free the graphs and the steps' tensors."""
        self._steps = None

    @property
    def nbytes(self) -> int:
        """Bytes of the steps' tensors and the graphs' pool, without the driver's own memory."""
        return 0 if self._steps is None else self._steps.nbytes


def graph_use(graph: bool | None, model: Any, facts: ModelFacts, drafter: Drafter, backend: str) -> GraphUse:
    """Resolve ``patch(graph=graph)``.

    Raises:
        ValueError: ``graph`` is true, and no step can overlap with the host.
    """
    if graph is False:
        return GraphUse(reason="graph=False was given")
    reason = _impossible(model, facts, drafter, backend)
    if graph and reason:
        raise ValueError(f"graph=True, but {reason}; leave graph out to do without")
    if graph is None and not reason and facts.device.type != "cuda":
        reason = f"on {facts.device} nothing is gained by it: the host computes the steps itself"
    return GraphUse(wanted=not reason, reason=reason, must=bool(graph))


def _impossible(model: Any, facts: ModelFacts, drafter: Drafter, backend: str) -> str:
    """Why every step of this model needs the host, or an empty string."""
    devices = {layer.device for layer in facts.layers} | {facts.device}
    if not isinstance(drafter, StaticDrafter):
        return f"{type(drafter).__name__} reads the tokens on the host"
    if len(devices) > 1:
        return f"the model is on {len(devices)} devices"
    if facts.device.type == "cuda" and backend == "reference":
        return "backend 'reference' reads lengths on the host"
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return "the model is one of several processes' parts"
    if rope_limit(model.config) is not None:
        return "its rotary embedding reads the positions on the host (dynamic, longrope)"
    return ""


def rope_limit(config: Any) -> int | None:
    """The length beyond which the rotary embedding changes (dynamic, longrope); ``None``: no such length."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    if not any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds):
        return None
    limits: list[int | None] = [getattr(text, "original_max_position_embeddings", None), text.max_position_embeddings]
    limits += [kind.get("original_max_position_embeddings") for kind in kinds]
    return min(limit for limit in limits if limit)
