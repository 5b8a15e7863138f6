"""The prompts of bench_batch.py (from Spec-Bench) and the sides that it compares."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import specmemo_kernels as sk
from specmemo_kernels.cli.common import load_model, load_tokenizer
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.step_attention import StepAttention
from specmemo_kernels.planning.memory_tracker import MemoryTracker

#: A forward pass: its rows, and the rows of the lm_head.
Pass = tuple[int, int]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DRAFTERS = ("medusa", "draft", "lookup")


@dataclass(frozen=True)
class Work:
    """Prompts, each continued by ``new_tokens`` tokens; EOS is ignored, so all sides write the same number."""

    model: Any
    tokenizer: Any
    prompts: list[list[int]]
    new_tokens: int

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))


@dataclass(frozen=True)
class Outcome:
    """New tokens per prompt, their seconds, the side's counters and, for this package, its forward passes."""

    answers: list[list[int]]
    seconds: float
    counts: dict[str, Any]
    passes: Counter[Pass] | None

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


def load_work(folder: Path, dtype: str, questions: Path, limit: int, new_tokens: int) -> Work:
    """First turns of the questions, cut to the last tokens that fit the model's context."""
    model = load_model(folder, DTYPES[dtype], torch.device("cpu"))
    model.generation_config.eos_token_id = None
    tokenizer = load_tokenizer(folder)
    room = model.config.max_position_embeddings - new_tokens - 16
    lines = questions.read_text(encoding="utf-8").splitlines()[:limit]
    texts = [json.loads(line)["turns"][0] for line in lines]
    return Work(model, tokenizer, [tokenizer(text, verbose=False).input_ids[-room:] for text in texts], new_tokens)


def first_layers(model: Any, layers: int) -> Any:
    """A draft model: the first layers of the model itself, its embedding, norm and lm_head."""
    config = type(model.config)(**(model.config.to_dict() | {"num_hidden_layers": layers}))
    small = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    small.load_state_dict(model.state_dict(), strict=False)
    small.generation_config.eos_token_id = None
    return small.eval()


def heads_for(drafter: str, work: Work, folder: Path, draft_layers: int) -> Any:
    """The ``heads`` argument of ``patch``."""
    if drafter == "draft":
        return sk.DraftModel(first_layers(work.model, draft_layers), tokens=5)
    return folder / "heads" if drafter == "medusa" else "prompt-lookup"


