"""Selects an operator's implementation: the named backend, or the best one for the tensors' device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specmemo_kernels.ops.namespace import operator_packet

if TYPE_CHECKING:
    from specmemo_kernels.cache.kv_storage import LayerKV

#: Modules by backend, relative to this package: a hub kernel has them under another name.
BACKENDS = {"reference": "..backends.reference", "cpu": "..backends.cpu", "triton": "..backends.triton"}


class BackendUnavailable(RuntimeError):
    """The requested backend can't run here; the message has the reason and the fix."""


@functools.cache
def _load(name: str) -> ModuleType:
    return importlib.import_module(BACKENDS[name], __package__)


def unavailable(name: str) -> str | None:
    """Why backend ``name`` can't be used in this process, or ``None`` when it can."""
    if name not in BACKENDS:
        return f"unknown backend {name!r}; there are {', '.join(BACKENDS)}"
    try:
        _load(name)
    except Exception as error:  # a broken installation raises anything
        reason = f"backend {name!r} can't be imported ({type(error).__name__}: {error})"
        return reason + _hint(name, error)
    return None


def _hint(name: str, error: Exception) -> str:
    """Advice for a failed import; empty if unknown."""
    if name == "triton":
        missing = isinstance(error, ModuleNotFoundError) and error.name == "triton"
        return "; pip install triton" if missing else ""
    if name == "cpu":
        advice = "; no C++ module for this Python and system: install specmemo_kernels with a C++17 compiler"
        return advice if isinstance(error, ImportError) else ""
    return "; reinstall the package"


def unsuited(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why backend ``name`` can't compute in ``dtype`` on ``device``; empty if it can."""
    hook = getattr(_load(name), "check_device", None)
    try:
        if hook is not None:
            hook(torch.empty(0, dtype=dtype, device=device))
    except ValueError as error:
        return str(error)
    return ""


def _sizes(layer: LayerKV) -> dict[str, Any]:
    """A layer's sizes as a backend's functions take them."""
    return {name: value for name, value in vars(layer).items() if name != "of_drafter"}


def split_workspace(
    name: str, layer: LayerKV, num_qo_heads: int, page_dtype: torch.dtype | None = None
) -> tuple[int, int]:
    """Workspace of ``tree_attention`` on backend ``name``: tokens per split, and bytes per row and split.

    ``(0, 0)`` if the workspace doesn't grow with the context.

    Args:
        layer: sizes of the attention layer.
        page_dtype: dtype of quantised pages; ``None``: pages in the layer's dtype.
    """
    hook = getattr(_load(name), "split_workspace", None)
    if hook is None:
        return 0, 0
    split_size, row_bytes = hook(**_sizes(layer), num_qo_heads=num_qo_heads, page_dtype=page_dtype)
    return int(split_size), int(row_bytes)


def fixed_workspace(name: str, layer: LayerKV, num_qo_heads: int, page_dtype: torch.dtype | None = None) -> int:
    """Maximum workspace of ``tree_attention`` on backend ``name`` besides :func:`split_workspace`, in bytes.

    Arguments as in :func:`split_workspace`.
    """
    hook = getattr(_load(name), "fixed_workspace", None)
    return 0 if hook is None else int(hook(**_sizes(layer), num_qo_heads=num_qo_heads, page_dtype=page_dtype))


def few_rows(name: str, dtype: torch.dtype, transposed: bool = False) -> int | None:
    """Rows up to which ``linear`` of backend ``name`` is at least as fast as torch's; ``None``: any number.

    ``transposed``: the weight is a transposed ``[inputs, outputs]``.
    """
    hook = getattr(_load(name), "few_rows", None)
    return 0 if hook is None else hook(dtype, transposed)


def linear_workspace(name: str, dtype: torch.dtype, inputs: int, middle: int = 0, transposed: bool = False) -> int:
    """Bytes that backend ``name`` keeps for ``linear``, or for ``gated_mlp`` with ``middle`` activations per row.

    ``transposed`` as for :func:`few_rows`.
    """
    hook = getattr(_load(name), "linear_workspace", None)
    return 0 if hook is None else int(hook(dtype, inputs, middle, transposed))


def decompression_workspace(name: str, dtype: torch.dtype) -> int:
    """Bytes that backend ``name`` takes for a product with a compressed matrix besides its result, at most."""
    hook = getattr(_load(name), "decompression_workspace", None)
    return 0 if hook is None else int(hook(dtype))


def release_threads(name: str) -> None:
    """End the worker threads that backend ``name`` keeps for the calling thread, until its next operator."""
    hook = getattr(_load(name), "release_threads", None)
    if hook is not None:
        hook()


def kernel_configs(
    name: str, layer: LayerKV, num_qo_heads: int, page_dtype: torch.dtype | None = None
) -> tuple[Any, ...] | None:
    """Block sizes of ``tree_attention`` on backend ``name``, one per class of sequences; ``None`` without a choice.

    Arguments as in :func:`split_workspace`.

    Raises:
        ValueError: an unsupported device, dtype or head size.
    """
    hook = getattr(_load(name), "kernel_configs", None)
    return None if hook is None else tuple(hook(**_sizes(layer), num_qo_heads=num_qo_heads, page_dtype=page_dtype))


@functools.cache
def _default(device_type: str) -> str:
    if device_type == "cuda":
        return "triton"
    return "cpu" if device_type == "cpu" and unavailable("cpu") is None else "reference"


def backend_name(requested: str | None, device: torch.device) -> str:
    """The backend for ``device``: ``requested`` if given (without a fallback), else the best.

    Raises:
        BackendUnavailable: the requested backend (or triton on a GPU) can't be imported.
        ValueError: the requested backend can't run on that device.
    """
    name = _default(device.type) if requested is None else requested
    if reason := unavailable(name):
        raise BackendUnavailable(reason)
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"backend 'cpu' needs tensors on the CPU, these are on {device}")
    return name


