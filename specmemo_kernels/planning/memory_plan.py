"""Memory plans: the bytes of each part of generation, decided before anything is allocated.

:func:`divide_budget` makes the plan of a loaded model and tree, from measurements. Plans from a configuration are made
by :mod:`specmemo_kernels.planning.planner`.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field

from specmemo_kernels.backends.kernel_config import KernelConfig
from specmemo_kernels.planning.footprint import (
    GenerationShape,
    StepSize,
    fixed_parts,
    object_bytes,
    page_parts,
    pages_within,
    pass_bytes,
)
from specmemo_kernels.tree.tree_budget import TreeBudget, Trees

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


class BudgetError(ValueError):
    """The budget is too small; the message has the largest part, the limit and what to do."""


def parse_bytes(size: int | str, name: str = "memory_budget") -> int:
    """Parse ``"2GiB"``, ``"512 MB"``, ``"1000"`` or a number of bytes.

    Raises:
        ValueError: not a positive size; ``name`` is the argument's name.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", str(size))
    count = math.nan
    if match:
        count = (float if "." in match[1] else int)(match[1]) * _UNITS.get(match[2], math.nan)
    if isinstance(size, float) and size % 1:
        count = math.nan
    if not 1 <= count < 1 << 63:
        raise ValueError(f"{name} is {size!r}, expected bytes or a size such as '2GiB' or '512MB'")
    return int(count)


