"""Recurrent and convolution layers (mixers) in our forward passes: their states come from the state pool.

A mixer's own code runs, with a cache of transformers' kind that holds the states of the rows it gets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from specmemo_kernels.cache.state_pool import MixerSpec
from specmemo_kernels.integrations.hf.convolution import fast_convolutions
from specmemo_kernels.integrations.hf.recurrence import FEW_TOKENS, Recurrence
from specmemo_kernels.integrations.hf.replaced import OurForward, ReplacedForwards

Tensor = torch.Tensor
#: States that an unknown layer may have; transformers' layers have up to four (Inkling).
_MOST_STATES = 8
#: A state tensor in a cache: its kind and its index among those.
StateKey = tuple[str, int]


class HoldsKeys(Exception):
    """A module stores keys and values in its cache, so it is an attention layer."""


class MixerCache(Cache):
    """A cache for one call of one mixer.

    Args:
        layer: the mixer's layer index. keys, states: the states before the call; none for new sequences.
        cut: the states of convolutions after this many of the call's tokens are kept in ``windows``.
    """

    def __init__(
        self, layer: int, keys: Sequence[StateKey] = (), states: Sequence[Tensor] = (), cut: int | None = None
    ) -> None:
        numbers = [number for kind, number in keys if kind != "linear"]
        count = 1 + max(numbers, default=_MOST_STATES - 1)
        self.state: Any = LinearAttentionLayer(number_of_states=count)
        self.cut, self.windows = cut, dict[StateKey, Tensor]()
        self.linear: Tensor | None = None
        super().__init__(layers=[self.state] * (layer + 1))
        for (kind, number), tensor in zip(keys, states, strict=bool(states)):
            self._set(kind, number, tensor)

    def _set(self, kind: str, number: int, tensor: Tensor) -> None:
        state = self.state
        if kind == "linear":
            self.linear = tensor
            return
        if kind == "conv":
            state.conv_states[number], state.conv_kernel_size[number] = tensor, tensor.shape[-1]
            state.is_conv_states_initialized[number] = True
            state.dtype, state.device = tensor.dtype, tensor.device
        else:
            state.recurrent_states[number] = tensor
            state.is_recurrent_states_initialized[number] = True
        state.has_previous_state[number] = True

    def contents(self) -> dict[StateKey, Tensor]:
        """The states after the call."""
        kinds = (("conv", self.state.conv_states), ("recurrent", self.state.recurrent_states))
        found = {(kind, i): tensor for kind, states in kinds for i, tensor in states.items() if tensor is not None}
        return found if self.linear is None else found | {("linear", 0): self.linear}

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        columns = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        if self.cut is not None:
            width = self.state.conv_states[state_idx].shape[-1]
            self.windows["conv", state_idx] = columns[..., self.cut : self.cut + width]
        return columns

    def update(self, *_: Any, **__: Any) -> Any:
        raise HoldsKeys

    def get_linear_cache(self, _: int) -> Tensor | None:
        """MiniMax's name for its state."""
        return self.linear

    def set_linear_cache(self, _: int, state: Tensor) -> None:
        self.linear = state


