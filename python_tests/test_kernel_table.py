"""Kernel block sizes from a file: what a table changes, and that an invalid one is refused."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from specmemo_kernels.backends.kernel_config import KernelConfig, attention_configs
from specmemo_kernels.backends.kernel_table import read_kernel_table, use_kernel_table

ROOT = Path(__file__).resolve().parents[1]
KEY = ("sm_90", 128, 4, torch.bfloat16, False)


@pytest.fixture(autouse=True)
def rules_afterwards() -> Iterator[None]:
    yield
    use_kernel_table(None)


def classes_of_rules() -> tuple[KernelConfig, ...]:
    return attention_configs("sm_90", 128, 128, 4, torch.bfloat16)


def content(configs: tuple[KernelConfig, ...]) -> dict[str, Any]:
    entry = {"target": "sm_90", "head_dim": 128, "group": 4, "dtype": "bfloat16", "quantised": False}
    return {"version": 1, "entries": [entry | {"classes": [asdict(config) for config in configs]}]}


def write(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_table_replaces_the_rules_of_its_entries(tmp_path: Path) -> None:
    rules, float16 = classes_of_rules(), attention_configs("sm_90", 128, 128, 4, torch.float16)
    measured = (replace(rules[0], num_stages=2), *rules[1:])
    use_kernel_table(write(tmp_path / "table.json", content(measured)))
    assert classes_of_rules() == measured != rules
    assert attention_configs("sm_90", 128, 128, 4, torch.float16) == float16
    assert attention_configs("sm_90", 128, 128, 4, torch.bfloat16, True)[0].resident == 0, "invariant: by the rules"
    assert attention_configs("sm_90", 128, 64, 4, torch.bfloat16) != measured, "narrower values"
    use_kernel_table(None)
    assert classes_of_rules() == rules


Change = Callable[[dict[str, Any]], Any]


def changed(**fields: Any) -> Change:
    """A change of the first class."""
    return lambda table: table["entries"][0]["classes"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda table: table.update(version=2), '"version": 1'),
        (lambda table: table.update(entries={}), "entries aren't a list"),
        (lambda table: table["entries"].append(None), "an entry needs target"),
        (lambda table: table["entries"][0].update(target="sm_1"), "target 'sm_1'"),
        (lambda table: table["entries"][0].update(head_dim=True), "an entry needs target"),
        (lambda table: table["entries"][0].update(head_dim=4096), "head_dim is 4096"),
        (lambda table: table["entries"][0].update(classes=[]), "at least one"),
        (changed(block_n=48), "block_n is 48, allowed are 16, 32, 64, 128"),
        (changed(num_warps="4"), "a class needs the integers"),
        (changed(num_warps=True), "a class needs the integers"),
        (changed(more=1), "a class needs the integers"),
        (changed(num_stages=99), "num_stages is 99, allowed are 1, 2"),
        (changed(resident=0), "resident is 0"),
        (changed(split_size=80), "split_size is 80, it must be a multiple"),
        (changed(split_size=256), "must have one split_size"),
        (changed(min_nodes=2), "min_nodes of the first class must be 1"),
        (changed(max_nodes=9), "min_nodes of the first class must be 1"),
        (lambda table: table["entries"][0]["classes"].pop(), "max_nodes of the last class"),
        (changed(block_n=128, direct_n=128, num_stages=6), "shared memory, sm_90 has"),
    ],
)
def test_an_invalid_table_is_refused(tmp_path: Path, change: Change, reason: str) -> None:
    table = content(classes_of_rules())
    before = classes_of_rules()
    change(table)
    with pytest.raises(ValueError, match=rf"table\.json is no table of kernel block sizes: .*{reason}"):
        use_kernel_table(write(tmp_path / "table.json", table))
    assert classes_of_rules() == before


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "JSON object"),
        ("[" * 100_000, "recursion"),
        ("no table", "Expecting value"),
        (" " * (1 << 20) + "{}", "more than 1048576 bytes"),
    ],
    ids=["cut off", "a list", "deep", "no text", "large"],
)
def test_files_that_are_no_tables(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_kernel_table(write(tmp_path / "table.json", text))
    with pytest.raises(ValueError, match=r"missing\.json is no table .*No such file"):
        read_kernel_table(tmp_path / "missing.json")


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        return importlib.import_module("gpu_sweep")
    finally:
        sys.path.remove(str(ROOT / "bench"))


def test_winners_of_a_sweep_are_a_table(sweep: ModuleType, tmp_path: Path) -> None:
    """The configuration that is fastest over the cases of its class, not the one that is best in one or has failed."""
    rows = []
    for shape in sweep.CASES:
        case = sweep.attention_case("llama3-8b", *shape)
        for config in sweep.variants(case, "sm_90"):
            row = {"case": case.name, "page_size": 16, "config": asdict(config), "ms": 2.0}
            if config.block_n == 128 and config.num_stages == 2:
                row.pop("ms")
            elif config.num_stages == 4:
                row["ms"] = 0.9 if case.name.endswith("b8-t25") else 3.0
            elif config.nodes_n == 16:
                row["ms"] = 1.0
            rows.append(row)
    path = write(tmp_path / "table.json", sweep.table(rows, "sm_90"))
    classes = read_kernel_table(path)[KEY]
    assert [config.nodes_n for config in classes] == [16, classes_of_rules()[1].nodes_n, 16], "no case of 64 rows"
    assert [c.max_nodes for c in classes] == [c.max_nodes for c in classes_of_rules()]
    for case in sweep.CASES[:2]:
        for config in sweep.variants(sweep.attention_case("llama3-8b", *case), "gfx942"):
            assert config.split_size % config.block_n == 0, "splits start at whole tiles"