def format_bytes(size: float) -> str:
    """``1536`` as ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def format_at_least(size: int) -> str:
    """:func:`format_bytes` rounded up, so that the text is a sufficient budget."""
    unit = 1024 ** next(power for power in range(4) if size < 1024 ** (power + 1) or power == 3)
    # format_bytes has one decimal for KiB and MiB, two for GiB.
    decimals = {1: 1, 1024: 10, 1024**2: 10}.get(unit, 100)
    return format_bytes(math.ceil(size * decimals / unit) * unit / decimals)


@dataclass(frozen=True)
class MemoryPlan:
    """Limits of generation, and the memory they take.

    Attributes:
        tree: the tree of a step, root included; pruned for the device and the budget.
        max_sequences: sequences decoded at once; others are queued.
        page_size: tokens per page. max_pages: maximum of pages (``None``, without a budget: as many as the lengths of
            a call need).
        prefill_chunk: maximum of prompt tokens per forward pass.
        budget: bytes for all parts, or ``None``. Plans of :func:`plan_memory` include the model's weights, those of
            patching don't.
        parts: maximum bytes of each part; their sum is within the budget. A call with more rows than
            ``max_sequences`` also holds their ids, 24 bytes per padded token.
        pass_bytes: the part of ``parts["activations"]`` for the tensors of one pass, on a CPU also of a recorded step;
            0 in plans of :func:`plan_memory`.
        kept_steps: maximum of cached steps, recordings or graphs (LRU); 0 in plans of :func:`plan_memory`.
        drafter: its kind, if chosen by the plan. heads: Medusa heads to load, if chosen by the plan.
        head_bits: 4 if the drafter's matrices are in 4-bit codes, ``None``: as stored.
        kv_dtype: ``"int8"`` or ``"fp8"`` for pages of codes with scales; ``None``: the model's dtype.
        tokens_per_step, tokens_per_second, step_seconds: predicted, for a known device.
        reasons: explanation of the choice, in sentences.
        kernels: block sizes of the GPU kernels, one per class of sequences (for the widest heads, where layers differ);
            ``None`` for other backends.
    """

    tree: Trees
    max_sequences: int
    page_size: int
    max_pages: int | None
    prefill_chunk: int
    budget: int | None
    parts: dict[str, int] = field(default_factory=dict)
    drafter: str | None = None
    heads: int | None = None
    head_bits: int | None = None
    kv_dtype: str | None = None
    tokens_per_step: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    reasons: tuple[str, ...] = ()
    kernels: tuple[KernelConfig, ...] | None = None
    pass_bytes: int = 0
    kept_steps: int = 0

    @property
    def total_bytes(self) -> int:
        """Predicted peak: the sum of the parts."""
        return sum(self.parts.values())

    @property
    def generation_bytes(self) -> int:
        """All parts but the model's weights: the bytes that ``patch(memory_budget=...)`` limits."""
        return self.total_bytes - self.parts.get("weights", 0)

    @property
    def max_nodes(self) -> int:
        """Scratch slots: the nodes of one step over all sequences."""
        return self.tree.size * self.max_sequences

    @property
    def max_tokens(self) -> int | None:
        """Capacity of the pages in tokens, over all sequences."""
        return None if self.max_pages is None else self.max_pages * self.page_size

    def to_json(self) -> dict[str, object]:
        """A dict for ``json.dump``; a static tree as rank paths."""
        tree = asdict(self.tree) if isinstance(self.tree, TreeBudget) else [list(path) for path in self.tree.paths]
        return asdict(self) | {"tree": tree}

    def __str__(self) -> str:
        pages = "as needed"
        if self.max_pages is not None:
            pages = f"{counted(self.max_pages, 'page')} of {counted(self.page_size, 'token')}"
        speed: tuple[str, ...] = ()
        if self.tokens_per_second is not None:
            speed = (f"predicted {self.tokens_per_second:.1f} tokens/s, {self.tokens_per_step:.2f} tokens per step",)
        return "; ".join(
            (
                f"budget {'none' if self.budget is None else format_bytes(self.budget)}",
                f"tree of {counted(self.tree.size, 'node')}, depth {self.tree.max_depth}",
                f"KV: {pages}" + (f" in {self.kv_dtype}" if self.kv_dtype is not None else ""),
                *((f"the drafter in {self.head_bits} bits",) if self.head_bits is not None else ()),
                f"prefill chunk {self.prefill_chunk}",
                f"at most {counted(self.max_sequences, 'sequence')} at once",
                ", ".join(f"{name} {format_bytes(size)}" for name, size in self.parts.items()),
                *speed,
            )
        )


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def divide_budget(
    shape: GenerationShape,
    tree: Trees,
    *,
    budget: int | None,
    page_size: int,
    max_sequences: int = 8,
    prefill_chunk: int = 256,
    kv_dtype: str | None = None,
    slots: int = 1,
) -> MemoryPlan:
    """Divide ``budget`` bytes: heads, scratch and a forward pass first, the rest for pages.

    With a small budget the prefill chunk shrinks first, down to the nodes of a step, as this costs little speed; then
    the number of sequences. A chunk isn't longer than the cache. ``kv_dtype`` must be that of ``shape``.

    Raises:
        BudgetError: the pages for one sequence of ``slots`` tokens don't fit.
    """
    if budget is None:
        size = StepSize(tree.size, max_sequences, prefill_chunk, page_size)
        return MemoryPlan(
            tree, max_sequences, page_size, None, prefill_chunk, None, fixed_parts(shape, size), kv_dtype=kv_dtype,
            pass_bytes=pass_bytes(shape, size), kept_steps=shape.kept_steps,
        )  # fmt: skip
    sizes = [
        StepSize(tree.size, sequences, chunk, page_size)
        for sequences in _halvings(max_sequences, 1)
        for chunk in chunk_sizes(prefill_chunk)
    ]
    for size in sizes:
        parts, page = fixed_parts(shape, size), page_parts(shape, size)
        left, page_bytes = budget - sum(parts.values()), sum(page.values())
        # At least a quarter for pages, so that a large chunk or batch doesn't starve the cache; of the bytes that a
        # smaller one can have.
        quarter = (budget - shape.workspace_bytes - shape.libraries.at(sizes[-1].rows)) // 4
        pages = pages_within(shape, page_size, left, page_bytes)
        fits = pages * page_size >= size.chunk or size.chunk == sizes[-1].chunk
        if pages * page_size >= slots and ((left >= quarter and fits) or size == sizes[-1]):
            parts = {name: parts.get(name, 0) + pages * page.get(name, 0) for name in parts | page}
            parts["metadata"] += object_bytes(shape, page_size, pages)
            return MemoryPlan(
                tree, size.sequences, page_size, pages, size.chunk, budget, parts, kv_dtype=kv_dtype,
                pass_bytes=pass_bytes(shape, size), kept_steps=shape.kept_steps,
            )  # fmt: skip
    raise BudgetError(_too_small(budget, -(-slots // page_size), page_size, parts, page_bytes, shape))


def _too_small(
    budget: int, pages: int, page_size: int, parts: dict[str, int], page_bytes: int, shape: GenerationShape
) -> str:
    """The parts of the smallest plan with ``pages`` pages, the missing bytes, and what would fit."""
    least = sum(parts.values()) + pages * page_bytes + object_bytes(shape, page_size, pages)
    held, shorter = ("one page", "") if pages == 1 else (f"{pages} pages", ", a shorter context")
    needed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    largest = max(parts, key=lambda name: parts[name])
    instead = ", or heads='prompt-lookup', which has no weights" if parts["heads"] else ""
    coded_head_bytes, products = shape.coded_head_bytes, shape.products
    if coded_head_bytes is not None and least - parts["heads"] + coded_head_bytes <= budget:
        instead = f", or head_bits=4, with which the drafter takes {format_bytes(coded_head_bytes)}" + instead
    if products.layer:
        instead += f". Each product of a {products.layer} takes up to {format_bytes(products.peak)} while it runs"
    return (
        f"memory_budget {format_bytes(budget)} is too small for {held} of {page_size} tokens "
        f"({format_bytes(pages * page_bytes)}) beside {needed}: {format_bytes(least - budget)} missing, the largest "
        f"part is {largest}; give at least {format_at_least(least)}{shorter}, or a smaller tree or fewer heads{instead}"
    )


def chunk_sizes(prefill_chunk: int) -> list[int]:
    """The sizes that a budget may shrink chunks to, in descending order."""
    return _halvings(prefill_chunk, min(32, prefill_chunk))


def _halvings(start: int, least: int) -> list[int]:
    values = [start]
    while values[-1] > least:
        values.append(max(least, values[-1] // 2))
    return values
