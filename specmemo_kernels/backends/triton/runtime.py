"""Where the kernels run: on a GPU, or in Triton's interpreter, and the launch options of either."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import triton

from specmemo_kernels.backends.kernel_config import KernelConfig
from specmemo_kernels.backends.kernel_target import INTERPRETER, target_of_gpu

# Read at the moment at which the kernels' decorators read it. The interpreter (TRITON_INTERPRET=1, set before this
# package and triton are imported) runs the kernels on CPU tensors, slowly, for tests.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


Function = TypeVar("Function", bound=Callable[..., Any])


def entry_point(function: Function) -> Function:
    """Decorator of the backend's operators: checks the first argument, and makes its device the current one.

    Triton launches on the current device's stream, whatever device the tensors are on. Errors: :func:`check_device`.
    """

    @functools.wraps(function)
    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        check_device(tensor)
        if tensor.device.type != "cuda":
            return function(tensor, *args, **kwargs)
        with torch.cuda.device(tensor.device):
            return function(tensor, *args, **kwargs)

    return cast(Function, run)


def check_device(tensor: torch.Tensor) -> None:
    """Refuse what the kernels can't run on.

    Raises:
        ValueError: a CPU tensor outside the interpreter, or float64.
    """
    if tensor.dtype == torch.float64:
        raise ValueError(
            "the triton backend computes in float32 and takes float16, bfloat16 or float32 tensors, not float64; "
            "use backend='reference' for float64"
        )
    if tensor.device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            "the triton backend needs tensors on a GPU, these are on the CPU; use backend='cpu' or 'reference', or set "
            "TRITON_INTERPRET=1 before python starts to run the kernels in Triton's interpreter (slow, for tests)"
        )


@functools.cache
def target_of(device: torch.device) -> str:
    """The name of a device's kernel target, such as ``"sm_90"``.

    Raises:
        ValueError: a GPU that no rule covers.
    """
    return INTERPRETER if INTERPRETED else target_of_gpu(device)


@functools.cache
def launch_options(device: torch.device, config: KernelConfig) -> dict[str, int | bool]:
    """Keyword arguments of a launch; cached, so treat the dict as read-only."""
    target = target_of(device)
    return {} if target == INTERPRETER else compile_options(target, config)


def compile_options(target: str, config: KernelConfig) -> dict[str, int | bool]:
    """What the compiler is told for a target. FP fusion is pinned: Triton's default changed between versions."""
    options: dict[str, int | bool] = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }
    if target.startswith("gfx") and config.waves_per_eu:
        options["waves_per_eu"] = config.waves_per_eu
    return options
