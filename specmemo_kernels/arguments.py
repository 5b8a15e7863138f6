"""Checks of arguments. Each error has the argument's name, its value and what is allowed."""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
from collections.abc import Iterable
from typing import Any


def as_integer(value: Any) -> int | None:
    """``value`` as an ``int``, or ``None`` if it isn't an integer. numpy's integers are, booleans are not."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def integers(values: Any) -> list[int] | None:
    """``values`` as a list, or ``None`` if they aren't one row of integers. Tensors and arrays must be 1-D."""
    if isinstance(values, str | bytes):
        return None
    try:
        found = [as_integer(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]
    except TypeError:  # nothing to iterate over
        return None
    return None if None in found else [number for number in found if number is not None]


def integer(name: str, value: Any, least: int = 1, most: int | None = None, or_else: str = "") -> int:
    """``value`` as an ``int``.

    Args:
        or_else: what else is allowed, for the message.

    Raises:
        TypeError: it isn't an integer.
        ValueError: it is below ``least`` or above ``most``.
    """
    limit = f"at least {least}" if most is None else f"from {least} to {most}"
    number = as_integer(value)
    if number is None:
        raise wrong_type(name, value, f"an integer, {limit}{or_else}")
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name} is {number}, it must be {limit}{or_else}")
    return number


def positive_number(name: str, value: Any, most: float = math.inf, hint: str = "") -> float:
    """A finite number above 0 and at most ``most``; numpy's numbers count, booleans don't.

    Raises:
        TypeError: it isn't a number.
        ValueError: it is out of range.
    """
    limit = "above 0 and finite" if most == math.inf else f"above 0 and at most {most:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong_type(name, value, f"a number {limit}{hint}")
    number = float(value)
    if not (0 < number <= most and math.isfinite(number)):
        raise ValueError(f"{name} is {value}, it must be {limit}{hint}")
    return number


def flag(name: str, value: Any, or_none: bool = False) -> None:
    """
    Raises:
        TypeError: ``value`` is neither ``True`` nor ``False`` (nor ``None``, with ``or_none``).
    """
    if not (isinstance(value, bool) or (or_none and value is None)):
        raise wrong_type(name, value, "True, False or None" if or_none else "True or False")


def text(name: str, value: Any, allowed: Iterable[str]) -> None:
    """
    Raises:
        TypeError: ``value`` is neither text nor ``None``.
        ValueError: it is another text than the ``allowed`` ones.
    """
    expected = f"{', '.join(map(repr, allowed))} or None"
    if value is not None and not isinstance(value, str):
        raise wrong_type(name, value, expected)
    if value is not None and value not in allowed:
        raise ValueError(f"{name} is {value!r}, expected {expected}")


def wrong_type(name: str, value: Any, expected: str) -> TypeError:
    """The error for a value of another type than ``expected``."""
    return TypeError(f"{name} is {shown(value)} of type {type(value).__name__}, it must be {expected}")


def shown(value: Any) -> str:
    """A value in an error message, at most a line long."""
    return reprlib.repr(value)
