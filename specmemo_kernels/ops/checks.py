"""Argument checks of the operators. Each error has the argument's name, its value and the expected one.

Each function takes its operator's arguments in order, without the backend. It reads metadata and scalars only, never
a tensor's values, so it needs no device synchronisation.
"""

from __future__ import annotations

import torch

from specmemo_kernels.cache.page_order import swap_order
from specmemo_kernels.ops.compressed_weights import row_bytes
from specmemo_kernels.ops.weight_codes import GROUP, groups_of

Tensor = torch.Tensor
Shape = tuple[int | None, ...]
Scales = tuple[Tensor | None, Tensor | None]
QUANTISED = (torch.int8, torch.float8_e4m3fn)
#: Nodes on a path are indexed in int32.
_MAX_DEPTH = 2**31 - 2
ACTIVATIONS = ("silu", "gelu_tanh", "relu")


def _shape(name: str, tensor: Tensor, expected: Shape, meaning: str) -> None:
    actual = tensor.shape
    if len(actual) == len(expected):
        for size, expected_size in zip(actual, expected, strict=True):
            if expected_size is not None and size != expected_size:
                break
        else:
            return
    sizes = ", ".join("*" if size is None else str(size) for size in expected)
    raise ValueError(f"{name} has shape {tuple(actual)}, expected [{sizes}] ({meaning})")


def _dtype(name: str, tensor: Tensor, expected: torch.dtype) -> None:
    if tensor.dtype != expected:
        raise ValueError(f"{name} has dtype {tensor.dtype}, expected {expected}")


def _device(name: str, tensor: Tensor, expected: torch.device) -> None:
    if tensor.device != expected:
        raise ValueError(f"{name} is on {tensor.device}, expected {expected}")


def _rows(name: str, tensor: Tensor, shape: Shape, meaning: str, dtype: torch.dtype, device: torch.device) -> None:
    """Check a tensor whose last dimension is contiguous."""
    _shape(name, tensor, shape, meaning)
    _dtype(name, tensor, dtype)
    _device(name, tensor, device)
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have a contiguous last dimension, its strides are {tensor.stride()}")


def _array(
    name: str,
    tensor: Tensor,
    shape: Shape,
    meaning: str,
    dtype: torch.dtype,
    device: torch.device,
    transposable: bool = False,
) -> None:
    """Check a contiguous tensor; ``transposable``: or one that is contiguous with its last two dimensions swapped."""
    _shape(name, tensor, shape, meaning)
    _dtype(name, tensor, dtype)
    _device(name, tensor, device)
    if not tensor.is_contiguous() and not (transposable and tensor.mT.is_contiguous()):
        swapped = ", also with its last two dimensions swapped" if transposable else ""
        raise ValueError(f"{name} must be contiguous{swapped}, its strides are {tensor.stride()}")


def positive(**values: float | None) -> None:
    """Check optional numbers: above 0, or ``None``."""
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}, it must be positive (or None)")


def _not_empty(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, it must be at least 1")


def metadata(block_table: Tensor, seq_lens: Tensor, qo_indptr: Tensor, pages: Tensor) -> None:
    """Check the three tensors that locate each sequence's tokens."""
    _array("seq_lens", seq_lens, (None,), "[B]", torch.int32, pages.device)
    batch = seq_lens.shape[0]
    _array("block_table", block_table, (batch, None), "[B, max_pages]", torch.int32, pages.device)
    _array("qo_indptr", qo_indptr, (batch + 1,), "[B + 1]", torch.int32, pages.device)


def page_dtype(k_pages: Tensor, v_pages: Tensor, scales: Scales, rows: Tensor, name: str) -> None:
    """Check pages of the rows' dtype without scales, or quantised pages with one scale per token and head."""
    _dtype("v_pages", v_pages, k_pages.dtype)
    if k_pages.dtype not in QUANTISED:
        _dtype(name, rows, k_pages.dtype)
        if any(tensor is not None for tensor in scales):
            raise ValueError(f"scales are for pages of int8 or float8_e4m3fn, k_pages has dtype {k_pages.dtype}")
        return
    if rows.dtype in QUANTISED:
        raise ValueError(f"{name} has dtype {rows.dtype}, only pages are quantised")
    for label, tensor in zip(("k_scales", "v_scales"), scales, strict=True):
        if tensor is None:
            raise ValueError(f"{label} is None, pages of {k_pages.dtype} need it: one scale per token and head")
        _shape(label, tensor, tuple(k_pages.shape[:-1]), "as k_pages without head_dim")
        _dtype(label, tensor, torch.float32)
        _device(label, tensor, k_pages.device)


def page_order(k_pages: Tensor, v_pages: Tensor, scales: Scales) -> None:
    """Check that all are in the order of their shapes, or all head by head within each page."""
    names = ("k_pages", "v_pages", "k_scales", "v_scales")
    tensors = [(name, t) for name, t in zip(names, (k_pages, v_pages, *scales), strict=True) if t is not None]
    if all(tensor.is_contiguous() for _, tensor in tensors):
        return
    for name, tensor in tensors:
        if not swap_order(tensor, scales=name.endswith("scales")).is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, or, like all pages and scales of the call, contiguous after transposing "
                f"tokens and heads (HND); its shape is {tuple(tensor.shape)}, its strides are {tensor.stride()}"
            )


