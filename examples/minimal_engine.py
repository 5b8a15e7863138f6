"""A speculative inference engine for Llama, of ``specmemo_kernels.ops`` and ``DraftTree``; see docs/integrating.md."""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

from specmemo_kernels import DraftTree, ops

TREE = DraftTree.from_paths([[0], [0, 0], [1], [0, 0, 0], [2], [0, 1], [1, 0], [0, 0, 0, 0], [3], [0, 0, 1], [0, 1, 0]])
SUPPORTED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
             "quantization_config": None, "rope_type": "default", "type": "default"}  # fmt: skip


class Llama:
    def __init__(self, folder: Path, dtype: torch.dtype, device: str = "cpu", invariant: bool = False) -> None:
        config = json.loads((folder / "config.json").read_text())
        config |= config.get("rope_parameters") or config.get("rope_scaling") or {}
        for name, value in SUPPORTED.items():
            if config.get(name, value) != value:
                raise ValueError(f"{folder}/config.json: {name} is {config[name]!r}, this engine has {value!r} only")
        index = folder / "model.safetensors.index.json"
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        self.weights = {name: w.to(device, dtype) for file in files for name, w in load_file(folder / file).items()}
        self.lm_head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])  # absent: tied
        self.num_layers, self.eps = config["num_hidden_layers"], config["rms_norm_eps"]
        self.dtype, self.device = dtype, device
        self.kv_heads, self.invariant = config.get("num_key_value_heads") or config["num_attention_heads"], invariant
        self.head_dim = size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.frequencies = 1 / config.get("rope_theta", 10000.0) ** (torch.arange(0, size, 2, device=device) / size)
        self.eos = config["eos_token_id"] if isinstance(config["eos_token_id"], list) else [config["eos_token_id"]]

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attention) -> torch.Tensor:
        """The lm_head's inputs ``[N, hidden_size]`` of N packed rows; ``attention(layer, q, k, v)`` is the engine's."""
        angles, half = (positions[:, None] * self.frequencies).repeat(1, 2)[:, None], self.head_dim // 2
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        x, linear = self.weights["model.embed_tokens.weight"][tokens], partial(ops.linear, invariant=self.invariant)
        for layer in range(self.num_layers):
            w = {n.split(".")[-2]: t for n, t in self.weights.items() if n.startswith(f"model.layers.{layer}.")}
            h = ops.rms_norm(x, w["input_layernorm"], eps=self.eps)
            q, k, v = (linear(h, w[f"{part}_proj"]).unflatten(1, (-1, self.head_dim)) for part in "qkv")
            q, k = (part * cos + torch.cat([-part[..., half:], part[..., :half]], -1) * sin for part in (q, k))
            x = x + linear(attention(layer, q, k, v).flatten(1), w["o_proj"])
            h, mlp = ops.rms_norm(x, w["post_attention_layernorm"], eps=self.eps), ("gate_proj", "up_proj", "down_proj")
            x = x + ops.gated_mlp(h, *(w[part] for part in mlp), activation="silu", invariant=self.invariant)
        return ops.rms_norm(x, self.weights["model.norm.weight"], eps=self.eps)


@dataclass(eq=False)
class Sequence:
    tokens: list[int]  # prompt and output
    max_tokens: int
    num_pages: int  # all are reserved on admission, so that no step runs out of pages
    pages: list[int] | None = None
    seq_len: int = 0  # tokens in pages; in decoding all but the newest, which is the tree's root
    hidden: torch.Tensor | None = None  # the lm_head's input that gave the newest token; None in prefill


