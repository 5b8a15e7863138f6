"""vLLM plugin: an attention backend over vLLM's KV pages, and verification of draft trees (docs/engines.md).

``register`` is the entry point ``specmemo`` of ``vllm.general_plugins``; vLLM calls it in each of its processes.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from specmemo_kernels.integrations.vllm.versions import unsupported_version

_LOGGER = logging.getLogger("vllm.specmemo")
_PACKAGE = __name__

BACKEND = f"{_PACKAGE}.backend.TreeAttentionBackend"
WORKER = f"{_PACKAGE}.worker.TreeWorker"
DRAFTER = f"{_PACKAGE}.drafter.TreeDrafter"

__all__ = ["register", "tree_options"]


def register() -> None:
    """Register the attention backend as ``CUSTOM``. Nothing else changes; may be called again.

    With another version of vLLM than the supported ones nothing is registered and a warning names them.
    """
    problem = unsupported_version()
    if problem is not None:
        _LOGGER.warning("%s Nothing was registered.", problem)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from specmemo_kernels.integrations.vllm.cpu_platform import accept_custom_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    accept_custom_backend()


def tree_options(
    heads: str | Path,
    nodes: int = 8,
    *,
    tree: list[list[int]] | None = None,
    head_bits: int | None = None,
    backend: str | None = None,
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` (or ``EngineArgs``) that make it verify draft trees.

    Args:
        heads: folder, file or hub id of Medusa heads or of a drafter that reads hidden states, as for ``patch``.
        nodes: of the tree, its root included. Each request takes as many tokens of ``max_num_batched_tokens`` per step.
        tree: rank paths in the place of the best tree of ``nodes`` nodes; a path comes after its parent. Drafters that
            read hidden states make a tree of their own for each request in each step, unless this is given.
        head_bits: 4 packs the drafter's matrices into 4-bit codes.
        backend: of the operators; ``None``: by device.
    """
    if tree is not None:
        nodes = len(tree) + 1
    if nodes < 2:
        raise ValueError(f"nodes is {nodes}; a tree has a root and at least one draft, or use vLLM without trees")
    options = {"heads": str(heads), "tree": tree, "head_bits": head_bits, "backend": backend}
    return {
        "worker_cls": WORKER,
        "speculative_config": {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": nodes - 1},
        "additional_config": {"specmemo": {name: value for name, value in options.items() if value is not None}},
    }