def new_rows(k_new: Tensor, v_new: Tensor, k_pages: Tensor, v_pages: Tensor, scales: Scales) -> None:
    """Check new keys and values against the pages."""
    _shape("k_pages", k_pages, (None, None, None, None), "[num_pages, page_size, num_kv_heads, head_dim]")
    num_pages, page_size, heads, head_dim = k_pages.shape
    _not_empty(page_size=page_size, num_kv_heads=heads)
    _shape("v_pages", v_pages, (num_pages, page_size, heads, None), "[num_pages, page_size, num_kv_heads, v_head_dim]")
    _device("v_pages", v_pages, k_pages.device)
    page_dtype(k_pages, v_pages, scales, k_new, "k_new")
    dtype, device = k_new.dtype, k_pages.device
    _rows("k_new", k_new, (None, heads, head_dim), "[N, num_kv_heads, head_dim]", dtype, device)
    _rows("v_new", v_new, (k_new.shape[0], heads, v_pages.shape[3]), "[N, num_kv_heads, v_head_dim]", dtype, device)
    page_order(k_pages, v_pages, scales)


def append_paged_kv(
    k_new: Tensor,
    v_new: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    new_rows(k_new, v_new, k_pages, v_pages, (k_scales, v_scales))
    metadata(block_table, seq_lens, qo_indptr, k_pages)


def tree_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    tree_mask: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    max_qo_len: int | None,
    max_seq_len: int | None,
    invariant: bool,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    min_qo_len: int | None,
) -> None:
    new_rows(k_new, v_new, k_pages, v_pages, (k_scales, v_scales))
    metadata(block_table, seq_lens, qo_indptr, k_pages)
    shape = (k_new.shape[0], None, k_new.shape[2])
    _rows("q", q, shape, "[N, num_qo_heads, head_dim]", k_new.dtype, k_pages.device)
    _not_empty(num_qo_heads=q.shape[1])
    if q.shape[1] % k_new.shape[1]:
        raise ValueError(f"num_qo_heads {q.shape[1]} is not a multiple of num_kv_heads {k_new.shape[1]}")
    if tree_mask is not None:
        _array("tree_mask", tree_mask, (q.shape[0], None), "[N, ceil(T/64)]", torch.int64, q.device)
        if q.shape[0]:
            _not_empty(mask_words=tree_mask.shape[1])
    if sinks is not None:
        _array("sinks", sinks, (q.shape[1],), "[num_qo_heads]", sinks.dtype, q.device)  # any dtype
    positive(window=window, softcap=softcap, max_qo_len=max_qo_len, min_qo_len=min_qo_len)


def commit_paged_kv(
    k_scratch: Tensor,
    v_scratch: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    index: Tensor,
    length: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    metadata(block_table, seq_lens, qo_indptr, k_pages)
    batch = seq_lens.shape[0]
    _shape("k_pages", k_pages, (None,) * 5, "[num_layers, num_pages, page_size, num_kv_heads, head_dim]")
    layers, num_pages, page_size, heads, head_dim = k_pages.shape
    _not_empty(page_size=page_size, num_kv_heads=heads)
    _shape("v_pages", v_pages, (layers, num_pages, page_size, heads, None), "as k_pages, head_dim may differ")
    _device("v_pages", v_pages, k_pages.device)
    page_dtype(k_pages, v_pages, (k_scales, v_scales), k_scratch, "k_scratch")
    dtype, device = k_scratch.dtype, k_pages.device
    k_shape = (layers, None, heads, head_dim)
    _array("k_scratch", k_scratch, k_shape, "[num_layers, N, num_kv_heads, head_dim]", dtype, device)
    v_shape = (layers, k_scratch.shape[1], heads, v_pages.shape[4])
    _array("v_scratch", v_scratch, v_shape, "[num_layers, N, num_kv_heads, v_head_dim]", dtype, device)
    page_order(k_pages, v_pages, (k_scales, v_scales))
    _array("accept_length", length, (batch,), "[B]", torch.int32, k_pages.device)
    _array("accept_index", index, (batch, None), "[B, max_depth + 1]", torch.int32, k_pages.device)


def verify_tree_greedy(draft: Tensor, target: Tensor, parents: Tensor, qo_indptr: Tensor, max_depth: int) -> None:
    _shape("draft_tokens", draft, (None,), "[N]")
    nodes = draft.shape[0]
    for name, tensor, dtype in (
        ("draft_tokens", draft, torch.int64),
        ("target_tokens", target, torch.int64),
        ("parents", parents, torch.int32),
    ):
        _array(name, tensor, (nodes,), "[N]", dtype, draft.device)
    _array("qo_indptr", qo_indptr, (None,), "[B + 1]", torch.int32, draft.device)
    if not qo_indptr.shape[0]:
        raise ValueError("qo_indptr is empty, it must be [B + 1], of at least one element")
    if not 0 <= max_depth <= _MAX_DEPTH:
        raise ValueError(f"max_depth is {max_depth}, it must be between 0 and {_MAX_DEPTH}")


def lm_head_argmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _lm_head(hidden, weight, bias, None)
    if not weight.shape[0]:
        raise ValueError("weight has 0 rows, lm_head_argmax needs at least 1 token to choose from")


def lm_head_topk(hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int, scales: Tensor | None) -> None:
    _lm_head(hidden, weight, bias, scales)
    limit = min(weight.shape[0], 64)
    if not 1 <= k <= limit:
        raise ValueError(f"lm_head_topk: k is {k}, it must be between 1 and {limit}")


def lm_head_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int, scales: Tensor | None) -> None:
    lm_head_topk(hidden, weight, bias, k, scales)


