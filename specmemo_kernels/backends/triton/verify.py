"""Greedy verification, one program per tree."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specmemo_kernels.backends.kernel_config import VERIFY_CONFIG
from specmemo_kernels.backends.triton.primitives import wait_for_inputs
from specmemo_kernels.backends.triton.runtime import entry_point, launch_options

Tensor = torch.Tensor

NO_CHILD = tl.constexpr(2147483647)


@triton.jit
def first_child(draft_ptr, parents_ptr, node, nodes, token, BLOCK_T: tl.constexpr):
    """The first child of ``node`` with draft ``token``, or ``NO_CHILD``; children come after their parent."""
    child = NO_CHILD
    start = node + 1
    while (start < nodes) & (child == NO_CHILD):
        index = start + tl.arange(0, BLOCK_T)
        inside = index < nodes
        parent = tl.load(parents_ptr + index, mask=inside, other=-1)
        draft = tl.load(draft_ptr + index, mask=inside, other=-1)
        match = (parent == node) & (draft == token) & (draft >= 0)
        child = tl.min(tl.where(match, index, NO_CHILD), 0)
        start += BLOCK_T
    return child


@triton.jit(do_not_specialize=["places"])
def verify_tree_greedy_kernel(
    accept_index_ptr, accept_length_ptr, bonus_token_ptr,
    draft_ptr, target_ptr, parents_ptr, qo_indptr_ptr, places, BLOCK_T: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences). Writes all entries of the three results."""
    wait_for_inputs(OVERLAPPED)
    sequence = tl.program_id(0)
    first_row = tl.load(qo_indptr_ptr + sequence)
    nodes = tl.load(qo_indptr_ptr + sequence + 1) - first_row
    path_ptr = accept_index_ptr + sequence.to(tl.int64) * places
    length = -1
    bonus = tl.full((), -1, tl.int64)
    node = tl.where(nodes > 0, 0, NO_CHILD)
    for depth in range(places):
        tl.store(path_ptr + depth, tl.where(node == NO_CHILD, -1, node))
        if node != NO_CHILD:
            length += 1
            bonus = tl.load(target_ptr + first_row + node)
            node = first_child(draft_ptr + first_row, parents_ptr + first_row, node, nodes, bonus, BLOCK_T)
    tl.store(accept_length_ptr + sequence, length)
    tl.store(bonus_token_ptr + sequence, bonus)


@entry_point
def verify_tree_greedy(
    draft_tokens: Tensor, target_tokens: Tensor, parents: Tensor, qo_indptr: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each tree from its root along the children whose draft is the target's token.

    Returns:
        accept_index ``[B, max_depth + 1]`` int32 padded with -1, accept_length ``[B]`` int32, bonus_token ``[B]``
        int64; -1 in the last two for a sequence without nodes.

    Raises:
        ValueError: an unsupported device.
    """
    batch = qo_indptr.shape[0] - 1
    accept_index = parents.new_empty(batch, max_depth + 1)
    accept_length = parents.new_empty(batch)
    bonus_token = target_tokens.new_empty(batch)
    if batch:
        verify_tree_greedy_kernel[(batch,)](
            accept_index, accept_length, bonus_token, draft_tokens, target_tokens, parents, qo_indptr, max_depth + 1,
            BLOCK_T=64, **launch_options(draft_tokens.device, VERIFY_CONFIG),
        )  # fmt: skip
    return accept_index, accept_length, bonus_token
