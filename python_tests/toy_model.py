"""A language model of two attention layers over the paged cache, and drafters that know its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specmemo_kernels import ops
from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting import Drafter, DraftInput
from specmemo_kernels.engine.decode import SpecDecoder
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.verify import GreedyVerifier
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.step_attention import AttentionParams, StepAttention
from specmemo_kernels.forward.target import TargetOutput
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor
VOCAB, WIDTH = 23, 24
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6], [7, 7]]


class ToyTarget:
    """Random weights, large enough that every visible token, its position and its place in the cache decide the next.

    The two layers differ in heads, sizes and window, so that the pool has two groups. Attention goes through the
    operators in :meth:`forward` and through a dense softmax of its own in :meth:`next_token`.
    """

    static, invariant = True, False

    def __init__(self, dtype: torch.dtype = torch.float64, backend: str = "reference") -> None:
        g = torch.Generator().manual_seed(11)
        self.device, self.vocab_size, self.backend = torch.device("cpu"), VOCAB, backend
        self.layers = [LayerKV(2, 8, 12, dtype, self.device), LayerKV(1, 8, 8, dtype, self.device)]
        self.heads, self.windows = [4, 2], [None, 9]

        def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(rows, columns, generator=g) * scale * rows**-0.5).to(dtype)

        self.embedding = torch.randn(VOCAB, WIDTH, generator=g).to(dtype)
        self.lm_head = torch.randn(VOCAB, WIDTH, generator=g).to(dtype)
        self.frequencies = torch.rand(WIDTH, generator=g).to(dtype) * 2
        self.projections = [
            (
                matrix(WIDTH, heads * kv.head_dim, 1.5),
                matrix(WIDTH, kv.num_kv_heads * kv.head_dim, 1.5),
                matrix(WIDTH, kv.num_kv_heads * kv.v_head_dim, 3.0),
                matrix(heads * kv.v_head_dim, WIDTH, 3.0),
            )
            for heads, kv in zip(self.heads, self.layers, strict=True)
        ]
        self._logits: dict[tuple[int, ...], Tensor] = {}

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embedding[tokens] + torch.sin(positions[:, None] * self.frequencies)

    def project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _ = self.projections[layer]
        kv = self.layers[layer]
        return (
            (x @ query).unflatten(1, (self.heads[layer], kv.head_dim)),
            (x @ key).unflatten(1, (kv.num_kv_heads, kv.head_dim)),
            (x @ value).unflatten(1, (kv.num_kv_heads, kv.v_head_dim)),
        )

    def forward(self, batch: TreeBatch, attention: StepAttention, keep: Tensor | None, logits: bool) -> TargetOutput:
        """One forward pass; see :class:`specmemo_kernels.forward.target.TargetModel`."""
        x = self.embed(batch.tokens.clamp(min=0), batch.positions)
        for layer, window in enumerate(self.windows):
            q, k, v = self.project(layer, x)
            out = attention(layer, q, k, v, params=AttentionParams(0.5, window))
            x = torch.tanh(x + out.flatten(1) @ self.projections[layer][3])
        x = x if keep is None else x[keep]
        return TargetOutput(x, None)

    def argmax(self, output: TargetOutput) -> Tensor:
        return ops.lm_head_argmax(output.hidden, self.lm_head, backend=self.backend)

    def row_logits(self, output: TargetOutput, rows: list[int]) -> Tensor:
        return output.hidden[rows] @ self.lm_head.T

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """``[VOCAB]`` after ``tokens``: one pass over all of them with dense causal attention."""
        known = self._logits.get(tuple(tokens))
        if known is not None:
            return known
        index = torch.arange(len(tokens))
        x = self.embed(torch.tensor(tokens), index)
        for layer, window in enumerate(self.windows):
            q, k, v = self.project(layer, x)
            hidden = index[None, :] > index[:, None]
            if window is not None:
                hidden |= index[None, :] <= index[:, None] - window
            outs = []
            for head in range(self.heads[layer]):
                shared = head * k.shape[1] // self.heads[layer]
                scores = (q[:, head] @ k[:, shared].T * 0.5).masked_fill(hidden, float("-inf"))
                outs.append(scores.softmax(1) @ v[:, shared])
            x = torch.tanh(x + torch.cat(outs, dim=1) @ self.projections[layer][3])
        self._logits[tuple(tokens)] = x[-1] @ self.lm_head.T
        return self._logits[tuple(tokens)]

    def next_token(self, tokens: Sequence[int]) -> int:
        return int(self.logits(tokens).argmax())

    def margin(self, tokens: Sequence[int]) -> float:
        """The distance of the best next token's logit from the second."""
        best, second = self.logits(tokens).topk(2).values.tolist()
        return best - second


