"""vLLM with this package's attention and draft trees gives vLLM's own tokens (``make test-vllm``).

Each engine is a process of its own (``vllm_session.py``). The oracle is vLLM without the plugin, on the same calls, in
float32.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm", exc_type=ImportError)

from drafter_oracles import write_clover2, write_dflash, write_eagle1, write_eagle3

import specmemo_kernels
from specmemo_kernels.drafting.medusa_heads import MedusaHeads

HERE = Path(__file__).parent
DEMO = Path(specmemo_kernels.__file__).parent / "demo_model"
TOPICS = ("a lighthouse", "the tides", "bread", "a chess game", "winter", "an old map", "two brothers", "a garden")
FORMS = (
    "Write a short story about {}.",
    "Explain {} to a child, in simple words.",
    "What is the best thing about {}? Give three reasons, and one against it.",
    "{}",
    "List five facts about {}. Then say which of them is the most surprising, and why people often get it wrong.",
)
SYSTEM = (
    "You are a careful assistant. You answer in plain words, you say what you don't know, and you keep to the point. "
    "If a question has several parts, you answer each of them in the order in which it was asked. "
)
PROMPTS = [SYSTEM * (i % 3) + form.format(topic) for i, topic in enumerate(TOPICS) for form in FORMS]
GREEDY = {"temperature": 0.0, "max_tokens": 48}
TREES = {"heads": str(DEMO / "heads"), "nodes": 8}


def frozen(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@functools.cache
def _session(given: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, str(HERE / "vllm_session.py")], input=given, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-6000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def session(calls: list[dict[str, Any]], *, trees: Any = None, sabotage: str | None = None, **engine: Any) -> Any:
    engine = {"model": str(DEMO), "dtype": "float32", "max_num_seqs": 8, "block_size": 32} | engine
    environment = engine.pop("environment", {})
    given = {"engine": engine, "trees": trees, "sabotage": sabotage, "calls": calls, "environment": environment}
    return _session(frozen(given))


def tokens(result: Any) -> list[list[int]]:
    return [request[0] for call in result["calls"] for request in call["tokens"]]


def greedy_calls(count: int = 40) -> list[dict[str, Any]]:
    """All at once, eight at a time; then alone, where the prefix cache has the prompts."""
    return [
        {"prompts": PROMPTS[:count], "params": GREEDY},
        {"prompts": PROMPTS[:count], "params": GREEDY, "alone": True},
    ]


def accepted_drafts(result: Any) -> int:
    return int(result["metrics"]["vllm:spec_decode_num_accepted_tokens"])


def tokens_per_step(result: Any) -> float:
    return 1 + accepted_drafts(result) / result["metrics"]["vllm:spec_decode_num_drafts"]


@pytest.mark.parametrize("cached", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("kind", ["attention", "trees"])
def test_greedy_tokens(kind: str, cached: bool) -> None:
    """40 prompts in batches of eight and alone. vLLM itself finds the plugin."""
    engine = {"enable_prefix_caching": cached}
    own = session(greedy_calls(), **engine)
    extra = {"attention_backend": "CUSTOM"} if kind == "attention" else {"trees": TREES}
    ours = session(greedy_calls(), **engine, **extra)
    assert tokens(ours) == tokens(own)
    assert any(ours["calls"][1]["cached"]) == cached
    if kind == "trees":
        assert accepted_drafts(ours) > 1000


@pytest.mark.parametrize("fault", ["no commit", "causal mask", "chain positions"])
def test_the_comparison_finds_faults(fault: str) -> None:
    own = session(greedy_calls())
    ours = session(greedy_calls()[:1], trees=TREES, sabotage=fault)
    wrong = sum(a != b for a, b in zip(tokens(ours), tokens(own), strict=False))
    assert wrong >= 10, wrong


def test_tokens_per_step() -> None:
    """As many tokens per step as this package's engine with the same tree; seconds are printed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    with specmemo_kernels.patch(model, TREES["heads"], tree=TREES["nodes"]) as handle:
        for prompt in PROMPTS:
            model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=48, do_sample=False)
        engine = handle.stats.tokens_per_step
    ours, own = session(greedy_calls(), trees=TREES), session(greedy_calls())
    print(f"tokens per step {tokens_per_step(ours):.3f}, engine {engine:.3f}")
    print(f"seconds alone {ours['calls'][1]['seconds']:.2f}, vLLM's own {own['calls'][1]['seconds']:.2f}")
    assert tokens_per_step(ours) >= 0.95 * engine