@dataclass(frozen=True, eq=False)
class Mixer:
    """A recurrent or convolution layer.

    Attributes:
        keyword: its argument for a cache. layer: its layer index. index: its place among the model's mixers.
        keys: its states in a cache, in the order of ``spec.states``.
        arguments: its other arguments in a pass of one token.
        outputs: its number of outputs, of which the first one is used.
        steps_alone: tokens behind the prompt are fed one by one, the nodes of one depth of all trees at a time, because
            that is about as fast, or because it computes other results for a token alone, as ``generate`` does.
        few: its ``forward`` with a token-by-token recurrence, for up to :data:`FEW_TOKENS` tokens, if it has one.
        divisible: :meth:`divided` is right.
        prompts_alone: it is wrong for several tokens behind others, so prompts too are fed one by one.
    """

    module: nn.Module
    keyword: str
    layer: int
    index: int
    keys: tuple[StateKey, ...]
    spec: MixerSpec
    arguments: Mapping[str, Any]
    outputs: int = 1
    steps_alone: bool = False
    prompts_alone: bool = False
    few: Recurrence | None = None
    divisible: bool = False

    @property
    def alone_differs(self) -> bool:
        """Whether it computes other results for a token alone, as ``generate`` does behind a prompt."""
        return self.spec.least_rows > 1

    @property
    def kind(self) -> tuple[type, MixerSpec]:
        """Equal for mixers with the same code and sizes."""
        return type(self.module), self.spec

    def arguments_for(self, sequences: int, tokens: int) -> dict[str, Any]:
        """Other arguments for ``sequences`` rows of ``tokens`` tokens, all at the same position."""
        index = torch.zeros(sequences, tokens, dtype=torch.int64, device=self.spec.device)
        return arguments_of_rows(self.arguments, 1, index)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the mixer on a pass's packed rows, or its own ``forward`` outside of our passes."""
        current = _pass.get()
        if current is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        result = current.run(self, *with_hidden_states(args, kwargs))
        return result if self.outputs == 1 else (result, *[None] * (self.outputs - 1))

    def call(
        self, x: Tensor, states: Sequence[Tensor], others: Mapping[str, Any], *, alone: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """The results and the new states of sequences ``x`` ``[B, L, hidden_size]`` behind ``states``, if any.

        ``alone``: feed the tokens one by one.
        """
        if alone and x.shape[1] > 1:
            parts = []
            for i in range(x.shape[1]):
                part, states = self.call(x[:, i : i + 1], states, others)
                parts.append(part)
            return torch.cat(parts, dim=1), [*states]
        cache = MixerCache(self.layer, self.keys, states)
        forward = type(self.module).forward if self.few is None or x.shape[1] > FEW_TOKENS else self.few.function()
        output = self._run(forward, x, others, cache)
        found = cache.contents()
        return output, [found[key] for key in self.keys]

    def divides(self, tokens: int) -> bool:
        """Whether :meth:`divided` takes this many tokens."""
        return self.divisible and (self.few is None or tokens <= FEW_TOKENS)

    def divided(
        self, x: Tensor, states: Sequence[Tensor], others: Mapping[str, Any], cut: int
    ) -> tuple[Tensor, list[Tensor]]:
        """The results of :meth:`call`, and the states after the first ``cut`` tokens.

        A convolution's state is a window of its input; a recurrence is run in two parts.
        """
        cache, found = MixerCache(self.layer, self.keys, states, cut), list[Tensor]()
        forward = type(self.module).forward if self.few is None else self.few.function(cut, found)
        output = self._run(forward, x, others, cache)
        recurrent = [key for key in self.keys if key[0] != "conv"]
        after = cache.windows | dict(zip(recurrent, found, strict=True))
        return output, [after[key] for key in self.keys]

    def _run(self, forward: Any, x: Tensor, others: Mapping[str, Any], cache: MixerCache) -> Tensor:
        with fast_convolutions(x):
            output = forward(self.module, x, **{**others, self.keyword: cache, "attention_mask": None})
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result


def with_hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """The hidden states, and the other arguments, of a mixer's call."""
    others = dict(kwargs)
    return (args[0] if args else others.pop("hidden_states")), others


def arguments_of_rows(others: Mapping[str, Any], count: int, index: Tensor) -> dict[str, Any]:
    """The other arguments of a mixer for rows ``index`` of ``count``."""
    return {name: _of_rows(value, count, index) for name, value in others.items()}


def _of_rows(value: Any, count: int, index: Tensor) -> Any:
    if isinstance(value, tuple):
        return tuple(_of_rows(part, count, index) for part in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, count):
        return value[0][index]
    return value


class PackedPass(Protocol):
    """The mixers' part of a forward pass (:class:`specmemo_kernels.integrations.hf.mixer_pass.MixerPass`)."""

    def run(self, mixer: Mixer, hidden: Tensor, others: Mapping[str, Any]) -> Tensor:
        """The result ``[1, N, ...]`` of packed rows ``hidden`` ``[1, N, hidden_size]``."""


_pass: ContextVar[PackedPass | None] = ContextVar("specmemo_mixers", default=None)


@dataclass(frozen=True)
class Mixers:
    """The recurrent and convolution layers of a model, in the order in which they run."""

    mixers: tuple[Mixer, ...] = ()
    _forwards: ReplacedForwards = field(default_factory=ReplacedForwards, repr=False, compare=False)

    @property
    def specs(self) -> tuple[MixerSpec, ...]:
        return tuple(mixer.spec for mixer in self.mixers)

    @property
    def least_chunk(self) -> int:
        """The smallest prefill chunk with which every part of a prompt has the mixers' least rows."""
        return max((2 * mixer.spec.least_rows - 1 for mixer in self.mixers), default=1)

    @property
    def may_resume(self) -> bool:
        """Whether a written text's state is what the same text as a prompt would give."""
        return not any(mixer.alone_differs for mixer in self.mixers)

    @contextmanager
    def running(self, current: PackedPass | None) -> Iterator[None]:
        """Run the mixers of passes in this context (thread, task) on packed rows."""
        if not self.mixers:
            yield
            return
        with self._forwards.installed(lambda: [OurForward(m.module, m.forward) for m in self.mixers]):
            token = _pass.set(current)
            try:
                yield
            finally:
                _pass.reset(token)
