"""Device checks and launch options of the kernels, on a GPU and in Triton's interpreter."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import triton

from specmemo_kernels.backends.kernel_config import KernelConfig
from specmemo_kernels.backends.kernel_target import INTERPRETER, TARGETS, target_of_gpu

# Read once, as the kernels' decorators do. The interpreter (TRITON_INTERPRET=1, set before this package and triton are
# imported) runs the kernels on CPU tensors, slowly, for tests.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


Function = TypeVar("Function", bound=Callable[..., Any])


def entry_point(function: Function) -> Function:
    """Decorator of the backend's operators: :func:`check_device`, then make the tensor's device the current one.

    Triton launches on the current device's stream, also if the tensors are on another device.
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
    """
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
        ValueError: an unsupported GPU.
    """
    return INTERPRETER if INTERPRETED else target_of_gpu(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of a device's multiprocessors (AMD: compute units)."""
    if INTERPRETED:
        return TARGETS[INTERPRETER].multiprocessors
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def rounds_by_bits(target: str, dtype: torch.dtype) -> bool:
    """Whether float32 is rounded to ``dtype`` by integer instructions: AMD GPUs convert to bfloat16 in six of them."""
    return dtype == torch.bfloat16 and TARGETS[target].hip


@functools.cache
def launch_options(device: torch.device, config: KernelConfig, fusion: bool = True) -> dict[str, int | bool]:
    """Keyword arguments of a launch, and the constexpr ``OVERLAPPED``; cached, so treat the dict as read-only."""
    target = TARGETS[target_of(device)]
    options = {} if target.name == INTERPRETER else compile_options(config, target.name, fusion)
    return options | {"OVERLAPPED": target.overlaps} | ({"launch_pdl": True} if target.overlaps else {})


def compile_options(config: KernelConfig, target: str, fusion: bool = True) -> dict[str, int | bool]:
    """Options of Triton's compiler. ``fusion``: of multiplications and additions."""
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": fusion}
    kind = TARGETS[target]
    # Without a limit on registers, ptxas may spill a few of them to fit one more program.
    if not kind.hip and (config.resident > 1 or (config.resident and kind.matrix is None)):
        options["maxnreg"] = min(255, 65536 // (32 * config.num_warps * config.resident) // 8 * 8)
    return options | ({"matrix_instr_nonkdim": config.instruction_rows} if config.instruction_rows else {})