def test_small_chunks_and_long_prompts() -> None:
    """Prompts in chunks of at most 64 tokens beside trees; generation up to the longest sequence, off the tree's
    size."""
    long = [[5 + (7 * i + 13 * j) % 4000 for j in range(length)] for i, length in enumerate((1, 63, 64, 65, 200, 331))]
    calls = [{"prompts": long * 2, "params": GREEDY | {"max_tokens": 400, "ignore_eos": True}}]
    engine = {"max_num_batched_tokens": 64, "max_model_len": 347, "max_num_seqs": 5}
    own, ours = session(calls, **engine), session(calls, trees=TREES, **engine)
    assert tokens(ours) == tokens(own)
    assert [len(row) + len(prompt) for row, prompt in zip(tokens(ours), long * 2, strict=True)] == [347] * 12
    assert accepted_drafts(ours) > 300


def test_preemption_and_aborts() -> None:
    """With few blocks requests are preempted and computed again; every other request is aborted on the way."""
    calls = [
        {"prompts": PROMPTS[:24], "params": GREEDY | {"max_tokens": 200, "ignore_eos": True}},
        {"prompts": PROMPTS[:24], "params": GREEDY | {"max_tokens": 90, "ignore_eos": True}, "abort_after": 17},
    ]
    engine = {"num_gpu_blocks_override": 24, "block_size": 32, "max_num_seqs": 8, "max_model_len": 320}
    plain = [{name: value for name, value in call.items() if name != "abort_after"} for call in calls]
    own, ours = session(plain, max_model_len=320), session(calls, trees=TREES, **engine)
    assert ours["metrics"]["vllm:num_preemptions"] > 0
    for index, (got, expected) in enumerate(zip(tokens(ours), tokens(own), strict=True)):
        aborted = index >= 24 and index % 2
        assert got == (expected[: len(got)] if aborted else expected)
        assert not aborted or 17 <= len(got) < 90


def test_logprobs_of_the_accepted_path() -> None:
    """Log-probabilities and ranks of emitted tokens and of prompts."""
    params = GREEDY | {"max_tokens": 20, "logprobs": 4, "prompt_logprobs": 2}
    calls = [{"prompts": PROMPTS[:8], "params": params}]
    own, ours = session(calls), session(calls, trees=TREES)
    assert tokens(ours) == tokens(own)
    assert accepted_drafts(ours) > 20
    for name in ("logprobs", "prompt_logprobs"):
        for got, expected in zip(ours["calls"][0][name], own["calls"][0][name], strict=True):
            assert len(got) == len(expected)
            for step, oracle in zip(got, expected, strict=True):
                assert (step is None) == (oracle is None)
                if step is None:
                    continue
                assert step.keys() == oracle.keys()
                for token, (value, rank) in step.items():
                    assert value == pytest.approx(oracle[token][0], abs=1e-4)
                    assert rank == oracle[token][1]


SAMPLING = [
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.6, "top_p": 0.9, "seed": 2},
    {"temperature": 1.0, "top_k": 20, "seed": 3, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.5, "presence_penalty": 0.6, "frequency_penalty": 0.4, "seed": 5},
    {"temperature": 0.0, "min_tokens": 30},
    {"temperature": 0.0, "bad_words": ["the", " and"]},
    {"temperature": 0.3, "seed": 6, "allowed_token_ids": list(range(200, 900))},
    {"temperature": 0.0, "stop": ["."], "max_tokens": 60},
    {"temperature": 0.9, "seed": 7, "n": 3},
]


@pytest.mark.parametrize("batch", [1, 8])
def test_sampling(batch: int) -> None:
    """Sampling parameters, with seeds: vLLM's own tokens, in mixed batches and alone.

    vLLM itself refuses min_p and logit_bias with any speculation.
    """
    params = [{"max_tokens": 40, **SAMPLING[i % len(SAMPLING)]} for i in range(24)]
    calls = [{"prompts": PROMPTS[:24], "params": params}]
    own, ours = session(calls, max_num_seqs=batch), session(calls, trees=TREES, max_num_seqs=batch)
    for got, expected, asked in zip(ours["calls"][0]["tokens"], own["calls"][0]["tokens"], params, strict=True):
        assert got == expected, asked
    assert ours["calls"][0]["reasons"] == own["calls"][0]["reasons"]
    assert accepted_drafts(ours) > 100


