"""The operators as torch sees them: schema, fakes, autograd and compilation agree with what the kernels do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import AttentionCase, attention_inputs
from op_cases import (
    LmHeadCase,
    PagedCase,
    VerifyCase,
    append_inputs,
    commit_inputs,
    lm_head_code_inputs,
    lm_head_inputs,
    verify_inputs,
)
from selection import sample

from specmemo_kernels import ops
from specmemo_kernels.ops.compressed_weights import compress

Tensor = torch.Tensor
BACKENDS = ("reference", "cpu")
PAGED = PagedCase("opcheck", (3, 0, 9), (4, 0, 2), (2, -1, 1), v_head_dim=24, page_size=4)


def finite(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments without values that can't be compared: NaN, overflow in sums of products (copied pages hold
    any bits), and page ids out of range.
    """

    def tame(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if x.dtype == torch.float8_e4m3fn:
            return (x.view(torch.uint8) & 0xBF).view(x.dtype)
        return x.nan_to_num(0, 0, 0).clamp(-9, 9)

    numbers = {name: tame(x) for name, x in inputs.items()}
    if "block_table" in numbers:
        numbers["block_table"] = torch.where(numbers["block_table"] == 2**30, 0, numbers["block_table"])
    return numbers


def attention(**changes: Any) -> list[Any]:
    case = AttentionCase("opcheck", (5, 0, 20), (3, 0, 6), head_dim=16, v_head_dim=8, **changes)
    return [*finite(attention_inputs(case, torch.float32)).values(), min(case.nodes) or None]


CODES = lm_head_code_inputs(LmHeadCase("opcheck", 3, 50, 80, bias=True), torch.float32)
LINEAR = list(lm_head_inputs(LmHeadCase("opcheck", 3, 50, 16, bias=True), torch.float32).values())
PROBLEMS: dict[str, tuple[str, list[Any]]] = {
    "tree": ("tree_attention", attention()),
    "tree_int8": ("tree_attention", attention(kv_dtype="int8")),
    # No fp8: opcheck sums its arguments, which torch can't for float8.
    "append_int8": (
        "append_paged_kv",
        list(finite(append_inputs(replace(PAGED, kv_dtype="int8"), torch.float32)).values()),
    ),
    "commit_int8": (
        "commit_paged_kv",
        list(finite(commit_inputs(replace(PAGED, kv_dtype="int8"), torch.float32)).values()),
    ),
    "chunk": ("tree_attention", attention(tree=False, window=4, softcap=3.0, sinks=True)),
    "unbounded": ("tree_attention", [*attention()[:-6], None, None, False, None, None, None]),
    "append": ("append_paged_kv", list(finite(append_inputs(PAGED, torch.float32)).values())),
    "commit": ("commit_paged_kv", list(finite(commit_inputs(PAGED, torch.float32)).values())),
    "verify": ("verify_tree_greedy", [*verify_inputs(VerifyCase("opcheck", (9, 0, 4), 5)).values(), 5]),
    "argmax": (
        "lm_head_argmax",
        list(lm_head_inputs(LmHeadCase("opcheck", 3, 50, 16, bias=True), torch.float32).values()),
    ),
    "argmax_plain": ("lm_head_argmax", list(lm_head_inputs(LmHeadCase("opcheck", 3, 50, 16), torch.float32).values())),
    "topk": ("lm_head_topk", [*lm_head_inputs(LmHeadCase("opcheck", 3, 50, 16), torch.float32).values(), 7, None]),
    "log_probs": (
        "lm_head_log_probs",
        [*lm_head_inputs(LmHeadCase("opcheck", 3, 50, 16), torch.float32).values(), 7, None],
    ),
    "linear": ("linear", [*LINEAR, None, False]),
    "linear_transposed": ("linear", [LINEAR[0], LINEAR[1].T.contiguous().T, None, None, False]),
    "grouped_linear": (
        "grouped_linear",
        [LINEAR[0], torch.stack([LINEAR[1]] * 2), None, torch.tensor([1, len(LINEAR[0])]), False],
    ),
    "linear_codes": ("linear", [CODES["hidden"], CODES["weight"], CODES["bias"], CODES["scales"], False]),
    "gated_mlp": ("gated_mlp", [LINEAR[0], LINEAR[1], LINEAR[1], LINEAR[1].T.contiguous(), *[None] * 3, "silu", False]),
    "rms_norm": ("rms_norm", [LINEAR[0], torch.ones(16), 1e-6, 1.0, True]),
    "decompress": ("decompress", [compress(torch.randn(3, 300).bfloat16()), 300]),
    "topk_codes": ("lm_head_topk", [CODES["hidden"], CODES["weight"], CODES["bias"], 7, CODES["scales"]]),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transposed_input_has_the_strides_of_its_fake(backend: str) -> None:
    x = torch.randn(3, 2, 16).transpose(0, 1)
    arguments = (x, torch.ones(16), 1e-6, 1.0, True, backend)
    result = torch.library.opcheck(torch.ops.specmemo.rms_norm.default, arguments, test_utils="test_faketensor")
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", sample(BACKENDS, BACKENDS[-1:]))
@pytest.mark.parametrize("problem", sample(PROBLEMS, ["tree", "verify", "topk_codes", "gated_mlp"]))
def test_opcheck(problem: str, backend: str) -> None:
    """All of opcheck's utilities: schema, autograd registration, fake tensors, compilation with dynamic shapes."""
    name, arguments = PROBLEMS[problem]
    result = torch.library.opcheck(getattr(torch.ops.specmemo, name).default, (*arguments, backend))
    assert set(result.values()) == {"SUCCESS"}
    assert len(result) == 4


def step(inputs: dict[str, Any], commit: dict[str, Any], verify: dict[str, Any], head: Tensor, backend: str) -> Any:
    """One layer of a step, with every operator once."""
    out, lse = ops.tree_attention(**inputs, backend=backend)
    append = {n: inputs[n] for n in ("k_new", "v_new", "k_pages", "v_pages", "block_table", "seq_lens", "qo_indptr")}
    ops.append_paged_kv(**append, backend=backend)
    tokens = ops.lm_head_argmax(out[:, 0] * 2, head, backend=backend)
    values, candidates = ops.lm_head_topk(out[:, 1], head, k=3, backend=backend)
    index, length, bonus = ops.verify_tree_greedy(**verify, max_depth=4, backend=backend)
    ops.commit_paged_kv(**commit, accept_index=index, accept_length=length, backend=backend)
    return out + 1, lse, tokens, values, candidates, index, length, bonus


def problem() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], Tensor]:
    case = PagedCase("compile", (3, 6), (5, 8), (0, 0), head_dim=16, page_size=8)
    append = finite(append_inputs(case, torch.float32))
    query = torch.randn(13, 4, 16, generator=torch.Generator().manual_seed(3))
    verify = verify_inputs(VerifyCase("compile", (5, 8), 4, tokens=1))
    commit = finite(commit_inputs(case, torch.float32))
    commit = {n: x for n, x in commit.items() if not n.startswith("accept")}
    head = torch.randn(40, 16, generator=torch.Generator().manual_seed(4))
    return append | {"q": query, "scale": 0.25}, commit, verify, head


