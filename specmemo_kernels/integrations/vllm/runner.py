"""vLLM's model runner with draft trees: positions, masks, acceptance, commit and drafts.

Drafts travel through vLLM's scheduler as its speculative tokens, in the order of the tree's nodes: it plans their
slots, cuts them by prefix, which leaves a tree, and rolls back what wasn't accepted.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from specmemo_kernels import ops
from specmemo_kernels.integrations.vllm import acceptance
from specmemo_kernels.integrations.vllm.backend import TreeAttentionBackend, TreeAttentionMetadata
from specmemo_kernels.integrations.vllm.drafter import MedusaTreeDrafter
from specmemo_kernels.integrations.vllm.pages import block_pages
from specmemo_kernels.integrations.vllm.step import StepTrees, TreeScratch, step_trees

Tensor = torch.Tensor


class TreeRunner:
    """In front of vLLM's ``GPUModelRunner`` or ``CPUModelRunner`` in a class's bases."""

    drafter: MedusaTreeDrafter

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self._check_settings()
        self._step: StepTrees | None = None
        self._metadata: list[tuple[TreeAttentionMetadata, list[str]]] = []
        self._scratch: TreeScratch | None = None
        self._last_rows: Tensor | None = None

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
        if not isinstance(getattr(self, "drafter", None), MedusaTreeDrafter):
            raise ValueError(
                "TreeWorker needs the tree drafter as vLLM's speculative_config: pass the arguments of "
                "specmemo_kernels.integrations.vllm.tree_options"
            )
        self.drafter.verified = True

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        """Load model and heads, and allocate scratch, so that vLLM's memory profile counts it."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        foreign = [name for name, layer in layers.items() if layer.attn_backend is not TreeAttentionBackend]
        if foreign or not layers:
            raise NotImplementedError(
                f"draft trees need attention backend CUSTOM (specmemo) in every attention layer; {foreign or 'none'} "
                "has another"
            )
        rows = min(self.max_num_reqs * self.drafter.tree.size, self.max_num_tokens)
        shapes = {name: (layer.num_kv_heads, layer.head_size) for name, layer in layers.items()}
        self._scratch = TreeScratch(shapes, rows, self.model_config.dtype, self.device)

    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        groups = [group for groups in self.attn_groups for group in groups]
        foreign = [group.backend.get_name() for group in groups if group.backend is not TreeAttentionBackend]
        if foreign:
            raise NotImplementedError(f"draft trees need attention in every layer; this model has {foreign} too")

    def _prepare_inputs(self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        lengths: list[int] = num_scheduled_tokens.tolist()
        sizes = [0] * len(lengths)
        for request, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            index = self.input_batch.req_id_to_index[request]
            # Behind prompt tokens of the same step, drafts aren't verified: only the first row counts.
            if lengths[index] == len(drafts) + 1:
                sizes[index] = lengths[index]
        self._step = step_trees(self.drafter.tree, sizes, lengths, self.device)
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
        rows = self._logit_rows(spec_decode_metadata)
        metadata = self.input_batch.sampling_metadata
        if acceptance.needs_sampler(metadata):
            outputs = self.input_batch.req_output_token_ids[: len(rows.sizes)]
            accepted = acceptance.accept_sampled(rows, logits, self.sampler, metadata, outputs)
        else:
            targets = self.sampler.greedy_sample(logits.to(torch.float32))
            accepted = acceptance.accept_greedy(rows, targets.long())
        self._commit(accepted)
        self._last_rows = accepted.last_rows
        return accepted.output

    def _logit_rows(self: Any, spec_decode_metadata: Any) -> acceptance.LogitRows:
        drafts: list[int] = spec_decode_metadata.num_draft_tokens
        sizes = self._step.sizes if self._step is not None else [0] * len(drafts)
        begins = [0]
        for count in drafts:
            begins.append(begins[-1] + count + 1)
        tokens = self.input_ids.gpu[spec_decode_metadata.logits_indices].long()
        return acceptance.LogitRows(self.drafter.tree, tuple(max(size, 1) for size in sizes), tuple(begins), tokens)

    def _commit(self: Any, accepted: acceptance.Accepted) -> None:
        """Copy the accepted nodes' keys and values from scratch to vLLM's blocks."""
        if self._step is None:
            return
        trees, scratch = self._step.trees, self._scratch
        nodes, lengths = trees.of_requests(accepted.nodes), trees.of_requests(accepted.lengths)
        kernels = ops.kernels(self.drafter.options.backend, self.device)
        for metadata, names in self._metadata:
            place = metadata.table_and_lengths(trees)
            for name in names:
                k_pages, v_pages = block_pages(self._layer(name).kv_cache)
                kernels.commit_paged_kv(
                    *scratch.layer(name), k_pages[None], v_pages[None], *place, nodes, lengths, None, None
                )

    def _layer(self: Any, name: str) -> Any:
        return self.compilation_config.static_forward_context[name]

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """True: drafts beyond ``max_model_len`` are cut by the scheduler, and the drafter has no cache of its own."""
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self: Any, scheduler_output: Any, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        """Drafts per request; none for prompts that aren't complete and for structured output."""
        sample_hidden_states = args[2] if len(args) > 2 else kwargs["sample_hidden_states"]
        drafting = [i for i, tokens in enumerate(sampled_token_ids) if tokens and self._may_draft(i)]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not drafting or acceptance.thinking(self.input_batch.sampling_metadata):
            return drafts
        index = torch.tensor(drafting, device=self.device)
        roots = torch.tensor([sampled_token_ids[i][-1] for i in drafting], device=self.device)
        proposed = self.drafter.propose_trees(roots, sample_hidden_states[self._last_rows[index]])
        limit = scheduler_output.num_spec_tokens_to_schedule
        for i, tokens in zip(drafting, proposed, strict=True):
            drafts[i] = tokens[:limit]
        return drafts

    def _may_draft(self: Any, index: int) -> bool:
        """A grammar's mask is for chains: a request with structured output gets no drafts."""
        parameters = self.requests[self.input_batch.req_ids[index]].sampling_params
        return parameters is None or parameters.structured_outputs is None
