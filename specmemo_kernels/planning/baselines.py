"""Memory of other implementations by part, for comparison: plain transformers, and Medusa as published.

As in :mod:`specmemo_kernels.planning.footprint`: peak bytes of live tensors, without the model's weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specmemo_kernels.planning.drafter_spec import HeadsSpec
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.predicted_shape import page_token_bytes, pass_row_bytes


@dataclass(frozen=True)
class Workload:
    """Sizes of a generation task.

    Attributes:
        context: tokens per sequence at the end, prompt and answer.
        batch: number of sequences.
        prompt: tokens of the prompt; 0: half of the context.
    """

    context: int
    batch: int = 1
    prompt: int = 0

    def __post_init__(self) -> None:
        if self.prompt == 0:
            object.__setattr__(self, "prompt", max(1, self.context // 2))
        if self.batch < 1 or not 1 <= self.prompt < self.context:
            raise ValueError(
                f"a workload needs batch >= 1 and 1 <= prompt < context, got batch {self.batch}, prompt {self.prompt}, "
                f"context {self.context}"
            )

    @property
    def new_tokens(self) -> int:
        return self.context - self.prompt


@dataclass(frozen=True)
class MedusaRun:
    """Medusa as published (FasterDecoding/Medusa): five heads with a vocabulary matrix each, ``mc_sim_7b_63``.

    Attributes:
        nodes: tree size, root included. leaves, depth: number and length of its paths.
    """

    heads: HeadsSpec = field(default_factory=HeadsSpec)
    nodes: int = 64
    leaves: int = 42
    depth: int = 4


def plain_parts(spec: ModelSpec, workload: Workload, tp: int = 1) -> dict[str, int]:
    """transformers' greedy ``generate`` without padding: dynamic cache, fused attention, last logits only.

    The peak is the maximum of: a layer of the prefill; a layer of the last step, while old and new keys are
    concatenated; the logits of a step, in the model's dtype and in float32. ``tp`` as in :func:`page_token_bytes` and
    :func:`pass_row_bytes`.
    """
    batch, row, unpacked = workload.batch, pass_row_bytes(spec, tp), -(-spec.unpacked_matrix_bytes // tp)
    kv = page_token_bytes(spec, None, tp)
    full = batch * workload.context * kv
    logits = batch * spec.vocab_size * (spec.dtype_bytes + 4)
    moments = (
        {
            "kv_cache": batch * workload.prompt * kv,
            "activations": unpacked + batch * workload.prompt * row,
            "logits": 0,
        },
        {"kv_cache": full + full // (2 * spec.num_layers), "activations": unpacked + batch * row, "logits": 0},
        {"kv_cache": full, "activations": 3 * batch * spec.hidden_size * spec.dtype_bytes, "logits": logits},
    )
    return max(moments, key=lambda parts: sum(parts.values()))


def medusa_parts(spec: ModelSpec, workload: Workload, run: MedusaRun | None = None, tp: int = 1) -> dict[str, int]:
    """Peak of Medusa's published code.

    - the cache for ``max_position_embeddings`` tokens, candidates included (``initialize_past_key_values``);
    - all heads with their vocabulary matrices;
    - prefill: attention matrices ``[heads, L, L]``, in the softmax once in float32 and twice in the model's dtype;
      then logits of all prompt rows, the model's once and each head's twice (list and stack);
    - a step: the same logits for all nodes, then gathered for all paths of the tree.
    """
    run = run or MedusaRun()
    size, batch, length = spec.dtype_bytes, workload.batch, workload.prompt
    vocab_row = spec.vocab_size * size
    heads = run.heads.num_heads
    scores = batch * (spec.num_qo_heads // tp) * length**2 * (4 + 2 * size)
    logits = batch * length * vocab_row * (1 + 2 * heads)
    gathered = run.leaves * (run.depth + 1) * vocab_row * (1 + heads)
    step = batch * (run.nodes * vocab_row * (1 + 2 * heads) + gathered)
    hidden = batch * length * 3 * spec.hidden_size * size
    unpacked = -(-spec.unpacked_matrix_bytes // tp)
    moments = (
        {"attention_scores": scores, "activations": hidden + batch * length * 4 * spec.hidden_size * size},
        {"logits": logits, "activations": hidden},
        {"logits": step, "activations": unpacked + batch * run.nodes * pass_row_bytes(spec, tp)},
        {"activations": unpacked + batch * length * pass_row_bytes(spec, tp)},
    )
    static = {
        "kv_cache": batch * max(spec.max_context, workload.context) * page_token_bytes(spec, None, tp),
        "heads": run.heads.nbytes(spec, heads, tp),
    }
    return static | max(moments, key=lambda parts: sum(parts.values()))