class Plain:
    """The unpatched model's generate over left-padded batches, in the order of the prompts."""

    def __init__(self, work: Work, batch: int, **options: Any) -> None:
        self.work, self.batch, self.options = work, batch, options

    def answer(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        answers: list[list[int]] = []
        for first in range(0, len(prompts), self.batch):
            rows = prompts[first : first + self.batch]
            longest = max(map(len, rows))
            device = self.work.model.device
            ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
            output = self.work.model.generate(
                ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, **self.options
            )
            answers += output[:, longest:].tolist()
        return answers

    def held_bytes(self) -> int:
        """Bytes that stay allocated between calls, besides the model."""
        return 0

    passes = None

    def reset(self) -> None:
        """No counters."""

    def counts(self) -> dict[str, Any]:
        return {"tokens_per_step": None if self.options else 1.0}

    def close(self) -> None:
        """Nothing to undo."""


class Ours:
    """``generate_batch`` on a patched model of its own, ``batch`` prompts at a time.

    With ``disturb``, requests are submitted in reverse order, and every seventh is aborted after its first piece and
    submitted again.
    """

    def __init__(
        self, model: Any, heads: Any, batch: int, budget: str | int | None, disturb: bool, tree: int | None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.model, self.disturb = model, disturb
        self.handle = sk.patch(
            model, heads, max_batch_size=batch, memory_budget=budget, tree=tree, reuse_prefix=False,
            graph=False,  # passes of captured steps can't be counted
            **options,
        )  # fmt: skip
        self.passes: Counter[Pass] = Counter()
        forward = self.handle.target.forward

        def counting(batch: TreeBatch, attention: StepAttention, keep: torch.Tensor | None, logits: bool) -> Any:
            rows = len(batch.tokens)
            self.passes[rows, rows if keep is None else len(keep)] += 1
            return forward(batch, attention, keep, logits)

        vars(self.handle.target)["forward"] = counting

    def answer(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        if self.disturb:
            return _disturbed(self.model, prompts, new_tokens)
        done = sk.generate_batch(self.model, prompts, max_new_tokens=new_tokens, eos_token_ids=[])
        return [completion.tokens for completion in done]

    def reset(self) -> None:
        """Reset the counters."""
        self.handle.stats.reset()
        self.passes.clear()

    def held_bytes(self) -> int:
        self.handle.release()
        return self.handle.drafter.nbytes

    def counts(self) -> dict[str, Any]:
        stats, plan = self.handle.stats, self.handle.plan
        committed = stats.prefill_tokens + sum(stats.accepted_at_depth) + stats.sequence_steps
        slot = sum(layer.bytes_per_token for layer in self.handle.facts.layers)
        return {
            "tokens_per_step": stats.tokens_per_step,
            "preemptions": stats.preemptions,
            "tree_nodes": plan.tree.size,
            "kv_bytes_written": stats.slots_written * slot,
            "kv_bytes_committed": (committed + stats.recomputed_tokens) * slot,
            "steps": stats.steps,
        }

    def close(self) -> None:
        sk.unpatch(self.model)


Side = Plain | Ours


def take_turns(work: Work, sides: dict[str, Side], group: int) -> dict[str, Outcome]:
    """Run ``group`` prompts on every side, then the next ``group``, so that machine noise affects all sides alike.

    Each side first warms up on the first group.
    """
    answers: dict[str, list[list[int]]] = {name: [] for name in sides}
    seconds = dict.fromkeys(sides, 0.0)
    for side in sides.values():
        side.answer(work.prompts[:group], 2)
        side.reset()
    for first in range(0, len(work.prompts), group):
        for name, side in sides.items():
            started = time.perf_counter()
            answers[name] += side.answer(work.prompts[first : first + group], work.new_tokens)
            seconds[name] += time.perf_counter() - started
    return {
        name: Outcome(answers[name], seconds[name], side.counts(), side.passes and side.passes.copy())
        for name, side in sides.items()
    }


def peak_bytes(side: Side, work: Work, batch: int) -> int:
    """Peak tensor bytes of a generation over two batches of prompts, heads or draft model included."""
    held = side.held_bytes()
    with MemoryTracker() as tracker:
        side.answer(work.prompts[: 2 * batch], min(16, work.new_tokens))
    return tracker.peak + held


def _disturbed(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    order = list(reversed(range(len(prompts))))
    aborted = [i for i in order if i % 7 == 3]
    submitted = [*order, *aborted]
    answers: dict[int, list[int]] = {}
    texts = [prompts[i] for i in submitted]
    with sk.stream_batch(model, texts, max_new_tokens=new_tokens, eos_token_ids=[]) as run:
        for piece in run:
            if piece.index < len(order) and order[piece.index] in aborted and not piece.finished:
                run.abort(piece.index)
        for i, completion in zip(submitted, run.completions(), strict=True):
            if completion.finish_reason != "aborted":
                answers[i] = completion.tokens
    return [answers[i] for i in range(len(prompts))]


def matches(work: Work, answers: list[list[int]], reference: list[list[int]]) -> tuple[float, float]:
    """Exact and partial match as "Batch Speculative Decoding Done Right" defines them.

    Means over the prompts: equality of the decoded strings; length of the common prefix over the reference's length.
    """
    exact, partial = 0, 0.0
    for answer, expected in zip(answers, reference, strict=True):
        text, expected_text = work.text(answer), work.text(expected)
        exact += text == expected_text
        pairs = enumerate(zip(text, expected_text, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), len(expected_text))
        partial += min(same, len(text)) / max(1, len(expected_text))
    return exact / len(reference), partial / len(reference)


@torch.no_grad()
def near_ties(work: Work, exact_model: Any, answers: list[list[int]], reference: list[list[int]]) -> dict[str, int]:
    """Count the rows that differ, and those whose first difference is a near tie.

    In a near tie the two tokens' float32 logits differ by less than bfloat16's error: twice the largest error of any
    logit at that position, at least one unit in the last place of the larger logit.
    """
    differ = ties = 0
    for prompt, answer, expected in zip(work.prompts, answers, reference, strict=True):
        position = next((i for i, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b), None)
        if position is None:
            continue
        differ += 1
        ids = torch.tensor([prompt + expected[:position]])
        pair = [answer[position], expected[position]]
        exact, rounded = (model(ids).logits[0, -1].float() for model in (exact_model, work.model))
        band = 2 * float((exact - rounded).abs().max())
        ulp = float(rounded[pair].abs().max()) * 2**-7
        ties += float((exact[pair[0]] - exact[pair[1]]).abs()) <= max(band, ulp)
    return {"rows_that_differ": differ, "near_ties": ties}
