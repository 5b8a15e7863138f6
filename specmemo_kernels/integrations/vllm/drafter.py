"""Medusa heads that fill draft trees for vLLM's model runner; the ``model`` of its ``speculative_config``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specmemo_kernels.drafting.base import DraftInput
from specmemo_kernels.drafting.load_heads import load_heads
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.drafting.medusa_heads import MedusaHeads
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, best_first_paths, deepened
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor


@dataclass(frozen=True)
class TreeOptions:
    """``additional_config["specmemo"]``, as :func:`specmemo_kernels.integrations.vllm.tree_options` writes it."""

    heads: str
    tree: tuple[tuple[int, ...], ...] | None = None
    head_bits: int | None = None

    @classmethod
    def of(cls, vllm_config: Any) -> TreeOptions:
        """
        Raises:
            ValueError: no options, no heads, or an option that doesn't exist.
        """
        extra = vllm_config.additional_config
        given = dict(extra.get("specmemo") or {}) if isinstance(extra, dict) else {}
        unknown = given.keys() - cls.__dataclass_fields__.keys()
        if unknown or "heads" not in given:
            names = ", ".join(sorted(unknown))
            problem = f"has no option {names}" if unknown else "doesn't name the heads"
            raise ValueError(
                f"additional_config['specmemo'] {problem}; it is "
                "{'heads': folder or hub id, 'tree': rank paths (optional), 'head_bits': 4 (optional)}"
            )
        tree = given.get("tree")
        return cls(given["heads"], tree and tuple(map(tuple, tree)), given.get("head_bits"))


class MedusaTreeDrafter:
    """Proposes a tree for each request, from the hidden state that its newest token was computed from.

    vLLM creates it with its configuration and calls :meth:`load_model` after loading the model.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.options = TreeOptions.of(vllm_config)
        self._config = vllm_config
        self._nodes: int = vllm_config.speculative_config.num_speculative_tokens + 1
        self._drafter: MedusaDrafter | None = None
        self._tree: DraftTree | None = None

    @property
    def tree(self) -> DraftTree:
        """The tree of every step; its nodes are sorted best first, and each prefix is a tree."""
        assert self._tree is not None, "the model isn't loaded"
        return self._tree

    def load_model(self, model: torch.nn.Module) -> None:
        config = self._config.model_config
        parameter = next(model.parameters())
        heads = load_heads(
            self.options.heads,
            config.get_hidden_size(),
            config.get_vocab_size(),
            dtype=config.dtype,
            device=parameter.device,
            head_bits=self.options.head_bits,
        )
        self._tree = self._choose(heads)
        self._drafter = MedusaDrafter(heads, _lm_head(model, self._config))

    def _choose(self, heads: MedusaHeads) -> DraftTree:
        if self.options.tree is not None:
            tree = DraftTree.from_paths(self.options.tree)
            if tree.size != self._nodes:
                raise ValueError(
                    f"the tree has {tree.size - 1} drafts and num_speculative_tokens is {self._nodes - 1}; "
                    "they must be equal (tree_options sets both)"
                )
        else:
            accuracy = heads.cumulative_topk_accuracy or deepened(DEFAULT_ACCURACY, heads.num_heads)
            tree = DraftTree.from_paths(best_first_paths(accuracy[: heads.num_heads], self._nodes - 1))
        if tree.max_depth > heads.num_heads:
            raise ValueError(f"the tree is {tree.max_depth} deep, {heads.num_heads} heads can fill {heads.num_heads}")
        return tree

    def propose_trees(self, root_tokens: Tensor, hidden: Tensor) -> list[list[int]]:
        """Drafts of each request, in the order of the tree's nodes without the root.

        Args:
            root_tokens: ``[B]`` int64, the newest tokens. hidden: ``[B, hidden_size]``.
        """
        assert self._drafter is not None, "the model isn't loaded"
        filled = self._drafter.propose(DraftInput(self.tree, root_tokens, hidden, ()))
        drafts: list[list[int]] = filled[:, 1:].tolist()
        return drafts

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        raise RuntimeError(
            "vLLM's own worker verifies chains only and has no hidden states for the drafter: pass "
            "worker_cls='specmemo_kernels.integrations.vllm.worker.TreeWorker' (tree_options does)"
        )


def _lm_head(model: Any, config: Any) -> tuple[Tensor, None] | Callable[[Tensor], Tensor]:
    """The lm_head's matrix where it is whole and in memory as it is, else a call of the model's lm_head."""
    head = getattr(model, "lm_head", None)
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    sizes = config.model_config.get_vocab_size(), config.model_config.get_hidden_size()
    whole = isinstance(weight, Tensor) and weight.dtype == config.model_config.dtype and bias is None
    if whole and config.parallel_config.tensor_parallel_size == 1 and weight.ndim == 2 and weight.shape[1] == sizes[1]:
        return weight.data[: sizes[0]], None
    compute: Callable[[Tensor], Tensor] = model.compute_logits
    return compute
