"""Train a Llama of about 30M parameters from scratch, as a model to train drafters for.

    python bench/demo_texts.py --out build/demo_texts
    python bench/train_small.py --data build/demo_texts/training.jsonl --out build/small

A byte-level BPE of 8192 tokens and one pass over a part of the text. It writes recognisable Python, not useful Python.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from train_demo import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specmemo_kernels.training.windows import cut_windows, read_documents

EOS, VOCAB = "<|endoftext|>", 8192
#: 29.4M parameters.
SIZES = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip


def train_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the texts of a ``.jsonl`` file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24, show_progress=False,
    )  # fmt: skip
    lines = (json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines())
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS, model_max_length=1024)


def build_model() -> LlamaForCausalLM:
    """A model of these sizes with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, **SIZES, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=0,
            eos_token_id=0, pad_token_id=0, attn_implementation="sdpa",
        )
    )  # fmt: skip


def main(
    data: Annotated[Path, typer.Option(help="a .jsonl file with a text per line")],
    out: Annotated[Path, typer.Option(help="the model's folder")],
    steps: Annotated[int, typer.Option(help="optimiser steps")] = 130,
    batch: Annotated[int, typer.Option(help="windows per step")] = 24,
    length: Annotated[int, typer.Option(help="tokens of a window")] = 256,
    seed: Annotated[int, typer.Option(help="of weights and order")] = 0,
) -> None:
    """Train and save."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(data)
    windows = cut_windows(read_documents([data], tokenizer, VOCAB), None, length, tokenizer.eos_token_id)
    print(f"{windows.training.numel():,} tokens of text", flush=True)
    model = build_model()
    body = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    chosen = {id(p) for p in body}
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(body, lr=0.02, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW([p for p in model.parameters() if id(p) not in chosen], lr=3e-3, betas=(0.9, 0.95)),
    ]
    rates = [group["lr"] for optimiser in optimisers for group in optimiser.param_groups]
    model.model.compile(dynamic=False)
    started = time.monotonic()
    for step in range(steps):
        scale = min(1.0, (step + 1) / 50) * min(1.0, 0.02 + (steps - step) / (0.5 * steps))
        for group, rate in zip((g for o in optimisers for g in o.param_groups), rates, strict=True):
            group["lr"] = rate * scale
        ids = windows.batch(step, batch, seed)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            loss = cross_entropy(hidden[:, :-1], model.lm_head.weight, ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if step % 10 == 9:
            speed = (step + 1) * ids.numel() / (time.monotonic() - started)
            print(f"step {step + 1} of {steps}, loss {float(loss):.3f}, {speed:.0f} tokens/s", flush=True)
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        losses = [float(model(ids[None].long(), labels=ids[None].long()).loss) for ids in windows.held_out[:64]]
    mean, seconds = sum(losses) / len(losses), time.monotonic() - started
    print(f"held-out loss {mean:.3f}, perplexity {math.exp(mean):.1f}")
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    summary = {
        "parameters": sum(p.numel() for p in model.parameters()), "tokens": steps * batch * length,
        "seconds": round(seconds), "held_out_loss": mean,
    }  # fmt: skip
    (out / "training.json").write_text(json.dumps(summary) + "\n")


if __name__ == "__main__":
    typer.run(main)
