"""A patched model in transformers' assisted generation: as the assistant, as the target, as both."""

from __future__ import annotations

import pytest
import torch
from selection import sample
from test_families import batch, greedy
from tiny_models import VOCAB, tiny_model
from transformers import PreTrainedModel

import specmemo_kernels as sk


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny_model("llama", seed=11)


def noisy_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same vocabulary that guesses some tokens right."""
    assistant = tiny_model("llama", seed=11)
    assistant.load_state_dict(model.state_dict())
    torch.manual_seed(0)
    for parameter in assistant.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return assistant


def inputs(mask: bool) -> dict[str, torch.Tensor]:
    """A prompt; generate creates a missing mask."""
    return {name: value for name, value in batch((9,)).items() if mask or name == "input_ids"}


@pytest.mark.filterwarnings("ignore:specmemo")
@pytest.mark.parametrize("mask", sample([False, True], [True]))
@pytest.mark.parametrize("sampled", sample([False, True], [False]))
@pytest.mark.parametrize("who", sample(["assistant", "target", "both"], ["both"]))
def test_assisted_generation(target: PreTrainedModel, who: str, sampled: bool, mask: bool) -> None:
    """Tokens and scores are those of unpatched models, whether target, assistant or both are patched."""
    assistant, prompt = noisy_copy(target), inputs(mask)
    assistant.generation_config.num_assistant_tokens = 4
    options = {"max_new_tokens": 12, "do_sample": sampled, "return_dict_in_generate": True, "output_scores": True}

    def generated() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(3)
        output = target.generate(**prompt, assistant_model=assistant, **options)
        return output.sequences, torch.cat(output.scores)

    expected, scores = generated()
    alone = greedy(assistant, prompt, 12)
    patched = [model for model, name in ((target, "target"), (assistant, "assistant")) if who in (name, "both")]
    handles = [sk.patch(model, "prompt-lookup") for model in patched]
    tokens, found = generated()
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(found, scores)
    assert torch.equal(greedy(assistant, prompt, 12), alone), "it speculates where it isn't the assistant"
    for handle in handles:
        assert (handle.stats.steps > 0) == (handle.model is assistant)
        sk.unpatch(handle.model)


@pytest.mark.filterwarnings("ignore:specmemo")
@pytest.mark.parametrize("mask", sample([False, True], [True]))
@pytest.mark.parametrize("options", [{"assistant_early_exit": 1}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_a_model_that_assists_itself(target: PreTrainedModel, options: dict[str, int], mask: bool) -> None:
    expected = greedy(target, inputs(mask), 12, **options)
    with sk.patch(target, "prompt-lookup"):
        assert torch.equal(greedy(target, inputs(mask), 12, **options), expected)
        assert torch.equal(greedy(target, inputs(mask), 12), expected)
    assert torch.equal(greedy(target, inputs(mask), 12, **options), expected)


@pytest.mark.filterwarnings("ignore:specmemo")
def test_an_assistant_with_another_tokenizer(target: PreTrainedModel) -> None:
    """Universal assisted decoding: the assistant has another vocabulary."""
    assistant = tiny_model("llama", seed=12, vocab_size=VOCAB + 2)

    def generated(sampled: bool) -> torch.Tensor:
        own, other = word_tokenizer(list(range(VOCAB))), word_tokenizer(list(range(VOCAB + 2))[::-1])
        options = {"tokenizer": own, "assistant_tokenizer": other, "assistant_model": assistant}
        return target.generate(**inputs(False), max_new_tokens=12, do_sample=sampled, **options)

    expected = generated(False)
    with sk.patch(assistant, "prompt-lookup"):
        assert torch.equal(generated(False), expected)
        # Sampled tokens differ from run to run in transformers. Sampling also replaces the assistant's embeddings.
        assert generated(True).shape == (1, 21)


def word_tokenizer(order: list[int]):  # type: ignore[no-untyped-def]
    """A word per token; word ``i`` has the number ``order[i]``."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"w{i}": number for i, number in enumerate(order)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0")
