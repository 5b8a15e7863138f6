"""Bounds on the bytes of a forward pass by its number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class PassBytes:
    """Bound on the transient bytes of a forward pass: ``fixed + rows * per_row``.

    Attributes:
        few, few_rows: another bound for at most ``few_rows`` rows.
    """

    fixed: int = 0
    per_row: int = 0
    few: PassBytes | None = None
    few_rows: int = 0

    def at(self, rows: int) -> int:
        """The bound for ``rows`` rows, in bytes."""
        if self.few is not None and rows <= self.few_rows:
            return self.few.at(rows)
        return self.fixed + rows * self.per_row

    def elementwise_max(self, other: PassBytes) -> PassBytes:
        """A bound for either of two passes."""
        bound = PassBytes(max(self.fixed, other.fixed), max(self.per_row, other.per_row))
        rows = max(self.few_rows, other.few_rows)
        if not rows:
            return bound
        return replace(bound, few=self._up_to(rows).elementwise_max(other._up_to(rows)), few_rows=rows)

    def _up_to(self, rows: int) -> PassBytes:
        return self.few if self.few is not None and self.few_rows == rows else self

    def with_few(self, rows: int, few: PassBytes) -> PassBytes:
        """The same bound but for at most ``rows`` rows, for which ``few`` is one."""
        if self.few is None or self.few_rows <= rows:
            return replace(self, few=few, few_rows=rows)
        return replace(self, few=self.few.with_few(rows, few))

    @classmethod
    def between(cls, few: tuple[int, int], many: tuple[int, int]) -> Self:
        """The line through two ``(rows, bytes)``: a bound between them where bytes grow ever faster."""
        slope = max(0, -((few[1] - many[1]) // (many[0] - few[0])))
        return cls(max(0, many[1] - slope * many[0]), slope)

    @classmethod
    def stepwise(cls, points: Sequence[tuple[int, int]]) -> PassBytes:
        """The bytes of the next larger of two or more ascending ``(rows, bytes)``: a bound where more rows never take
        less. Beyond them, the line through the first and the last.
        """
        few: PassBytes | None = None
        few_rows = 0
        for rows, held in points:
            few, few_rows = cls(held, 0, few, few_rows), rows
        return replace(cls.between(points[0], points[-1]), few=few, few_rows=few_rows)

    @classmethod
    def fitted(cls, few: tuple[int, Sequence[int]], many: tuple[int, Sequence[int]]) -> Self:
        """A bound from two passes, given as ``(rows, bytes held after each operator)``.

        After each operator a pass holds ``a + b * rows`` bytes. Two passes give ``a`` and ``b`` of each operator, and
        their maxima bound the pass at any number of rows. Peaks are not enough: the peak of few rows may be at another
        operator than the peak of many. If the passes have different operators, all bytes count per row (an upper
        bound).

        Raises:
            ValueError: a pass without operators, or not more rows in ``many``.
        """
        (few_rows, few_bytes), (many_rows, many_bytes) = few, many
        if not 0 < few_rows < many_rows or not few_bytes or not many_bytes:
            raise ValueError(
                f"two passes over growing numbers of rows are needed, got {few_rows} rows with {len(few_bytes)} "
                f"operators and {many_rows} rows with {len(many_bytes)}"
            )
        if len(few_bytes) != len(many_bytes):
            peak = max(many_bytes)
            return cls(peak, -(-peak // many_rows))
        rows = many_rows - few_rows
        slopes = [-((a - b) // rows) for a, b in zip(few_bytes, many_bytes, strict=True)]
        constants = [-(-(a * many_rows - b * few_rows) // rows) for a, b in zip(few_bytes, many_bytes, strict=True)]
        return cls(max(0, *constants), max(0, *slopes))


@dataclass(frozen=True)
class ProductBytes:
    """What a product of a quantised layer takes while it runs.

    Attributes:
        beyond: bytes that a pass's measured tensors don't include, by its rows.
        layer: class of the layer whose product takes the most. peak: all bytes of such a product, at most.
    """

    beyond: PassBytes = PassBytes()
    layer: str = ""
    peak: int = 0

    def elementwise_max(self, other: ProductBytes) -> ProductBytes:
        """A bound for either of two products."""
        largest = self if self.peak >= other.peak else other
        return replace(largest, beyond=self.beyond.elementwise_max(other.beyond))
