"""Steps on a CPU as a list of operator calls: the counterpart of a CUDA graph.

The Python code of a small model's modules takes as long as its operators. A recorded step calls the same operators on
the same tensors without that code. Temporary tensors are allocated and freed as in the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specmemo_kernels.ops.dispatch import dispatcher_active, implementation

Tensor = torch.Tensor

#: Tensor methods that read values without an operator.
_READS = {getattr(Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr")}
_DYNAMIC = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class HostCapture:
    """Records a function's operators. Writes to tensors that it didn't allocate are not executed.

    Implements :class:`specmemo_kernels.engine.step_graph.Capture`.

    Raises:
        ValueError: ``device`` isn't a CPU.
    """

    #: Recording takes as long as 3 to 9 eager steps. A replay saves a sixth to a half of an eager step (models of 125
    #: and 7 million parameters). So steps that run only a few times aren't recorded.
    after = 8
    nbytes = 0  # temporaries are freed in every replay

    def __init__(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"steps on {device} can't be recorded, only steps on a CPU")

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record ``run``. Its replays run it eagerly while a dispatch mode, tracer or profiler is active.

        Raises:
            RuntimeError: its operators depend on values, or one of them can't be repeated.
        """
        recorder = _Recorder()
        with _NoReads(), recorder:
            run()
        program = recorder.program()
        return lambda: run() if dispatcher_active() else program()


class _NoReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise RuntimeError(f"{func.__name__} reads a tensor's values")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Geometry:
    """Where a tensor lies in the memory of variable ``name``."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, name: str) -> _Geometry:
        return cls(name, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True)
class _Call:
    """A line of source code, the variables that it reads, and those that it assigns."""

    source: str
    uses: frozenset[str]
    assigns: tuple[str, ...]


class _Recorder(TorchDispatchMode):
    """Executes operators and records those that compute or write something; views are created where they are used."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []
        self._constants: dict[str, Any] = {"as_strided": torch.as_strided}
        self._names: dict[int, str] = {}  # of constants, by id
        self._variables: dict[StorageWeakRef, tuple[_Geometry, torch.dtype]] = {}
        self._views: dict[_Geometry, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _depends_on_values(func, args):
            raise RuntimeError(f"{func} depends on a tensor's values")
        written = list(_written(func, args, kwargs))
        outside = [x for x in written if _storage(x) not in self._variables]
        if outside and (len(outside) < len(written) or len(func._schema.returns) > 1):
            raise RuntimeError(f"{func} writes to a tensor that the step didn't allocate, and has other results")
        known = {_storage(x) for x in _tensors((*args, *kwargs.values()))}
        result = (written[0] if func._schema.returns else None) if outside else func(*args, **kwargs)
        results = [result] if isinstance(result, Tensor) else list(result or ())
        new = [isinstance(x, Tensor) and _storage(x) not in known for x in results]
        if written or any(new):
            uses: set[str] = set()
            call = self._call(func, args, kwargs, uses)
            names = [self._variable(x) if is_new else "_" for x, is_new in zip(results, new, strict=True)]
            if any(new):
                call = f"{', '.join(names)}{'' if isinstance(result, Tensor) else ','} = {call}"
            self._calls.append(_Call(call, frozenset(uses), tuple(name for name in names if name != "_")))
        return result

    def program(self) -> Callable[[], None]:
        """A function of the recorded calls, which frees variables after their last use."""
        last = {name: i for i, call in enumerate(self._calls) for name in (*call.uses, *call.assigns)}
        freed: dict[int, list[str]] = {}
        for name, i in last.items():
            freed.setdefault(i, []).append(name)
        lines = ["def replay():"]
        for i, call in enumerate(self._calls):
            lines.append(f"    {call.source}")
            if i in freed:
                lines.append(f"    {' = '.join(freed[i])} = None")
        exec(compile("\n".join(lines), "<recorded step>", "exec"), self._constants)
        replay: Callable[[], None] = self._constants.pop("replay")
        return torch.inference_mode()(replay)

    def _call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], uses: set[str]) -> str:
        """Source code of an operator's call; ours bypass torch's dispatcher."""
        if func.namespace == "specmemo":
            name = func._schema.name.split("::")[1]
            func, args = getattr(implementation(args[-1], args[0].device), name), args[:-1]
        arguments = [self._source(value, uses) for value in args]
        arguments += [f"{name}={self._source(value, uses)}" for name, value in kwargs.items()]
        return f"{self._constant(func)}({', '.join(arguments)})"

    def _source(self, value: Any, uses: set[str]) -> str:
        if isinstance(value, Tensor):
            if (name := self._tensor(value)) not in self._constants:
                uses.add(name)
            return name
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._source(x, uses) for x in value)}]"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = self._names.setdefault(id(value), f"c{len(self._names)}")
        self._constants[name] = value
        return name

    def _tensor(self, tensor: Tensor) -> str:
        """The name of a tensor: a constant, a variable, or a view, which is created now unless it exists."""
        if (known := self._variables.get(_storage(tensor))) is None:
            return self._constant(tensor)
        base, dtype = known
        if tensor.dtype != dtype:
            raise RuntimeError(f"a {tensor.dtype} view of {dtype} memory can't be recorded")
        view = _Geometry.of(tensor, base.name)
        if view == base:
            return base.name
        if view not in self._views:
            self._views[view] = name = f"v{len(self._views)}"
            source = f"{name} = as_strided({base.name}, {view.size}, {view.stride}, {view.offset})"
            self._calls.append(_Call(source, frozenset([base.name]), (name,)))
        return self._views[view]

    def _variable(self, tensor: Tensor) -> str:
        name = f"t{len(self._variables)}"
        self._variables[_storage(tensor)] = _Geometry.of(tensor, name), tensor.dtype
        return name


def _storage(tensor: Tensor) -> StorageWeakRef:
    """Identifies a tensor's memory; the reference keeps its address from being used again."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _depends_on_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether the shape of an operator's result, or a result on the host, depends on a tensor's values."""
    if func is torch.ops.aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors([args[1]]))
    return any(tag in func.tags for tag in _DYNAMIC)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes to."""
    arguments = func._schema.arguments
    values = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
    for argument, value in zip(arguments, values, strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors([value])


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
