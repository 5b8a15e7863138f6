"""Prompts that begin like earlier texts are computed from there on only; the output doesn't change."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from selection import sample
from test_families import greedy
from test_generate_batch import alone
from test_patch_memory import wide_model, with_workspace
from tiny_models import VOCAB, OracleDrafter, tiny_model
from transformers import PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.planning.memory_tracker import MemoryTracker


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=11)


def turns(model: PreTrainedModel, count: int, new: int = 20) -> list[tuple[list[int], list[int]]]:
    """Prompts of a conversation and the unpatched model's replies: each prompt is the previous one, its reply and new
    tokens.
    """
    found, ids = [], [5, 9, 3, 4, 5]
    for turn in range(count):
        found.append((ids, alone(model, ids, new)))
        ids = [*ids, *found[-1][1], *range(7, 14 + turn)]
    return found


def one(ids: list[int]) -> dict[str, torch.Tensor]:
    row = torch.tensor([ids])
    return {"input_ids": row, "attention_mask": torch.ones_like(row)}


@pytest.mark.parametrize("kv_dtype", sample([None, "int8"], ["int8"]))
def test_a_conversation_computes_what_is_new(model: PreTrainedModel, kv_dtype: str | None) -> None:
    """In each turn everything but the reply's last token is reused; pages equal those of a fresh run."""
    conversation = turns(model, 5)
    heads = sk.MedusaHeads(32, VOCAB, 3)
    with sk.patch(model, heads, tree=6, page_size=4, kv_dtype=kv_dtype) as handle:
        known = 0
        for prompt, reply in conversation:
            handle.stats.reset()
            output = greedy(model, one(prompt), 20)
            stats, size = handle.stats, handle.plan.page_size
            if kv_dtype is None:
                assert output[0, len(prompt) :].tolist() == reply
                assert stats.reused_tokens == known
            assert stats.prefill_tokens == len(prompt) - stats.reused_tokens
            pool = handle.pool
            assert pool is not None
            pool.check_integrity()
            assert pool.num_pages == -(-(len(prompt) + 20 + handle.plan.tree.max_depth) // size)
            known = len(prompt) + 20 - 1  # the newest token is never computed
        assert kv_dtype is not None or handle.stats.reused_tokens > 100


def test_a_batch_shares_a_beginning(model: PreTrainedModel) -> None:
    """Padded rows with a common prefix of two pages, after a call that computed it; three rows at a time."""
    start = [3, 1, 4, 1, 5, 9, 2, 6]
    prompts = [[*start, 10 + i, *range(20, 21 + i)] for i in range(5)]
    expected = [alone(model, prompt, 12) for prompt in prompts]
    with sk.patch(model, OracleDrafter([], 0.0), tree=3, page_size=4, max_batch_size=3) as handle:
        greedy(model, one([*start, 50]), 4)
        handle.stats.reset()
        done = sk.generate_batch(model, prompts, max_new_tokens=12, eos_token_ids=[])
        assert [completion.tokens for completion in done] == expected
        assert handle.stats.reused_tokens == 8 * 5
        assert handle.stats.prefill_tokens == sum(len(prompt) - 8 for prompt in prompts)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        output = greedy(model, {"input_ids": ids, "attention_mask": mask}, 12, pad_token_id=0)
        assert output[:, width:].tolist() == expected
        assert handle.stats.reused_tokens > 2 * 8 * 5
    with sk.patch(model, OracleDrafter([], 0.0), tree=3, page_size=4, reuse_prefix=False) as handle:
        for _ in range(2):
            assert greedy(model, one(prompts[0]), 12)[0, len(prompts[0]) :].tolist() == expected[0]
        assert handle.stats.reused_tokens == 0


def test_sampling_from_kept_pages(model: PreTrainedModel) -> None:
    """The same prompt with different samples: those of the unpatched model."""

    def sampled() -> list[list[int]]:
        torch.manual_seed(3)
        options = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 12}
        return [model.generate(**one([5, 9, 3, 4, 5, 6, 7]), **options)[0].tolist() for _ in range(4)]

    expected = sampled()
    with sk.patch(model, OracleDrafter([], 0.0), tree=3, page_size=4) as handle:
        assert sampled() == expected
        assert handle.stats.reused_tokens == 3 * 4


def _in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[3, 5] += 0.5


def _through_data(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.5)


def _other_storage(model: PreTrainedModel) -> None:
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.flip(0)


def _other_parameter(model: PreTrainedModel) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight * 2)


