"""Use of a device's profile in ``patch`` without a tree."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from tiny_models import VOCAB, OracleDrafter, tiny_model

import specmemo_kernels as sk
from specmemo_kernels.integrations.hf import candidate_trees
from specmemo_kernels.ops import dispatch
from specmemo_kernels.planning.device import GIB, DeviceProfile

#: The model's 2 layers launch 243 operators: 0.2 ms, beside which a row is nothing (or everything).
FREE_ROWS = DeviceProfile("rows are free", GIB, 1e12, {"float32": 1e15}, 1e-6)
COSTLY_ROWS = replace(
    FREE_ROWS, name="rows cost all", matmul_rate={"float32": 1e6}, launch_seconds=1e-9, overlaps=False
)


def patched(profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch, heads: object = None) -> sk.SpecMemo:
    monkeypatch.setattr(candidate_trees, "profile_of", lambda _, **__: profile)
    model = tiny_model("llama", seed=40)
    return sk.patch(model, sk.MedusaHeads(32, VOCAB, 5) if heads is None else heads)


def test_rows_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """If rows are free the tree is as large as possible; if they cost everything it is one draft; both plans give the
    reason.
    """
    large, small = patched(FREE_ROWS, monkeypatch), patched(COSTLY_ROWS, monkeypatch)
    assert large.plan.tree.size == 64
    assert small.plan.tree.size == 2
    assert large.plan.tokens_per_step > 2.4 > small.plan.tokens_per_step
    assert "on rows are free a step over 64 nodes is predicted to take 1.00 times" in large.plan.reasons[0]
    assert "on rows cost all a step over 2 nodes" in small.plan.reasons[0]
    assert large.plan.tokens_per_second > small.plan.tokens_per_second


def test_heads_that_the_tree_does_not_use_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """They free their memory and leave the plan; a given tree keeps all heads."""
    one = patched(COSTLY_ROWS, monkeypatch)
    alone = sum(p.nbytes for p in sk.MedusaHeads(32, VOCAB, 1).parameters())
    assert one.drafter.max_depth == one.plan.tree.max_depth == 1
    assert one.drafter.nbytes == one.plan.parts["heads"] == alone
    sk.unpatch(one.model)
    assert sk.patch(one.model, sk.MedusaHeads(32, VOCAB, 5), tree=2).drafter.nbytes == 5 * alone


@pytest.mark.slow
def test_a_budget_too_small_for_the_fastest_tree(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Nodes and then heads are dropped until it fits; a given tree is never changed. Each thread has a workspace."""
    monkeypatch.setattr(candidate_trees, "profile_of", lambda _, **__: FREE_ROWS)
    sizes = []
    with sk.patch(tiny_model("llama", seed=40, vocab_size=3000), sk.MedusaHeads(32, 3000, 5), tree=2) as handle:
        workspace = handle.plan.parts["workspace"]  # it depends on the instruction set
    for budget in (workspace + others for others in (2_900_000, 1_425_000, 1_100_000, 600_000)):
        model = tiny_model("llama", seed=40, vocab_size=3000)
        handle = sk.patch(model, sk.MedusaHeads(32, 3000, 5), memory_budget=budget, max_batch_size=1)
        plan = handle.plan
        assert plan.total_bytes <= budget
        assert plan.tree.max_depth == handle.drafter.max_depth
        assert (plan.tree.size == 64) == (plan.tokens_per_second is not None)
        assert plan.tree.size == 64 or f"the budget holds a tree of {plan.tree.size} nodes" in plan.reasons[0]
        sizes.append(plan.tree.size)
        sk.unpatch(model)
        if plan.tree.size < 64:
            with pytest.raises(sk.BudgetError):
                sk.patch(model, sk.MedusaHeads(32, 3000, 5), memory_budget=budget, max_batch_size=1, tree=64)
    assert sizes == [64, 32, 4, 2]


