"""Predicted seconds of forward passes: a roofline over bytes and operations, plus launch overhead.

All times follow from a :class:`DeviceProfile`; nothing is measured on the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.device import DeviceProfile
from specmemo_kernels.planning.drafter_spec import RANKS, DrafterSpec, Drafts, DraftWork, HeadsSpec
from specmemo_kernels.planning.model_spec import MixerSizes, ModelSpec
from specmemo_kernels.planning.predicted_shape import page_token_bytes

#: Operators of a patched Llama of transformers 5, per layer and outside of layers, views included; counted by a
#: dispatch mode.
OPERATORS_PER_LAYER, OPERATORS_BESIDE = 79, 25
#: A rank's message before a step: its position and a checksum of its state, in four int64.
CHECKSUM_BYTES = 32
#: Operators of a step around the model: drafting, metadata, verification, the commit.
OPERATORS_AROUND = 60


@dataclass(frozen=True)
class Pass:
    """One forward pass.

    Attributes:
        rows: packed nodes or prompt tokens of all sequences.
        sequences: number of sequences.
        slots: committed tokens per sequence that the rows attend to.
        lm_rows: rows of the lm_head.
        heads: depth of the drafts. head_rows: sequences that they are for. width: candidates per depth.
        prompts: the rows are prompt tokens, which the drafter reads as well.
        recorded: a CUDA graph, or on a CPU a recorded program of fewer operators.
    """

    rows: int
    sequences: int
    slots: float
    lm_rows: int
    heads: int = 0
    head_rows: int = 0
    width: int = RANKS
    prompts: bool = False
    recorded: bool = False

    def draft_work(self, spec: ModelSpec, heads: DrafterSpec, tp: int) -> DraftWork:
        """The drafter's work in this pass."""
        if self.prompts:
            return heads.prompt_work(spec, self.rows, self.lm_rows)
        if not self.heads:
            return DraftWork()
        return heads.step_work(spec, Drafts(self.head_rows, self.heads, self.rows // self.sequences, self.width), tp)


@dataclass(frozen=True)
class Message:
    """``count`` collectives of ``nbytes`` per rank: an all-gather if ``gathered``, else an all-reduce."""

    count: int
    nbytes: int
    gathered: bool

    def seconds(self, device: DeviceProfile, tp: int) -> float:
        """Seconds of the collectives, by ring algorithms (Patarasuk and Yuan 2009).

        An all-gather takes ``tp - 1`` steps of ``nbytes``, an all-reduce ``2 (tp - 1)`` steps of ``nbytes / tp``.
        """
        steps, part = (tp - 1, self.nbytes) if self.gathered else (2 * (tp - 1), self.nbytes / tp)
        return self.count * device.collective_seconds(steps, steps * part)


def step_messages(spec: ModelSpec, run: Pass, heads: DrafterSpec) -> tuple[Message, ...]:
    """Collectives of a tensor parallel pass; none grows with the vocabulary.

    - all-reduce of the residual stream: after the embedding and twice per layer (transformers' plan);
    - all-gather of a checksum of the sequences (adaptive trees add two of the same size, which aren't counted);
    - all-gather of a value and a token, 16 bytes, per row with a token;
    - the drafter's (:class:`DraftWork`).
    """
    messages = [Message(2 * spec.num_layers + 1, run.rows * spec.hidden_size * spec.dtype_bytes, False)]
    messages.append(Message(1, CHECKSUM_BYTES, True))
    if run.lm_rows:
        messages.append(Message(1, 16 * run.lm_rows, True))
    work = run.draft_work(spec, heads, 1)
    messages += [Message(1, nbytes, True) for nbytes in work.gathered]
    return *messages, *(Message(1, nbytes, False) for nbytes in work.reduced)


def _attention_seconds(
    device: DeviceProfile, dtype: str, run: Pass, rows: int, width: float, paged: float, new: float
) -> float:
    """Seconds of attention of ``rows`` rows over all sequences' slots.

    Keys and values are read once (codes and scales with ``kv_dtype``; dequantisation isn't counted), and each row has
    two operations per slot and element of its queries and results.

    Args:
        width: of all layers' queries and results.
        paged, new: bytes of a token's keys and values in pages, and as computed.
    """
    flops = 2.0 * width * rows * (run.slots + rows / run.sequences / 2)
    return device.kernel_seconds(paged * run.sequences * run.slots + 2 * new * rows, flops, dtype)


def _mixer_seconds(spec: ModelSpec, mixers: MixerSizes, device: DeviceProfile, run: Pass) -> float:
    """Seconds of recurrent layers besides their products with the pass's rows.

    States are read and written. With drafts they are also copied for each path, at most one per two nodes, and the
    layers run once more on the rows that the last step accepted (two per sequence are assumed).
    """
    paths = max(1, run.rows // run.sequences // 2) if run.heads else 1
    seconds = 2 * paths * run.sequences * mixers.state_bytes / device.read_rate
    if run.heads:
        dtype, rows = device.compute_dtype(spec.dtype), 2 * run.sequences
        nbytes = mixers.weights * spec.quantised.attention.per_element(spec.dtype_bytes)
        seconds += device.linear_seconds(mixers.weights, nbytes, rows, dtype, mixers.matrices)
    return seconds


def pass_seconds(
    spec: ModelSpec, device: DeviceProfile, run: Pass, heads: DrafterSpec, tp: int = 1, kv_dtype: str | None = None
) -> float:
    """Predicted seconds of a forward pass with its heads, on each of ``tp`` devices.

    - the layers' matrices: read once, multiplied with every row (experts: with their share of rows);
    - matrices that are dequantised in each pass: written and read once in the model's dtype;
    - attention (:func:`_attention_seconds`);
    - states of recurrent layers (:func:`_mixer_seconds`);
    - the lm_head on ``lm_rows``;
    - the drafter's work (:meth:`Pass.draft_work`);
    - for ``tp > 1`` the collectives (:func:`step_messages`);
    - starts of kernels, and unless the pass is recorded operator launches on the host.
    """
    dtype = device.compute_dtype(spec.dtype)
    read = spec.read_weights(run.rows)
    rows_per_matrix = max(1, round(run.rows * spec.active_weights / read))
    share = spec.layer_weights_of_rank(tp, read)
    nbytes = share * spec.read_bytes(run.rows) / read
    seconds = device.linear_seconds(share, nbytes, rows_per_matrix, dtype, spec.layer_matrices)
    seconds += 2 * spec.unpacked_bytes(run.rows, run.lm_rows > 0) / tp / device.read_rate
    vocabulary = spec.lm_head_weights / tp
    if run.lm_rows:
        seconds += device.linear_seconds(vocabulary, spec.lm_head_bytes / tp, run.lm_rows, dtype, 1)
    width = spec.num_qo_heads * (spec.head_dim + spec.v_head_dim) / tp * spec.attention_layers
    paged, new = page_token_bytes(spec, kv_dtype, tp), page_token_bytes(spec, None, tp)
    seconds += _attention_seconds(device, dtype, run, run.rows, width, paged, new)
    if spec.mixers is not None:
        seconds += _mixer_seconds(spec, spec.mixers, device, run)
    work = run.draft_work(spec, heads, tp)
    for product in work.products:
        sizes = product.weights, product.nbytes, product.rows
        seconds += device.linear_seconds(*sizes, dtype, product.matrices, product.coded)
    paged, new = heads.page_token_bytes(spec, kv_dtype), heads.page_token_bytes(spec, None)
    for rows in work.attention:
        seconds += _attention_seconds(device, dtype, run, rows, heads.attention_width, paged, new)
    if tp > 1:
        seconds += sum(message.seconds(device, tp) for message in step_messages(spec, run, heads))
    launches = spec.num_layers * (OPERATORS_PER_LAYER + (2 if tp > 1 else 0)) + OPERATORS_BESIDE + OPERATORS_AROUND
    return device.with_launches(seconds, launches + work.operators, run.recorded)


@dataclass(frozen=True)
class Speed:
    """Predicted seconds of a step, and tokens per second of a workload, prefill included."""

    step_seconds: float
    tokens_per_second: float


def generation_speed(
    workload: Workload, prefill_seconds: float, step_seconds: float, tokens_per_step: float, sequences: int
) -> Speed:
    """Speed of a workload in rounds of ``sequences``: prefill, then ``new_tokens / tokens_per_step`` steps."""
    rounds = -(-workload.batch // sequences)
    seconds = rounds * (prefill_seconds + workload.new_tokens / tokens_per_step * step_seconds)
    return Speed(step_seconds, workload.batch * workload.new_tokens / seconds)


def decode_pass(workload: Workload, sequences: int, tree_size: int, heads: int, recorded: bool = False) -> Pass:
    """A step in the middle of the answer."""
    slots = workload.prompt + workload.new_tokens / 2
    rows = sequences * tree_size
    return Pass(rows, sequences, slots, rows, heads, sequences if heads else 0, recorded=recorded)


def prefill_seconds(
    spec: ModelSpec, device: DeviceProfile, workload: Workload, sequences: int, chunk: int, tp: int = 1,
    kv_dtype: str | None = None, heads: DrafterSpec | None = None,
) -> float:  # fmt: skip
    """Seconds to prefill all prompts of a round in chunks, which attend to half of the prompt on average.

    ``heads``: the drafter, which may read the prompts; ``None``: there is none.
    """
    tokens = sequences * workload.prompt
    full, rest = divmod(tokens, chunk)
    seconds = 0.0
    for count, rows in ((full, chunk), (1, rest)):
        if count and rows:
            run = Pass(rows, min(sequences, rows), workload.prompt / 2, min(sequences, rows), prompts=True)
            seconds += count * pass_seconds(spec, device, run, heads or HeadsSpec(0), tp, kv_dtype)
    return seconds


def plain_speed(spec: ModelSpec, device: DeviceProfile, workload: Workload, tp: int = 1) -> Speed:
    """transformers' ``generate``: one prefill pass; each step copies the cache, and ranks gather the logits."""
    chunk, no_heads = workload.batch * workload.prompt, HeadsSpec(0)
    step = pass_seconds(spec, device, decode_pass(workload, workload.batch, 1, 0), no_heads, tp)
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
    """Medusa as published: one prefill pass; all heads run on every prompt row and every node."""
    batch = workload.batch
    decode = decode_pass(workload, batch, nodes, heads.num_heads)
    step = pass_seconds(
        spec, device, Pass(decode.rows, batch, decode.slots, decode.rows, heads.num_heads, decode.rows), heads, tp
    )
    rows = batch * workload.prompt
    prefill = pass_seconds(spec, device, Pass(rows, batch, 0, rows, heads.num_heads, rows), heads, tp)
    return generation_speed(workload, prefill, step, tokens_per_step, batch)