def _other_module(model: PreTrainedModel) -> None:
    class Adapter(torch.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base, self.scaling, self.disabled = base, {"default": 1.5}, False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.base(x)
            return y if self.disabled else y * self.scaling["default"]

    layer = model.model.layers[0].mlp
    layer.up_proj = Adapter(layer.up_proj)


def _switch(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.disabled = True


def _scale(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.scaling["default"] = 0.5


def _a_training_step(model: PreTrainedModel) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.eval()


@pytest.mark.parametrize(
    "changes",
    [
        (_in_place,), (_through_data,), (_other_module, _switch, _scale),
        *(
            pytest.param((change,), marks=pytest.mark.slow)
            for change in (_other_storage, _other_parameter, _a_training_step)
        ),
    ],
    ids=lambda changes: "-".join(change.__name__.strip("_") for change in changes),
)  # fmt: skip
def test_another_model_finds_nothing(
    model: PreTrainedModel, changes: tuple[Callable[[PreTrainedModel], None], ...]
) -> None:
    """After each change the text is the changed model's own, and nothing is reused."""
    prompt = turns(model, 2)[1][0]
    with sk.patch(model, OracleDrafter([], 0.0), tree=3, page_size=4) as handle:
        greedy(model, one(prompt), 20)
        for change in changes:
            change(model)
            handle.stats.reset()
            assert greedy(model, one(prompt), 20)[0, len(prompt) :].tolist() == alone(copy.deepcopy(model), prompt, 20)
            assert handle.stats.reused_tokens == 0
        greedy(model, one(prompt), 20)
        assert handle.stats.reused_tokens > 0


def test_release_and_unpatch_drop_everything(model: PreTrainedModel) -> None:
    prompt = turns(model, 2)[1][0]
    for leave in (lambda handle: handle.release(), lambda handle: sk.unpatch(handle.model)):
        handle = model.specmemo if hasattr(model, "specmemo") else sk.patch(model, OracleDrafter([], 0.0), tree=3)
        greedy(model, one(prompt), 20)
        leave(handle)
        assert handle.bytes_by_part["kv_pages"] == 0
    with sk.patch(model, OracleDrafter([], 0.0), tree=3) as handle:
        greedy(model, one(prompt), 20)
        assert handle.stats.reused_tokens == 0


def test_a_draft_model_keeps_what_it_knows(model: PreTrainedModel) -> None:
    """It also computes the new message only, through larger pools."""
    prompts = [prompt for prompt, _ in turns(model, 3, new=12)]
    small = tiny_model("llama", seed=12, num_hidden_layers=1)
    rows = []
    with sk.patch(model, sk.DraftModel(small, tokens=3), tree=sk.DraftTree.chain(3), page_size=4) as handle:
        for prompt in prompts:
            before = handle.drafter.rows_computed
            greedy(model, one(prompt), 1 + 4)
            rows.append(handle.drafter.rows_computed - before)
            assert handle.drafter.page_bytes > 0
        steps = handle.stats.steps
    assert steps <= 3 * 4
    for prompt, count in zip(prompts[1:], rows[1:], strict=True):
        assert count < len(prompt), "the whole prompt was computed"


@pytest.mark.slow
def test_kept_pages_count_inside_the_budget() -> None:
    """A conversation that fills its budget: pools grow beside the old ones while both fit, then take all pages."""
    model = wide_model("llama", seed=20)
    heads = sk.MedusaHeads(128, VOCAB, 3)
    budget = with_workspace(model, 1_401_000)
    with sk.patch(model, heads, memory_budget=budget, tree=8, max_batch_size=1, page_size=8) as handle:
        plan = handle.plan
        assert plan.max_tokens is not None
        greedy(model, one([1, 2, 3]), 2)  # what is kept between calls
        handle.release()
        ids, reused, sizes = [5, 9, 3], 0, []
        with MemoryTracker() as tracker:
            while len(ids) + 20 + plan.tree.max_depth <= plan.max_tokens:
                handle.stats.reset()
                ids = [*greedy(model, one(ids), 20)[0].tolist(), *range(9, 19)]
                reused += handle.stats.reused_tokens > 0
                assert handle.pool is not None
                sizes.append(handle.pool.num_pages)
        assert tracker.peak + handle.drafter.nbytes <= plan.total_bytes
        assert len(sizes) > 4
        assert sizes[-1] == plan.max_pages
        assert reused >= len(sizes) - 2, "the first turn knows nothing, and once pages don't fit twice"
        expected = greedy(model, one(ids[: len(ids) // 2]), 10)
        handle.release()
        assert torch.equal(greedy(model, one(ids[: len(ids) // 2]), 10), expected)