@pytest.mark.parametrize("backend", sample(BACKENDS, ["cpu"]))
def test_compiled_step_is_the_step(backend: str) -> None:
    """One graph without breaks; the same results, and pools change in place."""
    eager, compiled = problem(), problem()
    pools = [inputs[name] for inputs in compiled[:2] for name in ("k_pages", "v_pages")]
    places, before = [pool.data_ptr() for pool in pools], [pool.clone() for pool in pools]
    wanted = step(*eager, backend)
    torch._dynamo.reset()
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(*compiled, backend)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    for inputs, reference in zip(compiled[:2], eager[:2], strict=True):
        assert all(torch.equal(inputs[name], reference[name]) for name in ("k_pages", "v_pages"))
    assert [pool.data_ptr() for pool in pools] == places
    assert not any(torch.equal(pool, old) for pool, old in zip(pools, before, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("problem", ["append", "append_int8", "commit", "commit_int8"])
def test_autograd_notices_written_pages(problem: str, backend: str) -> None:
    """Pages and scales have a new version, other arguments don't; pages of inference mode have none."""
    name, arguments = PROBLEMS[problem]
    operator, arguments = getattr(torch.ops.specmemo, name).default, [*arguments, backend]
    written = [argument.alias_info is not None for argument in operator._schema.arguments]
    before = [x._version if isinstance(x, Tensor) else None for x in arguments]
    operator(*arguments)
    for x, old, changed in zip(arguments, before, written, strict=True):
        if isinstance(x, Tensor):
            assert (x._version > old) == changed
    with torch.inference_mode():
        pages = [
            x.clone() if isinstance(x, Tensor) and changed else x for x, changed in zip(arguments, written, strict=True)
        ]
        operator(*pages)
    if backend != "reference":  # torch's own operators refuse them
        operator(*pages)
