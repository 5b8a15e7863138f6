"""The bundled model: its sizes, and the same tokens as unpatched on held-out files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import specmemo_kernels
from specmemo_kernels.cli.common import load_model, load_tokenizer
from specmemo_kernels.cli.demo_data import is_held_out, library_files
from specmemo_kernels.tree.choice import TreeChooser

FOLDER = Path(specmemo_kernels.__file__).parent / "demo_model"
PROMPTS = 50


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    """Held-out files cut at 1 to 500 tokens, some of them several times at different positions."""
    tokenizer = load_tokenizer(FOLDER)
    files = [file for file in library_files() if is_held_out(file)]
    texts = [file.read_text(encoding="utf-8", errors="ignore")[:40_000] for file in files]
    ids = [tokenizer(text, return_tensors="pt", verbose=False).input_ids for text in texts]
    cut = []
    for i in range(PROMPTS):
        row, length = ids[i % len(ids)], 1 + (i * 499) // (PROMPTS - 1)
        start = min((i // len(ids)) * 700, max(0, row.shape[1] - length))
        cut.append(row[:, start : start + length])
    return cut


@pytest.mark.slow
def test_it_writes_the_same_tokens_as_without_patching(
    prompts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TreeChooser, "tree_for", lambda self, *_: self.tree)  # whatever the machine's times say
    plain = load_model(FOLDER, torch.float32, torch.device("cpu"))
    patched = load_model(FOLDER, torch.float32, torch.device("cpu"))
    with specmemo_kernels.patch(patched, heads=FOLDER / "heads", tree=8) as handle:
        for ids in prompts:
            arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
            expected = plain.generate(ids, **arguments)
            assert torch.equal(patched.generate(ids, **arguments), expected), f"prompt of {ids.shape[1]} tokens"
        assert handle.stats.tokens_per_step >= 1.8


@pytest.mark.slow
def test_invariant_tokens_in_bfloat16(prompts: list[torch.Tensor]) -> None:
    """40 prompts write the same tokens with any drafter, batch size and prefill chunk."""
    model = load_model(FOLDER, torch.bfloat16, torch.device("cpu"))
    small = load_model(FOLDER, torch.bfloat16, torch.device("cpu"))
    del small.model.layers[2:]
    small.config.num_hidden_layers = 2
    rows = [ids[0, -200:].tolist() for ids in prompts[:40]]

    def written(heads: object, tree: int | None, batch: int, chunk: int) -> list[tuple[int, ...]]:
        options: dict[str, Any] = {"tree": tree, "max_batch_size": batch, "prefill_chunk": chunk}
        with specmemo_kernels.patch(model, heads, invariant=True, **options):
            outputs = specmemo_kernels.generate_batch(model, rows, max_new_tokens=24, eos_token_ids=[])
        return [tuple(output.tokens) for output in outputs]

    expected = written("prompt-lookup", 1, 8, 256)
    for heads, tree, batch, chunk in (
        (FOLDER / "heads", 8, 1, 256),
        (FOLDER / "heads", None, 16, 16),
        ("prompt-lookup", None, 4, 16),
        (specmemo_kernels.DraftModel(small, tokens=4), None, 8, 256),
    ):
        assert written(heads, tree, batch, chunk) == expected, (heads, tree, batch, chunk)


@pytest.mark.slow
def test_a_batch_of_prompts_of_different_lengths(prompts: list[torch.Tensor]) -> None:
    tokenizer = load_tokenizer(FOLDER)
    rows = [prompts[i][0] for i in (3, 30, 11, 42)]
    padded = torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_side="left", padding_value=tokenizer.pad_token_id
    )
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], batch_first=True, padding_side="left")
    model = load_model(FOLDER, torch.float32, torch.device("cpu"))
    expected = model.generate(padded, attention_mask=mask, max_new_tokens=40, do_sample=False)
    with specmemo_kernels.patch(model, heads=FOLDER / "heads"):
        assert torch.equal(model.generate(padded, attention_mask=mask, max_new_tokens=40, do_sample=False), expected)


def test_what_it_holds() -> None:
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 16 * 2**20
    assert not [file for file in files if file.suffix in {".bin", ".pt", ".pkl"}]
    model = load_model(FOLDER, torch.float32, torch.device("cpu"))
    assert 5e6 <= sum(p.numel() for p in model.parameters()) <= 20e6
    card = (FOLDER / "README.md").read_text()
    for word in ("held-out", "accuracy", "tokens per step", "training"):
        assert word in card


def test_its_heads_know_their_accuracy() -> None:
    heads = specmemo_kernels.MedusaHeads.from_pretrained(FOLDER / "heads")
    assert heads.cumulative_topk_accuracy is not None
    assert len(heads.cumulative_topk_accuracy) == heads.num_heads
    for row in heads.cumulative_topk_accuracy:
        assert row == sorted(row)
        assert 0 < row[0] < row[-1] <= 1


def test_its_tokenizer_gives_every_text_back() -> None:
    tokenizer = load_tokenizer(FOLDER)
    for text in ("def f(x):\n    return x ** 2  # ünïcödé\n", "\t\r\n \x00", "日本語 🙂"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
