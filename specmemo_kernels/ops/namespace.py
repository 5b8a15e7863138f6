"""The ``torch.library`` namespace of the operators. A hub kernel replaces this file with a namespace of its own."""

from __future__ import annotations

from typing import Any

import torch

NAMESPACE = "specmemo"


def operator_packet(name: str) -> Any:
    """``torch.ops.<namespace>.<name>``."""
    return getattr(getattr(torch.ops, NAMESPACE), name)
