"""The ``torch.library`` namespace of the operators: that of this build, so that several are loaded side by side."""

from __future__ import annotations

from typing import Any

from .._ops import add_op_namespace_prefix, ops

NAMESPACE = add_op_namespace_prefix("").removesuffix("::")


def operator_packet(name: str) -> Any:
    """``torch.ops.<namespace>.<name>``."""
    return getattr(ops, name)
