"""KV cache tensors: pages and scratch of all layers, and host copies of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specmemo_kernels.arguments import text
from specmemo_kernels.cache.page_order import empty_pages, swap_order
from specmemo_kernels.cache.state_pool import HostState

Tensor = torch.Tensor

#: Element types of quantised pages by their public names.
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
#: One float32 scale per token and head, 3 % of a page at head_dim 128. A float16 scale would overflow or underflow for
#: very large or very small keys.
SCALE_BYTES = 4


def page_dtype(kv_dtype: str | None) -> torch.dtype | None:
    """The element type of quantised pages; ``None``: pages in the layers' dtype.

    Raises:
        TypeError, ValueError: ``kv_dtype`` is not a key of :data:`KV_DTYPES`.
    """
    text("kv_dtype", kv_dtype, KV_DTYPES)
    return None if kv_dtype is None else KV_DTYPES[kv_dtype]


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to ``device`` without synchronising a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class LayerKV:
    """Sizes of one attention layer's keys and values.

    ``of_drafter``: a drafter's layer. It has pages like the target's layers, but no scratch: only rows of accepted
    tokens are computed into its pages.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device
    of_drafter: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Key and value bytes of one token, unquantised."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize

    @property
    def scratch_bytes(self) -> int:
        """Scratch bytes of one node."""
        return 0 if self.of_drafter else self.bytes_per_token

    def page_bytes_per_token(self, kv_dtype: str | None) -> int:
        """Bytes of one token in pages; with ``kv_dtype``, codes and two scales per head."""
        codes = page_dtype(kv_dtype)
        if codes is None:
            return self.bytes_per_token
        return self.num_kv_heads * ((self.head_dim + self.v_head_dim) * codes.itemsize + 2 * SCALE_BYTES)


@dataclass(frozen=True)
class LayerGroup:
    """Layers of equal sizes, stacked so that one launch commits all of them.

    ``k_pages`` is ``[num_layers, num_pages, page_size, num_kv_heads, head_dim]``, ``k_scratch``
    ``[num_layers, max_nodes, num_kv_heads, head_dim]``; values likewise. Quantised pages have ``k_scales``
    ``[num_layers, num_pages, page_size, num_kv_heads]`` float32. Scratch is never quantised. Pages are in HND order
    (:mod:`specmemo_kernels.cache.page_order`).
    """

    layers: tuple[int, ...]
    k_pages: Tensor
    v_pages: Tensor
    k_scratch: Tensor
    v_scratch: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    @property
    def stored(self) -> list[Tensor]:
        """Pages and scales, as in memory: ``[num_layers, num_pages, num_kv_heads, page_size, ...]``."""
        scales = [swap_order(t, scales=True) for t in (self.k_scales, self.v_scales) if t is not None]
        return [swap_order(self.k_pages), swap_order(self.v_pages), *scales]


@dataclass(frozen=True)
class HostPages:
    """Host copy of a sequence's first ``tokens`` tokens.

    ``parts``: keys, values and scales of each group, ``[pages, num_layers, num_kv_heads, page_size, ...]``. ``state``:
    of its recurrent layers.
    """

    tokens: int
    parts: tuple[Tensor, ...]
    state: HostState | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(part.nbytes for part in self.parts) + (0 if self.state is None else self.state.nbytes)


