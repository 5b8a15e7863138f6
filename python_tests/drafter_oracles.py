"""Dense, cache-free drafters, brute-force tree rules, and writers of random checkpoints in the published layouts.

Independent of ``specmemo_kernels``: drafters are tested against this file. Formats: shared/DRAFTERS.md.
"""

from __future__ import annotations

import functools
import heapq
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Config = dict[str, object]
Tensors = dict[str, Tensor]
TokenPath = tuple[int, ...]


def flat_config(config: Config) -> Config:
    """One level of keys. The top level overrides its nested dictionaries; ``None`` counts as absent."""
    nested = ("transformer_layer_config", "eagle_config", "dflash_config", "clover")
    levels = [config.get(name) or {} for name in nested] + [config]
    return {key: value for level in levels for key, value in level.items() if value is not None and key not in nested}


def rotary(config: Config, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim / 2] of positions 0 to length - 1; inverse frequencies are float32."""
    keys = {"head_dim", "max_position_embeddings", "rope_theta", "rope_parameters", "rope_scaling"} & config.keys()
    rope = LlamaConfig(num_attention_heads=1, hidden_size=config["head_dim"], **{key: config[key] for key in keys})
    kind, size, scale = rope.rope_parameters["rope_type"], rope.head_dim, 1.0
    if kind == "default":
        inverse = 1.0 / rope.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    else:
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](rope, "cpu", seq_len=length)
    angles = torch.outer(torch.arange(length, dtype=dtype), inverse.to(dtype))
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's rotation: element i and element i + D/2 of the last dimension are one pair."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class PlainDrafter:
    """Decoder layers over one dense sequence. Computes in the widest dtype among the tensors.

    Biases, ``q_norm`` and ``k_norm`` are applied where the tensors are present.
    """

    def __init__(self, config: Config, tensors: Tensors, embed: Tensor, lm_head: Tensor) -> None:
        self.config = flat_config(config)
        floating = [t.dtype for t in (*tensors.values(), embed, lm_head) if t.is_floating_point()]
        self.dtype = functools.reduce(torch.promote_types, floating)
        self.tensors = {name: self.cast(tensor) for name, tensor in tensors.items()}
        self.target_embed, self.target_head = self.cast(embed), self.cast(lm_head)
        self.heads = self.config["num_attention_heads"]
        self.config.setdefault("head_dim", self.config["hidden_size"] // self.heads)
        self.eps = self.config.get("rms_norm_eps", 1e-6)
        if "sliding_attention" in self.config.get("layer_types", ()):
            raise ValueError("sliding-window layers are not implemented; give layers of full attention")

    def cast(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.dtype) if tensor.is_floating_point() else tensor

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.tensors[f"{name}.weight"]

    def project(self, prefix: str, name: str, x: Tensor) -> Tensor:
        """Queries, keys or values of every attention head, [heads, n, head_dim]; grouped heads are repeated."""
        heads = self.linear(f"{prefix}.{name}_proj", x).unflatten(-1, (-1, self.config["head_dim"])).transpose(0, 1)
        if f"{prefix}.{name}_norm.weight" in self.tensors:
            heads = self.norm(f"{prefix}.{name}_norm", heads)
        return heads.repeat_interleave(self.heads // heads.shape[0], 0)

    def attention(self, prefix: str, x: Tensor, source: Tensor, causal: bool) -> Tensor:
        """Queries of ``x`` [m, .], keys and values of ``source`` [n, .]; ``x`` has the last m of the n positions."""
        queries, keys, values = (self.project(prefix, *pair) for pair in (("q", x), ("k", source), ("v", source)))
        m, n = len(x), len(source)
        cos, sin = rotary(self.config, n, self.dtype)
        queries, keys = rotate(queries, cos[n - m :], sin[n - m :]), rotate(keys, cos, sin)
        scores = queries @ keys.transpose(1, 2) * self.config["head_dim"] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones(m, n, dtype=torch.bool).triu(1 + n - m), float("-inf"))
        return self.linear(f"{prefix}.o_proj", (scores.softmax(-1) @ values).transpose(0, 1).flatten(1))

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate = ACT2FN[self.config.get("hidden_act", "silu")](self.linear(f"{prefix}.gate_proj", x))
        return self.linear(f"{prefix}.down_proj", gate * self.linear(f"{prefix}.up_proj", x))

    def layer(self, prefix: str, h: Tensor, x: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """A decoder layer with residual ``h``.

        Args:
            x: the attention's input; by default input_layernorm(h).
            context: further sources of keys and values before ``x``; with it attention isn't causal.
        """
        x = self.norm(f"{prefix}.input_layernorm", h) if x is None else x
        source = x if context is None else torch.cat([context, x])
        h = h + self.attention(f"{prefix}.self_attn", x, source, causal=context is None)
        return h + self.mlp(f"{prefix}.mlp", self.norm(f"{prefix}.post_attention_layernorm", h))


class PlainEagle1(PlainDrafter):
    """EAGLE-1 and EAGLE-2, which share a network: pairs (feature, token) in, one recursive feature per pair out."""

    def first_features(self, features: Tensor) -> Tensor:
        return features

    def recursive(self, h: Tensor) -> Tensor:
        return h

    def next_log_probs(self, features: Tensor, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        """Log-probabilities [V] of the token behind ``path``; pair t is (features[t], tokens[t])."""
        features, tokens = self.first_features(features.to(self.dtype)), list(tokens)
        for token in path:
            features = torch.cat([features, self.recursive(self.run(features, tokens)[-1:])])
            tokens.append(token)
        return self.log_probs(self.run(features, tokens)[-1])

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self.tensors.get("embed_tokens.weight", self.target_embed)[list(tokens)]

    def run(self, features: Tensor, tokens: Sequence[int]) -> Tensor:
        h = self.linear("fc", torch.cat([self.embed(tokens), features], -1))
        for i in range(self.config.get("num_hidden_layers", 1)):
            h = self.layer(f"layers.{i}", h, None if i else h)
        return h

    def log_probs(self, h: Tensor) -> Tensor:
        return F.linear(h, self.target_head).log_softmax(-1)


class PlainEagle3(PlainEagle1):
    """EAGLE-3, in EAGLE's own layout or in speculators'."""

    def __init__(self, config: Config, tensors: Tensors, embed: Tensor, lm_head: Tensor) -> None:
        super().__init__(config, tensors, embed, lm_head)
        self.tensors = {name.replace("midlayer.", "layers.0."): t for name, t in self.tensors.items()}
        self.norm_before_residual = self.config.get("norm_before_residual", "speculators_model_type" in config)

    def first_features(self, features: Tensor) -> Tensor:
        if self.config.get("norm_before_fc"):
            features = self.norm("input_norm", features)
        if self.config.get("fc_norm") or self.config.get("use_aux_norm"):
            parts = features.chunk(sum(name.startswith("fc_norm.") for name in self.tensors), -1)
            features = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        return self.linear("fc", features)

    def run(self, features: Tensor, tokens: Sequence[int]) -> Tensor:
        normed = self.norm("layers.0.hidden_norm", features)
        x = torch.cat([self.norm("layers.0.input_layernorm", self.embed(tokens)), normed], -1)
        h = self.layer("layers.0", normed if self.norm_before_residual else features, x)
        for i in range(1, self.config.get("num_hidden_layers", 1)):
            h = self.layer(f"layers.{i}", h)
        return h

    def recursive(self, h: Tensor) -> Tensor:
        return self.norm("norm", h) if self.config.get("norm_output") else h

    def log_probs(self, h: Tensor) -> Tensor:
        logits = F.linear(self.norm("norm", h), self.draft_head()) * self.config.get("logit_scale", 1.0)
        target_ids = torch.arange(len(logits)) + self.tensors.get("d2t", 0)
        result = torch.full((len(self.target_embed),), float("-inf"), dtype=self.dtype)
        result[target_ids] = logits.log_softmax(-1)
        return result

    def draft_head(self) -> Tensor:
        if self.config.get("tie_word_embeddings"):
            return self.tensors.get("embed_tokens.weight", self.target_embed)
        return self.tensors.get("lm_head.weight", self.target_head)


class PlainClover2(PlainDrafter):
    """Clover-2. The cosine has the attention's heads, as published; ``cosine_heads = 1`` is that of whole vectors."""

    cosine_heads: int | None = None

    def next_log_probs(self, features: Tensor, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        """Log-probabilities [V] of the token behind ``path``; features [n, H] are pre-final-norm states."""
        embeddings = self.tensors["clover_embed_tokens.weight"]
        h = self.regress("clover_head_mlp_rnn", features.to(self.dtype), embeddings[list(tokens)])
        for i in range(self.config.get("num_layers", 2)):
            h = self.layer(f"layers.{i}", h)
        state = self.norm("clover_norm", h[-1])
        hidden = self.linear("clover_head_mlp", state)
        for token in path:
            state = self.regress("clover_head_mlp_rnn2", state, embeddings[token])
            hidden = self.linear("clover_head_mlp2", torch.cat([state, embeddings[token]]))
        return F.linear(self.norm("clover_head_norm", hidden), self.target_head).log_softmax(-1)

    def regress(self, prefix: str, x: Tensor, y: Tensor) -> Tensor:
        """R(x, y) = x + cos(q(RMS(x)), k(y)) v(y), head by head."""
        pairs = (("q", self.norm(f"{prefix}.input_layernorm", x)), ("k", y), ("v", y))
        heads = (self.cosine_heads or self.heads, -1)
        q, k, v = (self.linear(f"{prefix}.{name}", part).unflatten(-1, heads) for name, part in pairs)
        return x + (F.cosine_similarity(q, k, -1, eps=self.eps)[..., None] * v).flatten(-2)


class PlainDFlash(PlainDrafter):
    """DFlash: one block of masks gives every depth's distribution."""

    def next_log_probs(self, features: Tensor, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        """Log-probabilities [V] at depth len(path) + 1; the tokens of ``path`` have no influence."""
        return self.depth_log_probs(features, tokens)[len(path)]

    def depth_log_probs(self, features: Tensor, tokens: Sequence[int]) -> Tensor:
        """Log-probabilities of depths 1 to block_size - 1, [block_size - 1, V]."""
        context = self.norm("hidden_norm", self.linear("fc", features.to(self.dtype)))
        masks = [self.config["mask_token_id"]] * (self.config["block_size"] - 1)
        h = self.target_embed[[tokens[-1], *masks]]
        for i in range(self.config["num_hidden_layers"]):
            h = self.layer(f"layers.{i}", h, context=context)
        return F.linear(self.norm("norm", h[1:]), self.target_head).log_softmax(-1)


def _top(log_probs: Tensor, top_k: int) -> list[tuple[int, Tensor]]:
    """The likeliest tokens that are possible at all, best first; of equal ones the smaller token id first."""
    values, tokens = log_probs.sort(descending=True, stable=True)
    return [(int(t), p) for t, p in zip(tokens[:top_k], values[:top_k], strict=True) if p > float("-inf")]


def eagle2_tree(next_log_probs: Callable[[TokenPath], Tensor], total: int, depth: int, top_k: int) -> set[TokenPath]:
    """EAGLE-2's dynamic tree: token paths of its total - 1 nodes besides the root, fewer if there are no more.

    Scores are added in the log-probabilities' dtype. Of equal scores the candidate created first wins.
    """

    def best(nodes: list[tuple[Tensor, TokenPath]], count: int) -> list[tuple[Tensor, TokenPath]]:
        return sorted(nodes, key=lambda node: -float(node[0]))[:count]

    beam = [(score, (token,)) for token, score in _top(next_log_probs(()), top_k)]
    candidates = list(beam)
    for _ in range(depth):
        children = [
            (score + step, (*path, token)) for score, path in beam for token, step in _top(next_log_probs(path), top_k)
        ]
        candidates += children
        beam = best(children, top_k)
    return {path for _, path in best(candidates, total - 1)}


def ddtree(log_probs: Tensor, nodes: int, top_k: int) -> set[TokenPath]:
    """DDTree: the likeliest nodes - 1 token paths under independent depths, from log_probs [D, V].

    Scores are float64. Of equal scores the smaller tuple of ranks wins, as published.
    """
    tops = [_top(row, top_k) for row in log_probs]
    heap: list[tuple[float, TokenPath, TokenPath]] = [(0.0, (), ())]
    taken: set[TokenPath] = set()
    while heap and len(taken) < nodes:
        cost, ranks, path = heapq.heappop(heap)
        taken.add(path)
        for rank, (token, step) in enumerate(tops[len(path)] if len(path) < len(tops) else ()):
            heapq.heappush(heap, (cost - float(step), (*ranks, rank), (*path, token)))
    return taken - {()}


_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_SIZES = {"hidden": "hidden_size", "intermediate": "intermediate_size", "heads": "num_attention_heads"}
_SIZES |= {"kv_heads": "num_key_value_heads", "head_dim": "head_dim", "vocab": "vocab_size"}
_LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "vocab_size": 61, "hidden_act": "silu"}
_LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": False}
_LLAMA |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 1024}
_LAYER_KEYS = {*_LLAMA, "rope_scaling", "rope_parameters"}
_DFLASH = {"block_size": 4, "num_target_layers": 2}
_EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "logit_scale")
_EAGLE3_FLAGS += ("tie_word_embeddings", "num_aux_hidden_states", "eagle_aux_hidden_state_layer_ids", "eagle_config")


