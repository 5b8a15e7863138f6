"""The rank interface and its single-process implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from specmemo_kernels import __version__, ops
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import AnyDrafter
from specmemo_kernels.drafting.medusa_heads import MedusaHeads
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.integrations.distributed.checkpoint_digest import checkpoint_digest
from specmemo_kernels.integrations.hf.target import HFTarget, ModelFacts, lm_head
from specmemo_kernels.planning.footprint import GenerationShape

Tensor = torch.Tensor
#: Called after each new token with all tokens so far; ``True`` ends the sequence.
Stop = Callable[[list[int]], bool]


class RankError(RuntimeError):
    """Another rank failed, exited, timed out, or runs something else; nothing was returned."""


class SingleRank:
    """The interface to a model's ranks, for a single process; :class:`rank_group.RankGroup` is for several."""

    rank, size = 0, 1

    def broadcast_result(self, compute: Callable[[], Any]) -> Any:
        """The result of ``compute`` on rank 0."""
        return compute()

    def broadcast_input(self, read: Callable[[], Any]) -> Any:
        """:meth:`broadcast_result` without a time limit, such as for a person's input."""
        return read()

    def broadcast_scalar(self, value: float) -> float:
        """Rank 0's number."""
        return value

    def run_on_all(self, name: str, do: Callable[[], Any]) -> Any:
        """``do()`` on every rank; if it fails on one rank, all ranks raise. ``name`` names it in the message."""
        return do()

    def assert_same(self, facts: Mapping[str, object]) -> None:
        """Raise :class:`RankError` unless ``facts`` are the same on all ranks."""

    def max_over_ranks(self, shape: GenerationShape) -> GenerationShape:
        """An upper bound of all ranks' shapes."""
        return shape

    def agree_on_random_state(self, device: torch.device) -> None:
        """Set torch's generator on ``device`` to rank 0's state."""

    def topk(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, k: int,
        scales: Tensor | None = None, backend: str | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """:func:`ops.lm_head_topk` over the whole vocabulary, ``weight`` and ``bias`` being this rank's rows of it."""
        return ops.kernels(backend, hidden.device).lm_head_topk(hidden, weight, bias, k, scales)

    def top_log_probs(
        self, hidden: Tensor, k: int, weight: Tensor, bias: Tensor | None, backend: str | None
    ) -> tuple[Tensor, Tensor]:
        """:meth:`topk` with log-probabilities, in float32."""
        log_p, tokens, _ = ops.kernels(backend, hidden.device).lm_head_log_probs(hidden, weight, bias, k, None)
        return log_p, tokens

    def replicate_kv_heads(self, model: Any) -> Callable[[], None]:
        """Give this rank all rows of key/value heads that are split between ranks; returns the undo function."""
        return lambda: None

    def lm_head(self, model: Any) -> tuple[Tensor, Tensor | None]:
        """This rank's rows of the model's lm_head and its bias."""
        return lm_head(model)

    def shard(self, heads: MedusaHeads, device: torch.device) -> MedusaHeads:
        """Heads with this rank's rows (or codes) of their own vocabulary matrices, on ``device``."""
        return heads

    def target(self, model: nn.Module, facts: ModelFacts, backend: str) -> HFTarget:
        """The target model of the speculative loop."""
        return HFTarget(model, facts, backend)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Context in which an error on one rank is an error on all ranks."""
        yield

    def fail(self, error: BaseException) -> None:
        """Notify the other ranks, at their next message, that this rank leaves a call with ``error``."""

    def step(self, sequences: Sequence[SequenceState], pool: PagedKVPool, aborted: Sequence[int] = ()) -> list[int]:
        """Check before a step that all ranks have the same sequences, tokens and pages; returns rank 0's ``aborted``.

        Raises:
            RankError: they differ.
        """
        return list(aborted)

    def stop(self, stop: Stop) -> Stop:
        """A stop function with rank 0's result; ``stop`` runs on all ranks."""
        return stop

    def agree_on_guesses(self, drafter: AnyDrafter) -> Callable[[Tensor], Tensor] | None:
        """A function that broadcasts rank 0's guesses ``[B, T]``; ``None`` if they are the same by construction."""
        return None

    def finish(self, sequences: Sequence[SequenceState]) -> None:
        """End a call: wait for all ranks, and check that they have the same tokens.

        Raises:
            RankError: they differ.
        """

    def close(self) -> None:
        """Free the process group and restore its timeout."""


def digest(model: Any) -> dict[str, object]:
    """The facts that all ranks must share: versions, configuration, checkpoint, and weights that aren't sharded.

    Sharded weights can't be compared; their checkpoint files are.
    """
    facts: dict[str, object] = {f"version of {name}": version(name) for name in ("torch", "transformers")}
    facts["version of specmemo_kernels"] = __version__
    facts["model"] = f"{type(model).__name__} {model.dtype}"
    facts |= {f"config.{name}": value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    for name, parameter in model.named_parameters():
        facts[f"shape of {name}"] = tuple(parameter.shape)
        if not hasattr(parameter, "placements"):
            facts[f"weights of {name}"] = _magnitude(parameter)
    return facts | checkpoint_digest(model.name_or_path)


def heads_digest(heads: nn.Module) -> dict[str, object]:
    """:func:`digest` of heads, before they are sharded."""
    return tensors_digest(dict([*heads.named_parameters(), *heads.named_buffers()]))


def tensors_digest(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """:func:`digest` of a drafter's weights."""
    return {f"heads' {name}": (tuple(t.shape), _magnitude(t)) for name, t in tensors.items()}


def _magnitude(tensor: Tensor) -> str:
    """Sum of all magnitudes in float64, reproducible on the same kind of device; for codes, the sum of bytes."""
    tensor = tensor.detach()
    if tensor.is_meta:
        return "not compared"
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        return str(int(tensor.contiguous().view(torch.uint8).sum(dtype=torch.int64)))
    return f"{float(torch.linalg.vector_norm(tensor, 1, dtype=torch.float64)):.9e}"
