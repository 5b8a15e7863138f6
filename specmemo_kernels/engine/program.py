"""A recorded step: calls of operators on constants and variables, compiled to Python functions."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Tensor = torch.Tensor
#: Most bytes of a result that a program keeps instead of computing it in every step.
_CONSTANT_BYTES = 4096
#: Lines of a program that are compiled at once: compiling takes 7 KiB per line.
_PART_LINES = 64


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in the memory of variable ``name``; ``stride`` and ``offset`` in elements."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, name: str) -> View:
        return cls(name, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of memory from the variable's start to the view's end."""
        if 0 in self.size:
            return 0
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Call:
    """``results = function(*args, **kwargs)``.

    Attributes:
        args: nested lists of :class:`View` for variables, and of constants: also tensors that outlive the step.
        results: the variables that it assigns, as whole tensors; ``None``: a result that isn't used.
        single: the function returns one tensor, not a sequence.
        written: names of the variables that it writes to.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    results: tuple[View | None, ...] = ()
    single: bool = True
    written: frozenset[str] = frozenset()

    @property
    def views(self) -> Iterator[View]:
        """The variables among the arguments."""
        return _views([*self.args, *self.kwargs.values()])

    def make(self, tensor: Callable[[View], Tensor]) -> Any:
        """Make the call with ``tensor(view)`` for each variable; returns its result."""
        fill = partial(_with_tensors, tensor)
        return self.function(*map(fill, self.args), **{name: fill(x) for name, x in self.kwargs.items()})


def rehearse(call: Call, device: torch.device) -> None:
    """Make a call with uninitialised variables, so that its kernels are compiled. What it writes has no meaning."""

    def uninitialised(view: View) -> Tensor:
        memory = torch.empty(view.nbytes // view.dtype.itemsize, dtype=view.dtype, device=device)
        return memory.as_strided(view.size, view.stride, view.offset)

    call.make(uninitialised)


def _with_tensors(tensor: Callable[[View], Tensor], argument: Any) -> Any:
    """``argument`` with ``tensor(view)`` for each variable in it."""
    if isinstance(argument, View):
        return tensor(argument)
    return [_with_tensors(tensor, x) for x in argument] if isinstance(argument, (list, tuple)) else argument


def _views(values: Sequence[Any]) -> Iterator[View]:
    for value in values:
        if isinstance(value, View):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _views(value)


def last_uses(calls: Sequence[Call]) -> dict[str, int]:
    """The last call that reads each variable, or makes one that none reads."""
    return {view.name: i for i, call in enumerate(calls) for view in (*call.results, *call.views) if view is not None}


def without_unread(calls: Sequence[Call]) -> list[Call]:
    """``calls`` without those whose results no other call reads."""
    read: set[str] = set()
    kept = []
    for call in reversed(calls):
        results = {view.name for view in call.results if view is not None}
        if not results or call.written or results & read:
            kept.append(call)
            read |= {view.name for view in call.views}
    return kept[::-1]


def with_constants(calls: Sequence[Call]) -> list[Call]:
    """``calls`` without those whose results never change, as of ``arange``: small results become constants."""
    written = {name for call in calls for name in call.written}
    constants: dict[str, Tensor] = {}

    def constant(view: View) -> Any:
        value = constants.get(view.name)
        return view if value is None else value.as_strided(view.size, view.stride, view.offset)

    kept, fill = [], partial(_with_tensors, constant)
    for call in calls:
        result = call.results[0] if len(call.results) == 1 else None
        if result is None or result.name in written or result.nbytes > _CONSTANT_BYTES or not _repeats(call, constants):
            keywords = {name: fill(value) for name, value in call.kwargs.items()}
            kept.append(replace(call, args=tuple(map(fill, call.args)), kwargs=keywords))
        else:
            constants[result.name] = call.make(constant)
    return kept


def _repeats(call: Call, constants: Container[str]) -> bool:
    """Whether an operator of torch has the same result in every step; ``constants``: names of such results."""
    function: Any = call.function
    operator = isinstance(function, torch._ops.OpOverload) and call.single and not call.written
    if not operator or torch.Tag.nondeterministic_seeded in function.tags:
        return False
    arguments = tree_leaves([call.args, call.kwargs])
    return not any(isinstance(x, Tensor) or (isinstance(x, View) and x.name not in constants) for x in arguments)


def peak_bytes(calls: Sequence[Call]) -> int:
    """Most bytes of variables at once, without what functions allocate and free."""
    last, live, peak = last_uses(calls), dict[str, int](), 0
    for i, call in enumerate(calls):
        live |= {view.name: view.nbytes for view in call.results if view is not None}
        peak = max(peak, sum(live.values()))
        live = {name: size for name, size in live.items() if last[name] > i}
    return peak


def compiled(calls: Sequence[Call]) -> Callable[[], None]:
    """A function that makes the calls and frees each variable after its last use."""
    return _Compiler().compile(calls)


class _Compiler:
    """Writes source code: a line per call, and one per view before its first use."""

    def __init__(self) -> None:
        self._constants: dict[str, Any] = {"as_strided": torch.as_strided}
        self._names: dict[int, str] = {}  # of constants, by id
        self._whole: dict[str, View] = {}  # variables as they were assigned
        self._made: dict[View, str] = {}
        self._lines: list[tuple[str, set[str]]] = []  # each with its variables

    def compile(self, calls: Sequence[Call]) -> Callable[[], None]:
        for call in calls:
            self._add(call)
        parts = list(self._parts())

        def replay() -> None:
            live: list[Tensor] = []
            for part in parts:
                live = part(live)

        return torch.inference_mode()(replay)

    def _parts(self) -> Iterator[Callable[[list[Tensor]], list[Tensor]]]:
        """Functions of :data:`_PART_LINES` lines. Each empties a list of the live variables and returns another."""
        last = {name: i for i, (_, names) in enumerate(self._lines) for name in names}
        live: list[str] = []
        for start in range(0, len(self._lines), _PART_LINES):
            source = ["def part(live):", f"    [{', '.join(live)}] = live", "    live.clear()"]
            for i, (line, names) in enumerate(self._lines[start : start + _PART_LINES], start):
                source.append(f"    {line}")
                over = sorted(name for name in names if last[name] == i)
                if over:
                    source.append(f"    {' = '.join(over)} = None")
                live = [*dict.fromkeys([*live, *sorted(names)])]
                live = [name for name in live if last[name] > i]
            source.append(f"    return [{', '.join(live)}]")
            exec(compile("\n".join(source), "<recorded step>", "exec"), self._constants)
            yield self._constants.pop("part")

    def _add(self, call: Call) -> None:
        used: set[str] = set()
        arguments = [self._source(value, used) for value in call.args]
        arguments += [f"{name}={self._source(value, used)}" for name, value in call.kwargs.items()]
        line = f"{self._constant(call.function)}({', '.join(arguments)})"
        assigned = [view for view in call.results if view is not None]
        if assigned:
            names = ", ".join("_" if view is None else view.name for view in call.results)
            line = f"{names}{'' if call.single else ','} = {line}"
        for view in assigned:
            self._whole[view.name] = view
            used.add(view.name)
        self._lines.append((line, used))

    def _source(self, value: Any, used: set[str]) -> str:
        if isinstance(value, View):
            used.add(name := self._variable(value))
            return name
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._source(x, used) for x in value)}]"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._constant(value)

    def _variable(self, view: View) -> str:
        """The name of a variable that holds ``view``, which is created now if it doesn't exist."""
        if view == self._whole[view.name]:
            return view.name
        if view not in self._made:
            self._made[view] = name = f"v{len(self._made)}"
            line = f"{name} = as_strided({view.name}, {view.size}, {view.stride}, {view.offset})"
            self._lines.append((line, {view.name, name}))
        return self._made[view]

    def _constant(self, value: Any) -> str:
        name = self._names.setdefault(id(value), f"c{len(self._names)}")
        self._constants[name] = value
        return name
