"""Invariant mode: whether a model's forward pass computes each row with the same bits in any pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.probe import like_attention
from specmemo_kernels.integrations.hf.target import ModelFacts, run_packed, tapped
from specmemo_kernels.planning.memory_tracker import is_composite

Tensor = torch.Tensor

#: Rows of the compared passes. Tiles have 4 or 8 rows: less than a tile, whole tiles, tiles and a remainder. 70 rows
#: take several passes over the weights, of 32 rows each.
_ROWS = (1, 3, 8, 21, 70)
#: Elements that don't fill a vector.
_FEW = 3


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
            so that an operation outside of the replaced modules depends on the other rows; or an element-wise operator
            rounds an element by its place.
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
    with facts.pass_mode(), ElementwiseOperators() as operators:
        run_packed(model, tokens, positions, like_attention, None, leaves=facts.leaves)
    if operators.dependent:
        raise UnsupportedModel(
            f"{type(model).__name__} computes {', '.join(sorted(operators.dependent))} outside of replaced modules: on "
            "this CPU the bits of an element depend on its place in the tensor, so on the number of rows; use "
            "invariant=False"
        )
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


class ElementwiseOperators(TorchDispatchMode):
    """Finds the operators of one tensor whose bits for an element depend on its place.

    torch computes a tensor, or a thread's part of it, in whole vectors, and the remaining elements one by one. Both
    needn't round alike.

    Attributes:
        dependent: names and dtypes of the operators found.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dependent: set[str] = set()
        self._compared: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        if torch.Tag.pointwise in func.tags and len(tensors) == 1 and tensors[0].is_floating_point():
            self._compare(func, tensors[0].dtype, args, kwargs)
        return func(*args, **kwargs)

    def _compare(self, func: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the results for many values at once, and a few at a time."""
        key = func, dtype, str(tree_map_only(Tensor, lambda _: None, (args, kwargs)))
        if key in self._compared:
            return
        self._compared.add(key)

        def result_of(values: Tensor) -> Tensor:
            own_args, own_kwargs = tree_map_only(Tensor, lambda _: values, (args, kwargs))
            result: Tensor = func(*own_args, **own_kwargs)
            return result.nan_to_num()

        whole = result_of(_sweep(dtype))
        # One call computes a strided tensor element by element. Some operators have other code for strided tensors, so
        # short contiguous ones confirm a difference.
        if torch.equal(whole, result_of(torch.stack([_sweep(dtype)] * 2, dim=1)[:, 0])):
            return
        if not torch.equal(whole, torch.cat([result_of(part) for part in torch.split(_sweep(dtype), _FEW)])):
            self.dependent.add(f"{func} in {str(dtype).removeprefix('torch.')}")


def _sweep(dtype: torch.dtype) -> Tensor:
    """65,536 values: all of a 16-bit dtype, or one of each sign, exponent and beginning of the mantissa."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu")
    if dtype in (torch.bfloat16, torch.float16):
        return bits.short().view(dtype)
    return (bits * 2**16 + 2**15 + 1).view(torch.float32).to(dtype)


def _max_positions(model: Any) -> int:
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048)
