"""KV cache tensors: pages and scratch of all layers, and host copies of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specmemo_kernels.arguments import text
from specmemo_kernels.cache.page_order import empty_pages, swap_order

Tensor = torch.Tensor
#: Keys, values and their scales.
PageTensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]

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
    """Sizes of one attention layer's keys and values."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Key and value bytes of one token, unquantised."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize

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


@dataclass(frozen=True)
class HostPages:
    """Host copy of a sequence's first ``tokens`` tokens.

    ``parts``: keys, values and scales of each group, ``[pages, num_layers, num_kv_heads, page_size, ...]``.
    """

    tokens: int
    parts: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(part.nbytes for part in self.parts)


class KVStorage:
    """Tensors of all layers' pages and scratch slots; a subclass allocates the pages to sequences.

    Attributes:
        groups: equal layers, stacked (:class:`LayerGroup`).
        k_pages, v_pages, k_scratch, v_scratch: per layer, views into the groups.
        k_scales, v_scales: likewise; ``None`` for each layer unless pages are quantised.
        version: increases whenever tensors are replaced.
    """

    def __init__(
        self, layers: Sequence[LayerKV], *, num_pages: int, page_size: int, max_nodes: int, kv_dtype: str | None
    ) -> None:
        self.layers = tuple(layers)
        self.num_pages, self.page_size, self.max_nodes, self.kv_dtype = num_pages, page_size, max_nodes, kv_dtype
        self.device = self.layers[0].device
        self.version = 0
        self._kinds = {kind: tuple(i for i, la in enumerate(self.layers) if la == kind) for kind in self.layers}
        self._adopt([(*self._new_pages(kind, num_pages), *self._new_scratch(kind, max_nodes)) for kind in self._kinds])

    def _new_pages(self, kind: LayerKV, num_pages: int) -> PageTensors:
        shape = (len(self._kinds[kind]), num_pages, self.page_size, kind.num_kv_heads)
        codes = page_dtype(self.kv_dtype)
        k, v = (empty_pages(shape, dim, codes or kind.dtype, kind.device) for dim in (kind.head_dim, kind.v_head_dim))
        if codes is None:
            return k, v, None, None
        scales = [empty_pages(shape, None, torch.float32, kind.device) for _ in range(2)]
        return k, v, scales[0], scales[1]

    def _new_scratch(self, kind: LayerKV, max_nodes: int) -> tuple[Tensor, Tensor]:
        shape = (len(self._kinds[kind]), max_nodes, kind.num_kv_heads)
        k = torch.empty(*shape, kind.head_dim, dtype=kind.dtype, device=kind.device)
        return k, torch.empty(*shape, kind.v_head_dim, dtype=kind.dtype, device=kind.device)

    def _adopt(self, tensors: Sequence[tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]]) -> None:
        """Replace the tensors of all groups."""
        self.version += 1
        self.groups = tuple(
            LayerGroup(layers, k, v, k_scratch, v_scratch, k_scales, v_scales)
            for layers, (k, v, k_scales, v_scales, k_scratch, v_scratch) in zip(
                self._kinds.values(), tensors, strict=True
            )
        )
        views = {layer: (group, i) for group in self.groups for i, layer in enumerate(group.layers)}
        order = [views[layer] for layer in range(len(self.layers))]
        self.k_pages = [group.k_pages[i] for group, i in order]
        self.v_pages = [group.v_pages[i] for group, i in order]
        self.k_scratch = [group.k_scratch[i] for group, i in order]
        self.v_scratch = [group.v_scratch[i] for group, i in order]
        self.k_scales = [None if group.k_scales is None else group.k_scales[i] for group, i in order]
        self.v_scales = [None if group.v_scales is None else group.v_scales[i] for group, i in order]

    def _renew_pages(self, num_pages: int) -> None:
        """Replace all pages by new ones, without their content."""
        self._adopt_pages([self._new_pages(kind, num_pages) for kind in self._kinds], num_pages)

    def _extend_pages(self, num_pages: int) -> None:
        """Allocate more pages and copy the content; a failed allocation changes nothing."""
        new = [self._new_pages(kind, num_pages) for kind in self._kinds]
        for pages, group in zip(new, self.groups, strict=True):
            for larger, old in zip(pages, (group.k_pages, group.v_pages, group.k_scales, group.v_scales), strict=True):
                if larger is not None and old is not None:
                    larger[:, : self.num_pages].copy_(old)
        self._adopt_pages(new, num_pages)

    def _adopt_pages(self, pages: Sequence[PageTensors], num_pages: int) -> None:
        self._adopt([(*p, g.k_scratch, g.v_scratch) for p, g in zip(pages, self.groups, strict=True)])
        self.num_pages = num_pages

    def resize_scratch(self, max_nodes: int) -> None:
        """Reallocate scratch for ``max_nodes`` nodes, between steps; a failed allocation leaves no scratch."""
        for nodes in (0, max_nodes):
            with torch.inference_mode(False):
                new = [self._new_scratch(kind, nodes) for kind in self._kinds]
            pages = [(g.k_pages, g.v_pages, g.k_scales, g.v_scales) for g in self.groups]
            self._adopt([(*p, *n) for p, n in zip(pages, new, strict=True)])
            self.max_nodes = nodes

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
        """All page tensors, as in memory: ``[num_layers, num_pages, num_kv_heads, page_size, ...]``."""
        pages = [swap_order(t) for g in self.groups for t in (g.k_pages, g.v_pages)]
        scales = [t for g in self.groups for t in (g.k_scales, g.v_scales)]
        return [*pages, *(swap_order(t, scales=True) for t in scales if t is not None)]

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages, scales included."""
        per_token = sum(layer.page_bytes_per_token(self.kv_dtype) for layer in self.layers)
        return per_token * self.num_pages * self.page_size

    @property
    def scratch_bytes(self) -> int:
        """Bytes of all scratch slots."""
        return sum(layer.bytes_per_token for layer in self.layers) * self.max_nodes
