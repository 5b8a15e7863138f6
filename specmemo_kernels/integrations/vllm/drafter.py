"""Medusa heads that fill draft trees for vLLM's model runner; the ``model`` of its ``speculative_config``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specmemo_kernels.drafting.base import DraftInput
from specmemo_kernels.drafting.load_heads import load_heads
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.drafting.medusa_heads import MedusaHeads
from specmemo_kernels.integrations.vllm.options import Options
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, best_first_paths, deepened
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor


class MedusaTreeDrafter:
    """Proposes a tree for each request, from the hidden state that its newest token was computed from.

    vLLM creates it with its configuration and calls :meth:`load_model` after loading the model.

    Attributes:
        verified: set by a model runner that verifies trees; vLLM's own verifies chains.
    """

    verified = False

    def __init__(self, vllm_config: Any) -> None:
        self.options = Options.of(vllm_config)
        if self.options.heads is None:
            raise ValueError("additional_config['specmemo'] doesn't name the heads: use tree_options(heads=...)")
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
        if not self.verified:
            raise ValueError(
                "vLLM's own worker verifies chains only and has no hidden states for the drafter: pass "
                "worker_cls='specmemo_kernels.integrations.vllm.worker.TreeWorker' (tree_options does)"
            )
        config = self._config.model_config
        parameter = next(model.parameters())
        assert self.options.heads is not None
        heads = load_heads(
            self.options.heads,
            config.get_hidden_size(),
            config.get_vocab_size(),
            dtype=config.dtype,
            device=parameter.device,
            head_bits=self.options.head_bits,
        )
        self._tree = self._choose(heads)
        self._drafter = MedusaDrafter(heads, _lm_head(model, self._config), self.options.backend)

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
        """vLLM asks for this method; :class:`TreeRunner` calls :meth:`propose_trees`."""
        raise NotImplementedError("this drafter is called by TreeWorker, through propose_trees")


def _lm_head(model: Any, config: Any) -> tuple[Tensor, None] | Callable[[Tensor], Tensor]:
    """The lm_head's matrix where it is whole and in memory as it is, else a call of the model's lm_head."""
    head, settings = getattr(model, "lm_head", None), config.model_config
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    vocab_size, hidden_size = settings.get_vocab_size(), settings.get_hidden_size()
    if (
        isinstance(weight, Tensor)
        and (weight.dtype, weight.shape[1:], bias) == (settings.dtype, (hidden_size,), None)
        and config.parallel_config.tensor_parallel_size == 1
    ):
        return weight.data[:vocab_size], None
    compute: Callable[[Tensor], Tensor] = model.compute_logits
    return compute
