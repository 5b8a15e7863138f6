"""Profiles of this machine's devices: measured, known by name, or cached from an earlier measurement."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specmemo_kernels import ops
from specmemo_kernels.backends.kernel_target import target_of_gpu
from specmemo_kernels.ops.weight_codes import GROUP, groups_of
from specmemo_kernels.planning.device import Curve, DeviceProfile
from specmemo_kernels.planning.host_memory import cpu_name, host_memory
from specmemo_kernels.planning.known_devices import KNOWN_DEVICES, same_name

#: A matrix and ``None``, or codes and scales; a product of rows with it; a number of square matrices of a side and
#: dtype, parts of one large tensor, so that the C allocator keeps no holes of their size.
Matrix = tuple[torch.Tensor, torch.Tensor | None]
Linear = Callable[[torch.Tensor, Matrix], torch.Tensor]
Maker = Callable[[int, int, torch.dtype, torch.device], list[Matrix]]

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_FEW_ROWS = (1, 4, 16, 64)
_SMALL_SIDE = 384
#: By type of device the side of large matrices, the total bytes of the matrices, more than caches hold, and the number
#: of groups that are multiplied in turn. On a GPU all of them are multiplied in one graph, because launches and
#: synchronisation take longer than a matrix; and with more rows, because 128 don't reach the rate of large products.
_SIDE, _BYTES, _TURNS = {"cpu": 1536, "cuda": 4096}, {"cpu": 112 << 20, "cuda": 1 << 30}, {"cpu": 12, "cuda": 1}
_MORE_ROWS = {"cpu": (), "cuda": (512, 2048)}
#: Operators per layer of transformers' Llama in a step with a cache, counted by a dispatch mode.
_LAYER_OPERATORS = 55


def probe(device: str = "cpu", seconds: float = 3.0, torch_products: bool = True) -> DeviceProfile:
    """Measure a torch device of this machine, in about ``seconds``.

    ``torch_products``: also torch's products on a CPU with our operators. They leave compiled kernels in memory.

    Bandwidth: a copy far larger than caches. Products, torch's and on a CPU our operator's: several row counts, with
    large and small matrices in turn, so that none is cached. Launches: the layers of a tiny transformers Llama. Each
    figure is the best of several runs.

    Raises:
        ValueError: no such device, or neither a CPU nor a CUDA or HIP device.
    """
    torch_device = _resolved(device)
    with _as_value_error(device):
        torch.empty(1, device=torch_device)
    if torch_device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r}: only cpu and cuda devices can be measured")
    on_cpu = torch_device.type == "cpu"
    sync: Callable[[], None] = (lambda: None) if on_cpu else functools.partial(torch.cuda.synchronize, torch_device)
    names = ["float32", "bfloat16"] if on_cpu else ["float32", "float16", "bfloat16"]
    linears: dict[str, tuple[Linear, Maker]] = {"": (_torch_linear, _dense)}
    if on_cpu and ops.unavailable("cpu") is None:
        linears = ({} if not torch_products else linears) | {
            "operator_": (_operator, _dense), "code_": (_operator, _coded)
        }  # fmt: skip
    share = seconds / (len(linears) * len(names) * (len(_ROWS) + len(_FEW_ROWS)) + 4)
    with torch.inference_mode():
        measured = {prefix: _curves(*linear, torch_device, names, share, sync) for prefix, linear in linears.items()}
        big = torch.zeros(2, 2**24 if on_cpu else 2**28, dtype=torch.float32, device=torch_device)
        read_rate = big.nbytes / _best(lambda: big[0].copy_(big[1]), 2 * share, sync)
        launch = _launch_seconds(torch_device, 2 * share, sync)
    products, _ = measured.get("operator_") or measured[""]
    rates = {name: 2 * rows / cost for name, points in products.items() for rows, cost in points[-1:]}
    common: dict[str, Any] = {"read_rate": read_rate, "matmul_rate": rates, "launch_seconds": launch}
    for prefix, (large, extra) in measured.items():
        common |= {f"{prefix}curves": large} | ({} if prefix == "code_" else {f"{prefix}matrix_seconds": extra})
    if on_cpu:
        return DeviceProfile(_machine(), host_memory(), overlaps=False, source="measured", **common)
    properties = torch.cuda.get_device_properties(torch_device)
    shared = int(getattr(properties, "shared_memory_per_block_optin", 0))
    common |= {"shared_memory": shared, "kernel_target": kernel_target(torch_device), "backend": "triton"}
    return DeviceProfile(properties.name, properties.total_memory, source="measured", **common)


def kernel_target(torch_device: torch.device) -> str | None:
    """The name of a GPU's Triton target; ``None``: the triton backend doesn't support it."""
    try:
        return target_of_gpu(torch_device)
    except ValueError:
        return None


def _torch_linear(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    return torch.nn.functional.linear(x, matrix[0])


def _operator(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """The linear layers of a patched model's steps, and of a drafter in 4-bit codes."""
    weight, scales = matrix
    return ops.kernels("cpu", x.device).linear(x, weight, None, scales, False)


