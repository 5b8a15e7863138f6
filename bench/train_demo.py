"""Train the bundled demo model: a small Llama and its Medusa heads, on Python's standard library.

    python bench/train_demo.py --steps 3000 --out specmemo_kernels/demo_model

A hash of a file's path inside the library decides whether it is held out, so the split is the same for every version of
Python. Base model and heads are trained jointly, with falling weights of the heads' losses, and saved as safetensors.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specmemo_kernels.cli.demo_data import is_held_out, library_files
from specmemo_kernels.drafting.medusa_heads import MedusaHeads

EOS = "<|endoftext|>"
VOCAB, CONTEXT, NUM_HEADS, HEAD_LAYERS = 4096, 1024, 4, 2
HEAD_LOSS = (0.4, 0.3, 0.2, 0.15)


def train_tokenizer(files: list[Path]) -> PreTrainedTokenizerFast:
    """A byte-level BPE over the training files, with runs of white space kept whole."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
    )
    tokenizer.train([str(f) for f in files], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS, model_max_length=CONTEXT)


def encode(files: list[Path], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """All files as one row of token ids, each file closed by EOS."""
    texts = [f.read_text(encoding="utf-8", errors="ignore") for f in files]
    rows = tokenizer.backend_tokenizer.encode_batch(texts)
    return np.concatenate([np.array([*row.ids, tokenizer.eos_token_id], dtype=np.int32) for row in rows])


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.03,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of ``hidden @ weight.T``; computes gradients chunk by chunk while the logits are in cache."""

    @staticmethod
    def forward(ctx, hidden, weight, target, chunk=512):  # type: ignore[no-untyped-def]
        hidden16, weight16 = hidden.to(torch.bfloat16), weight.to(torch.bfloat16)
        grad_hidden, grad_weight = torch.empty_like(hidden16), torch.zeros_like(weight, dtype=torch.float32)
        loss = torch.zeros(())
        for rows, ids, grads in zip(hidden16.split(chunk), target.split(chunk), grad_hidden.split(chunk), strict=True):
            logits = (rows @ weight16.T).float()
            loss += nn.functional.cross_entropy(logits, ids, reduction="sum")
            delta = logits.softmax(-1)
            delta[torch.arange(len(ids)), ids] -= 1
            delta16 = delta.to(torch.bfloat16)
            torch.mm(delta16, weight16, out=grads)
            grad_weight += delta16.T @ rows
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.count = len(target)
        return loss / ctx.count

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * (grad / ctx.count), grad_weight * (grad / ctx.count), None


def cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = ChunkedCrossEntropy.apply(hidden.flatten(0, 1), weight, target.flatten())  # type: ignore[no-untyped-call]
    return loss


def losses(model: LlamaForCausalLM, heads: MedusaHeads, ids: torch.Tensor, stride: int) -> torch.Tensor:
    """``[1 + num_heads]`` cross entropies; the heads use every ``stride``-th position, to save time."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    weight = model.lm_head.weight
    out = [cross_entropy(hidden[:, :-1], weight, ids[:, 1:])]
    offset = int(torch.randint(stride, ()))
    for head in range(heads.num_heads):
        ahead = head + 2
        seen, target = hidden[:, offset:-ahead:stride], ids[:, offset + ahead :: stride]
        out.append(cross_entropy(heads.features(seen, head), weight, target))
    return torch.stack(out)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def evaluate(model: LlamaForCausalLM, heads: MedusaHeads, tokens: np.ndarray, windows: int) -> dict[str, object]:
    """Held-out loss (nats per token) of the model, and cumulative top-1..10 accuracy of each head.

    A hit is the model's own greedy token at that position (as in verification), after the text's tokens.
    """
    model.eval()
    starts = np.linspace(0, len(tokens) - CONTEXT - 1, windows).astype(int)
    loss, correct, count = 0.0, torch.zeros(heads.num_heads, 10), torch.zeros(heads.num_heads)
    for start in starts:
        ids = torch.from_numpy(tokens[start : start + CONTEXT].astype(np.int64))[None]
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = (hidden @ model.lm_head.weight.T).float()
        loss += float(nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
        greedy = logits[0].argmax(-1)
        for head in range(heads.num_heads):
            ahead = head + 1
            guess = (heads.features(hidden[0, :-ahead], head) @ model.lm_head.weight.T).float().topk(10).indices
            hit = (guess == greedy[ahead:, None]).cumsum(-1).clamp(max=1)
            correct[head] += hit.sum(0)
            count[head] += len(hit)
    model.train()
    accuracy = (correct / count[:, None]).tolist()
    return {
        "held_out_loss": loss / windows,
        "cumulative_topk_accuracy": [[round(a, 4) for a in row] for row in accuracy],
    }


def optimisers(model: LlamaForCausalLM, heads: MedusaHeads) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between the layers, AdamW for the embedding, norms, biases and heads."""
    body = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in body}
    rest = [p for p in [*model.parameters(), *heads.parameters()] if id(p) not in chosen]
    return [
        torch.optim.Muon(body, lr=0.02, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01, fused=True),
    ]


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    files = library_files(include_tests=True)
    training = [f for f in files if not is_held_out(f)]
    held_out = [f for f in library_files(include_tests=False) if is_held_out(f)]
    tokenizer = train_tokenizer([f for f in training if "test" not in f.parts])
    data, test_data = encode(training, tokenizer), encode(held_out, tokenizer)
    print(
        f"{len(training)} files, {len(data):,} tokens; held out {len(held_out)} files, {len(test_data):,} tokens",
        flush=True,
    )

    model = build_model()
    heads = MedusaHeads(model.config.hidden_size, VOCAB, NUM_HEADS, HEAD_LAYERS, own_lm_head=False)
    model.model.compile(dynamic=False)
    opts = optimisers(model, heads)
    base_lr = [group["lr"] for opt in opts for group in opt.param_groups]
    weights = torch.tensor([1.0, *HEAD_LOSS])
    started, seen = time.time(), 0
    for step in range(args.steps):
        scale = min(1.0, (step + 1) / 100) * min(1.0, 0.02 + (args.steps - step) / (0.5 * args.steps))
        for group, lr in zip((g for opt in opts for g in opt.param_groups), base_lr, strict=True):
            group["lr"] = lr * scale
        starts = rng.integers(0, len(data) - args.length - 1, args.batch)
        ids = torch.from_numpy(np.stack([data[s : s + args.length] for s in starts]).astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16):
            parts = losses(model, heads, ids, stride=4)
        (parts.float() * weights).sum().backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *heads.parameters()], 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        seen += ids.numel()
        if step % 25 == 0 or step == args.steps - 1:
            rate = seen / (time.time() - started)
            row = " ".join(f"{x:.3f}" for x in parts.tolist())
            print(f"step {step} loss {row} {rate:.0f} tok/s", flush=True)
        if step % 500 == 499 and step + 1 < args.steps:
            facts = evaluate(model, heads, test_data, 16)
            save(args.out, model, heads, tokenizer, facts["cumulative_topk_accuracy"])
            print(json.dumps(facts), flush=True)
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "head_parameters": sum(p.numel() for p in heads.parameters()),
        "training_tokens": seen,
        "python": platform.python_version(),
        **evaluate(model, heads, test_data, 64),
    }
    facts["held_out_perplexity"] = round(math.exp(float(str(facts["held_out_loss"]))), 3)
    save(args.out, model, heads, tokenizer, facts["cumulative_topk_accuracy"])
    (args.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts), flush=True)


def save(
    folder: Path, model: LlamaForCausalLM, heads: MedusaHeads, tokenizer: PreTrainedTokenizerFast, accuracy: Any
) -> None:
    """Weights in bfloat16 (half the size): the model in ``folder``, heads and their accuracy in ``folder/heads``."""
    stored = build_model()
    stored.load_state_dict(model.state_dict())
    stored.to(torch.bfloat16).save_pretrained(folder)
    stored_heads = MedusaHeads(
        heads.hidden_size, heads.vocab_size, heads.num_heads, heads.num_layers, own_lm_head=False
    )
    stored_heads.load_state_dict(heads.state_dict())
    stored_heads.cumulative_topk_accuracy = accuracy
    stored_heads.to(torch.bfloat16).save_pretrained(folder / "heads")
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args)


if __name__ == "__main__":
    main()
