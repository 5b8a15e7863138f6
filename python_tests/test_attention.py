"""``tree_attention`` of every backend against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from cases import ATTENTION_CASES, QUANTISED_CASES, AttentionCase, attention_inputs, case_budget

from specmemo_kernels import ops


def dense_oracle(inputs: dict[str, object]) -> torch.Tensor:
    """float64, one query and head at a time, ancestors by walking bits: independent of the reference."""
    i = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    q, table, page = i["q"], i["block_table"], i["k_pages"].shape[1]
    out = torch.empty(q.shape[0], q.shape[1], i["v_new"].shape[2], dtype=torch.float64)
    group = q.shape[1] // i["k_new"].shape[1]
    for b, length in enumerate(i["seq_lens"].tolist()):
        start, end = i["qo_indptr"][b].item(), i["qo_indptr"][b + 1].item()

        def seen(node: int, start: int = start) -> list[int]:
            if i["tree_mask"] is None:
                return list(range(node + 1))
            return [j for j in range(node + 1) if (int(i["tree_mask"][start + node, j // 64]) >> (j % 64)) & 1]

        for node in range(end - start):
            position = length + len(seen(node)) - 1
            slots = [
                (t, i["k_pages"][table[b, t // page], t % page], i["v_pages"][table[b, t // page], t % page])
                for t in range(length)
            ]
            slots += [(length + len(seen(j)) - 1, i["k_new"][start + j], i["v_new"][start + j]) for j in seen(node)]
            slots = [s for s in slots if i["window"] is None or position - s[0] < i["window"]]
            for head in range(q.shape[1]):
                score = torch.stack([q[start + node, head] @ s[1][head // group] for s in slots]) * i["scale"]
                if i["softcap"]:
                    score = i["softcap"] * torch.tanh(score / i["softcap"])
                extra = score if i["sinks"] is None else torch.cat([score, i["sinks"][head][None]])
                weight = extra.softmax(0)[: len(slots)]
                out[start + node, head] = sum(w * s[2][head // group] for w, s in zip(weight, slots, strict=True))
    return out


@pytest.mark.parametrize(
    "case", [c for c in ATTENTION_CASES if max(c.seq_lens) < 140 and max(c.nodes) < 30], ids=lambda c: c.name
)
def test_reference_is_attention(case: AttentionCase) -> None:
    inputs = attention_inputs(case, torch.float64)
    out, _ = ops.tree_attention(**inputs, backend="reference")
    torch.testing.assert_close(out, dense_oracle(inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ATTENTION_CASES + QUANTISED_CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_within_budget(backend: str, case: AttentionCase, dtype: torch.dtype) -> None:
    inputs = attention_inputs(case, dtype)
    budget = case_budget(case, dtype)
    out, lse = ops.tree_attention(**inputs, backend=backend)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert float((out.double() - budget.out).abs().max()) <= budget.out_error
    assert float((lse.double() - budget.lse).abs().max()) <= budget.lse_error