def _dense(count: int, side: int, dtype: torch.dtype, device: torch.device) -> list[Matrix]:
    return [(matrix, None) for matrix in torch.ones(count, side, side, dtype=dtype, device=device)]


def _coded(count: int, side: int, _: torch.dtype, device: torch.device) -> list[Matrix]:
    """Codes and scales."""
    codes = torch.zeros(count, side, groups_of(side) * GROUP // 2, dtype=torch.uint8, device=device)
    scales = torch.ones(count, side, groups_of(side), dtype=torch.float16, device=device)
    return list(zip(codes, scales, strict=True))


def _curves(
    linear: Linear, make: Maker, torch_device: torch.device, names: list[str], share: float, sync: Callable[[], None]
) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """Seconds per weight, and the extra seconds per small matrix, by dtype."""
    kind = torch_device.type
    large, small = (
        {name: _linear_curve(linear, make, torch_device, name, side, counts, share, sync) for name in names}
        for side, counts in ((_SIDE[kind], (*_ROWS, *_MORE_ROWS[kind])), (_SMALL_SIDE, _FEW_ROWS))
    )
    return large, {name: _extra_seconds(small[name], large[name]) for name in names}


def _linear_curve(
    linear: Linear,
    make: Maker,
    torch_device: torch.device,
    name: str,
    side: int,
    counts: tuple[int, ...],
    share: float,
    sync: Callable[[], None],
) -> Curve:
    """Seconds per weight of square matrices at some row counts."""
    dtype, number = getattr(torch, name), _TURNS[torch_device.type]
    nbytes = sum(part.nbytes for part in make(1, side, dtype, torch_device)[0] if part is not None)
    count = max(1, _BYTES[torch_device.type] // (number * nbytes))
    weights = make(number * count, side, dtype, torch_device)
    # Every call takes the next group, which no cache holds.
    points, turns = [], itertools.cycle(weights[i * count : (i + 1) * count] for i in range(number))
    for rows in counts:
        x = torch.ones(rows, side, dtype=dtype, device=torch_device)

        def products(x: Any = x) -> None:
            for weight in next(turns):
                linear(x, weight)

        call = products if torch_device.type == "cpu" else _captured(products, torch_device)
        points.append((rows, _best(call, share, sync) / (count * side**2)))
    return tuple(points)


def _captured(call: Callable[[], None], torch_device: torch.device) -> Callable[[], None]:
    """``call`` as a CUDA graph."""
    with torch.cuda.device(torch_device):
        call()  # initialises libraries, which a capture can't
        torch.cuda.synchronize(torch_device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    return graph.replay


def _extra_seconds(small: Curve, large: Curve) -> Curve:
    """Seconds per small matrix beyond the time per weight of large ones."""
    expected = dict(large)
    return tuple((rows, max(0.0, seconds - expected[rows]) * _SMALL_SIDE**2) for rows, seconds in small)


def _launch_seconds(torch_device: Any, share: float, sync: Callable[[], None]) -> float:
    """Host seconds per operator, from the step times of a tiny Llama with two and with eight layers."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    seconds = []
    for layers in (2, 8):
        config = LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # leave the caller's random state
            model = LlamaForCausalLM(config).to(torch_device).eval()
        ids, cache = torch.zeros(1, 8, dtype=torch.int64, device=torch_device), DynamicCache(config=config)
        # The cache grows by one token per call, which doesn't matter.
        # By position, because versions of transformers name the cache's argument differently.
        step = functools.partial(lambda run, kept, tokens: run(tokens, None, None, kept), model, cache)
        step(ids)
        seconds.append(_best(functools.partial(step, ids[:, :1]), share / 2, sync))
    return max(seconds[1] - seconds[0], 1e-9) / (6 * _LAYER_OPERATORS)


def _best(call: Callable[[], Any], share: float, sync: Callable[[], None]) -> float:
    """Minimum seconds of the calls made in ``share`` seconds, at least three, after one warm-up call."""
    call()
    sync()
    best, ends, count = float("inf"), time.perf_counter() + share, 0
    while count < 3 or time.perf_counter() < ends:
        start = time.perf_counter()
        call()
        sync()
        best, count = min(best, time.perf_counter() - start), count + 1
    return best


def _machine() -> str:
    """Processor and number of torch threads; a CPU profile is valid for this pair."""
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


@contextmanager
def _as_value_error(device: str) -> Iterator[None]:
    """Turn torch's errors about a missing device into a ValueError with its name."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r}: {str(error).splitlines()[0]}") from error


def _resolved(device: str) -> torch.device:
    """The torch device with its index; a CPU has none."""
    with _as_value_error(device):
        torch_device = torch.device(device)
    if torch_device.type == "cpu":
        return torch.device("cpu")
    if torch_device.type == "cuda" and torch_device.index is None:
        try:
            return torch.device("cuda", torch.cuda.current_device())
        except (RuntimeError, AssertionError):  # no GPU here
            return torch.device("cuda", 0)
    return torch_device


def cache_file(device: str) -> Path:
    """Path of a device's profile in the user's cache folder (XDG base directories); ``"cuda"`` is the current GPU."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return folder / "specmemo_kernels" / f"device-{str(_resolved(device)).replace(':', '-')}.json"


@functools.cache
def profile_of(device: str, torch_products: bool = True) -> DeviceProfile:
    """The profile of a torch device: cached by `specmemo probe`, known by name, or probed in one to two seconds.

    ``torch_products`` as for :func:`probe`.

    Probes at most once per process, and writes no file. A cached CPU profile is valid for the same processor and number
    of threads. A GPU profile is valid for the same name and about the same memory, as cards of one name may differ in
    both memory and speed (a GeForce RTX 3060 has 8 or 12 GB). ``memory`` is this device's.

    Raises:
        ValueError: no such device.
    """
    torch_device = _resolved(device)
    if str(torch_device) != device:
        return profile_of(str(torch_device), torch_products)
    profiles = [] if torch_device.type == "cpu" else list(KNOWN_DEVICES.values())
    with suppress(OSError, ValueError):  # not measured yet
        profiles.insert(0, DeviceProfile.load(cache_file(device)))
    if torch_device.type == "cpu":
        name, memory = _machine(), host_memory()
    else:
        with _as_value_error(device):
            name = torch.cuda.get_device_name(torch_device)
            memory = torch.cuda.get_device_properties(torch_device).total_memory
    for profile in profiles:
        if same_name(profile.name, name) and (torch_device.type == "cpu" or _same_size(profile.memory, memory)):
            return replace(profile, memory=memory)
    return probe(device, 0.7, torch_products)


def _same_size(expected: int, memory: int) -> bool:
    """Compare memory sizes; drivers and error correction reserve up to a tenth."""
    return abs(memory - expected) <= expected // 10
