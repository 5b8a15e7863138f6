"""Whether a patched model's steps run one ahead of the host, from graphs on a GPU; the steps kept from call to call."""

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
    """What became of ``patch(graph=...)``.

    Attributes:
        wanted: steps run ahead wherever they can. reason: why they don't, else empty.
        must: it was asked for: a step that can't be captured is an error.
    """

    wanted: bool = False
    reason: str = ""
    must: bool = False
    _steps: StepCache | None = field(default=None, init=False, repr=False)

    def overlapped_steps(
        self, target: TargetModel, drafter: Drafter, pool: PagedKVPool, backend: str
    ) -> OverlappedSteps | None:
        """What makes the steps of one decoder; graphs of earlier ones serve again while they are for the same."""
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
        """Let go of everything that is kept."""
        self._steps = None

    @property
    def nbytes(self) -> int:
        """Bytes kept: the steps' own tensors and the graphs' pool (what the driver keeps for launches isn't known)."""
        return 0 if self._steps is None else self._steps.nbytes


def graph_use(graph: bool | None, model: Any, facts: ModelFacts, drafter: Drafter, backend: str) -> GraphUse:
    """What ``patch(graph=graph)`` comes to.

    Raises:
        ValueError: it must be, and can't.
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
    """Why no step of this model can run without asking the host, or an empty string."""
    devices = {layer.device for layer in facts.layers} | {facts.device}
    if not isinstance(drafter, StaticDrafter):
        return f"{type(drafter).__name__} looks at the tokens on the host"
    if len(devices) > 1:
        return f"the model lies on {len(devices)} devices"
    if facts.device.type == "cuda" and backend == "reference":
        return "backend 'reference' looks at lengths on the host"
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return "the model is one of several processes' parts"
    if moving_rope(model.config):
        return "its rotary embedding looks at the positions on the host (dynamic, longrope)"
    return ""


def rope_kinds(config: Any) -> list[dict[str, Any]]:
    """The settings of a model's rotary embeddings."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [rope, *(v for v in rope.values() if isinstance(v, dict))]


def moving_rope(config: Any) -> bool:
    """Whether positions are encoded otherwise beyond some length."""
    return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in rope_kinds(config))
