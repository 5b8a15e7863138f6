"""Steps as lists of operator calls: on a CPU the counterpart of a CUDA graph, on a GPU what a graph captures.

The Python code of a small model's modules takes as long as its operators. A recorded step calls the same operators on
the same tensors without that code, and fused ones where they apply. Temporary tensors are allocated and freed as in the
step itself, or lie in blocks that the recordings share; no other pass runs while these are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specmemo_kernels.engine.direct_calls import direct
from specmemo_kernels.engine.fusion import fused
from specmemo_kernels.engine.native_runs import native_runs
from specmemo_kernels.engine.program import Call, View, compiled, peak_bytes, with_constants, without_unread
from specmemo_kernels.engine.unwind import run_under
from specmemo_kernels.ops.dispatch import dispatcher_active, implementation
from specmemo_kernels.planning.host_allocator import mapped_temporaries
from specmemo_kernels.planning.memory_tracker import is_composite

Tensor = torch.Tensor

#: Tensor methods that read values without an operator.
_READS = {getattr(Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr")}
#: Conversions stay whole: their part has no built-in function (:mod:`specmemo_kernels.engine.direct_calls`).
_CONVERSION = torch.ops.aten.to
_DYNAMIC = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class HostCapture:
    """Records a function's operators. Writes to tensors that it didn't allocate are not executed.

    Implements :class:`specmemo_kernels.engine.step_graph.Capture`.

    Args:
        limit: bytes of a step's temporaries. The blocks get half of it; operators whose tensors need more, or that
            leave other temporaries of more than the other half, are called one by one.
        bounded: the process has a memory budget (:func:`specmemo_kernels.planning.host_allocator.return_large_blocks`).

    Raises:
        ValueError: ``device`` isn't a CPU.
    """

    #: Recording takes as long as 3 to 7 eager steps. A replay saves a quarter to two thirds of an eager step (models of
    #: 125 and 7 million parameters). So steps that run only a few times aren't recorded. The first seven answers of 64
    #: tokens of the small model take 0.93 of the time with 8 eager runs.
    after = 4
    pads = False
    nbytes = 0

    def __init__(self, device: torch.device, limit: int, bounded: bool = False) -> None:
        if device.type != "cpu":
            raise ValueError(f"steps on {device} can't be recorded, only steps on a CPU")
        self._limit, self._bounded = limit, bounded
        self._blocks: Any = None

    @property
    def block_bytes(self) -> int:
        """Bytes of the blocks."""
        return 0 if self._blocks is None else int(self._blocks.nbytes)

    def trim(self) -> None:
        if self._blocks is not None:
            self._blocks.trim()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record ``run``. Its replays run it eagerly while a dispatch mode, tracer or profiler is active.

        Raises:
            RuntimeError: its operators depend on values, or one of them can't be repeated.
        """
        with mapped_temporaries() if self._bounded else nullcontext():
            calls, kernels = record(run)
        calls, in_blocks = self._in_blocks(calls, kernels)
        program = compiled(direct(calls))

        def replay() -> None:
            eager = dispatcher_active()
            if eager or not in_blocks:
                self.trim()
            (run if eager else program)()

        return replay

    def _in_blocks(self, calls: list[Call], kernels: Any) -> tuple[list[Call], bool]:
        """The calls with runs in blocks, and whether there are any."""
        if not hasattr(kernels, "record"):
            return calls, False
        if self._blocks is None:
            self._blocks = kernels.Blocks(self._limit // 2)
        native = native_runs(calls, kernels, self._blocks)
        if len(native) == len(calls) or peak_bytes(native) > self._limit - self._limit // 2:
            return calls, False
        return native, True


def record(run: Callable[[], None]) -> tuple[list[Call], Any]:
    """The calls of ``run``, fused, and their backend. Writes to tensors that it didn't allocate are not executed.

    Raises:
        RuntimeError: its operators depend on values, or one of them can't be repeated.
    """
    recorder = _Recorder()
    with torch.inference_mode():
        run_under(run, _NoReads(), recorder)
    return recorder.calls(), recorder.kernels


class _NoReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise RuntimeError(f"{func.__name__} reads a tensor's values")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Executes operators and records those that compute or write something; views are created where they are used."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[Call] = []
        self._variables: dict[int, View] = {}  # by storage
        self._storages: list[StorageWeakRef] = []  # references keep the addresses of variables from being used again
        self._constants: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor, so that its id isn't used again
        self.kernels: Any = None  # the backend of our operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _depends_on_values(func, args):
            raise RuntimeError(f"{func} depends on a tensor's values")
        if torch.is_inference_mode_enabled() and is_composite(func) and func.overloadpacket is not _CONVERSION:
            with self:  # outside of inference mode torch decomposes them before the mode gets them
                return func.decompose(*args, **kwargs)
        written = list(_written(func, args, kwargs))
        outside = [x for x in written if _storage(x) not in self._variables]
        if outside and (len(outside) < len(written) or len(func._schema.returns) > 1):
            raise RuntimeError(f"{func} writes to a tensor that the step didn't allocate, and has other results")
        known = {_storage(x) for x in _tensors((*args, *kwargs.values()))}
        result = (written[0] if func._schema.returns else None) if outside else func(*args, **kwargs)
        if isinstance(result, (bool, int, float)):
            raise RuntimeError(f"{func} reads a tensor's values")
        results = [result] if isinstance(result, Tensor) else list(result or ())
        new = [isinstance(x, Tensor) and _storage(x) not in known for x in results]
        if written or any(new):
            function, args = self._implementation(func, args)
            recorded = [self._recorded(value) for value in args]
            keywords = {name: self._recorded(value) for name, value in kwargs.items()}
            changed = frozenset(self._variables[_storage(x)].name for x in written if not any(x is y for y in outside))
            names = [self._variable(x) if is_new else None for x, is_new in zip(results, new, strict=True)]
            assigned = tuple(names) if any(new) else ()
            call = Call(function, tuple(recorded), keywords, assigned, isinstance(result, Tensor), changed)
            self._calls.append(call)
        return result

    def calls(self) -> list[Call]:
        """The recorded calls, fused."""
        calls = with_constants(without_unread(self._calls))
        return calls if self.kernels is None else fused(calls, self.kernels)

    def _implementation(self, func: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Our operators bypass torch's dispatcher."""
        if func.namespace != "specmemo":
            return func, args
        self.kernels = implementation(args[-1], args[0].device)
        return getattr(self.kernels, func._schema.name.split("::")[1]), args[:-1]

    def _recorded(self, value: Any) -> Any:
        """Tensors of the step as views of variables; others are constants, whose memory is kept."""
        if isinstance(value, (list, tuple)):
            return [self._recorded(x) for x in value]
        if not isinstance(value, Tensor):
            return value
        if (base := self._variables.get(_storage(value))) is None:
            return self._constants.setdefault(id(value), (value, value.detach()))[1]
        if value.dtype != base.dtype:
            raise RuntimeError(f"a {value.dtype} view of {base.dtype} memory can't be recorded")
        return View.of(value, base.name)

    def _variable(self, tensor: Tensor) -> View:
        view = View.of(tensor, f"t{len(self._variables)}")
        self._variables[_storage(tensor)] = view
        self._storages.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
        return view


def _storage(tensor: Tensor) -> int:
    """Identifies a tensor's memory while it exists."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _depends_on_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether the shape of an operator's result, or a result on the host, depends on a tensor's values."""
    if func is torch.ops.aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors([args[1]]))
    return _is_dynamic(func)


@cache
def _is_dynamic(func: Any) -> bool:
    return any(tag in func.tags for tag in _DYNAMIC)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes to."""
    for position, name in _written_arguments(func):
        yield from _tensors([args[position] if position < len(args) else kwargs.get(name)])


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Positions and names of the arguments that an operator writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
