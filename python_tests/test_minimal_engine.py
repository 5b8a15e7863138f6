"""examples/minimal_engine.py generates transformers' tokens, frees its pages, and each of its steps is needed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from selection import sample
from tiny_models import random_heads, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import specmemo_kernels as sk
from specmemo_kernels import ops

SOURCE = Path(__file__).resolve().parents[1] / "examples" / "minimal_engine.py"
DEMO = Path(sk.__file__).parent / "demo_model"
NEW, NUM_PAGES, PAGE_SIZE = 24, 40, 4
TEXTS = ("import os\n", "def main():\n    ", "class Node:\n", "x = [", "for line in open(path):\n", "try:\n    import")
Tokens = list[list[int]]

spec = importlib.util.spec_from_file_location("minimal_engine", SOURCE)
assert spec is not None
assert spec.loader is not None
minimal_engine: Any = importlib.util.module_from_spec(spec)
sys.modules["minimal_engine"] = minimal_engine  # dataclasses look their module up
spec.loader.exec_module(minimal_engine)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in several files with four query heads, two KV heads, an lm_head of its own, and Medusa heads."""
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    model.generation_config.eos_token_id = [2, 5]
    model.config.eos_token_id = [2, 5]
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    random_heads(model).save_pretrained(folder / "heads")
    return folder


