"""Plans with quantised pages: their bytes and speed, and where they are offered."""

from __future__ import annotations

import re

import pytest
import torch
from test_planner import TOY, TOY_DEVICE, VICUNA

from specmemo_kernels.backends.kernel_config import attention_configs
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.cost import Pass, pass_seconds
from specmemo_kernels.planning.drafter_spec import HeadsSpec
from specmemo_kernels.planning.known_devices import known_device
from specmemo_kernels.planning.memory_plan import BudgetError, parse_bytes
from specmemo_kernels.planning.planner import plan_memory
from specmemo_kernels.planning.predicted_shape import page_token_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_pages(kv_dtype: str) -> None:
    """One byte per element and two float32 scales per head; faster where pages are read; never chosen by default."""
    work = Workload(4096, 8)
    plain, coded = (plan_memory(VICUNA, "a100", None, work, kv_dtype=kind) for kind in (None, kv_dtype))
    assert (plain.kv_dtype, coded.kv_dtype) == (None, kv_dtype)
    assert coded.parts["kv_pages"] == coded.max_tokens * 32 * 32 * (2 * 128 + 2 * 4)
    assert coded.parts["tree_scratch"] == coded.max_nodes * page_token_bytes(VICUNA), "a step's own are never codes"
    assert coded.tokens_per_second > plain.tokens_per_second
    assert any(f"kept in {kv_dtype}: tokens may differ" in reason for reason in coded.reasons)
    assert not any("tokens may differ" in reason for reason in plain.reasons)
    assert f"in {kv_dtype}" in str(coded)
    half = {"tp": 2, "kv_dtype": kv_dtype}
    assert plan_memory(VICUNA, "a100", None, work, **half).parts["kv_pages"] * 2 == coded.parts["kv_pages"]
    target = known_device("a100").kernel_target
    sizes = (target, 128, 128, 1, torch.float16)
    assert coded.kernels == attention_configs(*sizes, quantised=True) != plain.kernels == attention_configs(*sizes)


def test_codes_are_read_in_fewer_bytes() -> None:
    """A step's time falls by the saved bytes of its pages over the read rate; its own rows aren't quantised."""
    run = Pass(60, 3, 100.0, 60)
    plain, coded = (pass_seconds(TOY, TOY_DEVICE, run, HeadsSpec(0), kv_dtype=kind) for kind in (None, "int8"))
    saved = 3 * 100 * 3 * 2 * ((16 + 16) * 3 - 2 * 4)
    assert plain - coded == pytest.approx(saved / TOY_DEVICE.read_rate, rel=1e-9)


def test_other_pages_have_no_size() -> None:
    with pytest.raises(ValueError, match="kv_dtype is 'int4', expected 'int8', 'fp8' or None"):
        plan_memory(VICUNA, "titan-rtx", None, Workload(512), kv_dtype="int4")


def test_int8_pages_are_a_remedy_where_they_are() -> None:
    """Named with a budget that is enough for them; not if they wouldn't help or are used already."""
    work = Workload(8192)
    with pytest.raises(BudgetError, match=r"pages in int8, which is not lossless \(kv_dtype='int8'") as e:
        plan_memory(VICUNA, "titan-rtx", "15GiB", work)
    enough = parse_bytes(re.search(r"kv_dtype='int8': ([\d.]+ \w+)", str(e.value))[1])
    assert plan_memory(VICUNA, "titan-rtx", enough, work, kv_dtype="int8").kv_dtype == "int8"
    with pytest.raises(BudgetError) as e:
        plan_memory(VICUNA, "titan-rtx", "14GiB", work)
    assert "int8" not in str(e.value)
    with pytest.raises(BudgetError) as e:
        plan_memory(VICUNA, "titan-rtx", "14GiB", work, kv_dtype="int8")
    assert "lossless" not in str(e.value)
    tokens = int(re.search(r"a context of about (\d+)", str(e.value))[1])
    plan_memory(VICUNA, "titan-rtx", "14GiB", Workload(tokens), kv_dtype="int8")