def test_structured_output() -> None:
    """Grammars beside other requests: they get no drafts, the others do."""
    choice = GREEDY | {"choices": {"choice": ["yes, always", "no, never", "it depends on the day"]}}
    regex = GREEDY | {"choices": {"regex": r"[a-z]{3,9}-[0-9]{2}"}}
    params = [(choice, regex, GREEDY)[i % 3] for i in range(12)]
    calls = [{"prompts": PROMPTS[:12], "params": params}]
    own, ours = session(calls), session(calls, trees=TREES)
    assert tokens(ours) == tokens(own)
    assert accepted_drafts(ours) > 40


def test_tensor_parallel() -> None:
    own = session(greedy_calls(12))
    engine = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_SGL_KERNEL": "0"}}
    ours = session(greedy_calls(12), trees=TREES, **engine)
    assert tokens(ours) == tokens(own)
    assert accepted_drafts(ours) > 200


def test_engine_in_another_process() -> None:
    """vLLM's default: the engine and its worker get the configuration by message."""
    engine = {"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}}
    own, ours = session(greedy_calls(8)), session(greedy_calls(8), trees=TREES, **engine)
    assert tokens(ours) == tokens(own)


def test_bfloat16() -> None:
    """Rounding may change a token; most of an answer's beginning is the same."""
    own = session(greedy_calls(16), dtype="bfloat16")
    ours = session(greedy_calls(16), trees=TREES, dtype="bfloat16")
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
        for x, y in zip(tokens(ours), tokens(own), strict=True)
    ]
    assert sum(same) / len(same) > 0.5 * GREEDY["max_tokens"], same
    assert accepted_drafts(ours) > 200


def _llama(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(num_attention_heads=6, num_key_value_heads=2, **changes)


def _mistral(**changes: Any) -> Any:
    from transformers import MistralConfig

    return MistralConfig(num_attention_heads=4, num_key_value_heads=1, sliding_window=24, **changes)


def _gemma2(**changes: Any) -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(
        num_attention_heads=4, num_key_value_heads=2, sliding_window=24, query_pre_attn_scalar=32, **changes
    )


def _qwen3(**changes: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(num_attention_heads=4, num_key_value_heads=4, **changes)


@pytest.mark.parametrize("family", [_llama, _mistral, _gemma2, _qwen3], ids=["gqa", "window", "softcap", "qk-norm"])
@pytest.mark.parametrize("kind", ["attention", "trees"])
def test_families(family: Any, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Random models of 29 tokens, so that random heads' wide trees are accepted often; contexts beyond the window."""
    folder, heads = _random_model(family, tmp_path_factory.mktemp("model"))
    prompts = [[3 + (i * j) % 26 for j in range(length)] for i, length in enumerate((5, 17, 40, 90), 2)]
    calls = [{"prompts": prompts, "params": {"temperature": 0.0, "max_tokens": 70, "ignore_eos": True}}]
    engine = {"model": folder, "skip_tokenizer_init": True, "max_model_len": 256, "block_size": 32}
    calls[0]["params"]["detokenize"] = False
    own = session(calls, **engine)
    paths = [[a] for a in range(12)] + [[0, a] for a in range(8)] + [[0, 0, a] for a in range(4)]
    extra = {"attention_backend": "CUSTOM"} if kind == "attention" else {"trees": {"heads": heads, "tree": paths}}
    ours = session(calls, **engine, **extra)
    assert tokens(ours) == tokens(own)
    if kind == "trees":
        assert accepted_drafts(ours) > 20


def _random_model(family: Any, folder: Path) -> tuple[str, str]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 96 if family is _llama else 128, "intermediate_size": 160, "num_hidden_layers": 3}
    config = family(vocab_size=29, max_position_embeddings=512, head_dim=32, **sizes)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # large enough that the tokens depend on the context
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    model.save_pretrained(folder)
    heads = MedusaHeads(sizes["hidden_size"], 29, 3)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    heads.save_pretrained(folder / "heads")
    return str(folder), str(folder / "heads")


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "clover2", "dflash"])
def test_drafters_that_read_hidden_states(kind: str, tmp_path: Path) -> None:
    """Random drafters for a random model of 29 tokens: vLLM's tokens, through chunks, preemption and cached prefixes,
    and as many tokens per step as this package's engine with the same trees."""
    folder, _ = _random_model(_llama, tmp_path)
    files = _drafter_files(kind, tmp_path / kind)
    prompts = [[3 + (i * j) % 26 for j in range(length)] for i, length in enumerate((5, 17, 40, 90, 33), 2)]
    call = {"prompts": prompts, "params": {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}}
    call["params"]["detokenize"] = False
    calls = [call, call | {"alone": True}]
    engine = {"model": folder, "skip_tokenizer_init": True, "max_model_len": 256, "block_size": 32}
    own = session(calls, **engine)
    few = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "num_gpu_blocks_override": 12}
    ours = session(calls, **engine | few, trees={"heads": files, "nodes": 12})
    assert tokens(ours) == tokens(own)
    assert any(ours["calls"][1]["cached"])
    assert accepted_drafts(ours) > 30
    plain = session([call], **engine, enable_prefix_caching=False, trees={"heads": files, "nodes": 12})
    engine_steps = _engine_tokens_per_step(folder, files, prompts)
    print(f"{kind}: tokens per step {tokens_per_step(plain):.3f}, engine {engine_steps:.3f}")
    assert tokens(plain) == tokens(own)[: len(prompts)]
    assert tokens_per_step(plain) >= 0.95 * engine_steps