def plain(
    target: ToyTarget,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos: frozenset[int] = frozenset(),
    stop: Callable[[list[int]], bool] | None = None,
) -> list[int]:
    """New tokens of ordinary greedy decoding."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(target.next_token(tokens))
        if tokens[-1] in eos or (stop is not None and stop(tokens)):
            break
    return tokens[len(prompt) :]


class ToyDrafter:
    """Guesses for :class:`ToyTarget`.

    ``right``: every node holds the token that comes at its depth. ``last``: only the last of siblings does, the
    others are wrong. ``half``: each node with a coin. ``none``: -1 everywhere. ``random``: any token.
    ``outside``: numbers that are no tokens. ``root``: right, with rubbish in the root's column.

    Args:
        greedy: every token is the target's best, so that hidden states can be checked against the roots.
    """

    KINDS = ("right", "last", "half", "none", "random", "outside", "root")

    def __init__(self, kind: str, target: ToyTarget, greedy: bool = True) -> None:
        self.kind, self.target, self.greedy = kind, target, greedy
        self.generator = torch.Generator().manual_seed(5)
        self.max_depth, self.nbytes = 64, 0
        self.calls: list[DraftInput] = []

    def propose(self, inputs: DraftInput) -> Tensor:
        """See :class:`specmemo_kernels.drafting.Drafter`."""
        self.calls.append(inputs)
        tree, shape = inputs.tree, (len(inputs.token_ids), inputs.tree.size)
        assert inputs.root_tokens.tolist() == [tokens[-1] for tokens in inputs.token_ids]
        hidden = TargetOutput(inputs.hidden.to(self.target.lm_head.dtype), None)
        assert not self.greedy or self.target.argmax(hidden).tolist() == inputs.root_tokens.tolist()
        if self.kind == "none":
            return torch.full(shape, -1)
        if self.kind == "random":
            return torch.randint(0, VOCAB, shape, generator=self.generator)
        if self.kind == "outside":
            odd = torch.tensor([-1, -2, VOCAB, VOCAB + 1, 2**40, -(2**40)])
            return odd[torch.randint(0, len(odd), shape, generator=self.generator)]
        futures = [plain(self.target, tokens, tree.max_depth) for tokens in inputs.token_ids]
        right = torch.tensor([[0, *future] for future in futures])[:, list(tree.depths)]
        if self.kind == "half":
            wrong = torch.rand(shape, generator=self.generator) < 0.5
        elif self.kind == "last":
            last = {parent: node for node, parent in enumerate(tree.parents)}
            wrong = torch.tensor([last[parent] != node for node, parent in enumerate(tree.parents)])
        else:
            wrong = torch.tensor(False)
        result = torch.where(wrong, (right + 1) % VOCAB, right)
        if self.kind == "root":
            result[:, 0] = torch.tensor([2**40, -7, 0, 3]).repeat(shape[0])[: shape[0]]
        return result


TARGET = ToyTarget()


def decoder(
    tree: DraftTree,
    drafter: str | Drafter = "right",
    *,
    target: ToyTarget = TARGET,
    page_size: int = 4,
    num_pages: int = 64,
    prefill_chunk: int = 7,
    sequences: int = 4,
    backend: str = "reference",
) -> SpecDecoder:
    pool = PagedKVPool(
        target.layers,
        num_pages=num_pages,
        page_size=page_size,
        max_sequences=sequences,
        max_nodes=tree.size * sequences,
    )
    verifier = GreedyVerifier(target, backend)
    guesses = ToyDrafter(drafter, TARGET) if isinstance(drafter, str) else drafter
    return SpecDecoder(target, guesses, tree, pool, verifier, prefill_chunk=prefill_chunk, backend=backend)


def start(spec: SpecDecoder, sequences: list[SequenceState]) -> None:
    """Admit sequences and compute their contexts, without a step of the running ones."""
    spec.admit(sequences)
    try:
        while spec.prefilling:
            spec._forward(None)
    except BaseException:
        spec.release(sequences)
        raise


def finish(spec: SpecDecoder, waves: list[list[SequenceState]]) -> None:
    """Start a wave of sequences before each step and run all to their end; checks the pool after each step."""
    waves = list(waves)
    for _ in range(1000):
        if waves:
            start(spec, waves.pop(0))
            spec.pool.check_integrity()
        if spec.sequences:
            running = list(spec.sequences)
            finished = spec.step()
            spec.pool.check_integrity()
            assert spec.sequences == [s for s in running if s not in finished]
        if not waves and not spec.sequences:
            break
    assert not spec.sequences
    empty(spec.pool)


def empty(pool: PagedKVPool) -> None:
    pool.check_integrity()
    assert pool.free_pages == pool.num_pages
    assert pool.fits_sequences(pool.block_table.shape[0])


def same_as_plain(sequence: SequenceState) -> None:
    expected = plain(TARGET, sequence.prompt, sequence.max_new_tokens, sequence.eos_token_ids, sequence.stop)
    assert sequence.new_tokens == expected
    assert sequence.finished
