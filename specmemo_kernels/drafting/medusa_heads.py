"""Medusa heads as a module: residual SiLU blocks, with an lm_head of their own (maybe in 4 bits) or the model's."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from specmemo_kernels.arguments import integer
from specmemo_kernels.ops.weight_codes import GROUP, check_bits, groups_of, packed_bytes, unpack

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


class Int4Linear(nn.Module):
    """A linear layer with a matrix of 4-bit codes (:mod:`specmemo_kernels.ops.weight_codes`); not for training.

    Buffers: ``codes`` ``[out_features, 32 * G]`` uint8 and ``scales`` ``[out_features, G]`` float16; zeros when new.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        groups = groups_of(in_features)
        self.register_buffer("codes", torch.zeros(out_features, groups * (GROUP // 2), dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(out_features, groups, dtype=torch.float16))

    def matrix(self) -> torch.Tensor:
        """``[out_features, in_features]`` float32: what the codes stand for."""
        return unpack(self.codes, self.scales, self.in_features)


class MedusaHeads(nn.ModuleList):
    """``num_heads`` Medusa heads; head ``h`` guesses the token ``h + 2`` places after a hidden state.

    Args:
        hidden_size: width of the model's last hidden state.
        vocab_size: rows of the lm_head.
        num_heads: how many tokens ahead are guessed.
        num_layers: residual blocks per head.
        own_lm_head: each head owns a ``[vocab_size, hidden_size]`` matrix (Medusa-1); ``False``
            shares the model's lm_head (Medusa "v2"), which saves most of the memory.
        head_bits: 4 for own matrices in 4-bit codes, an eighth of float32's bytes; ``None``: in the heads' dtype.

    The state dict has the published names: ``{h}.{l}.linear.weight``, ``{h}.{l}.linear.bias`` and, with
    an own lm_head, ``{h}.{num_layers}.weight``, or ``{h}.{num_layers}.codes`` and ``.scales``.

    Attributes:
        cumulative_topk_accuracy: how often head ``h``'s best ``k + 1`` guesses hold the right token, ``[h][k]``, where
            somebody measured it; saved with the heads, it chooses the tree. ``None``: not known.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_layers: int = 1,
        *,
        own_lm_head: bool = True,
        head_bits: int | None = None,
    ) -> None:
        check_bits(head_bits)
        if head_bits is not None and not own_lm_head:
            raise ValueError(
                f"MedusaHeads: head_bits is {head_bits}, but without own_lm_head there is no matrix for it"
            )
        super().__init__()
        self.hidden_size = integer("MedusaHeads: hidden_size", hidden_size)
        self.vocab_size = integer("MedusaHeads: vocab_size", vocab_size)
        self.num_heads = integer("MedusaHeads: num_heads", num_heads)
        self.num_layers = integer("MedusaHeads: num_layers", num_layers)
        self.own_lm_head = own_lm_head
        self.head_bits = head_bits
        self.cumulative_topk_accuracy: list[list[float]] | None = None
        for _ in range(num_heads):
            layers: list[nn.Module] = [ResidualBlock(hidden_size) for _ in range(num_layers)]
            if own_lm_head:
                coded = head_bits is not None
                layers.append(
                    Int4Linear(hidden_size, vocab_size) if coded else nn.Linear(hidden_size, vocab_size, bias=False)
                )
            self.append(nn.Sequential(*layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What goes into the lm_head, per head: ``[num_heads, ..., hidden_size]``.

        With an own lm_head use :meth:`logits`; this stops in front of it.
        """
        return torch.stack([self.features(hidden, head) for head in range(self.num_heads)])

    def features(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        """The input of head ``head``'s lm_head, shaped like ``hidden`` ([..., hidden_size])."""
        layers = self._layers(head)
        for layer in range(self.num_layers):
            hidden = layers[layer](hidden)
        return hidden

    def lm_head_weight(self, head: int, shared: torch.Tensor) -> torch.Tensor:
        """The ``[vocab_size, hidden_size]`` matrix behind head ``head``; ``shared`` is the model's.

        Of one in 4 bits a new tensor is made, in the blocks' dtype.
        """
        if not self.own_lm_head:
            return shared
        own = self._layers(head)[self.num_layers]
        if isinstance(own, Int4Linear):
            return own.matrix().to(self.linear(head, 0).weight.dtype)
        return cast(nn.Linear, own).weight

    def own_tensors(self, head: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What head ``head``'s own lm_head is kept as: its matrix and ``None``, or codes and scales."""
        own = self._layers(head)[self.num_layers]
        return (own.codes, own.scales) if isinstance(own, Int4Linear) else (cast(nn.Linear, own).weight, None)

    def coded_bytes(self) -> int | None:
        """What the own matrices would take in 4 bits; ``None`` if there are none, or they are."""
        if not self.own_lm_head or self.head_bits is not None:
            return None
        rows = self.own_tensors(0)[0].shape[0]
        return self.num_heads * packed_bytes(rows, self.hidden_size)

    def linear(self, head: int, layer: int) -> nn.Linear:
        """The linear layer ``[hidden_size, hidden_size]`` of a residual block."""
        return cast(ResidualBlock, self._layers(head)[layer]).linear

    def _layers(self, head: int) -> nn.Sequential:
        return cast(nn.Sequential, self[head])

    def logits(self, hidden: torch.Tensor, shared_lm_head: torch.Tensor) -> torch.Tensor:
        """All heads' logits ``[num_heads, ..., vocab_size]``, for training and tests; decoding never makes them."""
        rows = [
            nn.functional.linear(self.features(hidden, head), self.lm_head_weight(head, shared_lm_head))
            for head in range(self.num_heads)
        ]
        return torch.stack(rows)

    def truncated(self, num_heads: int) -> MedusaHeads:
        """The first ``num_heads`` heads as a module of its own that shares their parameters: nothing is copied.

        Raises:
            ValueError: ``num_heads`` is below 1 or above what there is.
        """
        if not 1 <= num_heads <= self.num_heads:
            raise ValueError(f"MedusaHeads.truncated: num_heads is {num_heads}, there are {self.num_heads}")
        with torch.device("meta"):
            first = MedusaHeads(
                self.hidden_size, self.vocab_size, num_heads, self.num_layers, own_lm_head=self.own_lm_head,
                head_bits=self.head_bits,
            )  # fmt: skip
        for head in range(num_heads):
            first[head] = self[head]
        first.training = self.training
        if self.cumulative_topk_accuracy is not None:
            first.cumulative_topk_accuracy = self.cumulative_topk_accuracy[:num_heads]
        return first

    def twin(self) -> MedusaHeads:
        """A module with parameters and buffers of its own in the same memory: moving one moves only that one."""
        memo: dict[int, Any] = {id(p): nn.Parameter(p.data, p.requires_grad) for p in self.parameters()}
        memo |= {id(buffer): buffer.data for buffer in self.buffers()}
        return copy.deepcopy(self, memo)

    def part(self, first: int, last: int, device: torch.device) -> MedusaHeads:
        """Copies on ``device``: all of the blocks, and of own vocabulary matrices the rows ``[first, last)``.

        Codes and scales belong to a row: those of a part are the whole matrix's.
        """
        part = self.truncated(self.num_heads)
        for head in range(self.num_heads):
            blocks = list(self._layers(head).children())[: self.num_layers]
            layers = [copy.deepcopy(block).to(device) for block in blocks]
            if self.own_lm_head:
                layers.append(self._own_rows(head, first, last, device))
            part[head] = nn.Sequential(*layers)
        return part

    def _own_rows(self, head: int, first: int, last: int, device: torch.device) -> nn.Module:
        matrix, scales = self.own_tensors(head)
        mine = matrix.data[first:last].to(device, copy=True)
        if scales is None:
            linear = nn.Linear(self.hidden_size, len(mine), bias=False, device="meta")
            linear.weight = nn.Parameter(mine, requires_grad=False)
            return linear
        with torch.device("meta"):
            coded = Int4Linear(self.hidden_size, len(mine))
        coded.codes, coded.scales = mine, scales[first:last].to(device, copy=True)
        return coded

    @staticmethod
    def from_pretrained(
        source: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        head_bits: int | None = None,
    ) -> MedusaHeads:
        """The heads in a folder, a file or a hub repository, in any layout that :func:`load_heads` knows.

        The sizes come from the weights; heads without an lm_head of their own take ``vocab_size`` from ``config.json``.

        Args:
            source: what :func:`specmemo_kernels.drafting.load_heads.load_heads` takes as path or hub id.
            dtype, device: of the result; ``None`` keeps the file's dtype and the CPU.
            head_bits: 4 for own vocabulary matrices in 4-bit codes; ``None``: as stored.

        Raises:
            HeadsError: nothing usable there, or a size that can't be told; it names the file and the key.
        """
        from specmemo_kernels.drafting.load_heads import load_pretrained

        return load_pretrained(source, dtype=dtype, device=device, head_bits=head_bits)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``medusa_lm_head.safetensors`` into ``folder``.

        Files of those names are replaced at once, never half-written, so heads that somebody has open stay readable.
        """
        from safetensors.torch import save_file

        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "own_lm_head": self.own_lm_head,
        }
        if self.cumulative_topk_accuracy is not None:
            config["cumulative_topk_accuracy"] = self.cumulative_topk_accuracy
        tensors: dict[str, torch.Tensor] = {}
        written: set[int] = set()
        for key, value in self.state_dict().items():
            tensor = value.detach().contiguous()
            # Heads may share a matrix (Medusa's own repeat one block); safetensors wants each stored for itself.
            tensors[key] = tensor.clone() if tensor.data_ptr() in written else tensor
            written.add(tensor.data_ptr())
        weights = target / (WEIGHTS_NAME + ".new")
        save_file(tensors, weights)
        weights.replace(target / WEIGHTS_NAME)
        text = target / (CONFIG_NAME + ".new")
        text.write_text(json.dumps(config, indent=2) + "\n")
        text.replace(target / CONFIG_NAME)
