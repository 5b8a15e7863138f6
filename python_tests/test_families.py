"""Greedy output of a patched model equals the unpatched model's, token for token, in float32."""

from __future__ import annotations

import pytest
import torch
from selection import sample
from tiny_models import FAMILIES, VOCAB, OracleDrafter, tiny_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

import specmemo_kernels as sk


def batch(lengths: tuple[int, ...], seed: int = 0) -> dict[str, torch.Tensor]:
    """A left-padded batch of random prompts, which contain eos (2) and pad (0)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(0, VOCAB, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model: PreTrainedModel, inputs: dict[str, torch.Tensor], new: int, **kwargs: object) -> torch.Tensor:
    return model.generate(**inputs, max_new_tokens=new, do_sample=False, **kwargs)


def answers(inputs: dict[str, torch.Tensor], output: torch.Tensor) -> list[list[int]]:
    """Each row's real tokens, without the prompt's padding."""
    mask = torch.nn.functional.pad(
        inputs["attention_mask"], (0, output.shape[1] - inputs["input_ids"].shape[1]), value=1
    )
    return [row[keep.bool()].tolist() for row, keep in zip(output, mask, strict=True)]


@pytest.mark.parametrize("family", sample(FAMILIES, sorted(FAMILIES)[::4]))
def test_random_heads(family: str) -> None:
    """Random heads of two layers each, a ragged batch, windows of 24 tokens crossed."""
    model = tiny_model(family)
    inputs = batch((40, 1, 17))
    expected = greedy(model, inputs, 24)
    assert len(expected.unique()) > 12, "the random model repeats itself: nothing would be tested"
    heads = sk.MedusaHeads(model.config.hidden_size, VOCAB, 3, num_layers=2)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with sk.patch(model, heads, tree=12, page_size=4) as handle:
        assert torch.equal(greedy(model, inputs, 24), expected)
        assert handle.stats.steps > 0
    assert torch.equal(greedy(model, inputs, 24), expected)


@pytest.mark.parametrize("share", sample((1.0, 0.6, 0.0), [0.6]))
@pytest.mark.parametrize("family", sample(FAMILIES, sorted(FAMILIES)[::4]))
def test_oracle_drafter(family: str, share: float) -> None:
    """A drafter that is always, sometimes or never right, on a chain."""
    model = tiny_model(family, seed=1)
    inputs = batch((9, 30), seed=1)
    expected = greedy(model, inputs, 25)
    drafter = OracleDrafter(answers(inputs, expected), share)
    with sk.patch(model, drafter, tree=sk.DraftTree.chain(5), page_size=5) as handle:
        assert torch.equal(greedy(model, inputs, 25), expected)
    per_step = handle.stats.tokens_per_step
    assert per_step == {1.0: 6.0, 0.0: 1.0}.get(share, per_step)  # 1 + 24 tokens: 4 full steps of 6


@pytest.mark.parametrize("prompt", sample([1, 15, 16, 17, 63, 64, 65, 255, 257, 500], [1, 15, 16, 17, 65]))
@pytest.mark.parametrize("page_size", sample((1, 16, 64), [16]))
def test_prompt_lengths_and_pages(prompt: int, page_size: int) -> None:
    """Lengths around page and chunk boundaries, prefilled in chunks of 64 rows."""
    model = tiny_model("llama", seed=2)
    inputs = batch((prompt,), seed=prompt)
    expected = greedy(model, inputs, 20)
    drafter = OracleDrafter(answers(inputs, expected), 0.7)
    with sk.patch(model, drafter, tree=sk.DraftTree.chain(4), page_size=page_size, prefill_chunk=64) as handle:
        assert torch.equal(greedy(model, inputs, 20), expected)
        slots = handle.stats.slots_written
    assert slots < prompt + 20 + 5, "more was written to pages than committed tokens"


@pytest.mark.parametrize("size", sample([1, 2, 3, 7, 16, 33, 64], [1, 3, 64]))
def test_tree_sizes(size: int) -> None:
    """Branching trees whose right path is hidden among wrong siblings."""
    model = tiny_model("llama", seed=3)
    inputs = batch((21, 6), seed=size)
    expected = greedy(model, inputs, 30)
    tree = sk.DraftTree.from_paths(_bushy_paths(size - 1))
    drafter = OracleDrafter(answers(inputs, expected), 0.4)
    with sk.patch(model, drafter, tree=tree) as handle:
        assert torch.equal(greedy(model, inputs, 30), expected)
    assert handle.plan.tree.size == size


def _bushy_paths(count: int) -> list[tuple[int, ...]]:
    """``count`` paths, breadth first, three children each."""
    paths: list[tuple[int, ...]] = [()]
    for parent in paths:
        if len(paths) > count:
            break
        paths += [(*parent, rank) for rank in range(3)]
    return paths[1 : count + 1]


@pytest.mark.parametrize("family", sample(["llama", "gemma2", "gpt_oss"], ["gemma2"]))
def test_eos_inside_a_step(family: str) -> None:
    """EOS at every position of an accepted path; the rest of the path is dropped and the row padded."""
    model = tiny_model(family, seed=4)
    inputs = batch((12, 20), seed=4)
    free = greedy(model, inputs, 30)
    for column in range(20, 29):
        eos = [int(free[0, column]), int(free[1, column + 1])]
        expected = greedy(model, inputs, 30, eos_token_id=eos, pad_token_id=0)
        with sk.patch(model, OracleDrafter(answers(inputs, free), 1.0), tree=sk.DraftTree.chain(6)):
            assert torch.equal(greedy(model, inputs, 30, eos_token_id=eos, pad_token_id=0), expected)


def test_eos_inside_the_prompt() -> None:
    """EOS and pad tokens in a prompt end nothing."""
    model = tiny_model("llama", seed=5)
    inputs = batch((18, 18), seed=5)
    inputs["input_ids"][:, 5] = inputs["input_ids"][:, -1] = 7
    expected = greedy(model, inputs, 12, eos_token_id=7, pad_token_id=7)
    with sk.patch(model, OracleDrafter([], 1.0), tree=sk.DraftTree.chain(3)):
        assert torch.equal(greedy(model, inputs, 12, eos_token_id=7, pad_token_id=7), expected)


@pytest.mark.parametrize("new", sample(range(1, 9), range(1, 5)))
def test_length_limit_inside_a_step(new: int) -> None:
    """max_new_tokens is reached at every position of a fully accepted path."""
    model = tiny_model("llama", seed=6)
    inputs = batch((10,), seed=6)
    full = greedy(model, inputs, 12)
    expected = greedy(model, inputs, new)
    with sk.patch(model, OracleDrafter(answers(inputs, full), 1.0), tree=sk.DraftTree.chain(4)) as handle:
        assert torch.equal(greedy(model, inputs, new), expected)
        assert handle.stats.tokens == new - 1


def test_published_tree() -> None:
    """A tree as a list of rank paths, with heads narrower than its ranks refused, wide enough accepted."""
    model = tiny_model("llama", seed=7)
    heads = sk.MedusaHeads(model.config.hidden_size, VOCAB, 2, own_lm_head=False)
    paths = [[0], [1], [0, 0], [0, 3], [2]]
    inputs = batch((14,), seed=7)
    expected = greedy(model, inputs, 16)
    with pytest.raises(ValueError, match=r"3 deep.*guesses 2"):
        sk.patch(model, heads, tree=[*paths, [0, 0, 0]])
    with sk.patch(model, heads, tree=paths) as handle:
        assert torch.equal(greedy(model, inputs, 16), expected)
        assert handle.plan.tree.size == 6


class Backwards(torch.nn.Linear):
    """An lm_head whose weight doesn't determine the best token."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).flip(-1)


