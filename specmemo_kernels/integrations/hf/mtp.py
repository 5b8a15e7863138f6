"""A model's own multi-token prediction (MTP) layer as a drafter, as transformers loads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import MTP, POST_NORM, DraftRows
from specmemo_kernels.drafting.decoder_layer import Attention, BeamAttention
from specmemo_kernels.drafting.growth import grow_recurrent
from specmemo_kernels.drafting.source_files import HeadsError
from specmemo_kernels.drafting.vocabulary import TargetVocabulary
from specmemo_kernels.forward.batch import DraftedTrees, TreeBatch
from specmemo_kernels.forward.step_attention import AttentionParams, StepAttention
from specmemo_kernels.integrations.hf.attention import AttentionCall
from specmemo_kernels.integrations.hf.cache_argument import CACHE_ARGUMENT
from specmemo_kernels.integrations.hf.checks import unsupported_errors
from specmemo_kernels.integrations.hf.fuse import FUSED_BACKENDS, FusedLeaves, find_leaves
from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.target import ModelFacts, attach_views, step_mask
from specmemo_kernels.planning.cost import OPERATORS_BESIDE, OPERATORS_PER_LAYER
from specmemo_kernels.planning.feature_drafter_spec import BEAM, DEPTH, DrafterPart, FeatureDrafterSpec
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor


def load_mtp(model: Any) -> Any:
    """The MTP layers in the checkpoint of ``model`` (``MtpModel``).

    Raises:
        HeadsError: the model has none, or its checkpoint doesn't hold them.
    """
    from transformers.modeling_layers import MtpModel

    name, device = type(model).__name__, model.get_output_embeddings().weight.device
    with _mtp_settings(model) as count:
        if not count:
            raise HeadsError(f"heads is {MTP!r}, but the config of {name} has no MTP layers (num_nextn_predict_layers)")
        try:
            mtp: Any = MtpModel.from_pretrained(model, device_map={"": device})
            return mtp.eval()
        except (AttributeError, RuntimeError, TypeError, ValueError, OSError, StopIteration) as error:
            raise HeadsError(
                f"the MTP layers of {name} can't be loaded from {model.config.name_or_path!r}: {error}"
            ) from error


@contextmanager
def _mtp_settings(model: Any) -> Iterator[int]:
    """A context in which the model's configuration describes its MTP layers; yields their number.

    Qwen3-Next's and Qwen3.5's doesn't, though their checkpoints hold one layer under ``mtp.``. Where layers are of
    several kinds, an MTP layer has full attention and the last layer's kind of MLP.
    """
    text = model.config.get_text_config()
    left_out = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    count = getattr(text, "num_mtp_layers", None)
    if count is None:
        count = int(any("mtp" in pattern for pattern in left_out))
    settings: dict[str, Any] = {"num_mtp_layers": count}
    if getattr(text, "layer_types", None) is not None:
        settings["mtp_layer_types"] = ["full_attention"] * count
    if getattr(text, "mlp_layer_types", None) is not None:
        settings["mtp_mlp_layer_types"] = [text.mlp_layer_types[-1]] * count
    missing, before = (
        {key: value for key, value in settings.items() if getattr(text, key, None) is None},
        dict(vars(text)),
    )
    for key, value in missing.items():
        setattr(text, key, value)
    try:
        yield count
    finally:
        for key in missing:
            delattr(text, key)
        vars(text).update(before)


class MtpDrafter:
    """Uses the first MTP layer again and again, as EAGLE uses its layer.

    The pair of position t is the target's last state (behind the final norm) at t and the token t + 1, whose position
    the rotary embedding gets. Implements :class:`specmemo_kernels.drafting.base.FeatureDrafter`.

    Args:
        mtp: transformers' ``MtpModel``.
        facts: of the target.

    Attributes:
        detach: removes the views of the layer's configuration.
    """

    feature_ids, max_depth = (POST_NORM,), DEPTH

    def __init__(self, mtp: Any, vocabulary: TargetVocabulary, facts: ModelFacts, backend: str) -> None:
        self.mtp, self.backend, self._vocabulary = mtp, backend, vocabulary
        self._layer, self._index = mtp.layers[0], len(facts.layers)
        self.vocab_size = vocabulary.vocab_size
        self.beam, self.state_size = min(BEAM, vocabulary.vocab_size), facts.hidden_size
        self.detach = attach_views(self._layer)
        self._leaves = FusedLeaves()
        try:
            if backend in FUSED_BACKENDS:
                self._leaves = find_leaves(self._layer, facts.dtype, backend, invariant=False)
            self.layers, self.num_qo_heads = self._probe(facts)
        except BaseException:
            self.detach()
            raise

    @torch.inference_mode()
    def _probe(self, facts: ModelFacts) -> tuple[tuple[LayerKV, ...], int]:
        """Sizes of the layer's keys and values, and its query heads."""
        layers: list[LayerKV] = []
        heads = 0

        def record(layer: int, q: Tensor, k: Tensor, v: Tensor, *, params: AttentionParams) -> Tensor:
            nonlocal heads
            layers.append(LayerKV(k.shape[1], k.shape[2], v.shape[2], k.dtype, k.device, of_drafter=True))
            heads = q.shape[1]
            return v.repeat_interleave(heads // k.shape[1], dim=1)

        token = torch.zeros(1, dtype=torch.int64, device=facts.device)
        features = torch.zeros(1, facts.hidden_size, dtype=facts.dtype, device=facts.device)
        with unsupported_errors(self._layer):
            self._run(token, features, token, record)
        if not layers:
            raise UnsupportedModel(f"the MTP layer of {type(self.mtp).__name__} doesn't use the attention interface")
        return tuple(layers), heads

    @property
    def _weights(self) -> list[Tensor]:
        norm = self.mtp.shared_post_norm if self.mtp.use_shared_post_norm else None
        return [*self._layer.parameters(), *self._layer.buffers(), *(norm.parameters() if norm is not None else ())]

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's weights; embedding and lm_head are the target's."""
        return sum(weight.nbytes for weight in self._weights)

    @property
    def coded_nbytes(self) -> None:
        """Its weights are used as they are."""
        return None

    @property
    def workspace(self) -> int:
        """Bytes that operators keep for its products: it is a layer like the model's, whose own are counted."""
        return 0

    @property
    def spec(self) -> FeatureDrafterSpec:
        elements, kv = sum(weight.numel() for weight in self._weights), self.layers[0]
        rows = [weight.shape[0] for weight in self._weights if weight.dim() == 2]
        inputs, operators = 8 * self.state_size, OPERATORS_PER_LAYER + OPERATORS_BESIDE
        layer = DrafterPart(
            elements, len(rows), operators, inputs + 3 * max(rows, default=0), inputs, attends=True, embeds=True
        )
        return FeatureDrafterSpec(
            "MTP", self.max_depth, self.beam, elements, indices=0, hidden_size=self.state_size, num_layers=1,
            num_qo_heads=self.num_qo_heads, num_kv_heads=kv.num_kv_heads,
            head_dim=-(-(kv.head_dim + kv.v_head_dim) // 2), features=1, held=0, advance=layer, state=DrafterPart(),
            draft=layer,
        )  # fmt: skip

    def advance(self, batch: TreeBatch, features: Tensor, keep: Tensor, pool: PagedKVPool) -> Tensor:
        attention = StepAttention(pool, batch, self.backend)
        hidden = self._run(batch.tokens, features, batch.positions + 1, self._in_pool(attention))
        return hidden.index_select(0, keep)

    def draft(self, rows: DraftRows, tree: Trees) -> DraftedTrees:
        attention = BeamAttention(rows, self.backend)
        call, predict = self._in_pool(attention), self._vocabulary.top_log_probs

        def step(depth: int, parent: Tensor, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            attention.descend(parent)
            positions = (rows.seq_lens.long() + depth)[:, None].expand_as(parent).flatten()
            states = self._run(tokens, features, positions, call)
            return states, *predict(states, tree.width)

        return grow_recurrent(rows.roots, rows.states, tree, partial(predict, rows.states), step)

    def _in_pool(self, attention: Attention) -> AttentionCall:
        """``attention`` for the MTP layer, which counts its layers from 0."""

        def call(layer: int, q: Tensor, k: Tensor, v: Tensor, *, params: AttentionParams) -> Tensor:
            return attention(self._index + layer, q, k, v, params=params)

        return call

    def _run(self, tokens: Tensor, features: Tensor, positions: Tensor, call: AttentionCall) -> Tensor:
        """The layer's states ``[N, hidden_size]`` behind its final norm, for tokens at ``positions``."""
        leaves, mtp = self._leaves, self.mtp
        embedded, rotary = self._vocabulary.embed(tokens)[None], None
        if mtp.rotary_emb is not None:
            kind = {"layer_type": mtp.config.layer_types[0]} if mtp.has_per_layer_rope else {}
            rotary = mtp.rotary_emb(embedded, position_ids=positions[None], **kind)
        with leaves.running(len(tokens), tokens.device, call):
            hidden = self._layer(
                embedded, features[None], position_embeddings=rotary, attention_mask=step_mask(tokens.device),
                position_ids=positions[None], **{CACHE_ARGUMENT: None},
            )  # fmt: skip
        if mtp.use_shared_post_norm:
            hidden = mtp.shared_post_norm(hidden)
        return hidden[0]  # type: ignore[no-any-return]
