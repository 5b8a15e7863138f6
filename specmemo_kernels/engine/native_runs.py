"""Operators that follow each other in a recorded step as one call of the backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specmemo_kernels.engine.program import Call, View, last_uses
from specmemo_kernels.engine.unwind import run_under

Tensor = torch.Tensor


def native_runs(calls: Sequence[Call], kernels: Any, blocks: Any) -> list[Call]:
    """``calls``, where each run of operators that backend ``kernels`` records is one call of its program.

    ``blocks``: the memory of the programs, which never run at once.
    """
    last = last_uses(calls)
    whole = {view.name: view for call in calls for view in call.results if view is not None}
    result: list[Call] = []
    runs = groupby(enumerate(calls), key=lambda item: item[1].function in kernels.RECORDED)
    for recorded, group in runs:
        positions, run = zip(*group, strict=True)
        native = _Run(run, positions[0], last, whole).call(kernels, blocks) if recorded else None
        result += run if native is None else [native]
    return result


class _NoOperators(TorchDispatchMode):
    """Lets views pass; other operators of torch would run once, not in every replay."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(value.alias_info is None or value.alias_info.is_write for value in func._schema.returns):
            raise RuntimeError(f"{func} isn't recorded")
        return func(*args, **(kwargs or {}))


@dataclass
class _Run:
    """Calls from position ``first`` on; ``last``: where each variable is read for the last time, ``whole``: as made."""

    calls: tuple[Call, ...]
    first: int
    last: dict[str, int]
    whole: dict[str, View]

    def call(self, kernels: Any, blocks: Any) -> Call | None:
        """The call of their program.

        ``None`` if an input or result isn't contiguous, an operator needs torch, or the blocks are too few.
        """
        made = {view.name: view for call in self.calls for view in call.results if view is not None}
        read = dict.fromkeys(view.name for call in self.calls for view in call.views)
        inputs = [self.whole[name] for name in read if name not in made]
        results = [view for view in made.values() if self.last[view.name] >= self.first + len(self.calls)]
        if not results or not all(view.contiguous and not view.offset for view in (*inputs, *results)):
            return None

        def run(*tensors: Tensor) -> list[Tensor]:
            return self._run({view.name: tensor for view, tensor in zip(inputs, tensors, strict=True)}, results)

        arguments = tree_leaves([(call.args, call.kwargs) for call in self.calls])
        constants = [value for value in arguments if isinstance(value, Tensor)]
        try:
            # In inference mode copies such as those of `contiguous` would pass as views.
            with torch.inference_mode(False), torch.no_grad():
                examples = [torch.empty(view.size, dtype=view.dtype, device="cpu") for view in inputs]
                program: Any = run_under(partial(kernels.record, blocks, examples, run, constants), _NoOperators())
        except (MemoryError, RuntimeError, ValueError):
            return None
        return Call(program, tuple(inputs), results=tuple(results), single=False)

    def _run(self, variables: dict[str, Tensor], results: Sequence[View]) -> list[Tensor]:
        """Make the calls; a variable is freed after it was read for the last time."""

        def read(view: View) -> Tensor:
            return variables[view.name].as_strided(view.size, view.stride, view.offset)

        for i, call in enumerate(self.calls, self.first):
            output = call.make(read)
            outputs = [output] if call.single else list(output or ())
            del output
            for view in call.results:
                value = outputs.pop(0)
                if view is not None:
                    variables[view.name] = value
                del value
            for name in self._over(call, i):
                variables.pop(name, None)
        return [variables[view.name] for view in results]

    def _over(self, call: Call, position: int) -> Iterator[str]:
        """The variables of a call that no later call reads."""
        for view in (*call.views, *call.results):
            if view is not None and self.last[view.name] <= position:
                yield view.name
