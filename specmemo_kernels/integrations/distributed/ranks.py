"""What the processes of one model tell each other; here that of a single one, which has nobody to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from specmemo_kernels import __version__, ops
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import Drafter
from specmemo_kernels.drafting.medusa_heads import MedusaHeads
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.integrations.distributed.checkpoint_digest import checkpoint_digest
from specmemo_kernels.integrations.hf.target import HFTarget, ModelFacts, lm_head
from specmemo_kernels.planning.footprint import GenerationShape
from specmemo_kernels.tree.choice import TreeChooser

Tensor = torch.Tensor
#: Asked after each new token with all tokens so far; ``True`` ends the sequence.
Stop = Callable[[list[int]], bool]


class RankError(RuntimeError):
    """Another rank is gone, silent, failed, or isn't doing what this one does; nothing was returned."""


class SingleRank:
    """One process, which need not ask anybody; :class:`team.RankGroup` is several."""

    rank, size = 0, 1

    def decide(self, choose: Callable[[], Any]) -> Any:
        """What ``choose`` returns on rank 0."""
        return choose()

    def ask(self, choose: Callable[[], Any]) -> Any:
        """:meth:`decide` for what may take any time, such as what a person types."""
        return choose()

    def broadcast_scalar(self, value: float) -> float:
        """Rank 0's number."""
        return value

    def run_on_all(self, what: str, do: Callable[[], Any]) -> Any:
        """``do()`` on every rank; if it fails anywhere, all ranks raise."""
        return do()

    def assert_same(self, facts: Mapping[str, object]) -> None:
        """Raise :class:`RankError` unless these are the same everywhere."""

    def max_over_ranks(self, shape: GenerationShape) -> GenerationShape:
        """A shape that is enough for every rank."""
        return shape

    def agree_on_random_state(self, device: torch.device) -> None:
        """Torch's generator on ``device`` goes on from rank 0's state."""

    def topk(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, k: int,
        scales: Tensor | None = None, backend: str | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """:func:`ops.lm_head_topk` over the whole vocabulary, ``weight`` and ``bias`` being this rank's rows of it."""
        return ops.kernels(backend, hidden.device).lm_head_topk(hidden, weight, bias, k, scales)

    def whole_heads(self, model: Any) -> Callable[[], None]:
        """Give this rank all rows of its key/value heads, where it has some of them; returns what undoes it."""
        return lambda: None

    def lm_head(self, model: Any) -> tuple[Tensor, Tensor | None]:
        """This rank's rows of the model's lm_head and its bias."""
        return lm_head(model)

    def shard(self, heads: MedusaHeads, device: torch.device) -> MedusaHeads:
        """Heads with this rank's rows of their own vocabulary matrices, or codes, on ``device``."""
        return heads

    def target(self, model: nn.Module, facts: ModelFacts, backend: str) -> HFTarget:
        """The model as the loop sees it."""
        return HFTarget(model, facts, backend)

    def chooser(self, *args: Any) -> TreeChooser:
        """A :class:`TreeChooser` that chooses the same on every rank."""
        return TreeChooser(*args)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Around what must end on every rank if it ends on one."""
        yield

    def fail(self, error: BaseException) -> None:
        """This rank leaves a call with ``error``: the others, which wait for it, are told."""

    def step(self, sequences: Sequence[SequenceState], pool: PagedKVPool, aborted: Sequence[int] = ()) -> list[int]:
        """Before a step: raises :class:`RankError` unless all ranks have the same sequences, tokens and pages.

        Returns rank 0's ``aborted``.
        """
        return list(aborted)

    def stop(self, own: Stop) -> Stop:
        """What rank 0's says, asked of all of them."""
        return own

    def agree_on_guesses(self, drafter: Drafter) -> Callable[[Tensor], Tensor] | None:
        """What makes rank 0's guesses ``[B, T]`` everybody's; ``None`` where they are the same by construction."""
        return None

    def finish(self, sequences: Sequence[SequenceState]) -> None:
        """The end of a call: returns when all ranks got there with the same tokens, else raises :class:`RankError`."""

    def close(self) -> None:
        """Undo what was set up."""


def digest(model: Any) -> dict[str, object]:
    """What must be the same on every rank: versions, configuration, checkpoint, and the weights that all hold whole.

    Of weights that are divided nobody has what another one has; that they are of one model only their files tell.
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
    """The same of heads, before they are divided."""
    tensors = [*heads.named_parameters(), *heads.named_buffers()]
    return {f"heads' {name}": (tuple(t.shape), _magnitude(t)) for name, t in tensors}


def _magnitude(tensor: Tensor) -> str:
    """Sum of all magnitudes in float64, which the same weights give on the same kind of device; of codes, of bytes."""
    weights = tensor.detach()
    if weights.is_meta:
        return "not compared"
    if not weights.is_floating_point() or weights.element_size() < 2:
        return str(int(weights.contiguous().view(torch.uint8).sum(dtype=torch.int64)))
    return f"{float(torch.linalg.vector_norm(weights, 1, dtype=torch.float64)):.9e}"
