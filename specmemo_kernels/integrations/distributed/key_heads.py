"""Replicated key/value heads, for models with fewer of them than ranks.

transformers' tensor parallel plans shard the rows of a key or value projection evenly. With more ranks than key/value
heads (2 heads on 4 ranks, 8 on 16) each rank has a piece of a head, with which the model can't run. While the model is
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

    Each projection's parameter is replaced by a distributed tensor of ``ranks`` heads, some of them the same, whose
    local part is this rank's head. The original parameter's local part becomes a view of that head, so that nothing is
    stored twice. ``state_dict`` and saving use the original parameter.
    """

    _undo_steps: list[Callable[[], None]] = field(default_factory=list)

    @torch.no_grad()
    def install(self, model: Any, rank: int, ranks: int) -> None:
        """Replicate heads that are in pieces; collective, every rank must call it.

        Raises:
            UnsupportedModel: the ranks can't share the heads, or other parameters of the attention depend on them. The
                model is as before.
        """
        config = model.config.get_text_config()
        queries = int(getattr(config, "num_attention_heads", 0) or 0)
        keys = int(getattr(config, "num_key_value_heads", None) or queries)
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in _FUSED and _is_sharded(module) and (keys % ranks or queries % ranks):
                raise UnsupportedModel(
                    f"{_heads(model, queries, keys)}, and {name}, where both are one matrix, is divided over {ranks} "
                    f"ranks; {_remedy(queries, keys, shared=False)}"
                )
        layers = [(module, *heads) for module in model.modules() if (heads := _heads_in_pieces(model, module, ranks))]
        try:
            for attention, queries, keys in layers:
                for projection in map(attention.get_submodule, _KEYS_AND_VALUES):
                    for kind, parameter in list(projection.named_parameters(recurse=False)):
                        self._replace(projection, kind, parameter, keys, rank, ranks)
                if hasattr(attention, "num_key_value_groups"):  # the model's own attention repeats keys as often
                    restore = partial(setattr, attention, "num_key_value_groups", attention.num_key_value_groups)
                    self._undo_steps.append(restore)
                    attention.num_key_value_groups = queries // ranks
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore the original parameters."""
        while self._undo_steps:
            self._undo_steps.pop()()

    def _replace(self, projection: nn.Module, kind: str, original: Any, keys: int, rank: int, ranks: int) -> None:
        """Replace a parameter ``[keys * head_dim, ...]``; this rank's part is head ``rank * keys // ranks``."""
        from torch.distributed.tensor import DTensor

        full = original.full_tensor()
        head_rows, piece_rows = full.shape[0] // keys, full.shape[0] // ranks
        first = rank * keys // ranks * head_rows
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


def _heads_in_pieces(model: Any, attention: Any, ranks: int) -> tuple[int, int] | None:
    """The query and key/value heads of an attention module whose heads are in pieces; else ``None``."""
    if not all(isinstance(getattr(attention, name, None), nn.Module) for name in _PROJECTIONS[:3]):
        return None
    if not _is_sharded(attention.k_proj):
        return None
    dim = attention.head_dim
    queries, keys = attention.q_proj.weight.shape[0] // dim, attention.k_proj.weight.shape[0] // dim
    if not (queries % ranks or keys % ranks) or _gathers_output(attention.k_proj):
        return None
    has = _heads(model, queries, keys)
    if not ranks_share(queries, keys, ranks):
        raise UnsupportedModel(f"{has}, which {ranks} ranks can't share; {_remedy(queries, keys, shared=True)}")
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
        raise UnsupportedModel(f"{has}, fewer than {ranks} ranks, {reason}; {_remedy(queries, keys, shared=False)}")
    return queries, keys


def _heads(model: Any, queries: int, keys: int) -> str:
    return f"{type(model).__name__} has {queries} query and {keys} key/value heads"


def _remedy(queries: int, keys: int, *, shared: bool) -> str:
    """The possible numbers of ranks; ``shared``: also those where several ranks hold the same head."""
    usable = [n for n in range(1, queries + 1) if ranks_share(queries, keys, n) and (shared or n <= keys)]
    return f"start {' or '.join(map(str, usable))} instead"
