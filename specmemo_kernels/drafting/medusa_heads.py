"""Medusa heads as a module: residual SiLU blocks, with an lm_head of their own or the model's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "medusa_lm_head.safetensors"


class ResidualBlock(nn.Module):
    """``x + silu(W x + b)``, the block of Medusa (arXiv 2401.10774, section 2.1.1).

    The weights start at zero, so a new head repeats what the model's own lm_head says.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + nn.functional.silu(self.linear(hidden))


class MedusaHeads(nn.ModuleList):
    """``num_heads`` Medusa heads; head ``h`` guesses the token ``h + 2`` places after a hidden state.

    Args:
        hidden_size: width of the model's last hidden state.
        vocab_size: rows of the lm_head.
        num_heads: how many tokens ahead are guessed.
        num_layers: residual blocks per head.
        own_lm_head: each head owns a ``[vocab_size, hidden_size]`` matrix (Medusa-1); ``False``
            shares the model's lm_head (Medusa "v2"), which saves most of the memory.

    The state dict has the published names: ``{h}.{l}.linear.weight``, ``{h}.{l}.linear.bias`` and, with
    an own lm_head, ``{h}.{num_layers}.weight``.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_layers: int = 1,
        *,
        own_lm_head: bool = True,
    ) -> None:
        for name, value in (("hidden_size", hidden_size), ("vocab_size", vocab_size), ("num_heads", num_heads)):
            if value < 1:
                raise ValueError(f"MedusaHeads: {name} is {value}, it must be at least 1")
        if num_layers < 1:
            raise ValueError(f"MedusaHeads: num_layers is {num_layers}, it must be at least 1")
        super().__init__()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_layers, self.own_lm_head = num_heads, num_layers, own_lm_head
        for _ in range(num_heads):
            layers: list[nn.Module] = [ResidualBlock(hidden_size) for _ in range(num_layers)]
            if own_lm_head:
                layers.append(nn.Linear(hidden_size, vocab_size, bias=False))
            self.append(nn.Sequential(*layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What goes into the lm_head, per head: ``[num_heads, ..., hidden_size]``.

        With an own lm_head use :meth:`logits`; this stops in front of it.
        """
        return torch.stack([self.features(hidden, head) for head in range(self.num_heads)])

    def features(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        """The input of head ``head``'s lm_head, shaped like ``hidden`` ([..., hidden_size])."""
        for layer in self[head][: self.num_layers]:
            hidden = layer(hidden)
        return hidden

    def lm_head_weight(self, head: int, shared: torch.Tensor) -> torch.Tensor:
        """The ``[vocab_size, hidden_size]`` matrix behind head ``head``; ``shared`` is the model's."""
        return self[head][self.num_layers].weight if self.own_lm_head else shared

    def logits(self, hidden: torch.Tensor, shared_lm_head: torch.Tensor) -> torch.Tensor:
        """All heads' logits ``[num_heads, ..., vocab_size]``, for training and tests; decoding never makes them."""
        rows = [
            nn.functional.linear(self.features(hidden, head), self.lm_head_weight(head, shared_lm_head))
            for head in range(self.num_heads)
        ]
        return torch.stack(rows)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``medusa_lm_head.safetensors`` into ``folder``."""
        from safetensors.torch import save_file

        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        config = {
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "own_lm_head": self.own_lm_head,
        }
        (target / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
        save_file({k: v.detach().contiguous() for k, v in self.state_dict().items()}, target / WEIGHTS_NAME)