class _Checkpoint:
    """A configuration with random float32 tensors, large enough that each tensor changes the result.

    Args:
        options: ``seed``, ``pickle``, sizes (``_SIZES``), keys of a layer's configuration (``_LAYER_KEYS``), ``flags``.
    """

    def __init__(self, layers: int, options: Config, flags: Sequence[str] = ()) -> None:
        allowed = {"seed", "pickle", *_SIZES, *_LAYER_KEYS, *flags}
        if unknown := options.keys() - allowed:
            raise TypeError(f"unknown options {sorted(unknown)}; allowed: {sorted(allowed)}")
        named = {_SIZES.get(name, name): value for name, value in options.items()}
        layer = _LLAMA | {name: named[name] for name in _LAYER_KEYS & named.keys()}
        self.config: Config = layer | {"num_hidden_layers": layers}
        self.hidden, self.vocab, self.pickle = layer["hidden_size"], layer["vocab_size"], options.get("pickle", False)
        self.generator = torch.Generator().manual_seed(options.get("seed", 0))
        self.tensors: Tensors = {}

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def norm(self, name: str, size: int | None = None) -> None:
        self.tensors[f"{name}.weight"] = 1 + 0.1 * self.randn(size or self.hidden)

    def linear(self, name: str, outputs: int, inputs: int, bias: bool = False) -> None:
        self.tensors[f"{name}.weight"] = self.randn(outputs, inputs) * inputs**-0.5
        if bias:
            self.tensors[f"{name}.bias"] = self.randn(outputs) * 0.3

    def layer(self, prefix: str, norms: Sequence[str] = _LLAMA_NORMS, inputs: int | None = None) -> None:
        """A decoder layer with the given norms; ``inputs``: width of the attention's input, by default hidden."""
        size, width, bias = (self.config[key] for key in ("head_dim", "intermediate_size", "attention_bias"))
        queries, keys = (self.config[key] * size for key in ("num_attention_heads", "num_key_value_heads"))
        for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
            self.linear(f"{prefix}.self_attn.{name}_proj", outputs, inputs or self.hidden, bias)
        self.linear(f"{prefix}.self_attn.o_proj", self.hidden, queries, bias)
        for name in ("gate", "up"):
            self.linear(f"{prefix}.mlp.{name}_proj", width, self.hidden)
        self.linear(f"{prefix}.mlp.down_proj", self.hidden, width)
        for name in norms:
            self.norm(f"{prefix}.{name}", size if name.startswith("self_attn") else None)

    def reduced_vocabulary(self, draft_vocab: int) -> None:
        ids = torch.randperm(self.vocab, generator=self.generator)[:draft_vocab].sort().values
        self.tensors["d2t"] = ids - torch.arange(draft_vocab)
        self.tensors["t2d"] = torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, ids, True)

    def write(self, folder: Path | str, config: Config) -> tuple[Config, Tensors]:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "config.json").write_text(json.dumps(config, indent=2))
        if self.pickle:
            torch.save(self.tensors, Path(folder) / "pytorch_model.bin")
        else:
            save_file(self.tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        return config, self.tensors


def write_eagle3(
    folder: Path | str,
    *,
    layout: str = "eagle",
    layers: int = 1,
    draft_vocab: int | None = None,
    target_hidden: int | None = None,
    own_embedding: bool = False,
    **options: object,
) -> tuple[Config, Tensors]:
    """EAGLE-3 in the layout "eagle" or "speculators"; ``options`` as for ``_Checkpoint``, and ``_EAGLE3_FLAGS``.

    The draft's own embedding is also written where it is needed: tied, or another hidden size than the target's.
    """
    if layout not in ("eagle", "speculators") or (layout == "eagle" and layers != 1):
        raise ValueError(f"layout must be 'eagle' (one layer) or 'speculators', got {layout!r} with {layers} layers")
    new, top = _Checkpoint(layers, options, _EAGLE3_FLAGS), {k: options[k] for k in _EAGLE3_FLAGS if k in options}
    target, tied = target_hidden or new.hidden, top.get("tie_word_embeddings")
    if tied and draft_vocab not in (None, new.vocab):
        raise ValueError(f"a tied lm_head needs the whole vocabulary of {new.vocab}, got draft_vocab={draft_vocab}")
    _write_fc(new, target, flat_config(top))
    new.layer("midlayer" if layout == "eagle" else "layers.0", ("hidden_norm", *_LLAMA_NORMS), inputs=2 * new.hidden)
    for i in range(1, layers):
        new.layer(f"layers.{i}")
    new.norm("norm")
    if own_embedding or tied or target != new.hidden:
        new.tensors["embed_tokens.weight"] = new.randn(new.vocab, new.hidden)
    if not tied:
        new.linear("lm_head", draft_vocab or new.vocab, new.hidden)
    if draft_vocab:
        new.reduced_vocabulary(draft_vocab)
    top |= {"draft_vocab_size": draft_vocab or new.vocab} | ({"target_hidden_size": target} if target_hidden else {})
    return new.write(folder, _eagle3_config(layout, new.config, top))


def _write_fc(new: _Checkpoint, target: int, flags: Config) -> None:
    aux = flags.get("num_aux_hidden_states", 3)
    if flags.get("norm_before_fc"):
        new.norm("input_norm", aux * target)
    for i in range(aux) if flags.get("fc_norm") or flags.get("use_aux_norm") else ():
        new.norm(f"fc_norm.{i}", target)
    new.linear("fc", new.hidden, aux * target)


def _eagle3_config(layout: str, layer: Config, top: Config) -> Config:
    """Puts the layer's keys and all others where the layout has them."""
    if layout == "speculators":
        method = {"proposal_type": "greedy", "speculative_tokens": 3}
        verifier = {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}
        speculators = {"algorithm": "eagle3", "proposal_methods": [method], "verifier": verifier}
        names = {"speculators_model_type": "eagle3", "speculators_config": speculators}
        return {"architectures": ["Eagle3Speculator"], **names, "transformer_layer_config": layer, **top}
    nested = {name: top.pop(name) for name in ("norm_before_fc", "eagle_aux_hidden_state_layer_ids") if name in top}
    nested = {"use_aux_hidden_state": True} | nested | top.pop("eagle_config", {})
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **top, "eagle_config": nested}


