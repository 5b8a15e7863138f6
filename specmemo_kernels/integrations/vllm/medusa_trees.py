"""Draft trees of Medusa heads: from the hidden state that a request's newest token was computed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.drafting.base import DraftInput
from specmemo_kernels.drafting.load_heads import load_heads
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.integrations.vllm.options import Options, given_tree
from specmemo_kernels.integrations.vllm.step import CommittedRows
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, best_first_paths, deepened
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor


class MedusaTrees:
    """The same tree for every request and step; its nodes are sorted best first.

    Args:
        options: of the user.
        vllm_config, model: vLLM's.
        nodes: of a tree, the root included.
    """

    layers: tuple[LayerKV, ...] = ()
    num_qo_heads = 0
    aux_layers: tuple[int, ...] = ()

    def __init__(self, options: Options, vllm_config: Any, model: Any, nodes: int) -> None:
        config = vllm_config.model_config
        assert options.heads is not None
        heads = load_heads(
            options.heads,
            config.get_hidden_size(),
            config.get_vocab_size(),
            dtype=config.dtype,
            device=next(model.parameters()).device,
            head_bits=options.head_bits,
        )
        if options.tree is None:
            accuracy = heads.cumulative_topk_accuracy or deepened(DEFAULT_ACCURACY, heads.num_heads)
            self._tree = DraftTree.from_paths(best_first_paths(accuracy[: heads.num_heads], nodes - 1))
        else:
            self._tree = given_tree(options.tree, nodes, heads.num_heads)
        self.max_nodes = self._tree.size
        self._drafter = MedusaDrafter(heads, _lm_head(model, vllm_config), options.backend)

    def propose(self, rows: CommittedRows, drafting: list[int]) -> list[tuple[list[int], DraftTree]]:
        index = torch.tensor(drafting, device=rows.hidden.device)
        hidden, roots = rows.hidden[rows.last_rows[index]], rows.roots[index]
        filled = self._drafter.propose(DraftInput(self._tree, roots, hidden, ()))
        return [(drafts, self._tree) for drafts in filled[:, 1:].tolist()]


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