@pytest.mark.parametrize("longer", [0, 40, 400])
def test_a_context_that_the_budget_must_hold(longer: int, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """The tree gives way to it; a text of that length is then generated. A context too long is refused."""
    monkeypatch.setattr(candidate_trees, "profile_of", lambda _, **__: FREE_ROWS)
    model = tiny_model("llama", seed=40, vocab_size=3000)
    heads, options = sk.MedusaHeads(32, 3000, 5), {"memory_budget": 1_650_000, "max_batch_size": 1}
    with sk.patch(model, heads, **options) as handle:
        without = handle.plan, handle.max_length
    context = without[1] + longer
    ids = torch.randint(3, 3000, (1, 8))
    generate = {"attention_mask": torch.ones_like(ids), "max_new_tokens": context - 8, "do_sample": False}
    expected = model.generate(ids, **generate)
    with sk.patch(model, heads, context=context, **options) as handle:
        assert handle.max_length >= context
        assert handle.plan.total_bytes <= 1_650_000
        assert handle.plan.tree.size <= without[0].tree.size
        assert longer or handle.plan == without[0]
        assert torch.equal(model.generate(ids, **generate), expected)
    with pytest.raises(sk.BudgetError, match=r"too small for \d+ pages of 16 tokens .*a shorter context"):
        sk.patch(model, heads, context=20_000, **options)
    with pytest.raises(ValueError, match="context is 1, it must be at least 2"):
        sk.patch(model, heads, context=1)


def test_same_tokens_whatever_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(3, VOCAB, (1, 20))
    model = tiny_model("llama", seed=40)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    for profile in (FREE_ROWS, COSTLY_ROWS):
        found = patched(profile, monkeypatch).model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
        )
        assert torch.equal(found, expected)


def test_a_drafter_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unchanged, and its depth bounds the tree."""
    drafter = OracleDrafter([], 0.0, max_depth=2)
    handle = patched(FREE_ROWS, monkeypatch, drafter)
    assert handle.drafter is drafter
    assert handle.plan.tree.max_depth == 2


def test_dtypes_without_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 on a device whose profile lacks it uses the slowest rate and isn't refused."""
    monkeypatch.setattr(candidate_trees, "profile_of", lambda _, **__: FREE_ROWS)
    with sk.patch(tiny_model("llama").to(torch.bfloat16), sk.MedusaHeads(32, VOCAB, 2).to(torch.bfloat16)) as handle:
        assert handle.plan.tree.size > 2


def test_blocks_are_for_gpu_kernels() -> None:
    """The C++ and reference kernels have no block sizes (test_triton_steps checks Triton's)."""
    for backend in ("cpu", "reference"):
        with sk.patch(tiny_model("llama"), sk.MedusaHeads(32, VOCAB, 2), tree=4, backend=backend) as handle:
            assert handle.plan.kernels is None


def test_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration without sizes: a few nodes, no prediction, and the reason in the plan."""
    model = tiny_model("llama")
    monkeypatch.setattr(model.config, "to_dict", lambda: {"model_type": "odd"})
    with sk.patch(model, sk.MedusaHeads(32, VOCAB, 3)) as handle:
        assert handle.plan.tree.size == 12
        assert "odd has hidden_size=None, a size from 1 to 1099511627776 is needed" in handle.plan.reasons[0]
        assert handle.plan.tokens_per_second is None


def test_this_machine() -> None:
    """With the real profile: some drafts, a prediction, and no second measurement in the process."""
    with sk.patch(tiny_model("llama"), sk.MedusaHeads(32, VOCAB, 3)) as handle:
        assert 2 <= handle.plan.tree.size <= 64
        assert handle.plan.tokens_per_second > 0
    assert candidate_trees.profile_of("cpu") is candidate_trees.profile_of("cpu")


#: Compute catches up with the launches at 11 rows.
SOME_ROWS = replace(FREE_ROWS, name="some rows are free", matmul_rate={"float32": 1e10})


def test_the_plan_leaves_room_above_the_fastest_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same heads, and the plan says so; the chooser decides how much a step verifies."""
    handle = patched(SOME_ROWS, monkeypatch)
    plan = handle.plan
    fastest = int(plan.reasons[0].split("a step over ")[1].split()[0])
    assert 2 <= fastest < plan.tree.size
    assert f"steps may verify up to {plan.tree.size} nodes" in plan.reasons[1]
    assert plan.tree.max_depth == plan.tree.pruned(fastest).max_depth
    assert handle.chooser is not None
    assert handle.chooser.tree is plan.tree


def test_no_kernels_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default falls back to the reference with a warning, as on Apple's GPUs; a named backend doesn't warn."""
    heads = sk.MedusaHeads(32, VOCAB, 1)
    monkeypatch.setattr(dispatch, "_default", lambda _: "reference")
    model = tiny_model("llama", seed=40)
    with pytest.warns(UserWarning, match="no kernels for cpu here, so the reference backend computes"):
        sk.patch(model, heads, tree=2)
    sk.unpatch(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sk.patch(model, heads, tree=2, backend="reference").target.backend == "reference"
