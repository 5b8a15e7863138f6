"""One engine in a process of its own, for bench_engines.py.

    python bench/engine_worker.py ENGINE SETUP

SETUP is JSON (:class:`Setup`). Each line of standard input is a job (``prompts``, ``new_tokens``, ``watch``), each line
of standard output its result (``tokens``, ``seconds``, ``first_token_seconds``, ``bytes``). The weights are loaded
before anything else; ``bytes`` is the peak of anonymous resident memory beyond that, sampled if ``watch`` is true.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Tokens = list[list[int]]


@dataclass(frozen=True)
class Setup:
    """What an engine runs: a model folder with ``model.gguf``, a dtype, at most ``batch`` prompts of ``slots`` tokens
    (new ones included), whether acceptance is replayed, and this package's ``memory_budget`` and
    ``prefill_chunk``."""

    folder: str
    dtype: str
    batch: int
    slots: int
    threads: int
    replay: bool
    budget: str | None = None
    chunk: int = 256


class Engine:
    """An engine to measure; its constructor loads the model.

    ``generate`` calls ``first`` once, when every prompt has its first token. ``tokens_per_step``: of the last call, if
    the engine counts its steps. ``model_bytes``: of the model's weights as the engine keeps them. ``own_bytes``: of
    those that ``start`` made, in anonymous memory.
    """

    tokens_per_step: float | None = None
    model_bytes: int | None = None
    own_bytes = 0

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def start(self) -> None:
        """Allocate what generation needs, besides the model's weights."""

    def generate(self, prompts: Tokens, new_tokens: int, first: Callable[[], None]) -> Tokens:
        raise NotImplementedError


class Transformers(Engine):
    """``generate`` of transformers, in left-padded batches."""

    def __init__(self, setup: Setup, **options: Any) -> None:
        super().__init__(setup)
        import torch

        from specmemo_kernels.cli.common import load_model

        torch.set_num_threads(setup.threads)
        self.options, self.torch = options, torch
        self.model = load_model(setup.folder, getattr(torch, setup.dtype), torch.device("cpu"))
        self.model.generation_config.eos_token_id = None
        storages = {p.data_ptr(): p.nbytes for p in self.model.parameters()}  # tied ones once
        self.model_bytes = sum(storages.values())

    def generate(self, prompts: Tokens, new_tokens: int, first: Callable[[], None]) -> Tokens:
        class Streamer:  # the first put is the prompt, so the second marks the first token
            puts = 0

            def put(self, _: Any) -> None:
                self.puts += 1
                if self.puts == 2:
                    first()

            def end(self) -> None: ...

        ids = self.torch.tensor(prompts)
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        if len(prompts) == 1:
            options["streamer"] = Streamer()
        output = self.model.generate(ids, attention_mask=self.torch.ones_like(ids), **options, **self.options)
        return [row[len(prompts[0]) :] for row in output.tolist()]


class Ours(Transformers):
    """This package with prompt lookup, Medusa heads, or EAGLE-3 with chains of four drafts.

    Acceptance of random drafters is replayed. ``options``: of :func:`specmemo_kernels.patch`.
    """

    def __init__(self, setup: Setup, drafter: str, tree: Any = None, **options: Any) -> None:
        super().__init__(setup)
        import replay
        import shapes

        import specmemo_kernels as sk
        from specmemo_kernels import ops

        # All modules are loaded, as the other engines do, before memory is counted.
        ops.kernels(None, self.model.device)
        self.patch, self.stream_batch, self.shapes, self.replay = sk.patch, sk.stream_batch, shapes, replay
        self.drafter, self.tree, self.patch_options = drafter, tree, options

    def start(self) -> None:
        heads: Any = self.drafter
        if heads == "heads":
            random = self.setup.replay
            heads = (
                self.shapes.random_heads(self.model, 4, own_lm_head=False) if random else f"{self.setup.folder}/heads"
            )
        if heads == "eagle3":
            heads = f"{self.setup.folder}/eagle3"
        self.handle = self.patch(
            self.model, heads, tree=self.tree, max_batch_size=self.setup.batch, reuse_prefix=False,
            memory_budget=self.setup.budget, context=self.setup.slots, prefill_chunk=self.setup.chunk,
            **self.patch_options,
        )  # fmt: skip
        self.own_bytes = self.handle.compressed.nbytes
        self.model_bytes -= self.handle.compressed.saved_bytes
        self.target: Any = None
        self.texts = 0  # each has draws of its own
        if self.setup.replay and self.tree != 1:
            published = self.replay.PublishedChain() if self.drafter == "eagle3" else self.replay.Published()
            self.target, self.ranks = self.replay.ReplayedTarget(self.handle.target), published.ranks
            self.handle.target = self.target

    def generate(self, prompts: Tokens, new_tokens: int, first: Callable[[], None]) -> Tokens:
        if self.target is not None:
            first_text, self.texts = self.texts, self.texts + len(prompts)
            self.target.begin([self.ranks(text, 0, new_tokens + 8) for text in range(first_text, self.texts)])
        tokens: Tokens = [[] for _ in prompts]
        waiting = set(range(len(prompts)))
        self.handle.stats.reset()
        with self.stream_batch(self.model, prompts, max_new_tokens=new_tokens, eos_token_ids=[]) as run:
            for piece in run:
                tokens[piece.index] += piece.tokens
                if waiting:
                    waiting.discard(piece.index)
                    if not waiting:
                        first()
        self.tokens_per_step = self.handle.stats.tokens_per_step
        return tokens


