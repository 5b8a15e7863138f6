"""Whole key/value heads for every rank, also where a model has fewer of them than there are ranks.

transformers' tensor parallel plans divide the rows of a key or value projection evenly, so that with more ranks than
key/value heads each rank has a piece of one. Such a model can't run; while it is patched, each rank has all rows of the
head that its query heads attend to, gathered once from the ranks that hold the pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from specmemo_kernels.integrations.hf.attention import UnsupportedModel
from specmemo_kernels.integrations.hf.target import local_part
from specmemo_kernels.planning.model_spec import ranks_share

Tensor = torch.Tensor

_KEYS_AND_VALUES = ("k_proj", "v_proj")
#: Modules that hold queries, keys and values as one matrix.
_FUSED = ("qkv_proj", "query_key_value")
_PROJECTIONS = ("q_proj", *_KEYS_AND_VALUES, "o_proj")


@dataclass
class ReplicatedKVHeads:
    """What was done to a model so that this rank has whole heads; :meth:`undo` takes it back.

    Only weights change: of each projection the parameter, a distributed one as before, has this rank's head as its part
    (of ``ranks`` heads, some of them the same). The parameter that was there keeps its rows as a view of that, so that
    nothing is held twice, and is what ``state_dict`` shows and saving writes.
    """

    _undo: list[Callable[[], None]] = field(default_factory=list)

    @torch.no_grad()
    def install(self, model: Any, rank: int, ranks: int) -> None:
        """Give this one of ``ranks`` ranks whole heads where it has pieces; every rank has to call this.

        Raises:
            UnsupportedModel: the ranks can't share the heads, or something else in the attention depends on them;
                nothing was changed.
        """
        config = model.config.get_text_config()
        queries = int(getattr(config, "num_attention_heads", 0) or 0)
        keys = int(getattr(config, "num_key_value_heads", None) or queries)
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in _FUSED and _divided(module) and (keys % ranks or queries % ranks):
                raise UnsupportedModel(
                    f"{_heads(model, queries, keys)}, and {name}, where both are one matrix, is divided over {ranks} "
                    f"ranks; {_start(queries, keys, shared=False)}"
                )
        cut = [found for module in model.modules() if (found := _cut(model, module, ranks)) is not None]
        try:
            for attention, queries, keys in cut:
                self._replace(attention, queries, keys, rank, ranks)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Put the original weights back."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, attention: nn.Module, queries: int, keys: int, rank: int, ranks: int) -> None:
        for name in _KEYS_AND_VALUES:
            projection = attention.get_submodule(name)
            for kind, parameter in list(projection.named_parameters(recurse=False)):
                self._whole(projection, kind, parameter, keys, rank, ranks)
        if hasattr(attention, "num_key_value_groups"):  # the model's own attention repeats keys so many times
            self._undo.append(partial(setattr, attention, "num_key_value_groups", attention.num_key_value_groups))
            attention.num_key_value_groups = queries // ranks  # type: ignore[assignment]

    def _whole(self, projection: nn.Module, kind: str, original: Any, keys: int, rank: int, ranks: int) -> None:
        """One parameter ``[keys * head_dim, ...]``: all rows of head ``rank * keys // ranks``."""
        from torch.distributed.tensor import DTensor

        everything = original.full_tensor()
        rows = everything.shape[0] // keys
        first = rank * keys // ranks * rows
        head = everything[first : first + rows].clone()
        shape = torch.Size((ranks * rows, *head.shape[1:]))
        whole = DTensor.from_local(
            head, original.device_mesh, original.placements, run_check=False, shape=shape, stride=head.stride()
        )
        piece = rows * keys // ranks
        setattr(projection, kind, nn.Parameter(whole, requires_grad=original.requires_grad))
        original._local_tensor = head[rank * piece - first : (rank + 1) * piece - first]

        def show_original(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
            if prefix + kind in state:
                state[prefix + kind] = original.detach()

        hook = projection.register_state_dict_post_hook(show_original)  # type: ignore[no-untyped-call]

        def put_back() -> None:
            hook.remove()
            original._local_tensor = original._local_tensor.clone()
            setattr(projection, kind, original)

        self._undo.append(put_back)


def _divided(module: nn.Module) -> bool:
    """Whether a rank has some of a matrix's rows."""
    return any(place.is_shard(0) for place in getattr(getattr(module, "weight", None), "placements", ()))


def _gathered(projection: Any) -> bool:
    """Whether a divided projection's output comes back whole, so that every rank computes all heads."""
    weight = local_part(projection.weight)
    return bool(projection(weight.new_zeros(1, 1, weight.shape[1])).shape[-1] == projection.weight.shape[0])


def _cut(model: Any, attention: Any, ranks: int) -> tuple[nn.Module, int, int] | None:
    """A module whose heads are in pieces, with its query and key/value heads; of others ``None``."""
    if not all(isinstance(getattr(attention, name, None), nn.Module) for name in _PROJECTIONS[:3]):
        return None
    if not _divided(attention.k_proj):
        return None
    dim = attention.head_dim
    queries, keys = attention.q_proj.weight.shape[0] // dim, attention.k_proj.weight.shape[0] // dim
    if not (queries % ranks or keys % ranks) or _gathered(attention.k_proj):
        return None
    has = _heads(model, queries, keys)
    if not ranks_share(queries, keys, ranks):
        raise UnsupportedModel(f"{has}, which {ranks} ranks can't share; {_start(queries, keys, shared=True)}")
    fewer, instead = f"{has}, fewer than {ranks} ranks", _start(queries, keys, shared=False)
    for part in _KEYS_AND_VALUES:
        projection = getattr(attention, part)
        if type(projection) is not nn.Linear:
            raise UnsupportedModel(
                f"{fewer}, and its {part} is a {type(projection).__name__}, of which several ranks can't hold the same "
                f"rows; {instead}"
            )
        if projection.weight.shape[0] % ranks:
            raise UnsupportedModel(f"{fewer}, which don't divide the {dim} rows of a head; {instead}")
    for key, parameter in attention.named_parameters():
        divided = key.partition(".")[0] in _PROJECTIONS or hasattr(parameter, "placements")
        if not divided and parameter.numel() > dim:
            raise UnsupportedModel(
                f"{fewer}, and its {key} {tuple(parameter.shape)} belongs to several heads at once; {instead}"
            )
    return attention, queries, keys


def _heads(model: Any, queries: int, keys: int) -> str:
    return f"{type(model).__name__} has {queries} query and {keys} key/value heads"


def _start(queries: int, keys: int, *, shared: bool) -> str:
    """The numbers of ranks that would do; ``shared``: also those of which several hold the same head."""
    usable = [n for n in range(1, queries + 1) if ranks_share(queries, keys, n) and (shared or n <= keys)]
    return f"start {' or '.join(map(str, usable))} instead"