@cache
def prompts(folder: Path) -> Tokens:
    """20 prompts of 1 to 30 tokens."""
    if folder != DEMO:
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(6, 61, (1 + 7 * i % 30,), generator=generator).tolist() for i in range(20)]
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    return [tokenizer(TEXTS[i % 6] * (1 + i // 6) + f"# {i}\n" * (i % 3)).input_ids for i in range(20)]


@cache
def expected(folder: Path) -> Tokens:
    """transformers' own tokens, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    eos = eos_of(folder)
    return [
        model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=NEW, do_sample=False,
            eos_token_id=eos, pad_token_id=0,
        )[0].tolist()
        for prompt in prompts(folder)
    ]  # fmt: skip


@cache
def eos_of(folder: Path) -> list[int]:
    """Ends of text that occur: a line break for the bundled model, which hardly ends a text in so few tokens."""
    return AutoTokenizer.from_pretrained(DEMO)("\n\n").input_ids[-1:] if folder == DEMO else [2, 5]


def engine_of(folder: Path, heads: bool, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """An engine with NaN in all pages and scratch slots."""
    weights = load_file(folder / "heads" / "medusa_lm_head.safetensors") if heads else {}
    model = minimal_engine.Llama(folder, dtype, invariant=options.pop("invariant", False))
    if folder == DEMO:
        model.eos = eos_of(folder)
    options = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "max_seqs": 4, "chunk_len": 7} | options
    engine = minimal_engine.Engine(model, {name: w.to(dtype) for name, w in weights.items()}, **options)
    engine.pages.fill_(torch.nan)
    engine.scratch.fill_(torch.nan)
    return engine


def run(engine: Any, tokens: Tokens) -> tuple[Tokens, int]:
    """The tokens of all prompts, and the number of steps; pages hold NaN again once they are free."""
    sequences = [engine.add(prompt, NEW) for prompt in tokens]
    steps, most = 0, 0
    while engine.waiting or engine.running:
        engine.step()
        engine.pages[:, :, engine.free_pages] = torch.nan
        steps, most = steps + 1, max(most, len(engine.running))
        held = [page for s in engine.running for page in s.pages]
        assert len({*held, *engine.free_pages}) == len(held) + len(engine.free_pages) == engine.pages.shape[2]
    assert sum(s.num_pages for s in sequences) > 2 * engine.pages.shape[2], "pages are used again"
    assert most <= engine.max_seqs < len(sequences)
    return [s.tokens for s in sequences], steps


@pytest.mark.parametrize("name", sample(["demo", "tiny"], ["tiny"]))
def test_tokens_are_those_of_transformers(name: str, tiny: Path) -> None:
    folder = DEMO if name == "demo" else tiny
    answers, steps = expected(folder), {}
    lengths = [len(answer) - len(prompt) for answer, prompt in zip(answers, prompts(folder), strict=True)]
    assert min(lengths) < NEW, "some end before the limit"
    assert max(lengths) == NEW, "some end at the limit"
    for heads in (True, False):
        engine = engine_of(folder, heads)
        written, steps[heads] = run(engine, prompts(folder))
        assert written == answers, heads
        assert sorted(engine.free_pages) == list(range(NUM_PAGES))
    if folder == DEMO:
        assert steps[True] < 0.8 * steps[False], "drafts are accepted"


@pytest.mark.slow
def test_invariant_bfloat16_tokens_depend_on_no_setting() -> None:
    """They are those of the patched model in its invariant mode, too: rows are computed by the same operators."""
    kwargs: dict[str, Any] = {"dtype": torch.bfloat16, "invariant": True}
    batched, _ = run(engine_of(DEMO, True, **kwargs), prompts(DEMO))
    single, _ = run(engine_of(DEMO, False, max_seqs=1, chunk_len=64, **kwargs), prompts(DEMO))
    assert batched == single
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16)
    with sk.patch(model, sk.PromptLookupDrafter(), invariant=True, tree=4):
        run_of_patched = sk.generate_batch(model, prompts(DEMO), max_new_tokens=NEW, eos_token_ids=eos_of(DEMO))
        patched = [prompt + list(out.tokens) for prompt, out in zip(prompts(DEMO), run_of_patched, strict=True)]
    assert batched == patched


def without_tree_mask(*args: Any, **options: Any) -> Any:
    return ops.tree_attention(*args[:8], None, **options)


def without_commit(*_: Any) -> None:
    pass


def first_path(*args: Any, max_depth: int) -> Any:
    """Accept the best guesses unseen."""
    accepted, length, bonus = ops.verify_tree_greedy(*args, max_depth=max_depth)
    accepted[:, 1] = 1
    return accepted, length.clamp(min=1), bonus


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("tree_attention", without_tree_mask),
        ("commit_paged_kv", without_commit),
        ("verify_tree_greedy", first_path),
        ("append_paged_kv", without_commit),
    ],
)
def test_each_operator_is_needed(name: str, replacement: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask for trees, no write to pages, or unverified drafts: other tokens."""
    few = prompts(DEMO)[:5]
    names = {key: getattr(ops, key) for key in ops.__all__}
    monkeypatch.setattr(minimal_engine, "ops", SimpleNamespace(**names | {name: replacement}))
    engine = engine_of(DEMO, True)
    sequences = [engine.add(prompt, NEW) for prompt in few]
    while engine.waiting or engine.running:
        engine.step()
    assert [s.tokens for s in sequences] != expected(DEMO)[:5]


def test_pages_that_are_freed_early_change_tokens() -> None:
    """The NaN in free pages is seen: a page of a running sequence counts."""
    engine = engine_of(DEMO, True)
    sequence = engine.add(prompts(DEMO)[1], NEW)
    engine.step()
    engine.pages[:, :, sequence.pages[0]] = torch.nan
    while engine.running:
        engine.step()
    assert sequence.tokens != expected(DEMO)[1]


def test_a_prompt_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"need 15 of 10 pages; raise num_pages"):
        engine_of(DEMO, True, num_pages=10).add(list(range(30)), NEW)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type is 'llama3'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "type is 'linear'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
    ],
)
def test_other_models_are_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(DEMO / "model.safetensors", tmp_path)
    with pytest.raises(ValueError, match=message):
        minimal_engine.Llama(tmp_path, torch.float32)


def test_command_line_without_transformers() -> None:
    """The program runs, is short, and imports no transformers."""
    lines = SOURCE.read_text().splitlines()
    assert len(lines) <= 150
    code = (
        f"import runpy, sys; sys.argv = ['minimal_engine.py', {str(DEMO)!r}, 'import os', 'def main():']; "
        f"runpy.run_path({str(SOURCE)!r}, run_name='__main__'); assert 'transformers' not in sys.modules; "
        "assert not [m for m in sys.modules if m.startswith('specmemo_kernels.integrations')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("import os")
    assert "\n---\ndef main():" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("args", "says"), [((), "usage: "), (("/none", "x"), "'/none/config.json'")])
def test_wrong_command_lines(args: tuple[str, ...], says: str) -> None:
    done = subprocess.run([sys.executable, SOURCE, *args], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]