@pytest.mark.parametrize("processed", [{}, {"repetition_penalty": 1.3}])
def test_lm_head_of_its_own_kind(processed: dict[str, float]) -> None:
    """If the lm_head isn't a plain linear layer, the model's own logits are used."""
    model = tiny_model("llama", seed=8)
    model.lm_head.__class__ = Backwards
    inputs = batch((14, 5), seed=8)
    expected = greedy(model, inputs, 16, **processed)
    with sk.patch(model, OracleDrafter(answers(inputs, expected), 0.6), tree=sk.DraftTree.chain(4)) as handle:
        assert not handle.facts.plain_lm_head
        assert not handle.facts.exact_lm_head
        assert torch.equal(greedy(model, inputs, 16, **processed), expected)
        assert handle.stats.tokens_per_step > 1


@pytest.mark.parametrize(
    ("family", "reason"),
    [("llama4_text", "llama4_text.*chunk"), ("t5", "encoder-decoder")],
)
def test_refused_by_name(family: str, reason: str) -> None:
    """Models with unsupported attention are refused before anything changes."""
    small = {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "vocab_size": VOCAB,
        "intermediate_size": 32,
        "num_local_experts": 2,
    }
    config = CONFIG_MAPPING[family](**small)
    from specmemo_kernels.integrations.hf.checks import check_config
    from specmemo_kernels.integrations.hf.mask import UnsupportedModel

    with pytest.raises(UnsupportedModel, match=reason):
        check_config(config)


def test_model_outside_the_interface_is_refused() -> None:
    """A model with attention of its own, or with its weights elsewhere, is refused and left as it was."""
    config = CONFIG_MAPPING["bloom"](vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    before = type(model)
    with pytest.raises(sk.UnsupportedModel, match=r"Bloom|bloom"):
        sk.patch(model, OracleDrafter([], 1.0))
    assert type(model) is before
    assert "specmemo" not in vars(model)
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False)


def test_a_model_without_lm_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the model and as the draft model; both work as before."""
    prompt = torch.tensor([[1, 2, 3]])
    model, headless = tiny_model("llama"), tiny_model("llama")
    monkeypatch.setattr(headless, "get_output_embeddings", lambda: None)
    before = headless.generate(prompt, max_new_tokens=3, do_sample=False)
    with pytest.raises(
        sk.UnsupportedModel, match=r"LlamaForCausalLM has no lm_head, get_output_embeddings\(\) is None"
    ):
        sk.patch(headless, heads="prompt-lookup")
    with pytest.raises(sk.UnsupportedModel, match="has no lm_head"):
        sk.patch(model, heads=sk.DraftModel(headless))
    assert "specmemo" not in vars(model) | vars(headless)
    assert torch.equal(headless.generate(prompt, max_new_tokens=3, do_sample=False), before)
    with sk.patch(model, heads="prompt-lookup"):
        assert torch.equal(model.generate(prompt, max_new_tokens=3, do_sample=False), before)
