"""How long a forward pass takes: a roofline over what it reads and computes, and the host's share.

All times are predictions from a :class:`DeviceProfile`; nothing here is measured on the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.device import DeviceProfile
from specmemo_kernels.planning.footprint import HeadsSpec, page_token_bytes
from specmemo_kernels.planning.model_spec import ModelSpec

#: Operators of a patched Llama of transformers 5 in a layer and outside of layers, views included, as torch dispatches
#: them (a dispatch mode counted).
OPERATORS_PER_LAYER, OPERATORS_BESIDE = 79, 25
#: What each rank says before a step: its place, and a checksum of what it knows, in four int64.
CHECKSUM_BYTES = 32
#: Operators of a step around the model: drafting, metadata, verification, the commit.
OPERATORS_AROUND = 60


@dataclass(frozen=True)
class Pass:
    """One forward pass.

    Attributes:
        rows: packed nodes or prompt tokens, over all sequences.
        sequences: how many sequences they belong to.
        slots: committed tokens that each sequence's rows attend to.
        lm_rows: rows that reach the lm_head.
        heads, head_rows: Medusa heads that run, and on how many rows. width: candidates that are taken of each.
    """

    rows: int
    sequences: int
    slots: float
    lm_rows: int
    heads: int = 0
    head_rows: int = 0
    width: int = 10


@dataclass(frozen=True)
class Message:
    """``count`` collectives to each of which a rank hands ``nbytes``: gathered from all ranks, or else summed."""

    count: int
    nbytes: int
    gathered: bool

    def seconds(self, device: DeviceProfile, tp: int) -> float:
        """Rings (Patarasuk and Yuan 2009): ``tp - 1`` steps of a rank's bytes each to gather, ``2 (tp - 1)`` of their
        ``tp``-th part to sum.
        """
        steps, part = (tp - 1, self.nbytes) if self.gathered else (2 * (tp - 1), self.nbytes / tp)
        return self.count * device.collective_seconds(steps, steps * part)


def step_messages(spec: ModelSpec, run: Pass, heads: HeadsSpec) -> tuple[Message, ...]:
    """What ranks of tensor parallel tell each other in a pass; nothing grows with the vocabulary.

    - the residual stream, summed behind the embedding and twice in each layer (transformers' plan);
    - a checksum of the sequences (and as much twice more where each step chooses its tree);
    - a value and a token, 16 bytes, for each row whose token is wanted, and for each candidate of the heads: one
      message for each head that has an lm_head of its own, else one for all.
    """
    found = [Message(2 * spec.num_layers + 1, run.rows * spec.hidden_size * spec.dtype_bytes, False)]
    found.append(Message(1, CHECKSUM_BYTES, True))
    if run.lm_rows:
        found.append(Message(1, 16 * run.lm_rows, True))
    if run.heads:
        each, together = (run.heads, 1) if heads.own_lm_head else (1, run.heads)
        found.append(Message(each, 16 * together * run.head_rows * run.width, True))
    return tuple(found)


def pass_seconds(
    spec: ModelSpec, device: DeviceProfile, run: Pass, heads: HeadsSpec, tp: int = 1, kv_dtype: str | None = None
) -> float:
    """Predicted seconds of a forward pass and what belongs to it, on each of ``tp`` devices.

    - the layers' matrices: read once, multiplied with every row (a mixture's with the rows that its experts get);
    - attention: keys and values of all slots read once (as codes and scales where ``kv_dtype`` names some; turning
      them back isn't counted), ``4 * heads * dim`` operations per row and slot;
    - the lm_head on ``lm_rows``; each head's blocks and vocabulary matrix (its own, read in fewer bytes where it is in
      4 bits, or one more product with the model's for all heads) on ``head_rows``. A measured curve knows no codes, so
      on such a device they count like weights of the model's dtype;
    - for ``tp > 1`` the ranks' messages (:func:`step_messages`);
    - the host, which launches every operator.
    """
    dtype = device.compute_dtype(spec.dtype)
    size = spec.dtype_bytes
    read = spec.read_weights(run.rows)
    rows_each = max(1, round(run.rows * spec.active_weights / read))
    share = spec.layer_weights_of_rank(tp, read)
    seconds = device.linear_seconds(share, share * spec.bytes_per_weight, rows_each, dtype, spec.layer_matrices)
    vocabulary = spec.vocab_weights / tp
    if run.lm_rows:
        seconds += device.linear_seconds(vocabulary, vocabulary * size, run.lm_rows, dtype, 1)
    width = spec.num_qo_heads * (spec.head_dim + spec.v_head_dim) / tp
    flops = 2.0 * width * spec.num_layers * run.rows * (run.slots + run.rows / run.sequences / 2)
    pages, own = page_token_bytes(spec, kv_dtype, tp), page_token_bytes(spec, None, tp)
    seconds += device.kernel_seconds(pages * run.sequences * run.slots + 2 * own * run.rows, flops, dtype)
    if run.heads:
        blocks = run.heads * heads.num_layers * spec.hidden_size**2
        seconds += device.linear_seconds(blocks, blocks * size, run.head_rows, dtype, run.heads * heads.num_layers)
        own, rows = (run.heads, run.head_rows) if heads.own_lm_head else (1, run.heads * run.head_rows)
        seconds += device.linear_seconds(own * vocabulary, own * heads.vocab_bytes(spec, tp), rows, dtype, own)
    if tp > 1:
        seconds += sum(message.seconds(device, tp) for message in step_messages(spec, run, heads))
    launches = spec.num_layers * (OPERATORS_PER_LAYER + (2 if tp > 1 else 0)) + OPERATORS_BESIDE + OPERATORS_AROUND
    return device.with_host(seconds, launches)


@dataclass(frozen=True)
class Speed:
    """Predicted seconds of a step, and tokens per second over a whole workload, prefill included."""

    step_seconds: float
    tokens_per_second: float


def generation_speed(
    workload: Workload, prefill_seconds: float, step_seconds: float, tokens_per_step: float, sequences: int
) -> Speed:
    """All of a workload in rounds of ``sequences`` at once.

    ``prefill_seconds`` is that of a round; a round has ``new_tokens / tokens_per_step`` steps.
    """
    rounds = -(-workload.batch // sequences)
    seconds = rounds * (prefill_seconds + workload.new_tokens / tokens_per_step * step_seconds)
    return Speed(step_seconds, workload.batch * workload.new_tokens / seconds)


def decode_pass(workload: Workload, sequences: int, tree_size: int, heads: int) -> Pass:
    """A step half-way through the answer."""
    slots = workload.prompt + workload.new_tokens / 2
    rows = sequences * tree_size
    return Pass(rows, sequences, slots, rows, heads, sequences if heads else 0)


def prefill_seconds(
    spec: ModelSpec, device: DeviceProfile, workload: Workload, sequences: int, chunk: int, tp: int = 1,
    kv_dtype: str | None = None,
) -> float:  # fmt: skip
    """All prompts of a round in chunks, which attend to half of their prompt on average."""
    tokens = sequences * workload.prompt
    full, rest = divmod(tokens, chunk)
    no_heads = HeadsSpec(0)
    seconds = 0.0
    for count, rows in ((full, chunk), (1, rest)):
        if count and rows:
            run = Pass(rows, min(sequences, rows), workload.prompt / 2, min(sequences, rows))
            seconds += count * pass_seconds(spec, device, run, no_heads, tp, kv_dtype)
    return seconds


def plain_speed(spec: ModelSpec, device: DeviceProfile, workload: Workload, tp: int = 1) -> Speed:
    """transformers' own generate: one pass over all prompts; a step also copies the cache to add one token to it, and
    its ranks gather the logits.
    """
    chunk, none = workload.batch * workload.prompt, HeadsSpec(0)
    step = pass_seconds(spec, device, decode_pass(workload, workload.batch, 1, 0), none, tp)
    cache = 2 * workload.batch * (workload.prompt + workload.new_tokens / 2) * page_token_bytes(spec, None, tp)
    step += cache / device.read_rate
    if tp > 1:
        step += Message(1, workload.batch * spec.vocab_size * spec.dtype_bytes // tp, True).seconds(device, tp)
    return generation_speed(
        workload, prefill_seconds(spec, device, workload, workload.batch, chunk, tp), step, 1.0, workload.batch
    )


def medusa_speed(
    spec: ModelSpec, device: DeviceProfile, workload: Workload, heads: HeadsSpec, nodes: int, tokens_per_step: float,
    tp: int = 1,
) -> Speed:  # fmt: skip
    """Medusa as published: one pass over the prompt with all heads on every row, and all heads on every node."""
    batch = workload.batch
    decode = decode_pass(workload, batch, nodes, heads.num_heads)
    step = pass_seconds(
        spec, device, Pass(decode.rows, batch, decode.slots, decode.rows, heads.num_heads, decode.rows), heads, tp
    )
    rows = batch * workload.prompt
    prefill = pass_seconds(spec, device, Pass(rows, batch, 0, rows, heads.num_heads, rows), heads, tp)
    return generation_speed(workload, prefill, step, tokens_per_step, batch)
