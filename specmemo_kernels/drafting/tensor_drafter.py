"""What drafters made of published tensors share: their layers' keys and values, embedding, norms and linear layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specmemo_kernels import ops
from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.drafting.decoder_layer import DecoderLayer, RotaryEmbedding
from specmemo_kernels.drafting.published_config import DrafterConfig
from specmemo_kernels.drafting.vocabulary import TargetVocabulary
from specmemo_kernels.ops import Kernels
from specmemo_kernels.planning.drafter_spec import FeatureDrafterSpec

Tensor = torch.Tensor


class TensorDrafter:
    """Base of the drafters in :mod:`specmemo_kernels.drafting` that read features.

    Args:
        config, tensors: of a published drafter (:mod:`specmemo_kernels.drafting.published`).
        vocabulary: the target's embedding and lm_head.
        target_layers: number of the target's layers.
        backend: of the operators.
        max_depth: maximum depth of a tree. beam: nodes expanded per depth, at most ``vocab_size``.
    """

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        vocabulary: TargetVocabulary,
        target_layers: int,
        backend: str | None,
        *,
        max_depth: int,
        beam: int,
        vocab_size: int,
    ) -> None:
        self.vocabulary, self.backend = vocabulary, backend
        self.max_depth, self.vocab_size, self.beam = max_depth, vocab_size, min(beam, vocab_size)
        self.tensors = dict(tensors)
        spec, like = config.layer, next(iter(self.tensors.values()))
        self.dtype, self.device, self.eps = vocabulary.dtype, like.device, spec.rms_norm_eps
        layer = LayerKV(spec.num_kv_heads, spec.head_dim, spec.head_dim, self.dtype, self.device, of_drafter=True)
        self.layers = (layer,) * config.num_layers
        self.num_qo_heads, self.state_size = spec.num_qo_heads, spec.hidden_size
        self.decoder = [
            DecoderLayer(spec, self.tensors, f"layers.{i}.", target_layers + i) for i in range(config.num_layers)
        ]
        self.rotary = RotaryEmbedding(spec, self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def kernels(self) -> Kernels:
        """The operators."""
        return ops.kernels(self.backend, self.device)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """The linear layer ``name`` of ``x``."""
        bias = self.tensors.get(f"{name}.bias")
        return self.kernels.linear(x, self.tensors[f"{name}.weight"], bias, None, False)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """The RMSNorm ``name`` of ``x``."""
        return self.kernels.rms_norm(x, self.tensors[f"{name}.weight"], self.eps, 0.0, True)

    def elements(self, *prefixes: str) -> int:
        """Elements of all weights whose keys begin with one of ``prefixes``."""
        return sum(tensor.numel() for key, tensor in self.tensors.items() if key.startswith(prefixes))

    def spec_with(
        self, kind: str, *, pair: int, node: int, vocabulary: int = 0, features: int = 1, block: int = 0, rows: int = 0
    ) -> FeatureDrafterSpec:
        """Its sizes; see :class:`FeatureDrafterSpec` for the numbers of elements. ``features``: hidden states read."""
        layer = self.decoder[0].spec
        widest = 8 * layer.hidden_size + 3 * max(layer.intermediate_size, layer.num_qo_heads * layer.head_dim)
        return FeatureDrafterSpec(
            kind, self.max_depth, self.beam, self.elements(""), pair, node, vocabulary, len(self.layers),
            layer.num_kv_heads, layer.head_dim, features * self.vocabulary.hidden_size, widest, block, rows,
        )  # fmt: skip
