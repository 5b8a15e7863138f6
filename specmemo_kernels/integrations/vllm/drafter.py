"""The ``model`` of vLLM's ``speculative_config``: loads a drafter and fills draft trees for the model runner."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.drafting.published import open_drafter
from specmemo_kernels.integrations.vllm.feature_trees import FeatureTrees
from specmemo_kernels.integrations.vllm.medusa_trees import MedusaTrees
from specmemo_kernels.integrations.vllm.options import Options
from specmemo_kernels.integrations.vllm.step import CommittedRows
from specmemo_kernels.tree.draft_tree import DraftTree


class TreeSource(Protocol):
    """What fills trees: Medusa heads, or a drafter with layers of its own.

    Attributes:
        layers: keys and values of its layers; it has none if it reads last hidden states only.
        num_qo_heads: of these layers.
        aux_layers: the target's layers whose inputs it reads.
        max_nodes: of a tree.
    """

    layers: tuple[LayerKV, ...]
    num_qo_heads: int
    aux_layers: tuple[int, ...]
    max_nodes: int

    def propose(self, rows: CommittedRows, drafting: list[int]) -> list[tuple[list[int], DraftTree]]:
        """Tokens (without the root's) and tree of each request in ``drafting``; reads the rows of all requests."""


class TreeDrafter:
    """vLLM creates it with its configuration and calls :meth:`load_model` after loading the model.

    Attributes:
        options: of the user.
        verified: set by a model runner that verifies trees; vLLM's own verifies chains.
        source: fills the trees, once the model is loaded.
    """

    verified = False
    source: TreeSource

    def __init__(self, vllm_config: Any) -> None:
        self.options = Options.of(vllm_config)
        if self.options.heads is None:
            raise ValueError("additional_config['specmemo'] doesn't name the heads: use tree_options(heads=...)")
        self._config = vllm_config

    def load_model(self, model: torch.nn.Module) -> None:
        """
        Raises:
            ValueError: vLLM's own worker runs; options that don't fit the drafter.
            HeadsError: files that aren't a drafter for this model.
        """
        if not self.verified:
            raise ValueError(
                "vLLM's own worker verifies chains only and has no hidden states for the drafter: pass "
                "worker_cls='specmemo_kernels.integrations.vllm.worker.TreeWorker' (tree_options does)"
            )
        assert self.options.heads is not None
        nodes = self._config.speculative_config.num_speculative_tokens + 1
        published = open_drafter(self.options.heads)
        if published is None:
            self.source = MedusaTrees(self.options, self._config, model, nodes)
        else:
            self.source = FeatureTrees(published, self.options, self._config, model, nodes)

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        """Unused, but required by vLLM; :class:`TreeRunner` calls ``source.propose``."""
        raise NotImplementedError("this drafter is called by TreeWorker, not through propose")
