"""Argument checks. Each error has the argument's name, its value and the allowed values."""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
from collections.abc import Iterable
from typing import Any


def as_integer(value: Any) -> int | None:
    """``value`` as an ``int``; ``None`` for other types. numpy's integers are accepted, booleans are not."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def integers(values: Any) -> list[int] | None:
    """``values`` as a list; ``None`` unless they are a sequence of integers. Tensors and arrays must be 1-D."""
    if isinstance(values, str | bytes):
        return None
    try:
        checked = [as_integer(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]
    except TypeError:  # not iterable
        return None
    return None if None in checked else [number for number in checked if number is not None]


def integer(name: str, value: Any, least: int = 1, most: int | None = None, or_else: str = "") -> int:
    """Check an integer and return it as ``int``; ``or_else`` adds other allowed values to the message.

    Raises:
        TypeError: not an integer.
        ValueError: below ``least`` or above ``most``.
    """
    limit = f"at least {least}" if most is None else f"from {least} to {most}"
    number = as_integer(value)
    if number is None:
        raise wrong_type(name, value, f"an integer, {limit}{or_else}")
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name} is {number}, it must be {limit}{or_else}")
    return number


def number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """Check a finite number from ``least`` to ``most``. numpy's numbers are accepted, booleans are not.

    Raises:
        TypeError: not a number.
        ValueError: out of range.
    """
    limits = [f"at least {least:g}"] * (least > -math.inf) + [f"at most {most:g}"] * (most < math.inf)
    limit = " and ".join(["finite", *limits])
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong_type(name, value, f"a number, {limit}")
    checked = float(value)
    if not (least <= checked <= most and math.isfinite(checked)):
        raise ValueError(f"{name} is {value}, it must be {limit}")
    return checked


def positive_number(name: str, value: Any, most: float = math.inf, hint: str = "") -> float:
    """Check a finite number above 0 and at most ``most``. numpy's numbers are accepted, booleans are not.

    Raises:
        TypeError: not a number.
        ValueError: out of range.
    """
    limit = "above 0 and finite" if most == math.inf else f"above 0 and at most {most:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong_type(name, value, f"a number {limit}{hint}")
    number = float(value)
    if not (0 < number <= most and math.isfinite(number)):
        raise ValueError(f"{name} is {value}, it must be {limit}{hint}")
    return number


def flag(name: str, value: Any, or_none: bool = False) -> None:
    """Check a boolean.

    Raises:
        TypeError: ``value`` is not ``True`` or ``False`` (or ``None``, with ``or_none``).
    """
    if not (isinstance(value, bool) or (or_none and value is None)):
        raise wrong_type(name, value, "True, False or None" if or_none else "True or False")


def text(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Check a string option; ``None`` is allowed.

    Raises:
        TypeError: ``value`` is neither a string nor ``None``.
        ValueError: ``value`` is not in ``allowed``.
    """
    expected = f"{', '.join(map(repr, allowed))} or None"
    if value is not None and not isinstance(value, str):
        raise wrong_type(name, value, expected)
    if value is not None and value not in allowed:
        raise ValueError(f"{name} is {value!r}, expected {expected}")


def wrong_type(name: str, value: Any, expected: str) -> TypeError:
    return TypeError(f"{name} is {shown(value)} of type {type(value).__name__}, it must be {expected}")


def shown(value: Any) -> str:
    """``repr(value)``, shortened for an error message."""
    return reprlib.repr(value)