class Engine:
    def __init__(self, model: Llama, heads: dict[str, torch.Tensor], *, num_pages: int, page_size: int = 16,
                 max_seqs: int = 8, chunk_len: int = 64) -> None:  # fmt: skip
        self.model, self.heads, self.page_size = model, heads, page_size  # heads: in the model's dtype
        self.max_seqs, self.chunk_len = max_seqs, chunk_len
        self.tree = TREE.truncated(max((int(name.split(".")[0]) + 1 for name in heads), default=0))
        empty, token = partial(torch.empty, dtype=model.dtype, device=model.device), (model.kv_heads, model.head_dim)
        self.pages = empty(2, model.num_layers, num_pages, page_size, *token)  # of keys, of values
        self.scratch = empty(2, model.num_layers, max_seqs * self.tree.size, *token)  # candidates until verified
        self.free_pages, self.waiting, self.running = list(range(num_pages)), [], []

    def add(self, prompt: list[int], max_new_tokens: int) -> Sequence:
        """Queue a prompt of at least one token; the result's ``tokens`` grow with each step."""
        tokens = len(prompt) + max_new_tokens + self.tree.max_depth  # the last step may accept drafts behind the end
        if (num_pages := -(-tokens // self.page_size)) > self.pages.shape[2]:
            raise ValueError(f"{tokens} tokens need {num_pages} of {self.pages.shape[2]} pages; raise num_pages")
        self.waiting.append(Sequence(list(prompt), len(prompt) + max_new_tokens, num_pages))
        return self.waiting[-1]

    def draft(self, seqs: list[Sequence]) -> list[list[int]]:
        """Each tree's tokens: the newest one, then Medusa head h's guesses of the token h + 1 places behind it."""
        guesses = []  # of each depth, best first: [B][width]
        for head in range(self.tree.max_depth if seqs else 0):
            x, block = torch.stack([s.hidden for s in seqs]), 0
            while (weight := self.heads.get(f"{head}.{block}.linear.weight")) is not None:
                x, block = x + F.silu(ops.linear(x, weight, self.heads[f"{head}.{block}.linear.bias"])), block + 1
            lm_head = self.heads.get(f"{head}.{block}.weight", self.model.lm_head)  # of its own, or the model's
            guesses.append(ops.lm_head_topk(x, lm_head, k=self.tree.width)[1].tolist())
        return [[s.tokens[-1], *(guesses[len(p) - 1][b][p[-1]] for p in self.tree.paths)] for b, s in enumerate(seqs)]

    @torch.inference_mode()
    def step(self) -> None:
        """One forward pass over the trees of decoding sequences, and over a chunk of each other sequence's prompt."""
        while self.waiting and self.waiting[0].num_pages <= len(self.free_pages) and len(self.running) < self.max_seqs:
            self.running.append(self.waiting.pop(0))
            self.running[-1].pages = [self.free_pages.pop() for _ in range(self.running[-1].num_pages)]
        model, tree, int32 = self.model, self.tree, partial(torch.tensor, dtype=torch.int32, device=self.model.device)
        batch = sorted(self.running, key=lambda s: s.hidden is None)  # decoding sequences first
        trees = sum(s.hidden is not None for s in batch)
        rows = self.draft(batch[:trees]) + [s.tokens[s.seq_len : s.seq_len + self.chunk_len] for s in batch[trees:]]
        depths = [tree.depths] * trees + [range(len(row)) for row in rows[trees:]]
        tokens = int32([token for row in rows for token in row]).long()
        positions = int32([s.seq_len + depth for s, row in zip(batch, depths, strict=True) for depth in row])
        block_table = torch.nn.utils.rnn.pad_sequence([int32(s.pages) for s in batch], batch_first=True)
        seq_lens, qo_indptr = int32([s.seq_len for s in batch]), int32([0, *map(len, rows)]).cumsum(0).int()
        starts, nodes = qo_indptr.tolist(), trees * tree.size
        tree_mask = F.pad(tree.mask.repeat(trees, 1), (0, 0, 0, len(tokens) - nodes)).to(model.device)  # zeros: causal
        of_trees = block_table[:trees], seq_lens[:trees], qo_indptr[: trees + 1]
        of_chunks = block_table[trees:], seq_lens[trees:], qo_indptr[trees:] - nodes

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            pages, options = self.pages[:, layer], {"scale": model.head_dim**-0.5, "invariant": model.invariant}
            out, _ = ops.tree_attention(q, k, v, *pages, block_table, seq_lens, qo_indptr, tree_mask, **options)
            self.scratch[0, layer, :nodes], self.scratch[1, layer, :nodes] = k[:nodes], v[:nodes]
            ops.append_paged_kv(k[nodes:], v[nodes:], *pages, *of_chunks)
            return out

        hidden = model.forward(tokens, positions, attention)
        kept = [*range(nodes), *(end - 1 for end in starts[trees + 1 :])]  # all nodes, and the last row of each chunk
        target = ops.lm_head_argmax(hidden[kept], model.lm_head)
        verified = tokens[:nodes], target[:nodes], int32(tree.parents * trees), of_trees[2]
        accepted, length, _ = ops.verify_tree_greedy(*verified, max_depth=tree.max_depth)
        ops.commit_paged_kv(*self.scratch, *self.pages, *of_trees, accepted, length)
        next_token = dict(zip(kept, target.tolist(), strict=True))  # by row
        paths = [path[: drafts + 1] for path, drafts in zip(accepted.tolist(), length.tolist(), strict=True)]
        for s, start, path in zip(batch, starts, paths + depths[trees:], strict=False):
            s.seq_len += len(path)
            if s.seq_len >= len(s.tokens):  # else there are more chunks
                s.hidden = hidden[start + path[-1]].clone()
                for row in (start + node for node in path if start + node in next_token):
                    s.tokens.append(next_token[row])
                    if s.tokens[-1] in model.eos or len(s.tokens) == s.max_tokens:
                        self.running.remove(s)
                        self.free_pages += s.pages
                        break


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[2:] else sys.exit("usage: minimal_engine.py FOLDER_OF_A_LLAMA TEXT...")
    heads = {name: w.float() for file in folder.glob("heads/*.safetensors") for name, w in load_file(file).items()}
    engine = Engine(Llama(folder, torch.float32), heads, num_pages=256)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sequences = [engine.add(tokenizer.encode(text).ids, max_new_tokens=64) for text in sys.argv[2:]]
    while engine.waiting or engine.running:
        engine.step()
    print(*(tokenizer.decode(s.tokens) for s in sequences), sep="\n---\n")
