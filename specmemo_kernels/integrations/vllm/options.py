"""Options of the plugin, ``additional_config["specmemo"]`` of vLLM's configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from specmemo_kernels.tree.draft_tree import DraftTree

_USE = (
    "{'heads': folder or hub id, 'tree': rank paths (optional), 'head_bits': 4 (optional), "
    "'backend': 'cpu', 'triton' or 'reference' (optional)}"
)


@dataclass(frozen=True)
class Options:
    """
    Attributes:
        heads: Medusa heads or a published drafter, as ``patch`` takes them; needed for trees only.
        tree: rank paths; ``None``: the best tree for the heads' accuracies.
        head_bits: 4 packs Medusa heads and published drafters.
        backend: of the operators; ``None``: by device.
    """

    heads: str | None = None
    tree: tuple[tuple[int, ...], ...] | None = None
    head_bits: int | None = None
    backend: str | None = None

    @classmethod
    def of(cls, vllm_config: Any) -> Options:
        """
        Raises:
            ValueError: not a dict, or an option that doesn't exist.
        """
        extra = vllm_config.additional_config
        given = extra.get("specmemo", {}) if isinstance(extra, dict) else {}
        if not isinstance(given, dict):
            raise ValueError(f"additional_config['specmemo'] is {given!r}; it must be a dict {_USE}")
        unknown = given.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"additional_config['specmemo'] has no option {', '.join(sorted(unknown))}; it is {_USE}")
        tree = given.get("tree")
        return cls(**{**given, "tree": None if tree is None else tuple(map(tuple, tree))})


def given_tree(paths: tuple[tuple[int, ...], ...], nodes: int, depth: int) -> DraftTree:
    """The tree of rank ``paths``.

    Raises:
        ValueError: not a tree, not ``nodes`` nodes, or deeper than ``depth``.
    """
    tree = DraftTree.from_paths(paths)
    if tree.size != nodes:
        raise ValueError(
            f"the tree has {tree.size - 1} drafts and num_speculative_tokens is {nodes - 1}; they must be equal "
            "(tree_options sets both)"
        )
    if tree.max_depth > depth:
        raise ValueError(f"the tree is {tree.max_depth} deep, the drafter guesses {depth} tokens ahead")
    return tree
