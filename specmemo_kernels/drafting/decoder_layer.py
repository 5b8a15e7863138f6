"""A drafter's own decoder layers, computed by our operators, and the attention of drafted nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from specmemo_kernels import ops
from specmemo_kernels.backends.layers import ACTIVATION_FUNCTIONS
from specmemo_kernels.drafting import matrices
from specmemo_kernels.drafting.base import DraftRows
from specmemo_kernels.drafting.published_config import LayerSpec
from specmemo_kernels.forward.batch import uniform_rows
from specmemo_kernels.forward.step_attention import AttentionParams
from specmemo_kernels.ops import Kernels

Tensor = torch.Tensor
Rotary = tuple[Tensor, Tensor]


class Attention(Protocol):
    """Attention of a layer's rows: ``StepAttention`` for accepted tokens, :class:`BeamAttention` for drafted nodes."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, params: AttentionParams) -> Tensor: ...


class DecoderLayer:
    """A Llama or Qwen3 layer.

    Args:
        spec: its sizes.
        tensors: its weights, by key.
        prefix: of its keys, as ``"layers.0."``.
        index: its place among the pool's layers.
    """

    def __init__(self, spec: LayerSpec, tensors: Mapping[str, Tensor], prefix: str, index: int) -> None:
        self.spec, self.index = spec, index
        self._weights = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        self._params = AttentionParams(spec.head_dim**-0.5)

    def norm(self, kernels: Kernels, name: str, x: Tensor) -> Tensor:
        """The RMSNorm ``name`` of ``x``; ``x`` itself if the layer has none."""
        weight = self._weights.get(f"{name}.weight")
        return x if weight is None else kernels.rms_norm(x, weight, self.spec.rms_norm_eps, 0.0, True)

    def _linear(self, kernels: Kernels, name: str, x: Tensor) -> Tensor:
        return matrices.linear(kernels, self._weights, name, x)

    def query(self, kernels: Kernels, x: Tensor, rotary: Rotary) -> Tensor:
        """``[N, num_qo_heads, head_dim]`` of attention inputs ``x`` ``[N, inputs]``."""
        q = self._linear(kernels, "self_attn.q_proj", x).view(len(x), -1, self.spec.head_dim)
        return rotated(self.norm(kernels, "self_attn.q_norm", q), rotary)

    def key_value(self, kernels: Kernels, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys and values ``[N, num_kv_heads, head_dim]``."""
        k, v = (
            self._linear(kernels, f"self_attn.{name}_proj", x).view(len(x), -1, self.spec.head_dim) for name in "kv"
        )
        return rotated(self.norm(kernels, "self_attn.k_norm", k), rotary), v

    def __call__(
        self,
        kernels: Kernels,
        x: Tensor,
        residual: Tensor,
        rotary: Rotary,
        attention: Attention,
        keep: Tensor | None = None,
    ) -> Tensor:
        """``residual + attention(x)``, then the MLP of its norm added.

        ``keep``: the rows behind the attention, ``[K]`` int64; ``None``: all.
        """
        q = self.query(kernels, x, rotary)
        k, v = self.key_value(kernels, x, rotary)
        out = attention(self.index, q, k, v, params=self._params).flatten(1)
        if keep is not None:
            out, residual = out.index_select(0, keep), residual.index_select(0, keep)
        hidden = residual + self._linear(kernels, "self_attn.o_proj", out)
        return hidden + self._mlp(kernels, self.norm(kernels, "post_attention_layernorm", hidden))

    def _mlp(self, kernels: Kernels, x: Tensor) -> Tensor:
        """One operator, or three products and the activation where matrices are in codes."""
        names = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        if f"{names[0]}.codes" in self._weights:
            gate, up, down = names
            gates = ACTIVATION_FUNCTIONS[self.spec.hidden_act](self._linear(kernels, gate, x))
            return self._linear(kernels, down, gates.mul_(self._linear(kernels, up, x)))
        weights = [self._weights[f"{name}.weight"] for name in names]
        biases = [self._weights.get(f"{name}.bias") for name in names]
        return kernels.gated_mlp(x, *weights, *biases, self.spec.hidden_act, False)


class RotaryEmbedding:
    """Rotary position embedding of a layer, with transformers' frequencies, which don't depend on the text's length."""

    def __init__(self, spec: LayerSpec, device: torch.device) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config: Any = LlamaConfig(
            hidden_size=spec.hidden_size,
            num_attention_heads=spec.num_qo_heads,
            head_dim=spec.head_dim,
            max_position_embeddings=spec.max_position_embeddings,
            rope_parameters=dict(spec.rope),
        )
        self._embedding = LlamaRotaryEmbedding(config).to(device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """Cosines and sines ``[N, 1, head_dim]`` of ``positions`` ``[N]``."""
        like = torch.empty(0, dtype=dtype, device=positions.device)
        cos, sin = self._embedding(like, positions[None])
        return cos[0, :, None], sin[0, :, None]


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the halves of each head of ``x`` ``[N, heads, head_dim]``."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class BeamAttention:
    """Attention of the drafted nodes of one depth: over committed tokens, their own ancestors and themselves.

    The nodes' keys and values stay here, and never reach a page. The operator computes attention over the pages and the
    node itself, whose log-sum-exp merges it with the ancestors'.

    Args:
        both_ways: instead, all nodes of a sequence attend to each other; there is one depth.
    """

    def __init__(self, rows: DraftRows, backend: str | None, both_ways: bool = False) -> None:
        self._both_ways = both_ways
        self._rows, self._kernels = rows, ops.kernels(backend, rows.roots.device)
        self._above: dict[int, Tensor] = {}  # keys and values of all nodes on the way, ``[B * M, A, heads, Dk + Dv]``
        self._rows_above: Tensor | None = None

    def descend(self, parent: Tensor) -> None:
        """Go on with children of the last nodes; ``parent`` ``[B, M]`` int64: their parents among them."""
        above = next(iter(self._above.values()), None)
        if above is None:
            return
        sequences = len(parent)
        first = torch.arange(sequences, device=parent.device)[:, None] * (len(above) // sequences)
        self._rows_above = (parent + first).flatten()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, params: AttentionParams) -> Tensor:
        rows, pool = self._rows, self._rows.pool
        nodes = len(q) // len(rows.roots)
        indptr, _, mask = uniform_rows(len(rows.roots), nodes, q.device)
        if self._both_ways:
            mask = mask[:nodes].sum(0, keepdim=True).expand(len(q), -1).contiguous()
        out, lse = self._kernels.tree_attention(
            q, k, v, pool.k_pages[layer], pool.v_pages[layer], rows.block_table, rows.seq_lens, indptr, mask, *params,
            nodes, rows.max_seq_len, False, pool.k_scales[layer], pool.v_scales[layer], nodes,
        )  # fmt: skip
        if self._both_ways:
            return out
        new = torch.cat([k, v], dim=-1)[:, None]
        if layer in self._above:
            assert self._rows_above is not None, "descend is called between the depths"
            above = self._above[layer].index_select(0, self._rows_above)
            out = _merged(out, lse, q, above[..., : k.shape[-1]], above[..., k.shape[-1] :], params.scale)
            new = torch.cat([above, new], dim=1)
        self._above[layer] = new
        return out


def _merged(out: Tensor, lse: Tensor, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention over two sets of keys: that of ``out``, ``lse``, and ``keys``, ``values`` ``[N, A, heads, D]``."""
    shape, wide = (len(q), keys.shape[2], -1), lse.dtype
    scores = torch.einsum("nhgd,nahd->nhga", q.reshape(*shape, q.shape[2]).to(wide), keys.to(wide)) * scale
    weights = torch.cat([lse.view(*shape, 1), scores], dim=-1).softmax(dim=-1)
    merged = weights[..., :1] * out.view(*shape, out.shape[2]).to(wide)
    merged = merged + torch.einsum("nhga,nahd->nhgd", weights[..., 1:], values.to(wide))
    return merged.flatten(1, 2).to(out.dtype)
