"""Writes problems for every operator with results in float64 and error budgets, to a file for ``test_operators.py``.

Runs with the package and its tests on the path; the tests that read the file run where the package isn't installed.
A problem is a dict: ``name``, ``operator``, ``arguments``, ``results`` (of each result, or of each tensor that the call
changes: expected value, error budget or ``None`` for equal bits), ``changes`` (names of changed tensors), ``small``
(short enough for Triton's interpreter).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cases import ATTENTION_CASES, QUANTISED_CASES, attention_inputs, case_budget
from op_cases import (
    LM_HEAD_CASES,
    PAGED_CASES,
    VERIFY_CASES,
    append_inputs,
    commit_inputs,
    lm_head_inputs,
    verify_inputs,
)
from test_linear import product_error, random, unit
from test_ops import after_append, after_commit, walked
from torch.nn import functional

from specmemo_kernels import ops
from specmemo_kernels.ops import compressed_weights, weight_codes

Problem = dict[str, Any]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attention(dtype: torch.dtype) -> Iterator[Problem]:
    for case in ATTENTION_CASES + QUANTISED_CASES:
        budget = case_budget(case, dtype)
        results = [(budget.out, budget.out_error), (budget.lse, budget.lse_error)]
        small = dtype == torch.float32 and case.name in (
            "one_token",
            "ragged",
            "v_narrower",
            "all_extras",
            "window-int8",
        )
        yield problem("tree_attention", case.name, attention_inputs(case, dtype), results, small=small)


def paged(dtype: torch.dtype) -> Iterator[Problem]:
    """Plain pools have an oracle of their own; codes are those of the reference, bit for bit."""
    changes = ["k_pages", "v_pages"]
    for case in PAGED_CASES:
        for operator, new, after in (
            ("append_paged_kv", append_inputs, after_append),
            ("commit_paged_kv", commit_inputs, after_commit),
        ):
            inputs = new(case, dtype)
            results = [(pages, None) for pages in after(inputs)]
            small = case.name in ("page_edges", "by_token")
            yield problem(operator, case.name, inputs, results, changes, small=small)
            for kv_dtype in ("int8", "fp8"):
                coded = new(replace(case, kv_dtype=kv_dtype), dtype)
                expected = {name: x.clone() if torch.is_tensor(x) else x for name, x in coded.items()}
                getattr(ops, operator)(**expected, backend="reference")
                names = [*changes, "k_scales", "v_scales"]
                results = [(expected[name], None) for name in names]
                yield problem(operator, f"{case.name}-{kv_dtype}", coded, results, names, small=small)


def verify() -> Iterator[Problem]:
    for case in VERIFY_CASES:
        inputs = verify_inputs(case)
        paths = walked(inputs, case.max_depth)
        index = [path + [-1] * (case.max_depth + 1 - len(path)) for path, _, _ in paths]
        results = [
            (torch.tensor(index, dtype=torch.int32).reshape(len(paths), -1), None),
            (torch.tensor([length for _, length, _ in paths], dtype=torch.int32), None),
            (torch.tensor([token for _, _, token in paths]), None),
        ]
        yield problem("verify_tree_greedy", case.name, {**inputs, "max_depth": case.max_depth}, results)


def lm_head(dtype: torch.dtype) -> Iterator[Problem]:
    """Logits of small integers are exact, so tokens are determined, ties included."""
    for case in LM_HEAD_CASES:
        inputs = lm_head_inputs(case, dtype)
        logits = inputs["hidden"].double() @ inputs["weight"].double().T + (inputs["bias"].double() if case.bias else 0)
        order = logits.sort(dim=1, descending=True, stable=True)
        values, tokens = order.values[:, : case.k], order.indices[:, : case.k].contiguous()
        error = 4 * torch.finfo(torch.float32).eps * (1 + float(logits.abs().amax()) if logits.numel() else 0)
        lse = logits.logsumexp(dim=1)
        yield problem("lm_head_argmax", case.name, inputs, [(tokens[:, 0].contiguous(), None)])
        with_k = {**inputs, "k": case.k}
        yield problem("lm_head_topk", case.name, with_k, [(values, 0.0), (tokens, None)])
        log_p = [(values - lse[:, None], 2 * error), (tokens, None), (lse, error)]
        yield problem("lm_head_log_probs", case.name, with_k, log_p)


def layers(dtype: torch.dtype) -> Iterator[Problem]:
    for rows, outputs, inputs in ((1, 3, 16), (4, 100, 64), (9, 29, 2050), (70, 24, 64)):
        x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
        bias = random(outputs, dtype=dtype, seed=2)
        arguments = {"x": x, "weight": weight, "bias": bias}
        yield problem("linear", f"{rows}x{inputs}", arguments, [product_error(x, weight, bias, dtype)])
        codes, scales = weight_codes.pack(weight.float())
        matrix = weight_codes.unpack(codes, scales, inputs)
        exact, budget = product_error(x, matrix, bias, dtype)
        budget += unit(dtype) * functional.linear(x.double().abs(), matrix.double().abs())
        coded = {**arguments, "weight": codes, "scales": scales}
        yield problem("linear", f"{rows}x{inputs}-codes", coded, [(exact, budget)])
        yield grouped_linear(x, weight, bias, dtype)
        arguments = {"x": x, "weight": random(inputs, dtype=dtype, seed=3), "eps": 1e-5}
        for offset, round_first in ((0.0, True), (1.0, False)):
            wide = x.double()
            exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
            exact *= arguments["weight"].double() + offset
            roundings = (2 if round_first else 1) * unit(dtype) * 1.01 + (inputs + 8) * unit(torch.float32)
            variant = {**arguments, "offset": offset, "round_first": round_first}
            yield problem("rms_norm", f"{rows}x{inputs}-{offset}", variant, [(exact, roundings * exact.abs() + 1e-7)])
        yield gated_mlp(x, outputs, dtype)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> Problem:
    """Three groups: half of the rows, none, and all others but the last one."""
    ends = [len(x) // 2, len(x) // 2, len(x) - 1]
    parts = [(slice(0, ends[0]), weight, bias), (slice(ends[1], ends[2]), -weight, 2 * bias)]
    results = [product_error(x[rows], *parameters, dtype) for rows, *parameters in parts]
    nothing = torch.zeros(1, len(weight), dtype=torch.float64)
    exact, budget = (torch.cat([*each, nothing]) for each in zip(*results, strict=True))
    arguments = {
        "x": x, "weight": torch.stack([weight, weight, -weight]), "bias": torch.stack([bias, bias, 2 * bias]),
        "ends": torch.tensor(ends),
    }  # fmt: skip
    return problem("grouped_linear", f"{len(x)}x{x.shape[1]}", arguments, [(exact, budget)])


def compressed() -> Iterator[Problem]:
    for rows, columns in ((1, 1), (3, 128), (5, 300), (2, 129), (4, 64), (9, 640)):
        weight = random(rows, columns, dtype=torch.bfloat16)
        arguments = {"compressed": compressed_weights.compress(weight), "columns": columns}
        yield problem("decompress", f"{rows}x{columns}", arguments, [(weight, None)])


def gated_mlp(x: torch.Tensor, middle: int, dtype: torch.dtype) -> Problem:
    inputs = x.shape[1]
    gate, up = (random(middle, inputs, dtype=dtype, seed=seed) * inputs**-0.5 for seed in (1, 2))
    down = random(inputs, middle, dtype=dtype, seed=3) * middle**-0.5
    gates, gate_error = product_error(x, gate, None, dtype)
    ups, up_error = product_error(x, up, None, dtype)
    active = functional.silu(gates)
    active_error = 1.13 * gate_error + 2 * unit(dtype) * active.abs() + 4e-7  # silu's slope is at most 1.1
    error = (
        active_error * ups.abs() + up_error * (active.abs() + active_error) + unit(dtype) * (active * ups).abs() * 1.01
    )
    exact = functional.linear(active * ups, down.double())
    sizes = functional.linear((active * ups).abs() + error, down.double().abs())
    budget = functional.linear(error, down.double().abs()) + (middle + 1) * unit(torch.float32) * sizes
    budget += 1.01 * unit(dtype) * exact.abs() + 1e-6
    arguments = {"x": x, "gate": gate, "up": up, "down": down, "activation": "silu"}
    return problem("gated_mlp", f"{x.shape[0]}x{inputs}", arguments, [(exact, budget)])


def problem(
    operator: str, name: str, arguments: dict[str, Any], results: list[Any], changes: list[str] | None = None,
    *, small: bool = True,
) -> Problem:  # fmt: skip
    """Tensors are copied: a saved view would carry its whole storage, and calls change their arguments."""
    dtypes = {x.dtype for x in arguments.values() if torch.is_tensor(x) and x.is_floating_point()}
    kind = next((str(dtype).removeprefix("torch.") for dtype in DTYPES if dtype in dtypes), "")
    return {
        "name": f"{operator}-{name}-{kind}".rstrip("-"),
        "operator": operator,
        "arguments": {key: x.clone() if torch.is_tensor(x) else x for key, x in arguments.items()},
        "results": results,
        "changes": changes or [],
        "small": small and torch.bfloat16 not in dtypes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    problems = [
        *verify(),
        *compressed(),
        *(p for dtype in DTYPES for make in (attention, paged, lm_head, layers) for p in make(dtype)),
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(problems, out)
    print(f"{len(problems)} problems")


if __name__ == "__main__":
    main()
