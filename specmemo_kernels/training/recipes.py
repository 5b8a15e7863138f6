"""New drafters for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specmemo_kernels.drafting.published_config import CloverConfig, Eagle3Config, LayerSpec
from specmemo_kernels.training.target_states import FrozenTarget
from specmemo_kernels.training.trainable import Trainable, TrainableClover, TrainableEagle3, TrainableMedusa

Tensor = torch.Tensor

#: Decoder layers of a new drafter, or residual blocks of a head, where none are given: as published.
LAYERS: Mapping[str, int] = {"medusa": 1, "clover2": 2, "eagle3": 1}


@dataclass(frozen=True)
class DrafterSizes:
    """Sizes of a new drafter.

    Attributes:
        depth: tokens that it drafts. layers: see :data:`LAYERS`.
        intermediate_size: of its layers' MLP; ``None``: the target's, or four times the hidden size.
        draft_vocab: EAGLE-3: tokens of its own vocabulary matrix; 0: it shares the target's lm_head.
        feature_layers: EAGLE-3: the target's layers whose inputs it reads, L for the last one's output; empty: 2, L / 2
            and L - 3 of L layers.
    """

    depth: int
    layers: int
    intermediate_size: int | None = None
    draft_vocab: int = 0
    feature_layers: tuple[int, ...] = ()


def feature_ids(kind: str, sizes: DrafterSizes, layers: int) -> tuple[int, ...]:
    """The target's hidden states that a drafter reads, of a target with ``layers`` layers.

    Raises:
        ValueError: a layer that the target doesn't have.
    """
    if kind == "medusa":
        return ()
    if kind == "clover2":
        return (layers,)
    if wrong := [layer for layer in sizes.feature_layers if not 0 <= layer <= layers]:
        raise ValueError(
            f"feature layers {wrong} don't exist, the target has layers 0 to {layers - 1} ({layers}: the last output)"
        )
    if sizes.feature_layers:
        return sizes.feature_layers
    if layers < 3:
        raise ValueError(f"EAGLE-3 reads the inputs of layers 2, L / 2 and L - 3, the target has {layers} layers")
    return 2, layers // 2, layers - 3


def least_parameters(kind: str, target: FrozenTarget, sizes: DrafterSizes) -> int:
    """Parameters of the matrices that every layer of a drafter has, which isn't built for it."""
    width = target.weight.shape[1]
    if kind == "medusa":
        return sizes.depth * sizes.layers * width**2
    return 3 * sizes.layers * width * _layer(target, sizes).intermediate_size


def new_drafter(kind: str, target: FrozenTarget, sizes: DrafterSizes, training: Tensor, seed: int) -> Trainable:
    """A drafter with the weights of ``seed``.

    Args:
        kind: ``"medusa"``, ``"clover2"`` or ``"eagle3"``.
        training: the training text's tokens, whose most frequent ones are EAGLE-3's vocabulary.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "medusa":
            drafter: Trainable = TrainableMedusa(target, sizes.depth, sizes.layers)
        elif kind == "clover2":
            vocabulary = len(target.weight)
            config = CloverConfig(_layer(target, sizes, heads_alone=True), sizes.layers, sizes.depth, vocabulary)
            drafter = TrainableClover(target, sizes.depth, config)
        else:
            drafter = _eagle3(target, sizes, training)
    if isinstance(drafter, TrainableClover):
        drafter.assign(drafter.output_norm, final_norm(target.model, training[:1]))
    return drafter.to(target.device)


def final_norm(model: Any, tokens: Tensor) -> Tensor:
    """The weights of the RMSNorm before a model's lm_head, ``[hidden_size]``, fitted to its states of ``tokens``."""
    target = FrozenTarget(model, (model.config.get_text_config().num_hidden_layers,))
    states = target.states(tokens.long().to(target.device))
    before, after = states.features.double().flatten(0, 1), states.hidden.double().flatten(0, 1)
    normed = before * before.square().mean(dim=1, keepdim=True).rsqrt()
    return (normed * after).sum(dim=0) / normed.square().sum(dim=0)


def _eagle3(target: FrozenTarget, sizes: DrafterSizes, training: Tensor) -> TrainableEagle3:
    vocabulary, width = target.weight.shape
    ids = target.taps.ids
    tokens = frequent_tokens(training, sizes.draft_vocab, vocabulary) if 0 < sizes.draft_vocab < vocabulary else None
    config = Eagle3Config(
        layer=_layer(target, sizes), num_layers=sizes.layers, target_hidden_size=width, vocab_size=vocabulary,
        draft_vocab_size=vocabulary if tokens is None else len(tokens), num_aux=len(ids), aux_layer_ids=ids,
        norm_before_residual=True, norm_before_fc=False, fc_norm=False, norm_output=False, logit_scale=1.0,
        own_embedding=False, own_lm_head=sizes.draft_vocab > 0,
    )  # fmt: skip
    return TrainableEagle3(target, sizes.depth, config, None if tokens is None else tokens.to(target.device))


def frequent_tokens(training: Tensor, count: int, vocabulary: int) -> Tensor:
    """The ``count`` most frequent of ``vocabulary`` tokens in a text, ascending; of equally frequent ones the first."""
    counts = torch.bincount(training.flatten(), minlength=vocabulary)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def _layer(target: FrozenTarget, sizes: DrafterSizes, heads_alone: bool = False) -> LayerSpec:
    """A Llama layer of the target's width, with its heads and rotary embedding where it has such."""
    config, width = target.model.config.get_text_config(), target.weight.shape[1]
    heads = getattr(config, "num_attention_heads", 0) or max(1, width // 64)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    if heads_alone and width % heads:  # a regressive block splits the width into heads
        raise ValueError(f"clover2 needs a hidden size that is a multiple of the heads, {width} of {heads} heads isn't")
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type") != "llama3":  # kinds that stretch long texts, or differ by layer, aren't needed
        rope = {"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10000.0)}
    inner = sizes.intermediate_size or getattr(config, "intermediate_size", None) or 4 * width
    return LayerSpec(
        hidden_size=width, intermediate_size=inner, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        rms_norm_eps=1e-6, hidden_act="silu", attention_bias=False, mlp_bias=False, qk_norm=False, rope=rope,
        max_position_embeddings=getattr(config, "max_position_embeddings", None) or 4096,
    )  # fmt: skip
