"""What drafters made of published tensors share: their layers' keys and values, embedding, norms and linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Generic, TypeVar

import torch

from specmemo_kernels import ops
from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.drafting import matrices
from specmemo_kernels.drafting.decoder_layer import DecoderLayer, RotaryEmbedding
from specmemo_kernels.drafting.published_config import DrafterConfig
from specmemo_kernels.drafting.published_spec import drafter_spec
from specmemo_kernels.drafting.published_tensors import tensor_shapes
from specmemo_kernels.drafting.vocabulary import TargetVocabulary
from specmemo_kernels.ops import Kernels
from specmemo_kernels.ops.weight_codes import CODE_BITS

Tensor = torch.Tensor
Config = TypeVar("Config", bound=DrafterConfig)


class TensorDrafter(Generic[Config]):
    """Base of the drafters in :mod:`specmemo_kernels.drafting` that read features.

    Args:
        config, tensors: of a published drafter (:mod:`specmemo_kernels.drafting.published`), its matrices as in
            :mod:`specmemo_kernels.drafting.matrices`.
        vocabulary: the target's embedding and lm_head.
        target_layers: number of the target's layers.
        backend: of the operators.

    Attributes:
        spec: its sizes.
    """

    def __init__(
        self,
        config: Config,
        tensors: Mapping[str, Tensor],
        vocabulary: TargetVocabulary,
        target_layers: int,
        backend: str | None,
    ) -> None:
        self.config, self.vocabulary, self.backend = config, vocabulary, backend
        self.tensors = dict(tensors)
        shapes, keys = tensor_shapes(config), matrices.stored_keys(tensors)
        bits = None if len(keys) == len(tensors) else CODE_BITS
        self.spec = drafter_spec(config, {key: prod(shapes[key]) for key in keys}, vocabulary.vocab_size, bits)
        self.max_depth, self.beam = self.spec.max_depth, self.spec.beam
        self.vocab_size = self.spec.vocab_rows or vocabulary.vocab_size
        sizes, like = config.layer, next(iter(self.tensors.values()))
        self.dtype, self.device, self.eps = vocabulary.dtype, like.device, sizes.rms_norm_eps
        layer = LayerKV(sizes.num_kv_heads, sizes.head_dim, sizes.head_dim, self.dtype, self.device, of_drafter=True)
        self.layers = (layer,) * config.num_layers
        self.num_qo_heads = sizes.num_qo_heads
        self.feature_ids = self._feature_ids(target_layers)
        self.decoder = [
            DecoderLayer(sizes, self.tensors, f"layers.{i}.", target_layers + i) for i in range(config.num_layers)
        ]
        self.rotary = RotaryEmbedding(sizes, self.device)

    def _feature_ids(self, target_layers: int) -> tuple[int, ...]:
        """The hidden states that it reads, see :attr:`specmemo_kernels.drafting.base.FeatureDrafter.feature_ids`."""
        raise NotImplementedError

    @property
    def state_size(self) -> int:
        """Elements of a sequence's state."""
        return self.config.layer.hidden_size

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def coded_nbytes(self) -> int | None:
        """Bytes with all matrices in 4 bits; ``None`` if they are already."""
        if self.spec.head_bits is not None:
            return None
        return self.spec.packed_bytes + sum(tensor.nbytes for tensor in self.tensors.values() if tensor.ndim == 1)

    @property
    def workspace(self) -> int:
        """Bytes that the operators keep between calls for its products."""
        layer, backend = self.config.layer, ops.backend_name(self.backend, self.device)
        inputs = max(shape[1] for shape in tensor_shapes(self.config).values() if len(shape) == 2)
        mlp = ops.linear_workspace(backend, self.dtype, layer.hidden_size, layer.intermediate_size)
        return max(ops.linear_workspace(backend, self.dtype, inputs), mlp)

    @property
    def kernels(self) -> Kernels:
        """The operators."""
        return ops.kernels(self.backend, self.device)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """The linear layer ``name`` of ``x``."""
        return matrices.linear(self.kernels, self.tensors, name, x)

    def embedding(self, name: str, tokens: Tensor) -> Tensor:
        """Rows of its embedding ``name``, ``[N, hidden_size]``."""
        return matrices.embedding(self.tensors, name, tokens, self.config.layer.hidden_size, self.dtype)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """The RMSNorm ``name`` of ``x``."""
        return self.kernels.rms_norm(x, self.tensors[f"{name}.weight"], self.eps, 0.0, True)
