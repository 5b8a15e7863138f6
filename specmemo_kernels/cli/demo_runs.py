"""The runs behind ``specmemo demo``: one model plain and patched, timed, weighed and compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specmemo_kernels.cli.common import load_model, load_tokenizer
from specmemo_kernels.cli.env import collect_env
from specmemo_kernels.cli.errors import UserError
from specmemo_kernels.integrations.hf.chat import longest_text
from specmemo_kernels.integrations.hf.patch import patch
from specmemo_kernels.planning.memory_tracker import MemoryTracker

SIDES = ("plain", "patched")
LEAST_PROMPT = 32


@dataclass(frozen=True)
class Prompt:
    """A piece of a file to be completed; ``ids`` is ``[1, L]``."""

    title: str
    text: str
    ids: torch.Tensor


@dataclass
class PromptResult:
    """What the timed runs of one prompt gave; seconds are medians over the rounds, steps and tokens of one run."""

    title: str
    prompt_tokens: int
    new_tokens: int
    steps: int
    step_tokens: int
    plain_seconds: float
    patched_seconds: float
    same_tokens: bool


@dataclass
class DemoResult:
    """Everything in the closing table."""

    prompts: list[PromptResult]
    memory: dict[str, dict[str, int]]
    memory_prompt_tokens: int
    tree_nodes: int
    rounds: int

    def rate(self, side: str) -> float:
        """Tokens per second, the median over prompts."""
        seconds = [p.plain_seconds if side == "plain" else p.patched_seconds for p in self.prompts]
        return statistics.median(p.new_tokens / s for p, s in zip(self.prompts, seconds, strict=True))

    @property
    def speedup(self) -> float:
        """How much faster patched is, the median over prompts."""
        return statistics.median(p.plain_seconds / p.patched_seconds for p in self.prompts)

    @property
    def tokens_per_step(self) -> float:
        return sum(p.step_tokens for p in self.prompts) / max(1, sum(p.steps for p in self.prompts))

    @property
    def equal(self) -> int:
        """Prompts whose every run gave the same tokens, plain and patched."""
        return sum(p.same_tokens for p in self.prompts)

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens_per_second": {side: self.rate(side) for side in SIDES},
            "speedup": self.speedup,
            "tokens_per_step": self.tokens_per_step,
            "equal_prompts": self.equal,
            "memory_bytes": self.memory,
            "memory_prompt_tokens": self.memory_prompt_tokens,
            "tree_nodes": self.tree_nodes,
            "rounds": self.rounds,
            "prompts": [asdict(p) for p in self.prompts],
            "environment": collect_env(),
        }


class Pair:
    """The same model twice, plain and patched, so that neither run can touch the other."""

    def __init__(
        self,
        folder: Path,
        max_new_tokens: int,
        tree: int | None,
        memory_budget: str | None,
        device: torch.device,
        backend: str | None,
        kv_dtype: str | None = None,
    ) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.models = {side: load_model(folder, torch.float32, device) for side in SIDES}
        self.handle = patch(
            self.models["patched"],
            heads=folder / "heads",
            memory_budget=memory_budget,
            tree=tree,
            backend=backend,
            max_batch_size=1,
            kv_dtype=kv_dtype,
            reuse_prefix=False,  # each round computes its prompt, as the plain side does
        )
        self.max_new_tokens = max_new_tokens
        total = longest_text(self.models["patched"])
        self.room = total - max_new_tokens
        if self.room < LEAST_PROMPT:
            raise UserError(
                f"--max-new-tokens {max_new_tokens} leaves {self.room} of {total} tokens for a prompt, "
                f"a prompt needs at least {LEAST_PROMPT}"
            )

    def generate(self, side: str, prompt: Prompt, max_new_tokens: int | None = None, **kwargs: Any) -> Any:
        """Run one side greedily; returns what transformers' ``generate`` returns."""
        ids = prompt.ids.to(self.models[side].device)
        return self.models[side].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            do_sample=False,
            **kwargs,
        )


def measure(pair: Pair, prompts: list[Prompt], rounds: int, tick: Callable[[], None]) -> list[PromptResult]:
    """Time every prompt, plain and patched in turns so that a busy machine slows both."""
    results = []
    stats = pair.handle.stats
    for prompt in prompts:
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        outputs: list[list[int]] = []
        for turn in range(rounds):
            for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                stats.reset()
                started = time.perf_counter()
                output = pair.generate(side, prompt)[0].tolist()
                seconds[side].append(time.perf_counter() - started)
                outputs.append(output)
                if side == "patched":
                    steps, step_tokens = stats.steps, stats.tokens
                tick()
        results.append(
            PromptResult(
                title=prompt.title,
                prompt_tokens=prompt.ids.shape[1],
                new_tokens=len(outputs[0]) - prompt.ids.shape[1],
                steps=steps,
                step_tokens=step_tokens,
                plain_seconds=statistics.median(seconds["plain"]),
                patched_seconds=statistics.median(seconds["patched"]),
                same_tokens=all(output == outputs[0] for output in outputs),
            )
        )
    return results


def measure_memory(pair: Pair, prompt: Prompt) -> dict[str, dict[str, int]]:
    """Peak bytes of the tensors that one generation makes, by part; slow, so apart from the timing."""
    with MemoryTracker() as tracker:
        output = pair.generate("plain", prompt, return_dict_in_generate=True)
    layers = output.past_key_values.layers
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    plain = {"KV cache": cache, "everything else at the peak": tracker.peak - cache}
    del output, layers
    pair.handle.release()  # so that the pages are made, and counted, inside
    with MemoryTracker() as tracker:
        pair.generate("patched", prompt)
    parts = pair.handle.bytes_by_part
    held = parts["kv_pages"] + parts["tree_scratch"]
    patched = {
        "KV cache": parts["kv_pages"],
        "candidates' KV": parts["tree_scratch"],
        "everything else at the peak": tracker.peak - held,
        "kernels' workspace": pair.handle.plan.parts["workspace"],
        "heads": parts["heads"],
    }
    return {"plain": plain, "patched": patched}
