"""The runs of ``specmemo demo``: time and memory of one model, plain and patched."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specmemo_kernels.cli.common import load_model, load_tokenizer, patch_arguments
from specmemo_kernels.cli.env import collect_env
from specmemo_kernels.cli.errors import UserError
from specmemo_kernels.cli.options import DemoOptions
from specmemo_kernels.integrations.hf.cache_argument import CACHE_ARGUMENT
from specmemo_kernels.integrations.hf.chat import longest_text
from specmemo_kernels.integrations.hf.patch import patch
from specmemo_kernels.planning.host_allocator import allocated_bytes, free_library_buffers
from specmemo_kernels.planning.memory_tracker import MemoryTracker

SIDES = ("plain", "patched")
#: Sampling of the completions on the screen: 6 % of the lines are repetitions, 41 % in greedy completions (six prompts
#: of 128 tokens).
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
MIN_PROMPT = 32


@dataclass(frozen=True)
class Prompt:
    """A text to complete; ``ids`` is ``[1, L]``."""

    title: str
    text: str
    ids: torch.Tensor


@dataclass
class PromptResult:
    """Timed runs of one prompt; seconds are medians over the rounds, steps and tokens of one run."""

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
    """The figures of the closing table."""

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
        """Plain seconds over patched seconds, the median over prompts."""
        return statistics.median(p.plain_seconds / p.patched_seconds for p in self.prompts)

    @property
    def tokens_per_step(self) -> float:
        return sum(p.step_tokens for p in self.prompts) / max(1, sum(p.steps for p in self.prompts))

    @property
    def equal(self) -> int:
        """Number of prompts whose runs all gave the same tokens."""
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
    """The same model loaded twice, plain and patched, so that the runs share no state."""

    def __init__(self, folder: Path, device: torch.device, options: DemoOptions) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.models = {side: load_model(folder, torch.float32, device) for side in SIDES}
        # Without prefix reuse each round computes its prompt, as the plain side does.
        arguments = patch_arguments(options)
        self.handle = patch(self.models["patched"], folder / "heads", reuse_prefix=False, **arguments)
        self.max_new_tokens = options.max_new_tokens
        total = longest_text(self.models["patched"])
        self.room = total - self.max_new_tokens
        if self.room < MIN_PROMPT:
            raise UserError(
                f"--max-new-tokens {self.max_new_tokens} leaves {self.room} of {total} tokens for a prompt, "
                f"a prompt needs at least {MIN_PROMPT}"
            )

    def generate(self, side: str, prompt: Prompt, max_new_tokens: int | None = None, **kwargs: Any) -> Any:
        """``generate`` of one side, greedy by default."""
        ids = prompt.ids.to(self.models[side].device)
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens or self.max_new_tokens,
            "do_sample": False,
            **kwargs,
        }
        return self.models[side].generate(ids, attention_mask=torch.ones_like(ids), **options)

    def sample(self, side: str, prompt: Prompt, streamer: Any) -> None:
        """Stream a completion with :data:`SAMPLING`, from the same seed on both sides."""
        torch.manual_seed(0)
        self.generate(side, prompt, streamer=streamer, **SAMPLING)


def measure(pair: Pair, prompts: list[Prompt], rounds: int, tick: Callable[[], None]) -> list[PromptResult]:
    """Time every prompt, plain and patched in turns, so that other load on the machine slows both."""
    results, stats = [], pair.handle.stats
    for prompt in prompts:
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        outputs: list[list[int]] = []
        for turn in range(rounds):
            for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                stats.reset()
                started = time.perf_counter()
                outputs.append(pair.generate(side, prompt)[0].tolist())
                seconds[side].append(time.perf_counter() - started)
                if side == "patched":
                    steps, step_tokens = stats.steps, stats.tokens
                tick()
        results.append(
            PromptResult(
                title=prompt.title, prompt_tokens=prompt.ids.shape[1],
                new_tokens=len(outputs[0]) - prompt.ids.shape[1], steps=steps, step_tokens=step_tokens,
                plain_seconds=statistics.median(seconds["plain"]),
                patched_seconds=statistics.median(seconds["patched"]),
                same_tokens=all(output == outputs[0] for output in outputs),
            )
        )  # fmt: skip
    return results


def measure_memory(pair: Pair, prompt: Prompt) -> dict[str, dict[str, int]]:
    """Peak tensor bytes of one generation, by side and part. The tracker is slow, so these runs aren't timed.

    The plan has the buffers of libraries (MKL's) in its workspace, so those that the plain side leaves count, too.
    """
    free_library_buffers()  # of other runs
    with MemoryTracker() as tracker:
        output = pair.generate("plain", prompt, return_dict_in_generate=True)
    layers = output[CACHE_ARGUMENT].layers
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    plain = {"KV cache": cache, "everything else at the peak": tracker.peak - cache}
    del output, layers
    held = allocated_bytes()
    free_library_buffers()
    plain["workspace"] = held - allocated_bytes()
    pair.handle.release()  # so that the pages are allocated under the tracker
    with MemoryTracker() as tracker:
        pair.generate("patched", prompt)
    parts = pair.handle.bytes_by_part
    patched = {
        "KV cache": parts["kv_pages"],
        "candidates' KV": parts["tree_scratch"],
        "everything else at the peak": tracker.peak - parts["kv_pages"] - parts["tree_scratch"],
        "workspace": pair.handle.plan.parts["workspace"],
        "heads": parts["heads"],
    }
    return {"plain": plain, "patched": patched}
