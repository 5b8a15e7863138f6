"""The operators: tree attention over a paged KV cache, paged writes, greedy verification, lm_head argmax and top-k,
and a decoder's other layers for few rows: linear layers, gated MLPs, RMS normalisation.

Every operator here checks its arguments and calls ``torch.ops.specmemo.<name>``, so all of them trace, compile and
pass ``torch.library.opcheck``. :func:`kernels` returns a backend's functions without checks and dispatcher, for an
engine that calls them in every layer. ``backend`` is ``"reference"``, ``"cpu"``, ``"triton"`` or ``None`` (by device).

Shapes (B sequences, N nodes of all sequences packed in one row, T nodes of one sequence):

==============  ==========================================  =====================================================
``q``           ``[N, num_qo_heads, head_dim]``             queries of the step's nodes
``k_new``       ``[N, num_kv_heads, head_dim]``             their keys; ``v_new`` likewise (its head_dim may differ)
``k_pages``     ``[num_pages, page_size, num_kv_heads,      committed keys; ``v_pages`` likewise
                head_dim]``
``k_scales``    ``[num_pages, page_size, num_kv_heads]``    of quantised pages; ``v_scales`` likewise
                float32
``block_table`` ``[B, max_pages]`` int32                    page ids; only the pages that ``seq_lens`` reaches are read,
                                                            and nothing is written to a page of -1
``seq_lens``    ``[B]`` int32                               tokens in pages, drafts excluded
``qo_indptr``   ``[B + 1]`` int32                           where each sequence's nodes lie in the packed row
``tree_mask``   ``[N, ceil(T/64)]`` int64                   bit j of row i: node j of the same sequence is i or an
                                                            ancestor of i; a row of zeros is causal
``parents``     ``[N]`` int32                               parent inside the sequence, -1 for the root
==============  ==========================================  =====================================================

In memory pages are contiguous, or hold one head after the other (FlashInfer's NHD and HND): then they are contiguous
``[num_pages, num_kv_heads, page_size, head_dim]`` seen through ``transpose(-2, -3)``. Keys, values and scales of a call
are in the same order.

Pages have the dtype of ``q``, or are quantised: int8 or float8_e4m3fn codes with one float32 scale per token and head,
``element = code * scale``. Appending and committing quantise: ``scale`` is the largest magnitude over 127 or 448, codes
are rounded to nearest even. The error is at most half a scale in int8, and 1/16 of the element or 2**-10 scales in fp8.
A step's own keys and values are not quantised.

A node's position is ``seq_lens + depth``; its depth is its number of ancestors (of preceding rows in a causal chunk).
"""

from __future__ import annotations

import torch

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.ops import schema
from specmemo_kernels.ops.dispatch import (
    BackendUnavailable,
    Kernels,
    backend_name,
    decompression_workspace,
    few_rows,
    fixed_workspace,
    kernel_configs,
    kernels,
    linear_workspace,
    split_workspace,
    torch_products,
    unavailable,
    unsuited,
)

Tensor = torch.Tensor

__all__ = [
    "BackendUnavailable",
    "Kernels",
    "LayerKV",
    "append_paged_kv",
    "backend_name",
    "commit_paged_kv",
    "decompress",
    "decompression_workspace",
    "few_rows",
    "fixed_workspace",
    "gated_mlp",
    "grouped_linear",
    "kernel_configs",
    "kernels",
    "linear",
    "linear_workspace",
    "lm_head_argmax",
    "lm_head_log_probs",
    "lm_head_topk",
    "rms_norm",
    "schema",
    "split_workspace",
    "torch_products",
    "tree_attention",
    "unavailable",
    "unsuited",
    "verify_tree_greedy",
]


