"""Medusa heads as a module: residual SiLU blocks, and own lm_heads or the model's; matrices optionally in 4 bits."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from specmemo_kernels.arguments import integer
from specmemo_kernels.drafting.head_files import open_path
from specmemo_kernels.drafting.head_tensors import StoredHeads, accuracy_of, stored_heads
from specmemo_kernels.drafting.replaced_file import replace_file
from specmemo_kernels.drafting.source_files import CONFIG_NAME, WEIGHTS_NAME
from specmemo_kernels.ops.weight_codes import GROUP, check_bits, groups_of, packed_bytes, unpack


class Int4Linear(nn.Module):
    """A linear layer with a matrix of 4-bit codes (:mod:`specmemo_kernels.ops.weight_codes`), for inference only.

    Buffers: ``codes`` ``[out_features, 32 * G]`` uint8 and ``scales`` ``[out_features, G]`` float16; zeros when new.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.in_features = in_features
        groups = groups_of(in_features)
        self.register_buffer("codes", torch.zeros(out_features, groups * (GROUP // 2), dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(out_features, groups, dtype=torch.float16))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias else None)

    def matrix(self) -> torch.Tensor:
        """The dequantised matrix, ``[out_features, in_features]`` float32."""
        return unpack(self.codes, self.scales, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """For tests; drafting uses :func:`specmemo_kernels.ops.linear`."""
        return nn.functional.linear(x, self.matrix().to(x.dtype), self.bias)


class ResidualBlock(nn.Module):
    """``x + silu(W x + b)``, the block of Medusa (arXiv 2401.10774, section 2.1.1).

    The weights start at zero: a new head predicts the same token as the model's lm_head.
    """

    linear: nn.Linear | Int4Linear

    def __init__(self, hidden_size: int, *, coded: bool = False) -> None:
        super().__init__()
        if coded:
            self.linear = Int4Linear(hidden_size, hidden_size, bias=True)
            return
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + nn.functional.silu(self.linear(hidden))


def matrix_tensors(linear: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensors of a layer's matrix: itself and ``None``, or codes and scales."""
    if isinstance(linear, Int4Linear):
        return linear.codes, linear.scales
    return cast(nn.Linear, linear).weight, None


class MedusaHeads(nn.ModuleList):
    """``num_heads`` Medusa heads; head ``h`` guesses the token ``h + 2`` places after a hidden state.

    Args:
        hidden_size: width of the model's last hidden state.
        vocab_size: rows of the lm_head.
        num_heads: tokens guessed per step.
        num_layers: residual blocks per head.
        own_lm_head: each head has a ``[vocab_size, hidden_size]`` matrix (Medusa-1). ``False``: the heads share the
            model's lm_head (Medusa "v2"), which saves most of the memory.
        head_bits: 4 for all matrices in 4-bit codes, an eighth of float32's bytes; ``None``: in the heads' dtype.

    The state dict has the published names: ``{h}.{l}.linear.weight``, ``{h}.{l}.linear.bias`` and, with
    an own lm_head, ``{h}.{num_layers}.weight``. In 4 bits, ``.codes`` and ``.scales`` replace each ``.weight``.

    Attributes:
        cumulative_topk_accuracy: ``[h][k]``, the share of tokens among head ``h``'s best ``k + 1`` guesses, from which
            ``patch`` chooses the tree. Saved with the heads. ``None``: not measured.
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
        super().__init__()
        self.hidden_size = integer("MedusaHeads: hidden_size", hidden_size)
        self.vocab_size = integer("MedusaHeads: vocab_size", vocab_size)
        self.num_heads = integer("MedusaHeads: num_heads", num_heads)
        self.num_layers = integer("MedusaHeads: num_layers", num_layers)
        self.own_lm_head = own_lm_head
        self.head_bits = head_bits
        self.cumulative_topk_accuracy: list[list[float]] | None = None
        coded = head_bits is not None
        for _ in range(num_heads):
            layers: list[nn.Module] = [ResidualBlock(hidden_size, coded=coded) for _ in range(num_layers)]
            if own_lm_head:
                layers.append((Int4Linear if coded else nn.Linear)(hidden_size, vocab_size, bias=False))
            self.append(nn.Sequential(*layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The lm_heads' inputs ``[num_heads, ..., hidden_size]``; :meth:`logits` includes the lm_heads."""
        return torch.stack([self.features(hidden, head) for head in range(self.num_heads)])

    def features(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        """The input of head ``head``'s lm_head, shaped like ``hidden`` ([..., hidden_size])."""
        layers = self._layers(head)
        for layer in range(self.num_layers):
            hidden = layers[layer](hidden)
        return hidden

    def lm_head_weight(self, head: int, shared: torch.Tensor) -> torch.Tensor:
        """The lm_head of head ``head``, ``[vocab_size, hidden_size]``; ``shared`` is the model's.

        A matrix in 4 bits is dequantised into a new tensor of the blocks' dtype.
        """
        if not self.own_lm_head:
            return shared
        lm_head = self._layers(head)[self.num_layers]
        if isinstance(lm_head, Int4Linear):
            return lm_head.matrix().to(self.dtype)
        return cast(nn.Linear, lm_head).weight

    def own_tensors(self, head: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tensors of head ``head``'s own lm_head: matrix and ``None``, or codes and scales."""
        return matrix_tensors(self._layers(head)[self.num_layers])

    def coded_bytes(self) -> int | None:
        """Bytes of the matrices if packed into 4 bits; ``None`` if they are already."""
        if self.head_bits is not None:
            return None
        rows = self.own_tensors(0)[0].shape[0] if self.own_lm_head else 0
        return self.num_heads * packed_bytes(self.num_layers * self.hidden_size + rows, self.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states that the blocks take."""
        return cast(torch.Tensor, self.linear(0, 0).bias).dtype

    def linear(self, head: int, layer: int) -> nn.Linear | Int4Linear:
        """The linear layer ``[hidden_size, hidden_size]`` of a residual block."""
        return cast(ResidualBlock, self._layers(head)[layer]).linear

    def _layers(self, head: int) -> nn.Sequential:
        return cast(nn.Sequential, self[head])

    def logits(self, hidden: torch.Tensor, shared_lm_head: torch.Tensor) -> torch.Tensor:
        """All heads' logits ``[num_heads, ..., vocab_size]``, for training and tests only."""
        rows = [
            nn.functional.linear(self.features(hidden, head), self.lm_head_weight(head, shared_lm_head))
            for head in range(self.num_heads)
        ]
        return torch.stack(rows)

    def truncated(self, num_heads: int) -> MedusaHeads:
        """The first ``num_heads`` heads as a new module with the same parameters.

        Raises:
            ValueError: ``num_heads`` is out of range.
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
        """A copy whose parameters and buffers share this module's memory; each module can move to another device."""
        memo: dict[int, Any] = {id(p): nn.Parameter(p.data, p.requires_grad) for p in self.parameters()}
        memo |= {id(buffer): buffer.data for buffer in self.buffers()}
        return copy.deepcopy(self, memo)

    def part(self, first: int, last: int, device: torch.device) -> MedusaHeads:
        """A copy on ``device`` of the blocks and of rows ``[first, last)`` of own vocabulary matrices."""
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
        rows = matrix.data[first:last].to(device, copy=True)
        if scales is None:
            linear = nn.Linear(self.hidden_size, len(rows), bias=False, device="meta")
            linear.weight = nn.Parameter(rows, requires_grad=False)
            return linear
        with torch.device("meta"):
            coded = Int4Linear(self.hidden_size, len(rows), bias=False)
        coded.codes, coded.scales = rows, scales[first:last].to(device, copy=True)
        return coded

    @staticmethod
    def from_pretrained(
        source: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        head_bits: int | None = None,
    ) -> MedusaHeads:
        """Load heads from a folder, a file or a hub repository, in any layout of :func:`load_heads`.

        The sizes are those of the weights; without own lm_heads ``vocab_size`` comes from ``config.json``.

        Args:
            source: a path or a hub id.
            dtype, device: of the result; ``None`` keeps the file's dtype and the CPU.
            head_bits: 4 for all matrices in 4-bit codes; ``None``: as stored.

        Raises:
            HeadsError: no usable heads, or an unknown ``vocab_size``; the message has the file and the key.
        """
        check_bits(head_bits)
        parsed = stored_heads(open_path(source))
        hidden_size, vocab_size = parsed.sizes()
        parsed.check(hidden_size, vocab_size, dtype)
        return build_heads(parsed, hidden_size, vocab_size, dtype, device, head_bits)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``medusa_lm_head.safetensors`` into ``folder``.

        Existing files are replaced atomically: processes that have them open can still read them.

        Raises:
            HeadsError: ``cumulative_topk_accuracy`` isn't a row of shares for each head.
            OSError: they can't be written, as on a full disk.
        """
        from safetensors.torch import save_file

        given = {"cumulative_topk_accuracy": self.cumulative_topk_accuracy}
        accuracy = accuracy_of("the MedusaHeads module", given, self.num_heads)
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "own_lm_head": self.own_lm_head,
        }
        if accuracy is not None:
            config["cumulative_topk_accuracy"] = accuracy
        tensors: dict[str, torch.Tensor] = {}
        written: set[int] = set()
        for key, value in self.state_dict().items():
            tensor = value.detach().contiguous()
            # Heads may share a matrix, as Medusa's own repeat one block; safetensors refuses shared memory.
            tensors[key] = tensor.clone() if tensor.data_ptr() in written else tensor
            written.add(tensor.data_ptr())
        replace_file(target / WEIGHTS_NAME, lambda path: save_file(tensors, path))
        replace_file(target / CONFIG_NAME, lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))


def build_heads(
    source: StoredHeads,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    head_bits: int | None,
) -> MedusaHeads:
    """Read stored heads that passed :meth:`StoredHeads.check`; arguments as in :meth:`MedusaHeads.from_pretrained`."""
    bits = head_bits or source.head_bits
    with torch.device("meta"):
        heads = MedusaHeads(
            hidden_size, vocab_size, source.num_heads, source.num_layers, own_lm_head=source.own_lm_head,
            head_bits=bits,
        )  # fmt: skip
    heads.load_state_dict(source.read(hidden_size, dtype, device, bits), assign=True)
    heads.cumulative_topk_accuracy = source.accuracy
    return heads