class LlamaCpp(Engine):
    """llama.cpp through llama-cpp-python's low-level interface: a ``llama_decode`` per token of all sequences."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import llama_cpp
        import numpy

        self.lib, self.numpy = llama_cpp, numpy
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(f"{setup.folder}/model.gguf".encode(), params)
        if not self.model:
            raise OSError(f"llama.cpp can't load {setup.folder}/model.gguf")
        self.model_bytes = int(llama_cpp.llama_model_size(self.model))
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def start(self) -> None:
        lib, setup = self.lib, self.setup
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = setup.batch * setup.slots, setup.batch
        params.n_threads = params.n_threads_batch = setup.threads
        if setup.dtype == "float32":
            params.type_k = params.type_v = lib.GGML_TYPE_F32
        self.context = lib.llama_init_from_model(self.model, params)
        self.rows = lib.llama_n_batch(self.context)
        self.batch = lib.llama_batch_init(self.rows, 0, 1)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Decode rows ``(token, position, sequence, needs_logits)``; returns the argmax of rows that need logits."""
        batch, lib = self.batch, self.lib
        best: list[int] = []
        for start in range(0, len(rows), self.rows):
            part = rows[start : start + self.rows]
            batch.n_tokens = len(part)
            for i, (token, position, sequence, needs_logits) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, needs_logits
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if code := lib.llama_decode(self.context, batch):
                raise RuntimeError(
                    f"llama_decode returned {code} for {len(part)} rows, expected 0; check batch and slots"
                )
            for i, row in enumerate(part):
                if row[3]:
                    logits = lib.llama_get_logits_ith(self.context, i)
                    best.append(int(self.numpy.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax()))
        return best

    def passes(self, prompt: list[int], rows: int) -> Callable[[], None]:
        """A call that verifies ``rows`` tokens behind ``prompt`` in one pass and removes them from the cache."""
        memory = self.lib.llama_get_memory(self.context)
        self.lib.llama_memory_clear(memory, True)
        self.decode([(token, i, 0, False) for i, token in enumerate(prompt)])
        batch = [(prompt[i % len(prompt)], len(prompt) + i, 0, True) for i in range(rows)]

        def run() -> None:
            self.decode(batch)
            self.lib.llama_memory_seq_rm(memory, 0, len(prompt), -1)

        return run

    def generate(self, prompts: Tokens, new_tokens: int, first: Callable[[], None]) -> Tokens:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        rows = [
            (token, i, sequence, i == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for i, token in enumerate(prompt)
        ]
        tokens = [[token] for token in self.decode(rows)]
        first()
        for step in range(new_tokens - 1):
            rows = [(tokens[s][-1], len(prompt) + step, s, True) for s, prompt in enumerate(prompts)]
            for row, token in zip(tokens, self.decode(rows), strict=True):
                row.append(token)
        return tokens


class LlamaCppLookup(LlamaCpp):
    """llama.cpp with prompt lookup: the drafts of llama-cpp-python's ``LlamaPromptLookupDecoding``, verified as its
    ``Llama`` class does. (That class needs a tokenizer.)"""

    def generate(self, prompts: Tokens, new_tokens: int, first: Callable[[], None]) -> Tokens:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(num_pred_tokens=10)
        (prompt,) = prompts
        memory = self.lib.llama_get_memory(self.context)
        self.lib.llama_memory_clear(memory, True)
        ids = list(prompt)
        ids += self.decode([(token, i, 0, i == len(prompt) - 1) for i, token in enumerate(prompt)])
        first()
        while (room := len(prompt) + new_tokens - len(ids)) > 0:
            guesses = draft(self.numpy.array(ids, self.numpy.intc)).tolist()[: room - 1]
            rows = [(token, len(ids) - 1 + i, 0, True) for i, token in enumerate([ids[-1], *guesses])]
            best = self.decode(rows)
            right = next((i for i, guess in enumerate(guesses) if guess != best[i]), len(guesses))
            ids += best[: right + 1]
            self.lib.llama_memory_seq_rm(memory, 0, len(ids) - 1, -1)
        return [ids[len(prompt) :]]


class Vllm(Engine):
    """vLLM's CPU build; ``plugin``: with this package's attention, or with draft trees of so many nodes."""

    def __init__(self, setup: Setup, plugin: str | int | None = None) -> None:
        super().__init__(setup)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's process would poll while others are measured
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else each engine takes nearly all memory
        import torch
        from vllm import LLM

        options: dict[str, Any] = {}
        if plugin == "attention":
            options = {"attention_backend": "CUSTOM"}
        elif isinstance(plugin, int):
            from specmemo_kernels.integrations.vllm import tree_options

            options = tree_options(f"{setup.folder}/heads", plugin)
        torch.set_num_threads(setup.threads)
        self.llm = LLM(
            setup.folder, dtype=setup.dtype, skip_tokenizer_init=True, max_model_len=setup.slots,
            max_num_seqs=setup.batch, enable_prefix_caching=False, disable_log_stats=False, **options,
        )  # fmt: skip
        self._drafts = 0, 0  # of requests and steps, accepted ones

    def generate(self, prompts: Tokens, new_tokens: int, first: Callable[[], None]) -> Tokens:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        self._count()
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _count(self) -> None:
        values = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        drafts, accepted = (values.get(name, 0) for name in names)
        if drafts > self._drafts[0]:
            self.tokens_per_step = 1 + (accepted - self._drafts[1]) / (drafts - self._drafts[0])
        self._drafts = drafts, accepted


#: Drafts as vLLM's EAGLE-3 has them, four of them, as rank paths.
CHAIN = [[0] * depth for depth in range(1, 5)]
ENGINES: dict[str, Callable[[Setup], Engine]] = {
    "transformers": Transformers,
    "transformers, prompt lookup": lambda setup: Transformers(setup, prompt_lookup_num_tokens=10),
    "llama.cpp": LlamaCpp,
    "llama.cpp, prompt lookup": LlamaCppLookup,
    "vllm": Vllm,
    "vllm, our attention": lambda setup: Vllm(setup, "attention"),
    "vllm, our trees": lambda setup: Vllm(setup, 8),
    "specmemo, no drafts": lambda setup: Ours(setup, "heads", tree=1),
    "specmemo, prompt lookup": lambda setup: Ours(setup, "prompt-lookup"),
    "specmemo, heads": lambda setup: Ours(setup, "heads"),
    "specmemo, 4-bit heads": lambda setup: Ours(setup, "heads", head_bits=4),
    "specmemo, EAGLE-3": lambda setup: Ours(setup, "eagle3", tree=CHAIN),
    "specmemo, 4-bit EAGLE-3": lambda setup: Ours(setup, "eagle3", tree=CHAIN, head_bits=4),
    "specmemo, compressed, no drafts": lambda setup: Ours(setup, "heads", tree=1, compress=True),
    "specmemo, compressed, prompt lookup": lambda setup: Ours(setup, "prompt-lookup", compress=True),
    "specmemo, compressed, heads": lambda setup: Ours(setup, "heads", compress=True),
    "specmemo, compressed, 4-bit heads": lambda setup: Ours(setup, "heads", head_bits=4, compress=True),
    "specmemo, compressed, 4-bit EAGLE-3": lambda setup: Ours(setup, "eagle3", CHAIN, head_bits=4, compress=True),
}


def resident() -> int:
    """Bytes of anonymous resident memory."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


class Peak:
    """The largest :func:`resident` of a block of code, sampled every two milliseconds."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        done = threading.Event()

        def sample() -> None:
            while not done.wait(0.002):
                self.bytes = max(self.bytes, resident())

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def main() -> None:
    name, setup = sys.argv[1], Setup(**json.loads(sys.argv[2]))
    results = sys.stdout
    sys.stdout = sys.stderr  # for what libraries print
    engine = ENGINES[name](setup)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    loaded = resident()
    engine.start()
    print(json.dumps({"engine": name}), file=results, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        times: list[float] = []
        peak = Peak()
        with peak.watched() if job["watch"] else nullcontext():
            started = time.perf_counter()
            tokens = engine.generate(
                job["prompts"], job["new_tokens"], lambda times=times: times.append(time.perf_counter())
            )
            seconds = time.perf_counter() - started
        result = {"tokens": tokens, "seconds": seconds, "bytes": max(0, peak.bytes - loaded - engine.own_bytes)}
        result |= {"first_token_seconds": times[0] - started if times else None}
        result |= {"tokens_per_step": engine.tokens_per_step, "model_bytes": engine.model_bytes}
        print(json.dumps(result), file=results, flush=True)


if __name__ == "__main__":
    main()
