"""Fused operators in a recorded step: rotary embedding in one call, with the copies of keys and values to scratch where
a backend has that; addition and RMSNorm in one call, linear layers of one input in one call; own copies.

A model's own code computes them with several operators, each with a pass over its tensors. The fused operators round
as the separate ones do, so every bit is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from specmemo_kernels.engine.program import Call, View

Tensor = torch.Tensor

_ADD, _MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
_NEG, _CAT, _COPY = torch.ops.aten.neg.default, torch.ops.aten.cat.default, torch.ops.aten.copy_.default


def fused(calls: Sequence[Call], kernels: Any) -> list[Call]:
    """``calls`` with the fused operators of backend ``kernels`` where they apply."""
    program = _Program(calls)
    for name, rule in FUSED_OPERATORS.items():
        for position in range(len(calls) if hasattr(kernels, name) else 0):
            if (found := rule(program, position, kernels)) is not None:
                program.apply(found)
    return [call for call in program.calls if call is not None]


@dataclass(frozen=True)
class _Replacement:
    """``call`` in place of the calls at ``positions``, at position ``at``."""

    at: int
    call: Call
    positions: tuple[int, ...]


class _Program:
    """Calls by position, ``None`` where one was removed."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls: list[Call | None] = list(calls)
        self._producers: dict[str, int] = {}
        self._readers: dict[str, list[int]] = {}  # with a position for each use
        for position, call in enumerate(calls):
            self._add(position, call)

    def _add(self, position: int, call: Call) -> None:
        self._producers |= {view.name: position for view in call.results if view is not None}
        for view in call.views:
            self._readers.setdefault(view.name, []).append(position)

    def apply(self, replacement: _Replacement) -> None:
        for position in replacement.positions:
            for view in self._call(position).views:
                self._readers[view.name].remove(position)
            self.calls[position] = None
        self.calls[replacement.at] = replacement.call
        self._add(replacement.at, replacement.call)

    def _call(self, position: int) -> Call:
        call = self.calls[position]
        assert call is not None
        return call

    def producer(self, value: Any, function: Any, arguments: int, only_use: bool = True) -> int | None:
        """The position of the call of ``function`` whose only result is ``value``.

        ``None`` if it has another number of arguments, or if the result has other uses although ``only_use``.
        """
        position = self._producers.get(value.name) if isinstance(value, View) else None
        call = None if position is None else self.calls[position]
        if call is None or call.function is not function or call.results != (value,):
            return None
        if len(call.args) != arguments or call.kwargs or (only_use and len(self._readers[value.name]) > 1):
            return None
        return position

    def arguments(self, position: int) -> tuple[Any, ...]:
        return self._call(position).args

    def results(self, position: int) -> tuple[View | None, ...]:
        return self._call(position).results

    def readers_behind(self, view: View, position: int) -> list[int]:
        """The positions behind this one whose calls read a variable."""
        return [i for i in self._readers[view.name] if i > position]

    def linear(self, position: int, kernels: Any) -> Call | None:
        """The call at this position if it is ``linear`` of a constant contiguous matrix without codes."""
        call = self.calls[position]
        if call is None or call.function is not kernels.linear or len(call.args) != 5 or call.kwargs:
            return None
        x, weight, bias, scales, invariant = call.args
        constant = isinstance(weight, torch.Tensor) and weight.is_contiguous() and not isinstance(bias, View)
        return call if isinstance(x, View) and constant and scales is None and not invariant else None

    def copy(self, position: int) -> Call | None:
        """The call at this position if it is ``to.copy_(rows)`` of keys or values, ``[tokens, heads, size]``."""
        call = self.calls[position]
        if call is None or call.function is not _COPY or len(call.args) != 2 or call.kwargs:
            return None
        to, rows = call.args
        if not isinstance(to, torch.Tensor) or not to.is_contiguous() or not isinstance(rows, View):
            return None
        same = (tuple(to.shape), to.dtype) == (rows.size, rows.dtype)
        return call if len(rows.size) == 3 and rows.stride[-1] == 1 and same else None

    def made_before(self, view: View, position: int) -> bool:
        """Whether a variable is assigned by a call before this position."""
        return self._producers[view.name] < position

    def uses(self, tensors: Sequence[Tensor], first: int, last: int) -> bool:
        """Whether a call between these positions has an argument in the memory of one of ``tensors``."""
        memory = {x.untyped_storage().data_ptr() for x in tensors}
        arguments = [(call.args, call.kwargs) for call in self.calls[first : last + 1] if call is not None]
        constants = (x for x in tree_leaves(arguments) if isinstance(x, Tensor))
        return any(x.untyped_storage().data_ptr() in memory for x in constants)

    def unwritten(self, views: Sequence[Any], first: int, last: int) -> bool:
        """Whether no call between these positions writes to one of ``views``; constants may be written."""
        names = {view.name for view in views if isinstance(view, View)}
        calls = self.calls[first : last + 1]
        return not any(call is not None and call.written & names for call in calls)


