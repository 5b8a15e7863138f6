"""Replicated key/value heads, for models with fewer key/value heads than ranks.

transformers' tensor parallel plans shard the rows of a key or value projection evenly. With more ranks than key/value
heads (2 heads on 4 ranks, 8 on 16) each rank has a piece of a head, and the model can't run. While the model is
patched, each rank has all rows of the head that its query heads attend to, gathered once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.target import local_part
from specmemo_kernels.planning.model_spec import ranks_share

_KEYS_AND_VALUES = ("k_proj", "v_proj")
#: Modules that hold queries, keys and values as one matrix.
_FUSED = ("qkv_proj", "query_key_value")
_PROJECTIONS = ("q_proj", *_KEYS_AND_VALUES, "o_proj")


@dataclass
class ReplicatedKVHeads:
    """Whole key/value heads on this rank; :meth:`undo` restores the model.

    Each projection's parameter is replaced by a distributed tensor of ``ranks`` heads, one per rank, with repetitions.
    The original parameter's local part becomes a view of this rank's head, so that nothing is stored twice.
    ``state_dict`` and saving use the original parameter.
    """

    _undo_steps: list[Callable[[], None]] = field(default_factory=list)

    @torch.no_grad()
    def install(self, model: Any, rank: int, ranks: int) -> None:
        """Replicate heads that are split between ranks; collective, every rank must call it.

        Raises:
            UnsupportedModel: the ranks can't share the heads, or other parameters of the attention depend on them. The
                model is as before.
        """
        config = model.config.get_text_config()
        query_heads = int(getattr(config, "num_attention_heads", 0) or 0)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or query_heads)
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in _FUSED and _is_sharded(module) and (kv_heads % ranks or query_heads % ranks):
                raise UnsupportedModel(
                    f"{_heads(model, query_heads, kv_heads)}, and {name}, where both are one matrix, is divided over "
                    f"{ranks} ranks; {_remedy(query_heads, kv_heads, shared=False)}"
                )
        layers = [(module, *heads) for module in model.modules() if (heads := _split_heads(model, module, ranks))]
        try:
            for attention, query_heads, kv_heads in layers:
                for projection in map(attention.get_submodule, _KEYS_AND_VALUES):
                    for kind, parameter in list(projection.named_parameters(recurse=False)):
                        self._replace(projection, kind, parameter, kv_heads, rank, ranks)
                if hasattr(attention, "num_key_value_groups"):  # the model's own attention repeats keys as often
                    restore = partial(setattr, attention, "num_key_value_groups", attention.num_key_value_groups)
                    self._undo_steps.append(restore)
                    attention.num_key_value_groups = query_heads // ranks
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore the original parameters."""
        while self._undo_steps:
            self._undo_steps.pop()()

    def _replace(self, projection: nn.Module, kind: str, original: Any, kv_heads: int, rank: int, ranks: int) -> None:
        """Replace a parameter ``[kv_heads * head_dim, ...]``; this rank gets head ``rank * kv_heads // ranks``."""
        from torch.distributed.tensor import DTensor

        full = original.full_tensor()
        head_rows, piece_rows = full.shape[0] // kv_heads, full.shape[0] // ranks
        first = rank * kv_heads // ranks * head_rows
        head = full[first : first + head_rows].clone()
        shape = torch.Size((ranks * head_rows, *head.shape[1:]))
        replicated = DTensor.from_local(
            head, original.device_mesh, original.placements, run_check=False, shape=shape, stride=head.stride()
        )
        setattr(projection, kind, nn.Parameter(replicated, requires_grad=original.requires_grad))
        original._local_tensor = head[rank * piece_rows - first : (rank + 1) * piece_rows - first]

        def show_original(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
            if prefix + kind in state:
                state[prefix + kind] = original.detach()

        hook = projection.register_state_dict_post_hook(show_original)  # type: ignore[no-untyped-call]

        def restore() -> None:
            hook.remove()
            original._local_tensor = original._local_tensor.clone()
            setattr(projection, kind, original)

        self._undo_steps.append(restore)


def _is_sharded(module: nn.Module) -> bool:
    """Whether the rows of a module's weight are sharded."""
    return any(placement.is_shard(0) for placement in getattr(getattr(module, "weight", None), "placements", ()))


def _gathers_output(projection: Any) -> bool:
    """Whether a sharded projection returns all rows, so that every rank computes all heads."""
    weight = local_part(projection.weight)
    return bool(projection(weight.new_zeros(1, 1, weight.shape[1])).shape[-1] == projection.weight.shape[0])


def _split_heads(model: Any, attention: Any, ranks: int) -> tuple[int, int] | None:
    """Numbers of query and key/value heads of an attention module whose heads are split; else ``None``."""
    if not all(isinstance(getattr(attention, name, None), nn.Module) for name in _PROJECTIONS[:3]):
        return None
    if not _is_sharded(attention.k_proj):
        return None
    dim = attention.head_dim
    query_heads, kv_heads = attention.q_proj.weight.shape[0] // dim, attention.k_proj.weight.shape[0] // dim
    if not (query_heads % ranks or kv_heads % ranks) or _gathers_output(attention.k_proj):
        return None
    heads = _heads(model, query_heads, kv_heads)
    if not ranks_share(query_heads, kv_heads, ranks):
        raise UnsupportedModel(
            f"{heads}, which {ranks} ranks can't share; {_remedy(query_heads, kv_heads, shared=True)}"
        )
    reason = ""
    for part in _KEYS_AND_VALUES:
        projection = getattr(attention, part)
        if type(projection) is not nn.Linear:
            kind = type(projection).__name__
            reason = reason or f"and its {part} is a {kind}, of which several ranks can't hold the same rows"
        elif projection.weight.shape[0] % ranks:
            reason = reason or f"which don't divide the {dim} rows of a head"
    for key, parameter in attention.named_parameters():
        divided = key.partition(".")[0] in _PROJECTIONS or hasattr(parameter, "placements")
        if not divided and parameter.numel() > dim:
            reason = reason or f"and its {key} {tuple(parameter.shape)} belongs to several heads at once"
    if reason:
        remedy = _remedy(query_heads, kv_heads, shared=False)
        raise UnsupportedModel(f"{heads}, fewer than {ranks} ranks, {reason}; {remedy}")
    return query_heads, kv_heads


def _heads(model: Any, query_heads: int, kv_heads: int) -> str:
    return f"{type(model).__name__} has {query_heads} query and {kv_heads} key/value heads"


def _remedy(query_heads: int, kv_heads: int, *, shared: bool) -> str:
    """The possible numbers of ranks; with ``shared``, several ranks may hold the same head."""
    counts = range(1, query_heads + 1)
    usable = [n for n in counts if ranks_share(query_heads, kv_heads, n) and (shared or n <= kv_heads)]
    return f"start {' or '.join(map(str, usable))} instead"
