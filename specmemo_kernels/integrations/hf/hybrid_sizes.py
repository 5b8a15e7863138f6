"""Sizes of models with recurrent layers for plans: from the model itself, or from its code without weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specmemo_kernels.integrations.hf.find_mixers import stateful_modules
from specmemo_kernels.integrations.hf.measure import mixer_peak
from specmemo_kernels.integrations.hf.mixer_pass import chunk_pass
from specmemo_kernels.integrations.hf.mixers import Mixer, Mixers
from specmemo_kernels.integrations.hf.recurrence import FEW_TOKENS, Recurrence
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.planning.model_spec import MixerSizes, ModelSpec
from specmemo_kernels.planning.pass_bytes import PassBytes
from specmemo_kernels.planning.search import CHUNKS, MAX_NODES

#: Rows of the chunks that are counted, few because layers without a parallel form are traced row by row; bytes of more
#: rows are on the line through the first and the last.
_ROWS = (FEW_TOKENS, *(rows for rows in CHUNKS if rows <= 512))
#: Tokens of the paths that are counted, up to those of a chain of ``MAX_NODES``.
_PATHS = (1, 2, 4, 8, FEW_TOKENS, 32, MAX_NODES)


def with_mixers(spec: ModelSpec, model: Any, mixers: Mixers, attention_layers: int) -> ModelSpec:
    """``spec`` with the sizes of ``model``'s recurrent layers, and with its number of matrix elements."""
    return _with_mixers(spec, model, mixers.mixers, attention_layers) if mixers.mixers else spec


@torch.no_grad()
def recurrent_spec(spec: ModelSpec, source: str | Path) -> ModelSpec:
    """``spec`` of a ``config.json``, a folder with one or a hub id, with the sizes of its recurrent layers.

    The model is made by transformers on the meta device, without weights, in ``spec.dtype``. Each kind of its layers
    runs on prompts' chunks and paths of several sizes.

    Raises:
        ValueError: none of its modules keeps a state in transformers' cache.
    """
    if not spec.recurrent:
        return spec
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        model = make(config.get_text_config(), dtype=getattr(torch, spec.dtype)).eval()
        found = stateful_modules(model)
    if not found:
        raise ValueError(f"{spec.name} has recurrent layers, but none of its modules stores a state in its cache")
    kinds = list(config.get_text_config().layer_types)
    attention = sum((kind.endswith("attention") and kind != "linear_attention") or "hybrid" in kind for kind in kinds)
    spec = _with_mixers(spec, model, found, attention)
    chunk = path = PassBytes()
    for mixer in {mixer.kind: mixer for mixer in found}.values():
        few = Recurrence.of(mixer.module)
        mixer = replace(mixer, index=0, few=few, divisible=few is not None)
        chunk, path = chunk.elementwise_max(_chunk_bytes(mixer)), path.elementwise_max(_path_bytes(mixer))
    assert spec.mixers is not None, "recurrent"
    return replace(spec, mixers=replace(spec.mixers, chunk=chunk, path=path))


def _with_mixers(spec: ModelSpec, model: Any, mixers: Sequence[Mixer], attention_layers: int) -> ModelSpec:
    matrices = _matrices(mixer.module for mixer in mixers)
    outside = [model.get_input_embeddings(), *([] if spec.tied else [model.get_output_embeddings()])]
    layers = _elements(_matrices([model])) - _elements(_matrices(outside))
    specs = [mixer.spec for mixer in mixers]
    inputs = max(matrix.shape[-1] for matrix in matrices)
    sizes = MixerSizes(
        _elements(matrices), len(matrices), inputs, sum(each.state_bytes for each in specs),
        sum(each.row_bytes for each in specs),
    )  # fmt: skip
    bare = replace(spec, layers_without_keys=spec.num_layers - attention_layers, other_weights=0, mixers=sizes)
    return replace(bare, other_weights=layers - bare.layer_weights)


def _matrices(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The modules' matrices, each once."""
    return list({id(p): p for module in modules for p in module.parameters() if p.dim() > 1}.values())


def _elements(matrices: Sequence[torch.Tensor]) -> int:
    return sum(matrix.numel() for matrix in matrices)


def _chunk_bytes(mixer: Mixer) -> PassBytes:
    """Transient bytes of a pass while ``mixer`` computes a prompt's first or another chunk, by its rows."""
    spec = mixer.spec

    def peak(rows: int, first: bool) -> int:
        current = chunk_pass(Mixers((mixer,)), rows, first)
        assert current is not None, "there is a mixer"
        with MemoryTracker() as tracker:
            hidden = torch.zeros(1, rows, spec.hidden_size, dtype=spec.dtype, device=spec.device)
            current.run(mixer, hidden, mixer.arguments_for(1, rows))
        return int(tracker.peak) + 3 * hidden.nbytes  # the embeddings, and two of the residual stream

    return PassBytes.stepwise([(rows, max(peak(rows, True), peak(rows, False))) for rows in _ROWS])


def _path_bytes(mixer: Mixer) -> PassBytes:
    """Transient bytes of a path through a tree, by its tokens; by those of one token if ``mixer`` gets them alone.

    Whether it does, a loaded model's times decide. Here, if padded tokens take more bytes than its matrices.
    """
    weights = sum(matrix.nbytes for matrix in _matrices([mixer.module]))
    alone = mixer_peak(mixer, 1, 1)
    if mixer_peak(mixer, 1, 4) > weights:
        return PassBytes(alone)
    return PassBytes.stepwise([(tokens, max(alone, mixer_peak(mixer, 1, tokens))) for tokens in _PATHS])
