"""Finds a model's recurrent and convolution layers, and checks that tokens may be fed to them in pieces."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specmemo_kernels.cache.state_pool import MixerSpec
from specmemo_kernels.integrations.hf.cache_argument import CACHE_ARGUMENTS
from specmemo_kernels.integrations.hf.convolution import fast_convolutions
from specmemo_kernels.integrations.hf.mask import UnsupportedModel, unsupported
from specmemo_kernels.integrations.hf.mixers import (
    HoldsKeys,
    Mixer,
    MixerCache,
    Mixers,
    with_hidden_states,
)
from specmemo_kernels.integrations.hf.recurrence import Recurrence
from specmemo_kernels.planning.model_config import RECURRENT_KINDS

Tensor = torch.Tensor
#: Tokens of the check, and those of them that come first.
_TOKENS, _FIRST = 7, 3
#: Magnitudes of the tokens of further checks. A limit of time steps acts on some inputs only, more often on large ones:
#: that of Nemotron-H and Zamba2 changed results by 5e-4 to 2e-3 at both, for weights with which it didn't at 1. In the
#: other families of HYBRIDS (python_tests) rounding stayed below 6e-6.
_MAGNITUDES = (10.0, 100.0)
#: Maximum relative distance of two results by rounding, for float32 and for shorter dtypes.
_TOLERANCE, _SHORT_TOLERANCE = 1e-5, 0.02
#: In float32 also this many times the change by noise in the input's last bits, which a gated norm of small values
#: amplifies. In 61 random mixers of 10 families rounding was 0.1 to 1.4 times that change; where tokens one by one give
#: other results, the distance was 360 times and more.
_AMPLIFIED = 8
#: Calls that are timed; how much longer than together tokens may take one by one. A tree of 8 nodes has about twice as
#: many rows as paths, and its padded rows cost a gated delta rule of 100M parameters 13.6 ms instead of 5.8.
_TIMED, _LONGER = 5, 1.5


def is_recurrent(config: Any) -> bool:
    """Whether a model's configuration has layers with a state per sequence."""
    text = config.get_text_config()
    return bool(RECURRENT_KINDS & set(getattr(text, "layer_types", None) or ()))


@contextmanager
def trials(model: nn.Module) -> Iterator[dict[nn.Module, Mixer]]:
    """Give each module that takes a cache an empty one; the modules that store a state in it, in order."""
    found: dict[nn.Module, Mixer] = {}
    keywords = _cache_keywords(model)
    for module, keyword in keywords.items():
        vars(module)["forward"] = _Trial(module, keyword, found)
    try:
        yield found
    finally:
        for module in keywords:
            del vars(module)["forward"]


def _cache_keywords(model: nn.Module) -> dict[nn.Module, str]:
    """The innermost modules that take a cache, each with its argument's name."""
    keywords = {module: keyword for module in model.modules() if (keyword := _keyword(module))}
    return {m: k for m, k in keywords.items() if not any(part in keywords for part in m.modules() if part is not m)}


def _keyword(module: nn.Module) -> str | None:
    """The argument with which a layer's part gets its cache."""
    if not isinstance(getattr(module, "layer_idx", None), int) or "forward" in vars(module):
        return None
    return next((name for name in CACHE_ARGUMENTS if name in inspect.signature(type(module).forward).parameters), None)


def stateful_modules(model: nn.Module) -> list[Mixer]:
    """The modules that store a state, from a call of each with one row; attention isn't run."""
    found: dict[nn.Module, Mixer] = {}
    config: Any = model.config
    width = config.get_text_config().hidden_size
    for module, keyword in _cache_keywords(model).items():
        parameter, names = next(module.parameters()), inspect.signature(type(module).forward).parameters
        row = torch.zeros(1, 1, width, dtype=parameter.dtype, device=parameter.device)
        needed = {name: None for name in ("position_embeddings", "attention_mask") if name in names}
        with suppress(HoldsKeys, UnsupportedModel, AttributeError, RuntimeError, TypeError, ValueError):
            _Trial(module, keyword, found)(row, **needed)
    return list(found.values())