def _engine_tokens_per_step(folder: str, drafter: str, prompts: list[list[int]]) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with specmemo_kernels.patch(model, drafter, tree=12) as handle:
        for prompt in prompts:
            ids = torch.tensor([prompt])
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, min_new_tokens=60)
        return handle.stats.tokens_per_step


def _drafter_files(kind: str, folder: Path) -> str:
    sizes: dict[str, Any] = {"vocab": 29, "hidden": 96}
    if kind == "dflash":
        write_dflash(folder, target_layer_ids=(0, 1), num_target_layers=3, block_size=5, **sizes)
    else:
        {"eagle3": write_eagle3, "eagle": write_eagle1, "clover2": write_clover2}[kind](folder, **sizes)
    return str(folder)


def test_triton_in_the_interpreter() -> None:
    """The Triton kernels over vLLM's blocks."""
    pytest.importorskip("triton")
    calls = [{"prompts": PROMPTS[:2], "params": GREEDY | {"max_tokens": 12}}]
    own = session(calls)
    ours = session(calls, trees=TREES | {"backend": "triton"}, environment={"TRITON_INTERPRET": "1"})
    assert tokens(ours) == tokens(own)


def error(**changes: Any) -> str:
    """The message with which an engine refuses to start."""
    given = {"engine": {"model": str(DEMO), "dtype": "float32"}, "calls": []} | changes
    run = subprocess.run(
        [sys.executable, str(HERE / "vllm_session.py")],
        input=json.dumps(given), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode != 0
    return run.stderr


ENGINE = {"model": str(DEMO), "dtype": "float32"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"engine": ENGINE | {"attention_backend": "CPU_ATTN"}, "trees": TREES}, "CPU_ATTN can't verify draft trees"),
        ({"engine": ENGINE | {"worker_cls": "auto"}, "trees": TREES}, "TreeWorker"),
        ({"trees": TREES, "engine": ENGINE | {"additional_config": {}}}, "doesn't name the heads"),
        (
            {"trees": TREES, "engine": ENGINE | {"additional_config": {"specmemo": {"head": "x"}}}},
            "has no option head",
        ),
        ({"trees": {"heads": str(DEMO / "heads"), "tree": [[0], [0, 0], [0, 0, 0]] + [[0] * d for d in range(4, 8)]}},
         "the tree is 7 deep, the drafter guesses 5 tokens ahead"),
        ({"engine": ENGINE | {"attention_backend": "CUSTOM", "kv_cache_dtype": "bfloat16"}},
         "kv_cache_dtype not supported"),
        ({"trees": TREES, "sabotage": "version"}, "supports 0.32.*, and vLLM 9.9.9 is installed"),
    ],
    ids=["another backend", "another worker", "no heads", "unknown option", "too deep", "KV dtype", "another version"],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], sentence: str) -> None:
    assert sentence in error(**changes)
