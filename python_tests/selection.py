"""Everyday samples of exhaustive tests; ``make test-all`` runs all values and all examples."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from itertools import combinations, product
from typing import Any

import pytest

#: Whether every value and every example is tried.
ALL_EXAMPLES = bool(os.environ.get("SPECMEMO_ALL_EXAMPLES"))


def examples(count: int) -> int:
    """Number of Hypothesis examples: ``count`` in ``make test-all``, else a quarter."""
    return count if ALL_EXAMPLES else max(1, count // 4)


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


def pairwise(*parameters: Iterable[Any], first: Collection[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Rows of the parameters' product that have every pair of values of two parameters, the rows ``first`` included.

    Greedy: each row has the most pairs that no row before it has.
    """
    rows = list(product(*parameters))

    def pairs(row: tuple[Any, ...]) -> set[Any]:
        return set(combinations(enumerate(row), 2))

    missing = set().union(*map(pairs, rows)).difference(*map(pairs, first))
    chosen = list(first)
    while missing:
        chosen.append(max(rows, key=lambda row: len(missing & pairs(row))))
        missing -= pairs(chosen[-1])
    return chosen
