"""vLLM's model runner with draft trees: positions, masks, acceptance, commit and drafts.

Drafts travel through vLLM's scheduler as its speculative tokens, in the order of the tree's nodes: it plans their
slots, cuts them by prefix, which leaves a tree, and rolls back what wasn't accepted.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces import supports_eagle3

from specmemo_kernels import ops
from specmemo_kernels.integrations.vllm import acceptance
from specmemo_kernels.integrations.vllm.backend import TreeAttentionBackend, TreeAttentionMetadata
from specmemo_kernels.integrations.vllm.drafter import TreeDrafter
from specmemo_kernels.integrations.vllm.feature_trees import DraftLayer
from specmemo_kernels.integrations.vllm.pages import block_pages
from specmemo_kernels.integrations.vllm.step import CommittedRows, StepTrees, TreeScratch, step_trees
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor
_DRAFT_LAYER = "specmemo.drafter.layers.{}"

_pruned = lru_cache(maxsize=1024)(DraftTree.pruned)


class TreeRunner:
    """In front of vLLM's ``GPUModelRunner`` or ``CPUModelRunner`` in a class's bases."""

    drafter: TreeDrafter

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self._check_settings()
        self._proposed: dict[str, DraftTree] = {}  # of requests whose drafts vLLM's scheduler has
        self._trees: list[DraftTree | None] = []  # of this step's requests
        self._step: StepTrees | None = None
        self._metadata: list[tuple[TreeAttentionMetadata, list[str]]] = []
        self._scratch: TreeScratch | None = None
        self._accepted: acceptance.Accepted | None = None

    def _check_settings(self: Any) -> None:
        refused = {
            "asynchronous scheduling (pass async_scheduling=False)": self.use_async_scheduling,
            "pipeline parallelism": self.parallel_config.pipeline_parallel_size > 1,
            "decode context parallelism": self.dcp_world_size > 1,
            "positions of several dimensions (M-RoPE)": self.uses_mrope,
            "micro-batches": self.parallel_config.use_ubatching,
            "CUDA graphs (pass enforce_eager=True)": self.device.type != "cpu" and not self.model_config.enforce_eager,
        }
        for what, asked in refused.items():
            if asked:
                raise NotImplementedError(f"draft trees don't work with {what}; change it, or use vLLM without trees")
        if not isinstance(getattr(self, "drafter", None), TreeDrafter):
            raise ValueError(
                "TreeWorker needs the tree drafter as vLLM's speculative_config: pass the arguments of "
                "specmemo_kernels.integrations.vllm.tree_options"
            )
        self.drafter.verified = True

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        """Load model and drafter, and allocate scratch, so that vLLM's memory profile counts it."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        foreign = [name for name, layer in layers.items() if layer.attn_backend is not TreeAttentionBackend]
        if foreign or not layers:
            raise NotImplementedError(
                f"draft trees need attention backend CUSTOM (specmemo) in every attention layer; {foreign or 'none'} "
                "has another"
            )
        source = self.drafter.source
        for i, sizes in enumerate(source.layers):
            context = self.compilation_config.static_forward_context
            context[_DRAFT_LAYER.format(i)] = DraftLayer(sizes, source.num_qo_heads)
        rows = min(self.max_num_reqs * source.max_nodes, self.max_num_tokens)
        shapes = {name: (layer.num_kv_heads, layer.head_size) for name, layer in layers.items()}
        self._scratch = TreeScratch(shapes, rows, self.model_config.dtype, self.device)

    def _setup_eagle3_aux_hidden_state_outputs(self: Any) -> None:
        """Called by vLLM once the drafter is loaded: the model also returns the inputs of these layers."""
        layers = self.drafter.source.aux_layers
        self.use_aux_hidden_state_outputs = bool(layers)
        if layers and not supports_eagle3(self.get_model()):
            raise NotImplementedError(
                f"the drafter reads layers {layers} of the model, which vLLM's {type(self.get_model()).__name__} "
                "doesn't return; use Medusa heads or a drafter of last hidden states"
            )
        if layers:
            self.get_model().set_aux_hidden_state_layers(layers)

    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        groups = [group for groups in self.attn_groups for group in groups]
        foreign = [group.backend.get_name() for group in groups if group.backend is not TreeAttentionBackend]
        if foreign:
            raise NotImplementedError(f"draft trees need attention in every layer; this model has {foreign} too")

    def _prepare_inputs(self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        lengths: list[int] = num_scheduled_tokens.tolist()
        self._trees = [None] * len(lengths)
        for request, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            index = self.input_batch.req_id_to_index[request]
            # Not verified: placeholders (-1) of a prompt's only new token, and drafts behind prompt tokens.
            if drafts[0] >= 0 and lengths[index] == len(drafts) + 1:
                self._trees[index] = _pruned(self._proposed[request], lengths[index])
        self._step = step_trees(self._trees, lengths, self.device)
        if self._step is not None:
            self.positions[: len(self._step.depth_offsets)] += self._step.depth_offsets
        return result

    def _build_attention_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._build_attention_metadata(*args, **kwargs)  # type: ignore[misc]
        layers: dict[int, tuple[TreeAttentionMetadata, list[str]]] = {}
        for name, metadata in result[0].items():
            layers.setdefault(id(metadata), (metadata, []))[1].append(name)
        self._metadata = list(layers.values())
        if not kwargs.get("for_cudagraph_capture"):
            for metadata, _ in self._metadata:
                metadata.step, metadata.scratch = self._step, self._scratch
        return result

    def _sample(self: Any, logits: Tensor, spec_decode_metadata: Any) -> Any:
        begins = [0]
        for drafts in spec_decode_metadata.num_draft_tokens:
            begins.append(begins[-1] + drafts + 1)
        tokens = self.input_ids.gpu[spec_decode_metadata.logits_indices].long()
        rows = acceptance.LogitRows(tuple(self._trees), tuple(begins), tokens)
        metadata = self.input_batch.sampling_metadata
        if acceptance.needs_sampler(metadata):
            outputs = self.input_batch.req_output_token_ids[: len(rows.trees)]
            self._accepted = acceptance.accept_sampled(rows, logits, self.sampler, metadata, outputs)
        else:
            targets = self.sampler.greedy_sample(logits.to(torch.float32))
            self._accepted = acceptance.accept_greedy(rows, targets.long())
        self._commit()
        return self._accepted.output

    def _commit(self: Any) -> None:
        """Copy the accepted nodes' keys and values from scratch to vLLM's blocks."""
        if self._step is None:
            return
        trees, scratch, accepted = self._step.trees, self._scratch, self._accepted
        nodes, lengths = trees.of_requests(accepted.nodes), trees.of_requests(accepted.lengths)
        kernels = ops.kernels(self.drafter.options.backend, self.device)
        for metadata, names in self._metadata:
            place = metadata.table_and_lengths(trees)
            for name in names:
                layer = self._layer(name)
                if isinstance(layer, DraftLayer):
                    continue
                k_pages, v_pages = block_pages(layer.kv_cache)
                kernels.commit_paged_kv(
                    *scratch.layer(name), k_pages[None], v_pages[None], *place, nodes, lengths, None, None
                )

    def _layer(self: Any, name: str) -> Any:
        return self.compilation_config.static_forward_context[name]

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """True: drafts beyond ``max_model_len`` are cut by the scheduler."""
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self: Any,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Drafts per request; none for prompts that aren't complete and for structured output."""
        thinking = acceptance.thinking(sampling_metadata)
        drafting = [i for i, tokens in enumerate(sampled_token_ids) if tokens and not thinking and self._may_draft(i)]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        source = self.drafter.source
        if drafting or source.layers:  # a drafter's own layers read every row
            rows = self._committed_rows(scheduler_output, hidden_states, aux_hidden_states)
            proposed = source.propose(rows, drafting)
            limit = scheduler_output.num_spec_tokens_to_schedule
            ids = self.input_batch.req_ids
            for i, (tokens, tree) in zip(drafting, proposed, strict=True):
                drafts[i], self._proposed[ids[i]] = tokens[:limit], tree
            self._proposed = {name: tree for name, tree in self._proposed.items() if name in self.requests}
        return drafts

    def _committed_rows(self: Any, scheduler_output: Any, hidden: Tensor, aux: list[Tensor] | None) -> CommittedRows:
        batch, rows, following, counts, contexts = self.input_batch, [], [], [], []
        begin = 0
        for i, (request, path) in enumerate(zip(batch.req_ids, self._accepted.paths(), strict=True)):
            length = scheduler_output.num_scheduled_tokens[request]
            if self._trees[i] is None:
                unverified = len(scheduler_output.scheduled_spec_decode_tokens.get(request, ()))
                path = range(length - unverified)
            context = int(batch.num_computed_tokens_cpu[i])
            rows += [begin + node for node in path]
            following += batch.token_ids_cpu[i, context + 1 : context + 1 + len(path)].tolist()
            counts.append(len(path))
            contexts.append(context)
            begin += length
        caches = [self._layer(_DRAFT_LAYER.format(i)).kv_cache for i in range(len(self.drafter.source.layers))]
        owner = next((m for m, names in self._metadata if _DRAFT_LAYER.format(0) in names), self._metadata[0][0])
        index = torch.tensor([rows, following], device=self.device)
        return CommittedRows(hidden, aux, index[0], index[1], counts, contexts, owner.block_table, caches)

    def _may_draft(self: Any, index: int) -> bool:
        """A grammar's mask is for chains: a request with structured output gets no drafts."""
        parameters = self.requests[self.input_batch.req_ids[index]].sampling_params
        return parameters is None or parameters.structured_outputs is None