class KVStorage:
    """Tensors of all layers' pages and scratch slots; a subclass allocates the pages to sequences.

    Attributes:
        groups: equal layers, stacked (:class:`LayerGroup`).
        k_pages, v_pages, k_scratch, v_scratch: per layer, views into the groups.
        k_scales, v_scales: likewise; ``None`` for each layer unless pages are quantised.
        version: increases whenever tensors are replaced.
    """

    groups: tuple[LayerGroup, ...]
    k_pages: list[Tensor]
    v_pages: list[Tensor]
    k_scratch: list[Tensor]
    v_scratch: list[Tensor]
    k_scales: list[Tensor | None]
    v_scales: list[Tensor | None]

    def __init__(
        self, layers: Sequence[LayerKV], *, num_pages: int, page_size: int, max_nodes: int, kv_dtype: str | None
    ) -> None:
        self.layers = tuple(layers)
        self.num_pages, self.page_size, self.max_nodes, self.kv_dtype = num_pages, page_size, max_nodes, kv_dtype
        self.device = self.layers[0].device
        self.version = 0
        self._kinds = {kind: tuple(i for i, layer in enumerate(self.layers) if layer == kind) for kind in self.layers}
        self._adopt(
            [
                LayerGroup(layers, **self._new_pages(kind, num_pages), **self._new_scratch(kind, max_nodes))
                for kind, layers in self._kinds.items()
            ]
        )

    def _new_pages(self, kind: LayerKV, num_pages: int) -> dict[str, Any]:
        shape = (len(self._kinds[kind]), num_pages, self.page_size, kind.num_kv_heads)
        codes = page_dtype(self.kv_dtype)
        dims = {"k_pages": kind.head_dim, "v_pages": kind.v_head_dim}
        pages = {name: empty_pages(shape, dim, codes or kind.dtype, kind.device) for name, dim in dims.items()}
        if codes is not None:
            pages |= {name: empty_pages(shape, None, torch.float32, kind.device) for name in ("k_scales", "v_scales")}
        return pages

    def _new_scratch(self, kind: LayerKV, max_nodes: int) -> dict[str, Any]:
        shape = (len(self._kinds[kind]), 0 if kind.of_drafter else max_nodes, kind.num_kv_heads)
        dims = {"k_scratch": kind.head_dim, "v_scratch": kind.v_head_dim}
        return {name: torch.empty(*shape, dim, dtype=kind.dtype, device=kind.device) for name, dim in dims.items()}

    def _adopt(self, groups: Sequence[LayerGroup], **others: Any) -> None:
        """Replace the groups, the views of each layer and ``others``, attributes that go with them, all or none: a view
        may fail to be made, and an interrupt may come between two assignments.
        """
        views = {layer: (group, i) for group in groups for i, layer in enumerate(group.layers)}
        order = [views[layer] for layer in range(len(self.layers))]
        names = ("k_pages", "v_pages", "k_scratch", "v_scratch", "k_scales", "v_scales")
        changed: dict[str, Any] = {
            name: [None if (tensor := getattr(group, name)) is None else tensor[i] for group, i in order]
            for name in names
        }
        vars(self).update(changed, groups=tuple(groups), version=self.version + 1, **others)

    def _replace_pages(self, num_pages: int, copy: bool = False, **others: Any) -> None:
        """Allocate new pages, with the old content if ``copy``; a failed allocation changes nothing.

        ``others``: of :meth:`_adopt`.
        """
        kinds = zip(self._kinds, self.groups, strict=True)
        groups = [replace(group, **self._new_pages(kind, num_pages)) for kind, group in kinds]
        if copy:
            for group, old_group in zip(groups, self.groups, strict=True):
                for pages, old_pages in zip(group.stored, old_group.stored, strict=True):
                    pages[:, : self.num_pages].copy_(old_pages)
        self._adopt(groups, num_pages=num_pages, **others)

    def resize_scratch(self, max_nodes: int) -> None:
        """Reallocate scratch for ``max_nodes`` nodes, between steps; a failed allocation leaves no scratch."""
        for nodes in (0, max_nodes):
            with torch.inference_mode(False):
                kinds = zip(self._kinds, self.groups, strict=True)
                groups = [replace(group, **self._new_scratch(kind, nodes)) for kind, group in kinds]
                self._adopt(groups, max_nodes=nodes)

    def copy_out(self, pages: Sequence[int], tokens: int) -> HostPages:
        """Copy ``pages`` with ``tokens`` tokens to host memory, page by page: device memory may be short."""
        parts = []
        for tensor in self._stored():
            host = torch.empty(len(pages), *tensor[:, 0].shape, dtype=tensor.dtype, device="cpu")
            for row, page in enumerate(pages):
                host[row].copy_(tensor[:, page])
            parts.append(host)
        return HostPages(tokens, tuple(parts))

    def copy_in(self, pages: Sequence[int], copy: HostPages) -> None:
        """Write the result of :meth:`copy_out` to ``pages``."""
        for tensor, host in zip(self._stored(), copy.parts, strict=True):
            for row, page in enumerate(pages):
                tensor[:, page].copy_(host[row])

    def copy_from(self, other: KVStorage, new_pages: dict[int, int]) -> None:
        """Copy pages of ``other``, a storage of the same layers; ``new_pages`` maps its pages to pages here."""
        for target, source in zip(self._stored(), other._stored(), strict=True):
            for old, new in new_pages.items():
                target[:, new].copy_(source[:, old])  # page by page: no temporary

    def _stored(self) -> list[Tensor]:
        return [tensor for group in self.groups for tensor in group.stored]

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages, scales included."""
        per_token = sum(layer.page_bytes_per_token(self.kv_dtype) for layer in self.layers)
        return per_token * self.num_pages * self.page_size

    @property
    def scratch_bytes(self) -> int:
        """Bytes of all scratch slots."""
        return sum(layer.scratch_bytes for layer in self.layers) * self.max_nodes