def tree_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    tree_mask: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    max_qo_len: int | None = None,
    max_seq_len: int | None = None,
    invariant: bool = False,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    min_qo_len: int | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of every node over its sequence's committed tokens and its own ancestors.

    Args:
        tree_mask: ancestors of each node; ``None`` makes every sequence a causal chunk (prefill).
        scale: factor on ``q @ k``, usually ``head_dim ** -0.5``.
        window: a key is seen while ``query position - key position < window`` (sliding window); ``None``: always.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2); ``None``: unchanged.
        sinks: ``[num_qo_heads]``, a logit per head that joins the softmax without a value (gpt-oss).
        max_qo_len, max_seq_len: upper bounds of ``diff(qo_indptr)`` and ``seq_lens`` known to the caller, so that a
            GPU launch is sized without a synchronisation; ``None``: the bounds that the shapes imply.
        invariant: a node's bits are those of decoding its path's tokens one by one: on cpu in any tree, on triton in a
            chain. One kernel then serves all sequences: on cpu the one that packs keys, which is slower for one or two
            nodes; on triton one set of block sizes; reference raises ``ValueError``. Not with quantised pages: a pass
            reads its own keys unquantised, decoding reads their codes.
        k_scales, v_scales: with quantised pages, one scale per token and head; else ``None``.
        min_qo_len: a lower bound of ``diff(qo_indptr)`` that holds for the call and for all replays of a graph that
            captures it. It avoids launches of kernels for fewer nodes. Captured calls need it on triton, and the call
            before them too: it compiles the same kernels.

    Returns:
        ``out`` ``[N, num_qo_heads, v_head_dim]`` in q's dtype, and ``lse`` ``[N, num_qo_heads]`` float32 (float64 for
        float64), the natural logarithm of the softmax's denominator, sinks included.

    A sequence's result doesn't depend on the other sequences of the batch (bitwise on the cpu backend, and on triton if
    ``invariant``; otherwise the number of splits on triton depends on the batch).

    Raises:
        ValueError: a shape, dtype or device that doesn't fit; the message names the argument and both values.
    """
    result: tuple[Tensor, Tensor] = schema.call(
        "tree_attention", q, k_new, v_new, k_pages, v_pages, block_table, seq_lens, qo_indptr, tree_mask,
        scale, window, softcap, sinks, max_qo_len, max_seq_len, invariant, k_scales, v_scales,
        min_qo_len, backend,
    )  # fmt: skip
    return result


def append_paged_kv(
    k_new: Tensor,
    v_new: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Write row ``i`` of each sequence to position ``seq_lens + i`` of its pages (one layer; prefill).

    Changes ``k_pages`` and ``v_pages`` in place, and the scales of quantised pages. Arguments and errors as in
    :func:`tree_attention`.
    """
    schema.call(
        "append_paged_kv", k_new, v_new, k_pages, v_pages, block_table, seq_lens, qo_indptr, k_scales, v_scales, backend
    )


