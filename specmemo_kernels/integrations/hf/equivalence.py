"""Whether packed passes compute what a model's own forward pass computes, found out by running both on a few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from specmemo_kernels.engine.pressure import is_out_of_memory
from specmemo_kernels.integrations.distributed.ranks import RankError
from specmemo_kernels.integrations.hf.attention import attention_call, views_everywhere
from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.target import run_packed, tapped

Tensor = torch.Tensor

#: Order of the packed nodes: not that of their positions, so that tokens that mix outside of attention show.
_ORDER = (3, 0, 6, 1, 7, 4, 2, 5)
#: Relative distance of two hidden states that rounding explains, for float32 and for shorter dtypes.
_TOLERANCE, _SHORT_TOLERANCE = 0.03, 0.3


@dataclass(frozen=True)
class MaskFacts:
    """``windows`` and ``cached_tokens`` of :class:`specmemo_kernels.integrations.hf.target.ModelFacts`."""

    windows: tuple[int | None, ...]
    cached_tokens: int | None


@contextmanager
def unsupported_errors(model: nn.Module) -> Iterator[None]:
    """Turn errors of a model's own code, run on packed nodes, into :class:`UnsupportedModel`."""
    try:
        yield
    except (UnsupportedModel, RankError):
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise UnsupportedModel(f"{type(model).__name__} can't run a pass over packed nodes ({reason})") from error


@torch.no_grad()
def check_equivalence(model: Any, device: torch.device, vocab_size: int, cut: bool) -> MaskFacts:
    """Compare what reaches the lm_head in the model's own pass over a short prompt and in a packed one.

    Three passes over 8 tokens. The model must be prepared as for
    :func:`specmemo_kernels.integrations.hf.probe.probe`.

    Args:
        model: its vocabulary has ``vocab_size`` tokens; they go in on ``device``.
        cut: run the lm_head on no rows, where nothing comes after it.

    Raises:
        UnsupportedModel: the model's attention masks can't be expressed, or the hidden states differ.
    """
    tokens = _prompt(model.config, vocab_size).to(device)
    positions = torch.arange(len(tokens), device=device)
    with unsupported_errors(model):
        windows = _observe_masks(model, tokens, positions, cut)
        masks = MaskFacts(tuple(windows[layer] for layer in sorted(windows)), _cached_tokens(model, windows))
        own = _own_hidden(model, tokens, positions, cut)
        order = torch.tensor(_ORDER, device=device)
        with tapped(cut) as tap:
            run_packed(model, tokens[order], positions[order], _DenseAttention(order), None, windows)
    packed = tap.hidden[order.argsort().to(tap.hidden.device)]
    short = any(p.dtype.itemsize < 4 for p in model.parameters()) or own.dtype.itemsize < 4
    limit = _SHORT_TOLERANCE if short or torch.is_autocast_enabled(device.type) else _TOLERANCE
    distance = _distance(own, packed)
    if distance > limit:
        raise UnsupportedModel(
            f"{type(model).__name__} computes other hidden states for packed nodes than for a prompt (relative "
            f"distance {distance:.2g}, at most {limit} by rounding); something beside attention mixes tokens"
        )
    return masks


def _prompt(config: Any, vocab_size: int) -> Tensor:
    """As many tokens as :data:`_ORDER` has, none of them one with a meaning of its own (padding, an image)."""
    special = _special_tokens(config.to_dict())
    usual = [token for i in range(1, 64) if (token := 7919 * i % vocab_size) not in special]
    return torch.tensor((usual or [0])[: len(_ORDER)] * len(_ORDER))[: len(_ORDER)]


def _special_tokens(settings: dict[str, Any]) -> set[int]:
    found: set[int] = set()
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= _special_tokens(value)
        elif str(name).endswith(("token_id", "token_index")):
            found |= {each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)}
    return found


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Without dropout, whatever mode the model's modules are in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@dataclass
class _Windows:
    """Stands in for attention where only the masks matter; notes each layer's window."""

    by_layer: dict[int, int | None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, **_: Any) -> Tensor:
        self.by_layer[layer] = window
        return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _observe_masks(model: Any, tokens: Tensor, positions: Tensor, cut: bool) -> dict[int, int | None]:
    """The window of each layer, after a pass in which the model made masks for our attention function."""
    windows = _Windows({})
    with views_everywhere(model), tapped(cut), attention_call(windows):
        model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, return_dict=True)
    return windows.by_layer


def _cached_tokens(model: Any, windows: dict[int, int | None]) -> int | None:
    """Tokens that generate's cache keeps of a layer that may see more; ``None`` if there is no such layer."""
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    kept = {i: layer.sliding_window for i, layer in enumerate(cache.layers) if getattr(layer, "is_sliding", False)}
    return min((most for i, most in kept.items() if (window := windows.get(i)) is None or most < window), default=None)


def _own_hidden(model: Any, tokens: Tensor, positions: Tensor, cut: bool) -> Tensor:
    """``[N, hidden_size]``: what reaches the lm_head in the model's own forward pass."""
    with tapped(cut) as tap:
        mask = torch.ones_like(tokens)[None]
        model(
            input_ids=tokens[None], attention_mask=mask, position_ids=positions[None], use_cache=False, return_dict=True
        )
    return tap.hidden


@dataclass(frozen=True)
class _DenseAttention:
    """Attention over one sequence whose rows lie in any order, in float32: what the operator is specified to compute.

    Attributes:
        positions: ``[N]`` int64, each row's place in the sequence.
    """

    positions: Tensor

    def __call__(
        self,
        _: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        keys, values = (t.float().repeat_interleave(repeats, dim=1) for t in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q.float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        places = self.positions.to(q.device)
        behind = places[:, None] - places[None, :]
        hidden = (behind < 0) | (behind >= (window or len(places)))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(-1, len(places), 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(places)]
        return torch.einsum("hnm,mhd->nhd", weights, values).to(v.dtype).contiguous()


def _distance(own: Tensor, packed: Tensor) -> float:
    """The median row's distance, relative to its length; rows of ``own`` that aren't finite tell nothing."""
    own, packed = own.float(), packed.to(own.device).float()
    rows = own.isfinite().all(dim=-1)
    if not bool(rows.any()):
        return 0.0
    lengths = own[rows].norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    relative = (own[rows] - packed[rows]).norm(dim=-1) / lengths
    return float(relative.nan_to_num(nan=float("inf")).median())
