"""A drafter that finds the right tokens by the model's hidden states, so that it can run in a device step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from specmemo_kernels.drafting.base import DraftInput, candidate_columns, fill_tree


class HiddenOracle:
    """Looks the hidden state up among those that ``model`` has along ``answers``, and guesses what follows there.

    A place's guesses hold the right token with probability ``share``, at any rank. Implements
    :class:`specmemo_kernels.drafting.base.StaticDrafter`.

    Args:
        answers: the full token rows, prompt (without padding) and output, that greedy decoding writes.
    """

    nbytes = 0

    def __init__(
        self, model: PreTrainedModel, answers: Sequence[Sequence[int]], share: float, max_depth: int = 4, width: int = 4
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.max_depth, self.width, self.vocab = max_depth, width, model.config.vocab_size
        states, guesses = [], []
        for answer in answers:
            row = torch.tensor([list(answer)])
            with torch.no_grad():
                states.append(model.model(input_ids=row, use_cache=False).last_hidden_state[0, :-1])
            padded = torch.nn.functional.pad(row[0], (0, max_depth))
            right = padded.unfold(0, max_depth, 1)[2 : len(answer) + 1]  # behind the token that the state predicts
            offsets = torch.arange(1, width + 1).expand(*right.shape, width).clone()
            lucky = torch.rand(right.shape, generator=generator) < share
            place = torch.randint(0, width, right.shape, generator=generator)
            offsets.scatter_(2, place[..., None], torch.where(lucky, 0, width + 1)[..., None])
            guesses.append((right[..., None] + offsets) % self.vocab)
        self.states, self.guesses = torch.cat(states), torch.cat(guesses)

    def candidates(self, hidden: torch.Tensor, depth: int, width: int) -> torch.Tensor:
        """``[B, depth * width]``: the guesses at the nearest known state."""
        near = (self.states - hidden[:, None]).square().sum(dim=2).argmin(dim=1)
        return self.guesses.index_select(0, near)[:, :depth, :width].flatten(1)

    def propose(self, inputs: DraftInput) -> torch.Tensor:
        """The same guesses for a step on the host."""
        tree = inputs.tree
        if not tree.max_depth:
            return inputs.root_tokens[:, None]
        columns = candidate_columns(tree, tree.width, inputs.hidden.device)
        return fill_tree(inputs.root_tokens, self.candidates(inputs.hidden, tree.max_depth, tree.width), columns)