def commit_paged_kv(
    k_scratch: Tensor,
    v_scratch: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    accept_index: Tensor,
    accept_length: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Copy accepted nodes from scratch slots to pages, all layers in one call.

    Args:
        k_scratch, v_scratch: ``[num_layers, >= N, num_kv_heads, head_dim]``, keys and values of the step's nodes.
        k_pages, v_pages: ``[num_layers, num_pages, page_size, num_kv_heads, head_dim]``, changed in place.
        accept_index: ``[B, max_depth + 1]`` int32 node ids inside each sequence, root first.
        accept_length: ``[B]`` int32; the first ``accept_length + 1`` entries of a row are written to positions
            ``seq_lens, seq_lens + 1, ...``; -1 writes nothing.
        k_scales, v_scales: ``[num_layers, num_pages, page_size, num_kv_heads]`` with quantised pages, changed in place.
    """
    schema.call(
        "commit_paged_kv", k_scratch, v_scratch, k_pages, v_pages, block_table, seq_lens, qo_indptr,
        accept_index, accept_length, k_scales, v_scales, backend,
    )  # fmt: skip


def verify_tree_greedy(
    draft_tokens: Tensor,
    target_tokens: Tensor,
    parents: Tensor,
    qo_indptr: Tensor,
    *,
    max_depth: int,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The longest path of drafts that equals greedy decoding.

    From the root, a child is accepted if its draft token equals the target's token at its parent; of equal siblings the
    first. A draft of -1 is never accepted.

    Args:
        draft_tokens, target_tokens: ``[N]`` int64.
        parents: ``[N]`` int32, parents before children.
        max_depth: longest path that ``accept_index`` holds; deeper nodes are not accepted.

    Returns:
        ``accept_index`` ``[B, max_depth + 1]`` int32 (padded with -1), ``accept_length`` ``[B]`` int32 (drafts only;
        -1 for a sequence without nodes) and ``bonus_token`` ``[B]`` int64 (-1 likewise).
    """
    result: tuple[Tensor, Tensor, Tensor] = schema.call(
        "verify_tree_greedy", draft_tokens, target_tokens, parents, qo_indptr, max_depth, backend
    )
    return result


def lm_head_argmax(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """``argmax(hidden @ weight.T + bias)`` per row, without a ``[N, V]`` tensor.

    Logits are rounded to the inputs' dtype before they are compared, as the model's own linear would. They compare as
    in ``torch.argmax``: NaN is the largest, ties go to the lowest token. So the result is what
    ``model(...).logits.argmax(-1)`` gives.

    Args:
        hidden: ``[N, hidden_size]``. weight: ``[V, hidden_size]``. bias: ``[V]`` or ``None``.

    Returns:
        ``[N]`` int64 tokens.

    Raises:
        ValueError: a shape, dtype or device that doesn't fit, or a vocabulary of no tokens.
    """
    tokens: Tensor = schema.call("lm_head_argmax", hidden, weight, bias, backend)
    return tokens


def lm_head_topk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    k: int,
    scales: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` best logits per row and their tokens, best first; no ``[N, V]`` tensor.

    NaN is the largest, ties go to the lower token.

    Args:
        hidden, weight, bias: as for :func:`lm_head_argmax`. With ``scales`` the weight is in 4-bit codes,
            ``[V, 32 * G]`` uint8 as :func:`specmemo_kernels.ops.weight_codes.pack` makes them, ``G = ceil(H / 64)``.
        scales: ``[V, G]`` float16, one for 64 codes; ``None``: the weight is not quantised. Sums are float32 over the
            dequantised elements (rounded to hidden's dtype first with ``backend="reference"``).

    Returns:
        values ``[N, k]`` in hidden's dtype and tokens ``[N, k]`` int64. ``1 <= k <= min(V, 64)``.
    """
    result: tuple[Tensor, Tensor] = schema.call("lm_head_topk", hidden, weight, bias, k, scales, backend)
    return result


def lm_head_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    k: int,
    scales: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The ``k`` best log-probabilities per row, their tokens, and the log-sum-exp; no ``[N, V]`` tensor.

    Arguments and ties as for :func:`lm_head_topk`. The logits are rounded to hidden's dtype, as a linear layer does.

    Returns:
        log-probabilities ``[N, k]`` (``logit - lse``, at most 0), tokens ``[N, k]`` int64, and ``lse`` ``[N]``, the
        natural logarithm of the sum of all exponentials. All but the tokens are float32 (float64 for float64).
    """
    result: tuple[Tensor, Tensor, Tensor] = schema.call("lm_head_log_probs", hidden, weight, bias, k, scales, backend)
    return result


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    invariant: bool = False,
    backend: str | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, fast for few rows: on a CPU each weight is read once, in place.

    Sums are float32 (float64 for float64), rounded once. ``backend="cpu"`` uses torch's product for more rows than
    :func:`few_rows`.

    Args:
        x: ``[..., inputs]``. bias: ``[outputs]`` or ``None``.
        weight: ``[outputs, inputs]``, contiguous, or a contiguous ``[inputs, outputs]`` transposed.
        scales: the weight is in 4-bit codes, as for :func:`lm_head_topk`.
        invariant: a row's result has the same bits for any number of rows. Only ``backend="cpu"``; others raise
            ``ValueError``.

    Returns:
        ``[..., outputs]`` in x's dtype.

    Raises:
        ValueError: a shape, dtype or device that doesn't fit.
    """
    result: Tensor = schema.call("linear", x, weight, bias, scales, invariant, backend)
    return result


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    *,
    invariant: bool = False,
    backend: str | None = None,
) -> Tensor:
    """:func:`linear` of groups of consecutive rows, each with a matrix of its own, as in a mixture of experts.

    Args:
        x: ``[N, inputs]``, the rows of the first group first. bias: ``[groups, outputs]`` or ``None``.
        weight: ``[groups, outputs, inputs]``, contiguous, or a contiguous ``[groups, inputs, outputs]`` transposed.
        ends: ``[groups]`` int64, ascending: group ``i`` has rows ``ends[i - 1]`` to ``ends[i]``. Rows behind the last
            end are in no group.
        invariant: as for :func:`linear`.

    Returns:
        ``[N, outputs]`` in x's dtype; zeros for rows in no group.

    Raises:
        ValueError: a shape, dtype or device that doesn't fit.
    """
    result: Tensor = schema.call("grouped_linear", x, weight, bias, ends, invariant, backend)
    return result


def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str,
    invariant: bool = False,
    backend: str | None = None,
) -> Tensor:
    """``down(activation(gate(x)) * up(x))`` in one call; every step is rounded to x's dtype, as separate layers do.

    Args:
        x: ``[..., inputs]``. gate, up: ``[middle, inputs]``. down: ``[outputs, middle]``. Biases: one per output.
        activation: ``"silu"``, ``"gelu_tanh"`` or ``"relu"``.
        invariant: as for :func:`linear`.

    Returns:
        ``[..., outputs]`` in x's dtype.

    Raises:
        ValueError: a shape, dtype or device that doesn't fit, or an unknown activation.
    """
    result: Tensor = schema.call(
        "gated_mlp", x, gate, up, down, gate_bias, up_bias, down_bias, activation, invariant, backend
    )
    return result


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    round_first: bool = True,
    backend: str | None = None,
) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * (weight + offset)`` for each row, in float32 (float64 for float64).

    Args:
        x: ``[..., size]``. weight: ``[size]``.
        offset: 1 for weights that are stored minus 1 (Gemma).
        round_first: the normalised row is rounded to x's dtype before it is multiplied with the weight (Llama).

    Returns:
        ``[..., size]`` in x's dtype. A row's bits don't depend on the other rows (``backend="cpu"``).

    Raises:
        ValueError: a shape, dtype or device that doesn't fit, or an ``eps`` below 0.
    """
    result: Tensor = schema.call("rms_norm", x, weight, eps, offset, round_first, backend)
    return result


def decompress(compressed: Tensor, columns: int, *, backend: str | None = None) -> Tensor:
    """The bfloat16 matrix of compressed rows (:func:`specmemo_kernels.ops.compressed_weights.compress`).

    Args:
        compressed: ``[rows, row_bytes(columns)]`` uint8.

    Returns:
        ``[rows, columns]``.

    Raises:
        ValueError: a shape or dtype that doesn't fit.
    """
    result: Tensor = schema.call("decompress", compressed, columns, backend)
    return result