class _Trial:
    """A module's ``forward`` with an empty cache."""

    def __init__(self, module: nn.Module, keyword: str, found: dict[nn.Module, Mixer]) -> None:
        self.module, self.keyword, self.found = module, keyword, found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, layer = self.module, int(self.module.layer_idx)  # type: ignore[arg-type]
        forward, cache, result = type(module).forward, MixerCache(layer), None
        named = dict(zip(list(inspect.signature(forward).parameters)[2:], args[1:], strict=False))
        hidden, others = with_hidden_states(args[:1], named | kwargs)
        with suppress(HoldsKeys):
            result = forward(module, hidden, **{**others, self.keyword: cache})
        if not (states := cache.contents()):
            return forward(module, *args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        if not isinstance(output, Tensor) or output.shape[:-1] != hidden.shape[:-1]:
            raise unsupported(module, "keeps a recurrent state within attention")
        if module in self.found:
            raise unsupported(module, "has a recurrent state and runs twice in one forward pass")
        sizes = tuple((tuple(state.shape[1:]), state.dtype) for state in states.values())
        spec = MixerSpec(sizes, hidden.shape[-1], hidden.dtype, hidden.device)
        outputs = len(result) if isinstance(result, tuple) else 1
        self.found[module] = Mixer(module, self.keyword, layer, len(self.found), tuple(states), spec, others, outputs)
        return result


@torch.no_grad()
def checked(found: dict[nn.Module, Mixer]) -> Mixers:
    """The mixers, with the way in which tokens are fed to them.

    Raises:
        UnsupportedModel: a mixer computes other results in pieces than at once, or reads more than its hidden states.
    """
    modes: dict[Any, dict[str, Any]] = {}
    mixers = []
    for mixer in found.values():
        if mixer.kind not in modes:
            modes[mixer.kind] = _modes(mixer)
        mixers.append(replace(mixer, **modes[mixer.kind]))
    return Mixers(tuple(mixers))


def _modes(mixer: Mixer) -> dict[str, Any]:
    """How tokens behind other tokens are fed to a mixer, by comparison with a pass over all tokens at once."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _TOKENS, mixer.spec.hidden_size, generator=generator, device="cpu")
    x = x.to(mixer.spec.device, mixer.spec.dtype)
    arguments = mixer.arguments_for(1, _TOKENS)
    with fast_convolutions(x):
        output = type(mixer.module).forward(mixer.module, x, **{**arguments, "attention_mask": None})
    expected = output[0] if isinstance(output, tuple) else output
    if not expected.isfinite().all():
        raise unsupported(mixer.module, f"has a recurrent state and computes NaN or infinity in {x.dtype}")
    zeros = {name: _zeros(value) for name, value in arguments.items()}
    if _distance(expected, mixer.call(x, (), zeros)[0]) > 0:
        raise unsupported(mixer.module, "has a recurrent state and reads positions")
    together, alone, limit = _errors(mixer, x, expected, zeros)
    if together <= limit:
        if alone > limit or any(_alone_differs(mixer, x * size, zeros) for size in _MAGNITUDES):
            return {"steps_alone": True, "spec": replace(mixer.spec, least_rows=2)}
        few = Recurrence.of(mixer.module)
        if few is not None and _error(replace(mixer, few=few), x, expected, zeros) > limit:
            few = None
        mixer = replace(mixer, few=few)
        _, states = mixer.call(x[:, :_FIRST], (), zeros)
        steps_alone = _alone_is_fast(mixer, x[:, _FIRST:], states, zeros)
        divisible = not steps_alone and _is_divisible(mixer, x[:, _FIRST:], states, zeros, limit)
        return {"steps_alone": steps_alone, "few": few, "divisible": divisible}
    if alone <= limit:
        return {"steps_alone": True, "prompts_alone": True}
    raise unsupported(
        mixer.module,
        f"computes other results in pieces than at once (relative distance {together:.2g} for several tokens and "
        f"{alone:.2g} token by token, at most {limit} by rounding)",
    )


def _errors(mixer: Mixer, x: Tensor, expected: Tensor, others: dict[str, Any]) -> tuple[float, float, float]:
    """Relative distances from ``expected`` of tokens behind others, together and one by one; at most, of rounding."""
    limit = _SHORT_TOLERANCE
    if x.dtype == torch.float32:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), device="cpu").to(x)
        noise *= torch.finfo(x.dtype).eps
        limit = max(_TOLERANCE, _AMPLIFIED * _distance(expected, mixer.call(x * (1 + noise), (), others)[0]))
    return _error(mixer, x, expected, others), _error(mixer, x, expected, others, alone=True), limit


def _error(mixer: Mixer, x: Tensor, expected: Tensor, others: dict[str, Any], alone: bool = False) -> float:
    first, states = mixer.call(x[:, :_FIRST], (), others)
    behind, _ = mixer.call(x[:, _FIRST:], states, others, alone=alone)
    return _distance(expected, torch.cat([first, behind], dim=1))


def _alone_differs(mixer: Mixer, x: Tensor, others: dict[str, Any]) -> bool:
    """Whether only tokens one by one give other results than all at once."""
    expected, _ = mixer.call(x, (), others)
    together, alone, limit = _errors(mixer, x, expected, others)
    return together <= limit < alone  # false for results that aren't finite


def _is_divisible(mixer: Mixer, x: Tensor, states: list[Tensor], others: dict[str, Any], limit: float) -> bool:
    """Whether one call gives the results of all tokens and the states after some of them."""
    expected, _ = mixer.call(x, [state.clone() for state in states], others)
    for cut in range(1, x.shape[1]):
        _, after = mixer.call(x[:, :cut], [state.clone() for state in states], others)
        try:
            output, found = mixer.divided(x, [state.clone() for state in states], others, cut)
        except (KeyError, ValueError):  # no state between two tokens
            return False
        distances = [_distance(a, b) for a, b in zip([expected, *after], [output, *found], strict=True)]
        if max(distances) > limit:
            return False
    return True


def _alone_is_fast(mixer: Mixer, x: Tensor, states: list[Tensor], others: dict[str, Any]) -> bool:
    """Whether tokens fed one by one take about as long as together; trees then need no padded paths."""
    seconds = {True: math.inf, False: math.inf}
    for _ in range(_TIMED):
        for alone in seconds:
            copies = [state.clone() for state in states]
            started = time.perf_counter()
            mixer.call(x, copies, others, alone=alone)
            if x.device.type == "cuda":
                torch.cuda.synchronize(x.device)
            seconds[alone] = min(seconds[alone], time.perf_counter() - started)
    return seconds[True] <= _LONGER * seconds[False]


def _zeros(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_zeros, value))
    return torch.zeros_like(value) if isinstance(value, Tensor) else value


def _distance(expected: Tensor, result: Tensor) -> float:
    difference = (result.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    return float(difference.nan_to_num(nan=float("inf")))
