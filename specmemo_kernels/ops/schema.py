"""The operators as torch sees them: schemas, checks on fake tensors, one kernel per device that picks a backend.

``Library.define`` rather than ``custom_op``: about 8 microseconds less per call, and a step makes two calls a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

from specmemo_kernels.ops.dispatch import backend_for
from specmemo_kernels.ops.layouts import Function, layouts, shortened

Tensor = torch.Tensor

SCHEMAS = {
    "tree_attention": (
        "(Tensor q, Tensor k_new, Tensor v_new, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seq_lens, "
        "Tensor qo_indptr, Tensor? tree_mask, float scale, int? window, float? softcap, Tensor? sinks, "
        "int? max_qo_len, int? max_seq_len, bool invariant, Tensor? k_scales, Tensor? v_scales, "
        "int? min_qo_len, str? backend) -> (Tensor, Tensor)"
    ),
    "append_paged_kv": (
        "(Tensor k_new, Tensor v_new, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor block_table, Tensor seq_lens, "
        "Tensor qo_indptr, Tensor(c!)? k_scales, Tensor(d!)? v_scales, str? backend) -> ()"
    ),
    "commit_paged_kv": (
        "(Tensor k_scratch, Tensor v_scratch, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor block_table, "
        "Tensor seq_lens, Tensor qo_indptr, Tensor accept_index, Tensor accept_length, Tensor(c!)? k_scales, "
        "Tensor(d!)? v_scales, str? backend) -> ()"
    ),
    "verify_tree_greedy": (
        "(Tensor draft_tokens, Tensor target_tokens, Tensor parents, Tensor qo_indptr, int max_depth, str? backend) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    "lm_head_argmax": "(Tensor hidden, Tensor weight, Tensor? bias, str? backend) -> Tensor",
    "lm_head_topk": (
        "(Tensor hidden, Tensor weight, Tensor? bias, int k, Tensor? scales, str? backend) -> (Tensor, Tensor)"
    ),
}


def _kernel(name: str) -> Callable[..., Any]:
    """The function torch calls for a real tensor: the last argument names the backend."""

    def run(*args: Any) -> Any:
        backend = backend_for(args[-1], args[0].device)
        return getattr(backend, name)(*args[:-1])

    functools.update_wrapper(run, _kernel, assigned=())
    run.__name__ = name
    return run


KERNELS = {name: _kernel(name) for name in SCHEMAS}


# Who has to hear of every call: autograd, modes, tracers and profilers.
LISTENERS: tuple[Callable[[], Any], ...] = (
    torch.is_grad_enabled,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._is_tracing,
    torch.autograd._profiler_enabled,  # type: ignore[attr-defined]
)

#: What was checked is remembered for this many kinds of calls; a step makes the same few again and again.
_REMEMBERED = 1024


class Operator:
    """What a call of an operator runs: a check, then torch's operator or, where nobody listens, the kernel alone.

    Between two layers' products a core's caches hold nothing of torch's dispatcher, and the way through it takes longer
    than attention over a thousand tokens.

    Args:
        name: of torch's operator and of the backends' functions.
        check: takes the arguments without the backend; raises for arguments that don't fit.
    """

    def __init__(self, name: str, check: Callable[..., None]) -> None:
        self._name = name
        self._check = check
        self._kernels: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        key = None if torch.compiler.is_compiling() else layouts(*args)
        kernel = self._kernels.get(key)
        if kernel is None:
            self._check(*args[:-1])
        if kernel is None and key is not None:
            kernel = getattr(backend_for(args[-1], args[0].device), self._name)
            if len(self._kernels) >= _REMEMBERED:
                self._kernels.clear()
            self._kernels[key] = kernel
        if kernel is None or any(listens() for listens in LISTENERS):
            return getattr(torch.ops.specmemo, self._name)(*args)
        return kernel(*args[:-1])

    def shortens(self, function: Function) -> Function:
        """A decorator of the function that hands its arguments, all and in their order, to this operator."""
        return shortened(function, LISTENERS, self._kernels)


def _fake_tree_attention(q: Tensor, k_new: Tensor, v_new: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape[0], q.shape[1], v_new.shape[2]), q.new_empty(q.shape[:2], dtype=lse)


def _fake_verify(
    draft: Tensor, target: Tensor, parents: Tensor, qo_indptr: Tensor, max_depth: int, _: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    batch = qo_indptr.shape[0] - 1
    return parents.new_empty(batch, max_depth + 1), parents.new_empty(batch), target.new_empty(batch)


FAKES: dict[str, Callable[..., Any]] = {
    "tree_attention": _fake_tree_attention,
    "append_paged_kv": lambda *_: None,
    "commit_paged_kv": lambda *_: None,
    "verify_tree_greedy": _fake_verify,
    "lm_head_argmax": lambda hidden, *_: hidden.new_empty(hidden.shape[0], dtype=torch.int64),
    "lm_head_topk": lambda hidden, weight, bias, k, *_: (
        hidden.new_empty(hidden.shape[0], k),
        hidden.new_empty(hidden.shape[0], k, dtype=torch.int64),
    ),
}

_Library: Any = torch.library.Library  # torch gives it no types
library = _Library("specmemo", "DEF")
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _key in ("CPU", "CUDA"):
        library.impl(_name, KERNELS[_name], _key)
    torch.library.register_fake(f"specmemo::{_name}", FAKES[_name], lib=library)