def _add_rms_norm(program: _Program, position: int, kernels: Any) -> _Replacement | None:
    """``rms_norm(a + b)``, where the sum may have other uses."""
    norm = program.calls[position]
    if norm is None or norm.function is not kernels.rms_norm:
        return None
    total, parameters = norm.args[0], norm.args[1:]
    added = program.producer(total, _ADD, 2, only_use=False)
    if added is None:
        return None
    terms = program.arguments(added)
    rows = (total.size, total.dtype, True)
    if any(not isinstance(x, View) or (x.size, x.dtype, x.contiguous) != rows for x in (total, *terms)):
        return None
    if any(isinstance(x, View) for x in parameters) or not program.unwritten([total], added, position):
        return None
    call = Call(kernels.add_rms_norm, (*terms, *parameters), results=(total, *norm.results), single=False)
    return _Replacement(added, call, (added, position))


def _rotary(program: _Program, position: int, kernels: Any) -> _Replacement | None:
    """``x * cos + cat([-x[..., half:], x[..., :half]], -1) * sin``."""
    call = program.calls[position]
    if call is None or call.function is not _ADD or len(call.args) != 2 or call.kwargs:
        return None
    first, second = (program.producer(x, _MUL, 2) for x in call.args)
    if first is None or second is None:
        return None
    (x, cos), (rotated, sin) = program.arguments(first), program.arguments(second)
    turned = program.producer(rotated, _CAT, 2)
    if turned is None or not all(isinstance(view, View) for view in (x, cos, sin)):
        return None
    halves, dim = program.arguments(turned)
    if dim not in (-1, len(x.size) - 1) or len(halves) != 2:
        return None
    negative = program.producer(halves[0], _NEG, 1)
    if negative is None or not _are_halves(x, halves[1], program.arguments(negative)[0]):
        return None
    positions = (first, second, turned, negative, position)
    rows = _rows(x, cos, sin, call.results[0])
    if rows is None or not program.unwritten([x, cos, sin], min(positions), position):
        return None
    return _Replacement(position, Call(kernels.rotary, rows[:3], results=rows[3:]), positions)


def _copy_rows(program: _Program, position: int, kernels: Any) -> _Replacement | None:
    """``to.copy_(rows)`` of keys or values."""
    call = program.copy(position)
    return None if call is None else _Replacement(position, replace(call, function=kernels.copy_rows), (position,))


def _linears(program: _Program, position: int, kernels: Any) -> _Replacement | None:
    """``linear`` of one input and several constant matrices, with biases or without."""
    first = program.linear(position, kernels)
    if first is None:
        return None
    found = [position]
    for other in program.readers_behind(first.args[0], position):
        call = program.linear(other, kernels)
        if call is None or call.args[0] != first.args[0] or not _stored_alike(call.args[1:3], first.args[1:3]):
            continue
        if not program.unwritten([first.args[0]], position, other):
            break
        found.append(other)
    if len(found) == 1:
        return None
    weights, biases = zip(*(program.arguments(i)[1:3] for i in found), strict=True)
    results = tuple(result for i in found for result in program.results(i))
    call = Call(kernels.linears, (first.args[0], list(weights), list(biases)), results=results, single=False)
    return _Replacement(position, call, tuple(found))


