"""What a drafter minimises, and how often its guesses are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from specmemo_kernels.planning.drafter_spec import RANKS
from specmemo_kernels.training.distillation import Teacher, distillation, greedy_tokens, ranks
from specmemo_kernels.training.target_states import TargetStates
from specmemo_kernels.training.trainable import Trainable

Tensor = torch.Tensor

#: Weight of a depth's loss, by the depth's power: 0.8 in EAGLE-3 (arXiv 2503.01840) and Medusa (arXiv 2401.10774).
DECAY = 0.8


class Objective(nn.Module):
    """The loss of a drafter over windows of text.

    For every drafted token, cross-entropy to the target's distribution behind the same tokens, over the draft
    vocabulary. It is what regenerated answers give in the mean, without the noise of sampling them. Places whose best
    token isn't in the draft vocabulary don't count.
    """

    def __init__(self, drafter: Trainable) -> None:
        super().__init__()
        self.drafter = drafter
        target = drafter.target
        weight, bias = target.weight, target.bias
        if drafter.tokens is not None:
            weight, bias = weight[drafter.tokens], None if bias is None else bias[drafter.tokens]
        self._teacher = weight, bias
        #: Bytes of the target's rows for the draft vocabulary, a copy.
        self.copied_bytes = 0 if drafter.tokens is None else weight.nbytes + drafter.tokens.nbytes
        scales = DECAY ** torch.arange(drafter.depth, dtype=torch.float32, device=target.device)
        self._scales = scales / scales.sum()

    def forward(self, states: TargetStates) -> tuple[Tensor, Tensor]:
        """The loss, and the cross-entropy of each depth in nats ``[depth]`` (without a gradient)."""
        drafter, tensors = self.drafter, self.drafter.cast()
        hidden, places = self._aligned(drafter.unrolled(states, tensors), states)
        counted = self._counted(places)
        teacher = Teacher(places, *self._teacher)
        weight, bias = drafter.matrix(tensors)
        loss, losses = distillation(hidden, weight, bias, self._scales, counted, teacher)
        if drafter.hidden_loss:
            apart = functional.smooth_l1_loss(hidden.float(), places.float().expand(hidden.shape), reduction="none")
            loss = loss + drafter.hidden_loss * (apart.mean(dim=(1, 2)) @ self._scales)
        return loss, losses

    @torch.no_grad()
    def hits(self, states: TargetStates) -> tuple[Tensor, Tensor]:
        """How often each depth's guess of each rank is the target's own token.

        Only where the text's tokens between are the target's own, as in generation.

        Returns:
            Counts ``[depth, RANKS]`` and the number of places of each depth ``[depth]``, float64.
        """
        drafter, target, tensors = self.drafter, self.drafter.target, self.drafter.cast()
        depth, (windows, length) = drafter.depth, states.tokens.shape
        best = greedy_tokens(states.hidden.flatten(0, 1), target.weight, target.bias).view(windows, length)
        own = states.tokens[:, 1:] == best[:, :-1]  # [t]: token t + 1 is the target's
        rows, matrix = drafter.rows(length), drafter.matrix(tensors)
        counts, totals = torch.zeros(depth, RANKS, dtype=torch.float64), torch.zeros(depth, dtype=torch.float64)
        alive = torch.ones(windows, rows, dtype=torch.bool, device=states.tokens.device)
        for d, hidden in enumerate(drafter.unrolled(states, tensors)):
            if d:
                alive = alive & own[:, d : d + rows]
            right = self._draft_ids(best[:, 1 + d : 1 + d + rows])
            found = ranks(hidden[alive][None], *matrix, right[alive])[0]
            found = torch.where(right[alive] < 0, RANKS, found).cpu()  # the draft vocabulary may be smaller than RANKS
            counts[d] = torch.bincount(found.clamp(max=RANKS), minlength=RANKS + 1)[:RANKS].double()
            totals[d] = len(found)
        return counts, totals

    def _aligned(self, unrolled: list[Tensor], states: TargetStates) -> tuple[Tensor, Tensor]:
        """Inputs of the vocabulary matrix ``[depth, N, H]`` for the same N places, and the target's ``[N, H]``."""
        depth, count = len(unrolled), unrolled[0].shape[1] - len(unrolled) + 1
        parts = [hidden[:, depth - 1 - d : depth - 1 - d + count] for d, hidden in enumerate(unrolled)]
        places = states.hidden[:, depth : depth + count]
        return torch.stack(parts).flatten(1, 2), places.flatten(0, 1)

    def _counted(self, places: Tensor) -> Tensor:
        if self.drafter.tokens is None:
            return torch.ones(len(places), device=places.device)
        target = self.drafter.target
        return (self._draft_ids(greedy_tokens(places, target.weight, target.bias)) >= 0).float()

    def _draft_ids(self, tokens: Tensor) -> Tensor:
        """Rows of the draft vocabulary; -1 for tokens without one."""
        if self.drafter.tokens is None:
            return tokens
        rows = torch.full((len(self.drafter.target.weight),), -1, device=tokens.device)
        rows[self.drafter.tokens] = torch.arange(len(self.drafter.tokens), device=tokens.device)
        return rows[tokens]


@dataclass(frozen=True)
class HeldOut:
    """A drafter on text that it wasn't trained on.

    Attributes:
        losses: cross-entropy of each depth, in nats.
        accuracy: ``[depth][k]``, the share of places whose token is among the best ``k + 1`` guesses. A depth without
            places repeats the row before it: zeros would mean that its guesses are useless.
        places: number of places of the first depth.
    """

    losses: tuple[float, ...]
    accuracy: tuple[tuple[float, ...], ...]
    places: int


@torch.no_grad()
def evaluate(
    objective: Objective, windows: Tensor, states: Callable[[Tensor], TargetStates], tick: Callable[[], None]
) -> HeldOut:
    """Measure a drafter on ``windows`` ``[W, L]``, one at a time; ``tick`` is called after each."""
    depth = objective.drafter.depth
    counts, totals = torch.zeros(depth, RANKS, dtype=torch.float64), torch.zeros(depth, dtype=torch.float64)
    losses = torch.zeros(depth, dtype=torch.float64)
    for window in windows:
        seen = states(window[None].long().to(objective.drafter.target.device))
        _, each = objective(seen)
        hits, places = objective.hits(seen)
        counts, totals, losses = counts + hits, totals + places, losses + each.cpu().double()
        tick()
    for d in range(1, depth):
        if not totals[d]:
            counts[d], totals[d] = counts[d - 1], totals[d - 1]
    accuracy = counts.cumsum(dim=1) / totals.clamp(min=1)[:, None]
    rows = tuple(tuple(round(value, 4) for value in row) for row in accuracy.tolist())
    return HeldOut(tuple((losses / max(1, len(windows))).tolist()), rows, int(totals[0]))
