"""Three sizes of the suite: everyday samples (``make test``), every value of every parameter (``make test-all``), and
their combinations with more random examples (``make test-exhaustive``).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import combinations, product
from typing import Any

import pytest

#: Whether this is ``make test-exhaustive``.
EXHAUSTIVE = bool(os.environ.get("SPECMEMO_EXHAUSTIVE"))


def examples(count: int) -> int:
    """Number of Hypothesis examples: ``count`` in exhaustive runs, else a quarter."""
    return count if EXHAUSTIVE else max(1, count // 4)


def sample(values: Iterable[Any], everyday: Collection[Any], key: Callable[[Any], Any] = lambda x: x) -> list[Any]:
    """``values`` as parameters, marked slow unless their ``key`` is in ``everyday``; a tuple is several parameters.

    Raises:
        ValueError: ``everyday`` has a key that no value has.
    """
    values = list(values)
    if unknown := set(everyday) - {key(value) for value in values}:
        raise ValueError(f"the everyday sample has {unknown}, which no parameter has")
    slow = [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.slow) for v in values]
    return [value if key(value) in everyday else other for value, other in zip(values, slow, strict=True)]


def covering(*parameters: Iterable[Any], first: Collection[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Rows of the parameters' product that have every value of each parameter, the rows ``first`` included; in
    exhaustive runs every pair of values of two parameters.

    Greedy: each row has the most values or pairs that no row before it has, and of such rows the values used least.
    """
    rows = list(product(*parameters))

    def parts(row: tuple[Any, ...]) -> set[Any]:
        return set(combinations(enumerate(row), 2 if EXHAUSTIVE else 1))

    missing = set().union(*map(parts, rows)).difference(*map(parts, first))
    chosen = list(first)
    used = Counter(value for row in chosen for value in enumerate(row))
    while missing:
        row = max(rows, key=lambda row: (len(missing & parts(row)), -sum(used[value] for value in enumerate(row))))
        chosen.append(row)
        used.update(enumerate(row))
        missing -= parts(row)
    return chosen
