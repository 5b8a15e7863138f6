"""Checked values of the ``config.json`` of published drafters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from specmemo_kernels.arguments import shown
from specmemo_kernels.drafting.source_files import HeadsError

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class ConfigReader:
    """Checked values of JSON objects; ``null`` is an absent value.

    Attributes:
        where: the file, for messages.
        objects: searched in this order.
    """

    where: str
    objects: tuple[Mapping[str, Any], ...]

    def value(self, name: str) -> Any:
        """The value, ``None`` if absent.

        Raises:
            HeadsError: two objects disagree.
        """
        values = [found for values in self.objects if (found := values.get(name)) is not None]
        if any(type(other) is not type(values[0]) or other != values[0] for other in values[1:]):
            raise HeadsError(f"{self.where}: {name} has the values {shown(values)}; leave one")
        return values[0] if values else None

    def wrong(self, name: str, value: Any, allowed: str) -> HeadsError:
        actual = "missing" if value is None else f"{shown(value)} of type {type(value).__name__}"
        return HeadsError(f"{self.where}: {name} is {actual}, it must be {allowed}; correct this file")

    def object(self, name: str) -> Mapping[str, Any]:
        """A nested object; empty if absent."""
        value = self.value(name)
        if not isinstance(value, dict | None):
            raise self.wrong(name, value, "an object")
        return value or {}

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        value = self.value(name)
        number = default if value is None else value
        if type(number) is not int or not least <= number <= most:
            raise self.wrong(name, value, f"an integer from {least} to {most}")
        return number

    def number(self, name: str, default: float | None = None, most: float = 1e30) -> float:
        value = self.value(name)
        number: Any = default if value is None else value
        if type(number) not in (int, float) or not 0 < number <= most:
            raise self.wrong(name, value, f"a number above 0 and at most {most:g}")
        return float(number)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.value(name)
        if not isinstance(value, bool | None):
            raise self.wrong(name, value, "true or false")
        return default if value is None else value

    def choice(self, name: str, default: str, allowed: Collection[str]) -> str:
        value = self.value(name)
        text = default if value is None else value
        if not isinstance(text, str) or text not in allowed:
            raise self.wrong(name, value, f"one of {', '.join(allowed)}")
        return text

    def layer_ids(self, name: str, offset: int) -> tuple[int, ...] | None:
        """A list of the target's layers, ``offset`` added to each; ``None`` if absent."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list) or not value or any(type(i) is not int or not 0 <= i <= 9999 for i in value):
            raise self.wrong(name, value, "a list of layers, integers from 0 to 9999")
        return tuple(layer + offset for layer in value)


def accuracy_rows(where: str, config: Mapping[str, Any]) -> tuple[tuple[float, ...], ...] | None:
    """``cumulative_topk_accuracy`` of a configuration: a row of shares per drafted token; ``None`` if absent.

    Raises:
        HeadsError: not rows of shares from 0 to 1, none of which is below the one before it in its row.
    """
    rows = config.get("cumulative_topk_accuracy")
    if rows is None:
        return None

    def is_share(value: Any) -> bool:
        return type(value) in (int, float) and 0 <= value <= 1

    def is_row(value: Any) -> bool:
        shares = isinstance(value, list | tuple) and bool(value) and all(map(is_share, value))
        return shares and list(value) == sorted(value)

    if not isinstance(rows, list | tuple) or not rows or not all(map(is_row, rows)):
        raise HeadsError(
            f"{where}: cumulative_topk_accuracy is {shown(rows)}, it must be a list with a list of shares from 0 to 1, "
            "in ascending order, for each drafted token; correct or remove it"
        )
    return tuple(tuple(map(float, row)) for row in rows)
