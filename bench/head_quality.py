"""The effect of 4-bit heads on acceptance: the bundled model over held-out library files.

    python bench/head_quality.py --json bench/results/head_quality.json

The bundled heads share the model's lm_head. Here each head gets a copy of it as its own matrix, which is then stored in
4 bits. Every step verifies the whole tree, so tokens per step depend on the guesses only. The tokens must be the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from kv_quality import prompts_from
from rich.console import Console
from rich.table import Table
from timing import write_result
from transformers import AutoModelForCausalLM, AutoTokenizer

import specmemo_kernels
from specmemo_kernels.cli.common import demo_model_folder
from specmemo_kernels.drafting.load_heads import load_heads


def with_own_matrices(heads: specmemo_kernels.MedusaHeads, lm_head: torch.Tensor) -> specmemo_kernels.MedusaHeads:
    """The same heads, each with a copy of the model's lm_head."""
    state = dict(heads.state_dict())
    state |= {f"{head}.{heads.num_layers}.weight": lm_head.detach().clone() for head in range(heads.num_heads)}
    return load_heads(state, heads.hidden_size, heads.vocab_size, dtype=lm_head.dtype)


def measured(
    model: Any, heads: Any, prompts: list[torch.Tensor], new: int, tree: int, head_bits: int | None
) -> tuple[dict[str, Any], list[list[int]]]:
    """Tokens per step and acceptance with a tree of ``tree`` nodes, and the tokens."""
    with specmemo_kernels.patch(model, heads, tree=tree, head_bits=head_bits) as handle:
        outputs = [model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None) for ids in prompts]
        row = {
            "nodes": tree,
            "head_bits": head_bits,
            "head_bytes": handle.bytes_by_part["heads"],
            "steps": handle.stats.steps,
            "tokens_per_step": handle.stats.tokens_per_step,
            "acceptance_by_depth": list(handle.stats.acceptance_by_depth),
        }
    return row, [out[0].tolist() for out in outputs]


def main(
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16")] = "float32",
    count: Annotated[int, typer.Option(help="continuations")] = 100,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 256,
    new: Annotated[int, typer.Option(help="tokens written after it")] = 64,
    trees: Annotated[str, typer.Option(help="nodes, comma-separated")] = "8,24,64",
    seed: Annotated[int, typer.Option(help="of the prompts")] = 0,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Generate, compare, print a table and write JSON; fails if a token differs."""
    folder = demo_model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    accuracy = (shared := specmemo_kernels.MedusaHeads.from_pretrained(folder / "heads")).cumulative_topk_accuracy
    heads = with_own_matrices(shared, model.get_output_embeddings().weight)
    heads.cumulative_topk_accuracy = accuracy
    prompts = prompts_from(AutoTokenizer.from_pretrained(folder), count, prompt, seed)
    rows, same = [], True
    for tree in map(int, trees.split(",")):
        (full, expected), (coded, tokens) = (measured(model, heads, prompts, new, tree, bits) for bits in (None, 4))
        rows += [full, coded | {"tokens_per_step_ratio": coded["tokens_per_step"] / full["tokens_per_step"]}]
        same &= tokens == expected
    table = Table("nodes", "bits", "heads, MiB", "tokens per step", "accepted at least 1, 2, ...")
    for row in rows:
        shares = " ".join(f"{share:.3f}" for share in row["acceptance_by_depth"])
        cells = (row["nodes"], row["head_bits"] or dtype, f"{row['head_bytes'] / 2**20:.2f}")
        table.add_row(*map(str, cells), f"{row['tokens_per_step']:.3f}", shares)
    Console(width=120).print(table)
    print("the same tokens" if same else "TOKENS DIFFER")
    setup = {"dtype": dtype, "count": count, "prompt_tokens": prompt, "new_tokens": new, "seed": seed, "same": same}
    write_result(json_, {**setup, "rows": rows})
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
