"""Drafters as trainable modules. Their layers are computed by the code that drafts, with differentiable operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from specmemo_kernels.drafting.clover import CloverDrafter
from specmemo_kernels.drafting.eagle import EagleDrafter
from specmemo_kernels.drafting.medusa_heads import MedusaHeads
from specmemo_kernels.drafting.published_config import CloverConfig, Eagle3Config
from specmemo_kernels.drafting.published_tensors import tensor_shapes
from specmemo_kernels.drafting.vocabulary import TargetVocabulary
from specmemo_kernels.ops import Kernels
from specmemo_kernels.ops.dispatch import implementation
from specmemo_kernels.training.attention import UnrolledAttention
from specmemo_kernels.training.target_states import FrozenTarget, TargetStates

Tensor = torch.Tensor


class Trainable(nn.Module, ABC):
    """A drafter in training: float32 parameters, computation in the target's dtype.

    Attributes:
        depth: tokens that it drafts behind each position.
        tokens: ``[draft vocabulary]`` int64, the target's token of each row of the vocabulary matrix; ``None``: all.
        hidden_loss: weight of the difference between the vocabulary matrix's inputs and the target's.
    """

    tokens: Tensor | None = None
    hidden_loss = 0.0

    def __init__(self, target: FrozenTarget, depth: int) -> None:
        super().__init__()
        self._target = (target,)  # a tuple: the target's modules aren't part of this module
        self.depth = depth

    @property
    def target(self) -> FrozenTarget:
        return self._target[0]

    def rows(self, length: int) -> int:
        """Positions of a window of ``length`` tokens from which all drafts lie inside it."""
        return length - 1 - self.depth

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The parameters by published key, in float32."""

    @abstractmethod
    def unrolled(self, states: TargetStates, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Inputs of the vocabulary matrix, a ``[B, rows, hidden_size]`` per depth.

        Row t of depth d (from 0) predicts token t + 2 + d, given the text's tokens before it.
        """

    def matrix(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The vocabulary matrix and its bias: the target's, or its own."""
        own = tensors.get("lm_head.weight")
        return (self.target.weight, self.target.bias) if own is None else (own, None)

    def cast(self) -> dict[str, Tensor]:
        """The parameters in the target's dtype."""
        return {key: tensor.to(self.target.dtype) for key, tensor in self.tensors().items()}


class TrainableMedusa(Trainable):
    """Medusa heads without own vocabulary matrices; new heads predict what the lm_head does."""

    def __init__(self, target: FrozenTarget, depth: int, layers: int) -> None:
        super().__init__(target, depth)
        vocabulary, width = target.weight.shape
        self.heads = MedusaHeads(width, vocabulary, depth, layers, own_lm_head=False)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.heads.named_parameters())

    def unrolled(self, states: TargetStates, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        hidden = states.hidden[:, : self.rows(states.tokens.shape[1])]
        features: Tensor = functional_call(self.heads, dict(tensors), (hidden,))
        return list(features)


class _Published(Trainable):
    """A drafter with the tensors of a published configuration."""

    def __init__(self, target: FrozenTarget, depth: int, config: Eagle3Config | CloverConfig) -> None:
        super().__init__(target, depth)
        self.config = config
        names = {key: shape for key, shape in tensor_shapes(config).items() if self._has(key)}
        self._keys = list(names)
        self._values = nn.ParameterList(_initial(key, shape) for key, shape in names.items())
        self._pass_through()

    #: Matrices that pass a state on, and its place among their inputs.
    _passed: Mapping[str, int]
    #: The norm before the vocabulary matrix, which begins as the target's.
    output_norm: str

    def _has(self, key: str) -> bool:
        return True

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self._keys, self._values, strict=True))

    @torch.no_grad()
    def _pass_through(self) -> None:
        """Let a new drafter pass a hidden state on: layers add nothing, and matrices of one state are the identity.

        Its first predictions are then those of the state's own lm_head, which Medusa's zeros give too.
        """
        for key, value in self.tensors().items():
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                value.zero_()
        for key, place in self._passed.items():
            value = self.tensors()[key]
            size = len(value)
            value.zero_()[:, place * size : (place + 1) * size] = torch.eye(size)

    @torch.no_grad()
    def assign(self, key: str, value: Tensor) -> None:
        """Set a parameter."""
        self._values[self._keys.index(key)].copy_(value)

    def _arguments(self, tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Arguments of a drafter's class."""

        def no_tokens(_: Tensor, __: int) -> tuple[Tensor, Tensor]:
            raise AssertionError("training computes log-probabilities by itself")

        target = self.target
        vocabulary = TargetVocabulary(target.embedding, no_tokens, len(target.weight), target.dtype)
        return self.config, tensors, vocabulary, target.model.config.get_text_config().num_hidden_layers, "reference"


class TrainableEagle3(_Published):
    """EAGLE-3, trained over as many unrolled steps as it drafts tokens.

    Args:
        tokens: the draft vocabulary, see :attr:`Trainable.tokens`; needs ``config.own_lm_head``.
    """

    config: Eagle3Config
    output_norm = "norm.weight"

    def __init__(self, target: FrozenTarget, depth: int, config: Eagle3Config, tokens: Tensor | None) -> None:
        self._passed = {"fc.weight": config.num_aux - 1}
        super().__init__(target, depth, config)
        self.tokens = tokens
        if config.own_lm_head:
            self.assign("lm_head.weight", target.weight if tokens is None else target.weight[tokens])

    def _has(self, key: str) -> bool:
        absent = {"embed_tokens.weight", "d2t"} | (set() if self.config.own_lm_head else {"lm_head.weight"})
        return key not in absent

    def unrolled(self, states: TargetStates, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        windows, length = states.tokens.shape
        rows, drafter = self.rows(length), _Eagle(*self._arguments(tensors))
        attention = UnrolledAttention(windows)
        features = drafter.combined(states.features[:, :rows].flatten(0, 1))
        positions = torch.arange(rows, device=states.tokens.device).repeat(windows)
        inputs = []
        for step in range(self.depth):
            tokens = states.tokens[:, 1 + step : 1 + step + rows].flatten()
            rotary = drafter.rotary(positions + step, features.dtype)
            features = drafter.run(tokens, features, rotary, attention, None)
            inputs.append(drafter.head_input(features).view(windows, rows, -1))
        return inputs


class TrainableClover(_Published):
    """Clover-2. Its loss includes the distance of its heads' outputs from the target's hidden states."""

    config: CloverConfig
    hidden_loss = 10.0  # clover/train: 10 SmoothL1 + cross-entropy
    output_norm = "clover_head_norm.weight"
    _passed: Mapping[str, int] = {"clover_head_mlp.weight": 0, "clover_head_mlp2.weight": 0}

    def __init__(self, target: FrozenTarget, depth: int, config: CloverConfig) -> None:
        super().__init__(target, depth, config)
        self.assign("clover_embed_tokens.weight", target.weight)

    def unrolled(self, states: TargetStates, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        windows, length = states.tokens.shape
        rows, drafter = self.rows(length), _Clover(*self._arguments(tensors))
        positions = torch.arange(rows, device=states.tokens.device).repeat(windows)
        features, tokens = states.features[:, :rows].flatten(0, 1), states.tokens[:, 1 : 1 + rows].flatten()
        hidden = drafter.run(tokens, features, positions, UnrolledAttention(windows), None)
        inputs = [drafter.first(hidden)]
        for step in range(1, self.depth):
            hidden, following = drafter.following(hidden, states.tokens[:, 1 + step : 1 + step + rows].flatten())
            inputs.append(following)
        return [each.view(windows, rows, -1) for each in inputs]


class _Eagle(EagleDrafter):
    @property
    def kernels(self) -> Kernels:
        return implementation("reference", self.device)


class _Clover(CloverDrafter):
    @property
    def kernels(self) -> Kernels:
        return implementation("reference", self.device)


def _initial(key: str, shape: tuple[int, ...]) -> nn.Parameter:
    """Ones for norms, zeros for biases, uniform with ``nn.Linear``'s bound for matrices."""
    if key.endswith("bias"):
        return nn.Parameter(torch.zeros(shape))
    if len(shape) == 1:
        return nn.Parameter(torch.ones(shape))
    return nn.Parameter(torch.empty(shape).uniform_(-1, 1) / shape[1] ** 0.5)
