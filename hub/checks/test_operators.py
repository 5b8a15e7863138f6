"""Every operator of the built kernel against results of the package in float64."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT, TREE

PROBLEMS: list[dict[str, Any]] = torch.load(ROOT / "build" / "hub-problems.pt")
HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: One problem of each operator that needs a tree's mask, several sequences or a vocabulary, for opcheck.
CHECKED = {
    "tree_attention": "tree_attention-page_edges-float32",
    "append_paged_kv": "append_paged_kv-page_edges-float32",
    "commit_paged_kv": "commit_paged_kv-page_edges-float32",
    "verify_tree_greedy": "verify_tree_greedy-ragged",
    "lm_head_argmax": "lm_head_argmax-bias-float32",
    "lm_head_topk": "lm_head_topk-bias-float32",
    "lm_head_log_probs": "lm_head_log_probs-bias-float32",
    "linear": "linear-4x64-float32",
    "grouped_linear": "grouped_linear-4x64-float32",
    "gated_mlp": "gated_mlp-4x64-float32",
    "rms_norm": "rms_norm-4x64-0.0-float32",
    "decompress": "decompress-5x300",
}


def copies(problem: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if torch.is_tensor(x) else x for name, x in problem["arguments"].items()}


def check(kernel: ModuleType, problem: dict[str, Any], backend: str) -> None:
    arguments = copies(problem)
    found = getattr(kernel, problem["operator"])(**arguments, backend=backend)
    found = found if isinstance(found, tuple) else (found,)
    if problem["changes"]:
        found = [arguments[name] for name in problem["changes"]]
    for result, (expected, budget) in zip(found, problem["results"], strict=True):
        assert result.shape == expected.shape
        if budget is None:
            bits = (x.flatten().clone(memory_format=torch.contiguous_format) for x in (result, expected))
            assert torch.equal(*(x.view(torch.uint8) for x in bits))
        else:
            assert bool(((result.double() - expected).abs() <= budget).all())


def test_problems_cover_every_operator(kernel: ModuleType) -> None:
    counts = Counter(problem["operator"] for problem in PROBLEMS)
    assert set(counts) == set(CHECKED) == set(sys.modules[f"{kernel.__name__}.ops.schema"].SCHEMAS)
    assert min(counts.values()) >= 6


@pytest.mark.skipif(INTERPRETED, reason="in the other process")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem["name"])
def test_operator(kernel: ModuleType, problem: dict[str, Any], backend: str) -> None:
    check(kernel, problem, backend)


@pytest.mark.skipif(not INTERPRETED, reason="test_triton runs it in a process of its own")
@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p["small"]], ids=lambda problem: problem["name"])
def test_interpreted(plain_kernel: ModuleType, problem: dict[str, Any]) -> None:
    check(plain_kernel, problem, "triton")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_triton() -> None:
    """The Triton kernels in the interpreter, which has to be chosen before triton is imported."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE, "-k", "interpreted"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=TREE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > sum(p["small"] for p in PROBLEMS)


@pytest.mark.skipif(INTERPRETED, reason="in the other process")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("operator", CHECKED)
def test_opcheck(kernel: ModuleType, operator: str, backend: str) -> None:
    """torch's checks of schema, autograd, fake tensors and compilation, in the kernel's own namespace."""
    problem = next(p for p in PROBLEMS if p["name"] == CHECKED[operator])
    overload = getattr(getattr(torch.ops, kernel.__name__), operator).default
    given = {name: finite(x) for name, x in copies(problem).items()} | {"backend": backend}
    arguments = [given.get(argument.name, argument.default_value) for argument in overload._schema.arguments]
    defaults = {"invariant": False, "round_first": True, "offset": 0.0}
    names = [argument.name for argument in overload._schema.arguments]
    arguments = [defaults.get(name) if x is None else x for name, x in zip(names, arguments, strict=True)]
    assert set(torch.library.opcheck(overload, tuple(arguments)).values()) == {"SUCCESS"}


def finite(x: Any) -> Any:
    """Without what opcheck can't compare: NaN, and sums that overflow."""
    if not torch.is_tensor(x):
        return x
    return x.nan_to_num(0, 0, 0).clamp(-9, 9) if x.is_floating_point() else torch.where(x == 2**30, 0, x)