class Kernels(Protocol):
    """The operators of one backend, with the arguments of :mod:`specmemo_kernels.ops`, positional, without backend."""

    tree_attention: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    append_paged_kv: Callable[..., None]
    commit_paged_kv: Callable[..., None]
    verify_tree_greedy: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    lm_head_argmax: Callable[..., torch.Tensor]
    lm_head_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    lm_head_log_probs: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    linear: Callable[..., torch.Tensor]
    grouped_linear: Callable[..., torch.Tensor]
    gated_mlp: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    decompress: Callable[..., torch.Tensor]


def kernels(backend: str | None, device: torch.device) -> Kernels:
    """The operators of ``backend`` (``None``: the best) for tensors on ``device``, for calls in every layer.

    The functions check no arguments. They bypass torch's dispatcher, which takes longer than attention over a thousand
    tokens, unless a dispatch mode, tracer or profiler is active now.

    Raises:
        BackendUnavailable, ValueError: as :func:`backend_name`.
    """
    return _dispatched(backend) if dispatcher_active() else implementation(backend, device)


def torch_products(name: str, calls: Kernels) -> Kernels:
    """``calls`` of backend ``name``, with the products of more rows than :func:`few_rows` for any number of rows.

    These are operators of torch, whose memory a dispatch mode sees.
    """
    products: dict[str, Callable[..., Any]] = getattr(_load(name), "TORCH_PRODUCTS", {})
    operators = {operator: getattr(calls, operator) for operator in Kernels.__annotations__}
    result: Any = SimpleNamespace(**operators | products)
    return result  # type: ignore[no-any-return]


def dispatcher_active() -> bool:
    """Whether a dispatch or function mode, a tracer or a profiler is active in this thread."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._is_tracing()
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    )


@functools.cache
def implementation(backend: str | None, device: torch.device) -> Kernels:
    """The module of ``backend``, whose functions bypass torch's dispatcher in any case."""
    module: Any = _load(backend_name(backend, device))
    return module  # type: ignore[no-any-return]


@functools.cache
def _dispatched(backend: str | None) -> Kernels:
    """The same operators through torch's dispatcher."""

    def through(name: str) -> Callable[..., Any]:
        return lambda *args: operator_packet(name)(*args, backend)

    calls: Any = SimpleNamespace(**{name: through(name) for name in Kernels.__annotations__})
    return calls  # type: ignore[no-any-return]