def _stored_alike(parameters: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two layers' weights are both compressed or not, and both have a bias or not."""
    (weight, bias), (other, other_bias) = parameters, others
    return weight.dtype == other.dtype and (bias is None) == (other_bias is None)


def _rotary_pair(program: _Program, position: int, kernels: Any) -> _Replacement | None:
    """``rotary`` of two tensors with the same angles, as of queries and keys."""
    first = program.calls[position]
    if first is None or first.function is not kernels.rotary:
        return None
    x, *angles = first.args
    for other in program.readers_behind(angles[0], position):
        call = program.calls[other]
        if call is None or call.function is not kernels.rotary or list(call.args[1:]) != angles:
            continue
        y = call.args[0]
        same = (y.size[0], y.size[2], y.dtype) == (x.size[0], x.size[2], x.dtype)
        if not same or not program.made_before(y, position) or not program.unwritten([y, *angles], position, other):
            return None
        results = (*first.results, *call.results)
        pair = Call(kernels.rotary_pair, (x, y, *angles), results=results, single=False)
        return _Replacement(position, pair, (position, other))
    return None


def _rotary_stored(program: _Program, position: int, kernels: Any) -> _Replacement | None:
    """``rotary_pair`` of queries and keys, and behind it copies of the rotated keys and of the values."""
    pair = program.calls[position]
    if pair is None or pair.function is not kernels.rotary_pair:
        return None
    (x, y, *angles), keys = pair.args, pair.results[1]
    assert keys is not None, "its reader is in the program"
    copies = [i for i in program.readers_behind(keys, position) if program.copy(i) is not None]
    if len(copies) != 1 or program.arguments(copies[0])[1] != keys:
        return None
    last = copies[0] + 1
    copied = program.copy(last) if last < len(program.calls) else None
    if copied is None:
        return None
    written, values = [program.arguments(copies[0])[0], copied.args[0]], copied.args[1]
    if values.size[:2] != keys.size[:2] or not program.made_before(values, position):
        return None
    if not program.unwritten([keys, values], position, last) or program.uses(written, position, copies[0] - 1):
        return None
    arguments = (x, y, values, *angles, *written)
    call = Call(kernels.rotary_stored, arguments, results=pair.results, single=False)
    return _Replacement(position, call, (position, copies[0], last))


def _are_halves(x: View, first: Any, second: Any) -> bool:
    """Whether two arguments are the halves of ``x`` along its last dimension."""
    low = replace(x, size=(*x.size[:-1], x.size[-1] // 2))
    high = replace(low, offset=x.offset + low.size[-1] * x.stride[-1])
    return isinstance(first, View) and isinstance(second, View) and (first, second) == (low, high)


def _rows(x: View, cos: View, sin: View, result: View | None) -> tuple[View, View, View, View] | None:
    """``x`` and ``result`` as ``[tokens, heads, size]``, ``cos`` and ``sin`` as ``[tokens, size]``.

    ``None`` unless the last dimensions are contiguous, the dtypes equal and the result lies in this order in memory.
    """
    if result is None or result.size != x.size or len(cos.size) != len(x.size):
        return None
    if sin != replace(cos, name=sin.name, offset=sin.offset):
        return None
    size = x.size[-1]
    if size % 2 or cos.size[-1] != size or any(v.stride[-1] != 1 or v.dtype != x.dtype for v in (x, cos, result)):
        return None
    axes = [i for i, length in enumerate(x.size[:-1]) if length > 1]
    tokens = [i for i in axes if cos.size[i] == x.size[i]]
    heads = [i for i in axes if cos.size[i] == 1]
    if len(tokens) > 1 or len(heads) > 1 or len(tokens) + len(heads) < len(axes):
        return None
    count, number = (x.size[dims[0]] if dims else 1 for dims in (tokens, heads))
    (x_token, x_head), (token, head) = (
        tuple(v.stride[dims[0]] if dims else 0 for dims in (tokens, heads)) for v in (x, result)
    )
    if result.offset or (tokens and token != number * size) or (heads and head != size):
        return None
    out = View(result.name, (count, number, size), (number * size, size, 1), 0, result.dtype)
    angle = cos.stride[tokens[0]] if tokens else 0
    angles = [replace(view, size=(count, size), stride=(angle, 1)) for view in (cos, sin)]
    return replace(x, size=out.size, stride=(x_token, x_head, 1)), angles[0], angles[1], out


_Rule = Callable[[_Program, int, Any], _Replacement | None]
#: Operators of backends that replace several calls, and the rule that finds these calls.
FUSED_OPERATORS: dict[str, _Rule] = {
    "rotary": _rotary, "add_rms_norm": _add_rms_norm, "copy_rows": _copy_rows, "linears": _linears,
    "rotary_pair": _rotary_pair, "rotary_stored": _rotary_stored,
}  # fmt: skip
