"""Predicted memory and speed against heads, nodes and keys and values, for models of three sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.planner import plan_request
from specmemo_kernels.planning.predicted_shape import weight_bytes
from specmemo_kernels.planning.search import PlanCandidate, PlanRequest, candidates, fastest

Row = dict[str, Any]
#: Published configurations, by name.
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    },
    "Vicuna-7B": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "torch_dtype": "float16",
    },
    "Llama-2-70B": {
        "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 32000, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "torch_dtype": "float16",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """A model on ``tp`` devices."""

    model: str
    device: str
    tp: int = 1

    @property
    def name(self) -> str:
        return f"{self.model} on {'' if self.tp == 1 else f'{self.tp} x '}{self.device}"


SCALES = (Scale("Llama-3.2-1B", "rtx-3060"), Scale("Vicuna-7B", "titan-rtx"), Scale("Llama-2-70B", "a100", 4))
NODES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)


def request_of(scale: Scale, context: int) -> PlanRequest:
    """One sequence of ``context`` tokens, half of them prompt, and Medusa's heads as published."""
    spec = ModelSpec.from_config(CONFIGS[scale.model], scale.model)
    return plan_request(spec, scale.device, Workload(context), tp=scale.tp)


def sensitivity(scale: Scale, nodes: Sequence[int] = NODES, contexts: Sequence[int] = CONTEXTS) -> list[Row]:
    """Rows by ``axis``: the fastest plan for each value, whether or not it fits the device.

    ``heads`` and ``nodes`` are at the first of ``contexts``; ``kv`` also with int8 pages.
    """
    request = request_of(scale, contexts[0])
    choices = candidates(request)
    depths = range(max(c.heads for c in choices) + 1)
    rows = [_row(request, "heads", n, [c for c in choices if c.heads == n]) for n in depths]
    rows += [_row(request, "nodes", n, [c for c in choices if c.tree_size == n]) for n in nodes]
    for context in contexts:
        for kv_dtype in (None, "int8"):
            longer = replace(request_of(scale, context), kv_dtype=kv_dtype)
            rows.append(_row(longer, "kv", context, candidates(longer)))
    return [{"scale": scale.name, **row} for row in rows]


def _row(request: PlanRequest, axis: str, value: int, choices: Sequence[PlanCandidate]) -> Row:
    best = fastest(choices, float("inf"))
    if best is None:
        raise ValueError(f"no plan has {axis} = {value}; of {axis} plans have other values")
    return {
        "axis": axis, "value": value, "kv_dtype": request.kv_dtype or request.spec.dtype, "heads": best.heads,
        "nodes": best.tree_size, "chunk": best.chunk,
        "generation_bytes": best.total_bytes - weight_bytes(request.spec, request.tp),
        "tokens_per_step": best.tokens_per_step, "tokens_per_s": best.speed.tokens_per_second,
        "fits": best.total_bytes <= request.device.memory,
    }  # fmt: skip
