"""Tokens per second of models with recurrent or convolution layers or experts, patched and plain, in turns.

    python bench/bench_hybrids.py --json out.json
    python bench/bench_hybrids.py --shapes qwen3-moe-270m,gpt-oss-270m --json out.json
    python bench/bench_hybrids.py --memory --dtype fp32 --batch 4

Random weights of about 100M parameters (mixtures of experts: 270M, of which a token uses 70M). The drafter knows the
answer, and its k-th guess at a depth is right as often as Medusa's published heads' on Vicuna-7B: acceptance is
replayed, drafting costs nothing. In float32 the tokens of each side are compared with those of plain ``generate``
before anything is timed; in bfloat16 near ties may be decided otherwise.

``planned``: what ``patch`` chooses. ``chain``: a chain of two drafts. ``tree``: 8 nodes. ``no drafts``: steps of one
node.

``--memory`` compares the peak of live tensors of a call, 8 nodes, with the plan for the pages that it uses; the
libraries' workspace isn't a tensor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench_step import DTYPES
from timing import print_rows, take_turns, write_result
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import specmemo_kernels as sk
from specmemo_kernels.drafting import DraftInput
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY

_COMMON = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
    "vocab_size": 32000, "tie_word_embeddings": True,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 4, "head_dim": 64}
#: A model type and its settings: two of three layers are convolutions; three of four are gated delta rules; all feed-
#: forward layers are mixtures of 32 experts, with matrices [outputs, inputs] or [inputs, outputs].
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2-120m": ("lfm2", _COMMON | {
        "intermediate_size": 2560, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "conv", "full_attention"] * 4,
    }),
    "qwen3-next-110m": ("qwen3_next", _COMMON | {
        "intermediate_size": 2048, "head_dim": 64, "linear_num_key_heads": 6, "linear_num_value_heads": 12,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "mlp_only_layers": [*range(12)],
        "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }),
    "qwen3-moe-270m": ("qwen3_moe", _COMMON | _EXPERTS | {"num_experts": 32, "moe_intermediate_size": 256}),
    "gpt-oss-270m": ("gpt_oss", _COMMON | _EXPERTS | {"num_local_experts": 32, "intermediate_size": 256}),
}  # fmt: skip
SIDES: dict[str, Any] = {"no drafts": 1, "chain": sk.DraftTree.chain(2), "tree": 8, "planned": None}


class KnowingDrafter:
    """Guesses from the known texts; the rank of the right guess is drawn by place in the text."""

    nbytes, max_depth = 0, 4

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = [list(text) for text in texts]

    def propose(self, inputs: DraftInput) -> torch.Tensor:
        return torch.tensor([self._row(tokens, inputs.tree) for tokens in inputs.token_ids])

    def _row(self, tokens: Sequence[int], tree: sk.DraftTree) -> list[int]:
        text = next((text for text in self.texts if text[: len(tokens)] == list(tokens)), [])
        place = {path: node for node, path in enumerate(tree.paths, start=1)}
        row, path, source = [0] * tree.size, (), random.Random(len(tokens))
        for depth, ahead in enumerate(text[len(tokens) : len(tokens) + tree.max_depth]):
            draw = source.random()
            rank = next((k for k, chance in enumerate(DEFAULT_ACCURACY[depth]) if draw < chance), None)
            if rank is None or (path := (*path, rank)) not in place:
                break
            row[place[path]] = ahead
        return row


def model_of(shape: str, dtype: torch.dtype) -> Any:
    """A model with the weights of a seed."""
    kind, settings = SHAPES[shape]
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    model = make(CONFIG_MAPPING[kind](**settings), dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def measure(shape: str, dtype: str, batch: int, prompt: int, new: int, seconds: float) -> list[dict[str, Any]]:
    """Tokens per second of each side, medians.

    Raises:
        RuntimeError: a side writes other tokens.
    """
    source = random.Random(1)
    prompts = [[source.randrange(5, 32000) for _ in range(prompt)] for _ in range(batch)]
    plain = model_of(shape, DTYPES[dtype])
    sides: dict[str, Callable[[], object]] = {"plain generate": lambda: generated(plain, prompts, new)}
    handles: dict[str, Any] = {}
    texts = generated(plain, prompts, new)
    for name, tree in SIDES.items():
        model = model_of(shape, DTYPES[dtype])
        handles[name] = sk.patch(model, KnowingDrafter(texts), tree=tree, max_batch_size=batch)
        written = generated(model, prompts, new)
        if dtype == "fp32" and written != texts:
            raise RuntimeError(f"{shape} {dtype} {name}: other tokens than plain generate")
        learning = partial(learnt, handles[name], prompts, new)
        for _ in range(4):
            learning()
        handles[name].stats.reset()
        sides[name] = learning
    times = take_turns(sides, seconds=seconds, rounds=(3, 50))
    rows = []
    for name, value in times.items():
        handle = handles.get(name)
        row = {"shape": shape, "dtype": dtype, "batch": batch, "side": name, "tokens_per_s": batch * new / value}
        row["speedup"] = times["plain generate"] / value
        if handle is not None:
            row |= {"nodes": handle.plan.tree.size, "tokens_per_step": handle.stats.tokens_per_step}
            row["state_bytes"] = handle.bytes_by_part.get("states", 0)
        rows.append(row)
    return rows


def memory(shape: str, dtype: str, batch: int, prompt: int, new: int) -> dict[str, Any]:
    """Peak and planned bytes of a call whose prompts fill a chunk, with a budget of about four times its pages."""
    source = random.Random(1)
    prompts = [[source.randrange(5, 32000) for _ in range(prompt)] for _ in range(batch)]
    model = model_of(shape, DTYPES[dtype])
    drafter, budget = KnowingDrafter(generated(model, prompts, new)), 2**30
    for _ in range(2):
        with sk.patch(
            model, drafter, tree=8, max_batch_size=batch, prefill_chunk=prompt, memory_budget=budget
        ) as handle:
            generated(model, prompts, 4)  # allocates what is kept between calls
            handle.release()
            with MemoryTracker() as tracker:
                generated(model, prompts, new)
            parts, held = handle.plan.parts, handle.bytes_by_part
        fixed = sum(parts[name] for name in ("tree_scratch", "activations", "states"))
        budget = fixed + parts["workspace"] + 4 * held["kv_pages"] + 2**18
    planned = fixed + parts["metadata"] + held["kv_pages"]
    row = {"shape": shape, "dtype": dtype, "batch": batch, "peak_bytes": tracker.peak, "planned_bytes": planned}
    return row | {"peak/plan": tracker.peak / planned, "state_bytes": parts["states"], "budget": budget}


def learnt(handle: Any, prompts: list[list[int]], new: int) -> None:
    """Generate, and let the drafter know the text: near ties in shorter dtypes depend on the tree."""
    texts = generated(handle.model, prompts, new)
    handle.drafter.texts += [text for text in texts if text not in handle.drafter.texts]


def generated(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Prompts of equal length with the tokens behind them."""
    ids = torch.tensor(prompts)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    rows: list[list[int]] = output.tolist()
    return rows


def main(
    shapes: Annotated[str, typer.Option(help="of " + ", ".join(SHAPES))] = ",".join(SHAPES),
    dtype: Annotated[str, typer.Option(help="of " + ", ".join(DTYPES))] = "bf16,fp32",
    batch: Annotated[str, typer.Option(help="sequences at once")] = "1",
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 128,
    new: Annotated[int, typer.Option(help="tokens to write")] = 64,
    seconds: Annotated[float, typer.Option(help="for each shape and dtype")] = 60.0,
    memory_: Annotated[bool, typer.Option("--memory", help="bytes instead of times")] = False,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure, print a table and write JSON."""
    rows = []
    for shape in shapes.split(","):
        for kind in dtype.split(","):
            for size in map(int, batch.split(",")):
                if memory_:
                    rows.append(memory(shape, kind, size, prompt, new))
                else:
                    rows += measure(shape, kind, size, prompt, new, seconds)
    print_rows(rows, title="models with recurrent layers or experts")
    write_result(json_, {"prompt": prompt, "new_tokens": new, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