def _lm_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None) -> None:
    _rows("hidden", hidden, (None, None), "[N, hidden_size]", hidden.dtype, hidden.device)
    _weight(hidden, weight, bias, scales, "V", "hidden_size")


def _weight(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    outputs: str,
    inputs: str,
    name: str = "",
    transposable: bool = False,
) -> None:
    """Check a matrix for rows of ``x``, in their dtype or in 4-bit codes; ``name``: of the matrix, else "weight"."""
    if scales is None:
        _plain_or_compressed(name or "weight", weight, (None,), outputs, x, inputs, transposable)
    else:
        groups = groups_of(x.shape[-1])
        meaning = f"4-bit codes, two a byte, whole groups of {GROUP}"
        _array("weight", weight, (None, groups * (GROUP // 2)), meaning, torch.uint8, x.device)
        meaning = f"[{outputs}, ceil({inputs} / {GROUP})]"
        _array("scales", scales, (weight.shape[0], groups), meaning, torch.float16, x.device)
    if bias is not None:
        bias_name = f"{name}_bias" if name else "bias"
        _array(bias_name, bias, (weight.shape[0],), f"[{outputs}]", x.dtype, x.device)


def _plain_or_compressed(
    name: str,
    weight: Tensor,
    shape: tuple[None, ...],
    meaning: str,
    x: Tensor,
    inputs: str,
    transposable: bool = False,
) -> None:
    """Check matrices for rows of ``x``, in their dtype or compressed; ``shape``, ``meaning``: but for the inputs."""
    size = x.shape[-1]
    if weight.dtype == torch.uint8 and x.dtype == torch.bfloat16 and x.device.type == "cpu":
        meaning = f"[{meaning}, bytes of a compressed row of {size} {inputs}]"
        _array(name, weight, (*shape, row_bytes(size)), meaning, torch.uint8, x.device)
    else:
        _array(name, weight, (*shape, size), f"[{meaning}, {inputs}]", x.dtype, x.device, transposable)


def _last_dimension(x: Tensor) -> None:
    if not x.ndim:
        raise ValueError("x has no dimensions, expected [..., inputs]")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, invariant: bool) -> None:
    _last_dimension(x)
    _weight(x, weight, bias, scales, "outputs", "inputs", transposable=True)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, invariant: bool) -> None:
    _shape("x", x, (None, None), "[N, inputs]")
    _plain_or_compressed("weight", weight, (None, None), "groups, outputs", x, "inputs", transposable=True)
    groups, outputs = weight.shape[:2]
    if bias is not None:
        _array("bias", bias, (groups, outputs), "[groups, outputs]", x.dtype, x.device)
    _array("ends", ends, (groups,), "[groups]", torch.int64, x.device)


def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    invariant: bool,
) -> None:
    _last_dimension(x)
    _weight(x, gate, gate_bias, None, "middle", "inputs", "gate")
    _weight(x, up, up_bias, None, "middle", "inputs", "up")
    _shape("up", up, tuple(gate.shape), "as gate")
    activations = x.new_empty((0, gate.shape[0]))
    _weight(activations, down, down_bias, None, "outputs", "middle", "down")
    if len({weight.dtype for weight in (gate, up, down)}) > 1:
        raise ValueError(f"gate is {gate.dtype}, up {up.dtype} and down {down.dtype}; compress all three or none")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")


def decompress(compressed: Tensor, columns: int) -> None:
    if columns < 0:
        raise ValueError(f"columns is {columns}, it must be at least 0")
    meaning = f"[rows, bytes of a compressed row of {columns} columns]"
    _array("compressed", compressed, (None, row_bytes(columns)), meaning, torch.uint8, compressed.device)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> None:
    _last_dimension(x)
    _array("weight", weight, (x.shape[-1],), "[size]", x.dtype, x.device)
    if not eps >= 0:
        raise ValueError(f"eps is {eps}, it must be at least 0")
