"""Steps on a CPU as a list of operator calls: the counterpart of a CUDA graph.

The model's Python code and torch's modules take as long as the operators of a small model. A recorded step calls the
same operators on the same tensors without them. Temporary tensors are allocated and freed as in the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specmemo_kernels.ops.dispatch import implementation

Tensor = torch.Tensor

#: Tensor methods that read values without an operator.
_READS = {getattr(Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr")}
_DYNAMIC = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class HostCapture:
    """Records the operators of a function. Writes to tensors from outside are recorded, not executed.

    Implements :class:`specmemo_kernels.engine.step_graph.Capture`.
    """

    nbytes = 0  # temporaries are freed in every replay

    def __init__(self, device: torch.device) -> None:
        """``device``: the CPU."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record ``run``.

        Raises:
            RuntimeError: the function reads values, so its operators depend on them.
        """
        with _NoReads(), _Recorder() as recorder:
            run()
        return recorder.program()


class _NoReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise RuntimeError(f"{func.__name__} reads a tensor's values")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _View:
    """A tensor of the step: variable ``name``, or a view of it."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Call:
    """``function(*args, **kwargs)``, arguments as source code; ``results``: the variables of its new tensors, ``""`` for
    other results; ``single``: it returns one tensor."""

    function: str
    arguments: list[str]
    results: list[str] = field(default_factory=list)
    single: bool = True

    def source(self) -> str:
        call = f"{self.function}({', '.join(self.arguments)})"
        if not any(self.results):
            return call
        names = [name or "_" for name in self.results]
        return f"{names[0] if self.single else ', '.join(names) + ','} = {call}"


class _Recorder(TorchDispatchMode):
    """Executes operators and records those that compute or write something."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._values: dict[str, Any] = {"as_strided": torch.as_strided}  # names of the program's constants
        self._constants: dict[Any, str] = {}
        self._temporaries: dict[StorageWeakRef, _View] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._views: dict[_View, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _depends_on_values(func, args):
            raise RuntimeError(f"{func} depends on a tensor's values")
        function, given = self._function(func, args)
        written = _written(func, args, kwargs)
        known = {StorageWeakRef(x.untyped_storage()) for x in _tensors((*args, *kwargs.values()))}
        outside = [x for x in written if StorageWeakRef(x.untyped_storage()) not in self._temporaries]
        if outside and (len(outside) < len(written) or len(func._schema.returns) > 1):
            raise RuntimeError(f"{func} writes to a tensor from outside and returns others")
        result = func(*args, **kwargs) if not outside else (written[0] if func._schema.returns else None)
        outputs = [result] if isinstance(result, Tensor) else list(result or ())
        if written or any(isinstance(x, Tensor) and StorageWeakRef(x.untyped_storage()) not in known for x in outputs):
            arguments = [self._source(value) for value in given]
            arguments += [f"{name}={self._source(value)}" for name, value in kwargs.items()]
            names = [self._result(x, known) for x in outputs]
            self._calls.append(_Call(function, arguments, names, isinstance(result, Tensor)))
        return result

    def _function(self, func: Any, args: Sequence[Any]) -> tuple[str, Sequence[Any]]:
        """The name of the function to call for an operator, and its positional arguments."""
        if func.namespace == "specmemo":  # past torch's dispatcher
            name = func._schema.name.split("::")[1]
            return self._constant(getattr(implementation(args[-1], args[0].device), name)), args[:-1]
        return self._constant(func), args

    def _constant(self, value: Any) -> str:
        name = self._constants.setdefault(id(value), f"c{len(self._constants)}")
        self._values[name] = value
        return name

    def _source(self, value: Any) -> str:
        """Source code of an argument."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._source, value))}]"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self._constant(value)

    def _tensor(self, tensor: Tensor) -> str:
        base = self._temporaries.get(StorageWeakRef(tensor.untyped_storage()))
        if base is None:
            return self._constant(tensor)
        if tensor.dtype != self._dtypes[base.name]:
            raise RuntimeError(f"a {tensor.dtype} view of {self._dtypes[base.name]} memory")
        view = _View(base.name, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        if view == base:
            return base.name
        if view not in self._views:
            self._views[view] = name = f"v{len(self._views)}"
            arguments = [base.name, repr(view.size), repr(view.stride), repr(view.offset)]
            self._calls.append(_Call("as_strided", arguments, [name]))
        return self._views[view]

    def _result(self, tensor: Any, known: set[StorageWeakRef]) -> str:
        """The variable of a new tensor; empty for others."""
        if not isinstance(tensor, Tensor):
            return ""
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage in known:
            return ""
        name = f"t{len(self._temporaries)}"
        self._temporaries[storage] = _View(name, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        self._dtypes[name] = tensor.dtype
        return name

    def program(self) -> Callable[[], None]:
        """A function of the recorded calls."""
        ends: dict[str, int] = {}
        for i, call in enumerate(self._calls):
            ends |= dict.fromkeys((x for x in call.results if x), i)
            ends |= dict.fromkeys((x for x in _names(call.arguments) if x in ends), i)
        last: dict[int, list[str]] = {}
        for name, i in ends.items():
            last.setdefault(i, []).append(name)
        lines = ["def replay():"]
        for i, call in enumerate(self._calls):
            lines.append(f"    {call.source()}")
            if i in last:
                lines.append(f"    {' = '.join(last[i])} = None")
        values = dict(self._values)
        exec(compile("\n".join(lines), "<recorded step>", "exec"), values)
        replay: Callable[[], None] = torch.inference_mode()(values["replay"])
        return replay


def _depends_on_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether the shape of an operator's result, or a result on the host, depends on a tensor's values."""
    if func is torch.ops.aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors([args[1]]))
    return any(tag in func.tags for tag in _DYNAMIC)


def _names(arguments: Sequence[str]) -> list[str]:
    return [word.strip(" []") for argument in arguments for word in argument.split("=")[-1].split(",")]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    values = [*args, *(kwargs.get(a.name) for a in func._schema.arguments[len(args) :])]
    pairs = zip(func._schema.arguments, values, strict=True)
    return [x for a, value in pairs if a.alias_info is not None and a.alias_info.is_write for x in _tensors([value])]


def _tensors(values: Any) -> list[Tensor]:
    """All tensors in nested lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
