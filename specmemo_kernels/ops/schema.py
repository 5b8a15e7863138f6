"""The operators as torch sees them: schemas, fake kernels, and one kernel per device that calls the chosen backend.

``Library.define`` rather than ``custom_op``: about 8 microseconds less per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from specmemo_kernels.ops import checks
from specmemo_kernels.ops.dispatch import implementation
from specmemo_kernels.ops.namespace import NAMESPACE, operator_packet

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
    "lm_head_log_probs": (
        "(Tensor hidden, Tensor weight, Tensor? bias, int k, Tensor? scales, str? backend) -> (Tensor, Tensor, Tensor)"
    ),
    "linear": ("(Tensor x, Tensor weight, Tensor? bias, Tensor? scales, bool invariant, str? backend) -> Tensor"),
    "grouped_linear": ("(Tensor x, Tensor weight, Tensor? bias, Tensor ends, bool invariant, str? backend) -> Tensor"),
    "gated_mlp": (
        "(Tensor x, Tensor gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, "
        "str activation, bool invariant, str? backend) -> Tensor"
    ),
    "rms_norm": "(Tensor x, Tensor weight, float eps, float offset, bool round_first, str? backend) -> Tensor",
    "decompress": "(Tensor compressed, int columns, str? backend) -> Tensor",
}


def call(name: str, *args: Any) -> Any:
    """Check the arguments of operator ``name``, and call it through torch's dispatcher."""
    getattr(checks, name)(*args[:-1])
    return operator_packet(name)(*args)


def _kernel(name: str) -> Callable[..., Any]:
    """The function torch calls for a real tensor: the last argument names the backend."""

    def run(*args: Any) -> Any:
        return getattr(implementation(args[-1], args[0].device), name)(*args[:-1])

    run.__name__ = name
    return run


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
    "lm_head_log_probs": lambda hidden, weight, bias, k, *_: (
        hidden.new_empty(hidden.shape[0], k, dtype=torch.promote_types(hidden.dtype, torch.float32)),
        hidden.new_empty(hidden.shape[0], k, dtype=torch.int64),
        hidden.new_empty(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32)),
    ),
    "linear": lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0]),
    "grouped_linear": lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[1]),
    "gated_mlp": lambda x, gate, up, down, *_: x.new_empty(*x.shape[:-1], down.shape[0]),
    "rms_norm": lambda x, *_: x.new_empty(x.shape),
    "decompress": lambda compressed, columns, _: compressed.new_empty(len(compressed), columns, dtype=torch.bfloat16),
}

#: Operators whose results could have gradients. Their backward pass raises; without one torch would leave them out.
_WITHOUT_GRADIENT = (
    "tree_attention", "lm_head_topk", "lm_head_log_probs", "linear", "grouped_linear", "gated_mlp", "rms_norm",
)  # fmt: skip


def _raise_no_gradient(name: str) -> None:
    raise NotImplementedError(
        f"{NAMESPACE}::{name} has no gradient; use torch's own operators for training, or detach its inputs"
    )


def _no_gradient(name: str) -> Callable[..., Any]:
    def backward(*_: Any) -> Any:
        _raise_no_gradient(name)

    return backward


def _count_changes(name: str) -> Callable[..., Any]:
    """The kernel that counts a new version of each tensor that the operator writes to, so that autograd notices.

    It refuses tensors that require a gradient: what the operator writes wouldn't have one.
    """
    operator = operator_packet(name).default
    written = [i for i, argument in enumerate(operator._schema.arguments) if argument.alias_info is not None]

    def run(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            _raise_no_gradient(name)
        changed = (args[i] for i in written if i < len(args) and args[i] is not None)
        increment_version([tensor for tensor in changed if not tensor.is_inference()])
        return operator.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args)

    return run


_Library: Any = torch.library.Library  # torch gives it no types
library = _Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _kernel(_name), _key)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", FAKES[_name], lib=library)
for _name in _WITHOUT_GRADIENT:
    torch.library.register_autograd(f"{NAMESPACE}::{_name}", _no_gradient(_name), lib=library)
for _name in SCHEMAS:
    if operator_packet(_name).default._schema.is_mutable:
        library.impl(_name, _count_changes(_name), "ADInplaceOrView", with_keyset=True)