def write_eagle1(
    folder: Path | str, *, layers: int = 1, own_embedding: bool = False, bias: bool = True, **options: object
) -> tuple[Config, Tensors]:
    """EAGLE-1 and EAGLE-2; the configuration has ``bias`` only if it is false, as true is its default."""
    new = _Checkpoint(layers, options)
    new.linear("fc", new.hidden, 2 * new.hidden, bias)
    for i in range(layers):
        new.layer(f"layers.{i}", _LLAMA_NORMS if i else _LLAMA_NORMS[1:])
    if own_embedding:
        new.tensors["embed_tokens.weight"] = new.randn(new.vocab, new.hidden)
    return new.write(folder, {"architectures": ["LlamaForCausalLM"], **new.config} | ({} if bias else {"bias": False}))


def write_clover2(folder: Path | str, *, layers: int = 2, **options: object) -> tuple[Config, Tensors]:
    """Clover-2; ``layers`` is ``num_layers`` of the configuration's ``clover``."""
    new = _Checkpoint(layers, options)
    new.tensors["clover_embed_tokens.weight"] = new.randn(new.vocab, new.hidden)
    for block in ("clover_head_mlp_rnn", "clover_head_mlp_rnn2"):
        new.norm(f"{block}.input_layernorm")
        for name in "qkv":
            new.linear(f"{block}.{name}", new.hidden, new.hidden, bias=True)
    for i in range(layers):
        new.layer(f"layers.{i}")
    new.norm("clover_norm")
    new.norm("clover_head_norm")
    new.linear("clover_head_mlp", new.hidden, new.hidden, bias=True)
    new.linear("clover_head_mlp2", new.hidden, 2 * new.hidden, bias=True)
    clover = {"num_heads": 5, "num_layers": layers, "heads_coefficient": 1.0, "decay_coefficient": 0.7}
    return new.write(folder, {"architectures": ["LlamaForCausalLM"], **new.config, "clover": clover})


def write_dflash(
    folder: Path | str, *, layers: int = 2, target_layer_ids: Sequence[int] = (0, 1), **options: object
) -> tuple[Config, Tensors]:
    """DFlash, for a target of the same hidden size. Options also: ``mask_token_id`` (the last) and ``_DFLASH``."""
    new = _Checkpoint(layers, options, ("mask_token_id", *_DFLASH))
    new.linear("fc", new.hidden, len(target_layer_ids) * new.hidden)
    new.norm("hidden_norm")
    for i in range(layers):
        new.layer(f"layers.{i}", (*_LLAMA_NORMS, "self_attn.q_norm", "self_attn.k_norm"))
    new.norm("norm")
    block = {name: options.get(name, default) for name, default in _DFLASH.items()}
    mask = options.get("mask_token_id", new.vocab - 1)
    block["dflash_config"] = {"target_layer_ids": list(target_layer_ids), "mask_token_id": mask}
    return new.write(folder, {"architectures": ["DFlashDraftModel"], **new.config, "model_type": "qwen3", **block})
