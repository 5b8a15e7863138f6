"""Invariant mode: whether a model's forward pass computes each row with the same bits in any pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.probe import like_attention
from specmemo_kernels.integrations.hf.target import ModelFacts, run_packed, tapped

Tensor = torch.Tensor

#: Rows of the compared passes. Tiles have 4 or 8 rows: less than a tile, whole tiles, tiles and a remainder. 70 rows
#: take several passes over the weights, of 32 rows each.
_ROWS = (1, 3, 8, 21, 70)


def check_invariant_arguments(backend: str, fuse: bool, kv_dtype: str | None) -> None:
    """Raise ``ValueError`` for arguments of ``patch`` that rule out invariant mode."""
    if backend != "cpu":
        raise ValueError(
            f"invariant is True, but backend {backend!r} has no invariant products; use backend='cpu' on a CPU, or "
            "invariant=False"
        )
    if not fuse:
        raise ValueError("invariant is True and fuse is False, but only fused layers are invariant; leave out fuse")
    if kv_dtype is not None:
        raise ValueError(
            f"invariant is True and kv_dtype is {kv_dtype!r}: a step reads its own keys unquantised, later steps read "
            "their codes; leave out kv_dtype"
        )


@torch.no_grad()
def check_invariance(model: Any, facts: ModelFacts) -> None:
    """Check that only replaced modules have matrices, and compare rows' bits in passes of several sizes.

    Raises:
        UnsupportedModel: another module has a matrix (a router, a quantised layer); or hidden states or logits differ,
            so that an operation outside of the replaced modules depends on the other rows.
    """
    for name, module in model.named_modules():
        if module in facts.leaves.modules or isinstance(module, nn.Embedding):
            continue
        if matrix := next((key for key, p in module.named_parameters(recurse=False) if p.ndim > 1), None):
            raise UnsupportedModel(
                f"{type(model).__name__} multiplies with {name}.{matrix} of {type(module).__name__}, which is not a "
                "plain linear layer, gated MLP or mixture of the model's dtype on the CPU: its bits may depend on the "
                "other rows; use invariant=False"
            )
    count = max(_ROWS)
    tokens = torch.arange(count, device="cpu") * 7919 % model.get_input_embeddings().weight.shape[0]
    positions = torch.arange(count, device="cpu") * 5 % max(1, min(count, _max_positions(model)))
    expected: tuple[Tensor, Tensor] | None = None
    for rows in sorted(_ROWS, reverse=True):
        with facts.pass_mode(), tapped(cut=facts.plain_lm_head) as tap:
            logits = run_packed(model, tokens[:rows], positions[:rows], like_attention, None, leaves=facts.leaves)[0]
        results = tap.hidden, logits
        expected = results if expected is None else expected
        if not all(torch.equal(result, all_rows[:rows]) for result, all_rows in zip(results, expected, strict=True)):
            raise UnsupportedModel(
                f"{type(model).__name__} computes other bits for {rows} rows than for {count}: an operation besides "
                "its linear layers depends on the number of rows; use invariant=False"
            )


def _max_positions(model: Any) -> int:
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048)
