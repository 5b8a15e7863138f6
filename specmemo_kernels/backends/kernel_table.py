"""Block sizes from a file, as ``bench/gpu_sweep.py`` measures them; needs neither triton nor a GPU.

A table is a JSON object: ``{"version": 1, "entries": [{"target": "sm_90", "head_dim": 128, "group": 4, "dtype":
"bfloat16", "quantised": false, "classes": [...]}]}``. Each class has the fields of :class:`KernelConfig`. A table
replaces the rules of :func:`kernel_config.attention_configs` for its entries, except in invariant mode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from specmemo_kernels.backends.kernel_config import NO_LIMIT, KernelConfig, TableKey, block_dim, replace_rules
from specmemo_kernels.backends.kernel_target import TARGETS

_VERSION = 1
_MAX_BYTES = 1 << 20
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_KEY = {"target": str, "head_dim": int, "group": int, "dtype": str, "quantised": bool}
_BLOCKS = frozenset((16, 32, 64, 128))
#: The values that each field may have; ``min_nodes`` and ``max_nodes`` are checked together.
_ALLOWED: dict[str, frozenset[int]] = {
    "block_m": _BLOCKS, "block_n": _BLOCKS, "direct_n": _BLOCKS, "nodes_n": frozenset((16, 32, 64)),
    "split_size": frozenset(range(16, 4097, 16)), "num_warps": frozenset((1, 2, 4, 8, 16)),
    "num_stages": frozenset(range(1, 7)), "resident": frozenset(range(1, 9)), "block_k": frozenset((0,)),
    "instruction_rows": frozenset((0, 16, 32)),
}  # fmt: skip


def use_kernel_table(path: str | Path | None) -> None:
    """Take block sizes from the table in ``path`` for plans and calls from now on; ``None``: from the rules again.

    Call it before ``patch``: a plan reserves the workspace of its block sizes.

    Raises:
        ValueError: the file isn't a valid table; the block sizes are as before.
    """
    replace_rules({} if path is None else read_kernel_table(Path(path)))


def read_kernel_table(path: Path) -> dict[TableKey, tuple[KernelConfig, ...]]:
    """
    Raises:
        ValueError: the file can't be read, or isn't a valid table.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        content = json.loads(data)
        if not isinstance(content, dict) or content.get("version") != _VERSION:
            raise ValueError(f'it isn\'t a JSON object with "version": {_VERSION}')
        if not isinstance(content.get("entries"), list):
            raise ValueError("its entries aren't a list")
        return dict(_entry(entry) for entry in content["entries"])
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no table of kernel block sizes: {error}") from error


def _entry(entry: Any) -> tuple[TableKey, tuple[KernelConfig, ...]]:
    if not isinstance(entry, dict) or any(type(entry.get(name)) is not kind for name, kind in _KEY.items()):
        raise ValueError(f"an entry needs {', '.join(_KEY)} and classes")
    if entry["target"] not in TARGETS or entry["dtype"] not in _DTYPES:
        raise ValueError(f"target {entry['target']!r} or dtype {entry['dtype']!r} of an entry is unknown")
    if not 1 <= entry["head_dim"] <= 512 or not 1 <= entry["group"] <= 1024:
        raise ValueError(
            f"head_dim is {entry['head_dim']} and group {entry['group']}: at least 1, at most 512 and 1024"
        )
    dtype, classes = _DTYPES[entry["dtype"]], entry.get("classes")
    if not isinstance(classes, list) or not classes:
        raise ValueError("the classes of an entry are a list with at least one of them")
    configs = tuple(_config(values) for values in classes)
    _check_classes(configs)
    for config in configs:
        _check_shared(config, entry["target"], entry["head_dim"], 1 if entry["quantised"] else dtype.itemsize)
    return (entry["target"], entry["head_dim"], entry["group"], dtype, entry["quantised"]), configs


def _config(values: Any) -> KernelConfig:
    names = {field.name for field in fields(KernelConfig)}
    if not isinstance(values, Mapping) or set(values) != names or any(type(v) is not int for v in values.values()):
        raise ValueError(f"a class needs the integers {', '.join(sorted(names))}, no others")
    for name, allowed in _ALLOWED.items():
        if values[name] not in allowed:
            some = f"{min(allowed)} to {max(allowed)}" if len(allowed) > 8 else ", ".join(map(str, sorted(allowed)))
            raise ValueError(f"{name} is {values[name]}, allowed are {some}")
    config = KernelConfig(**values)
    if any(config.split_size % size for size in (config.block_n, config.direct_n)):
        raise ValueError(f"split_size is {config.split_size}, it must be a multiple of block_n and direct_n")
    return config


def _check_classes(configs: tuple[KernelConfig, ...]) -> None:
    """Classes follow each other, and have one unit of splits: the merge has no classes."""
    starts = (1, *(config.max_nodes + 1 for config in configs))
    if any(c.min_nodes != start or c.max_nodes < start for c, start in zip(configs, starts, strict=False)):
        raise ValueError("min_nodes of the first class must be 1, of others the max_nodes before plus 1")
    if configs[-1].max_nodes != NO_LIMIT:
        raise ValueError(f"max_nodes of the last class must be {NO_LIMIT}")
    if len({config.split_size for config in configs}) > 1:
        raise ValueError("the classes of an entry must have one split_size")


def _check_shared(config: KernelConfig, target: str, head_dim: int, itemsize: int) -> None:
    """The tiles in flight fit shared memory; whether registers spill is only known when a kernel is compiled."""
    used = 2 * config.block_n * block_dim(head_dim) * itemsize * max(1, config.num_stages - 1)
    limit = TARGETS[target].shared_bytes
    if used > limit:
        raise ValueError(
            f"block_n {config.block_n} in {config.num_stages} stages needs {used} bytes of shared memory, "
            f"{target} has {limit}"
        )
