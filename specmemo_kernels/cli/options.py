"""The options of all commands: the fields of a dataclass are the parameters of its command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

KVDtype = Annotated[
    Literal["int8", "fp8"] | None,
    Option(help="Keys and values as 8-bit codes, not lossless (default: the model's dtype)."),
]
HeadBits = Annotated[
    int | None,
    Option(help="4: the drafter's matrices as 4-bit codes; no token changes (default: as stored)."),
]


@dataclass(frozen=True, kw_only=True)
class PatchOptions:
    """Options of the commands that patch a model."""

    device: Annotated[str, Option(help="A torch device: cpu, cuda, cuda:1, ...")] = "cpu"
    backend: Annotated[str | None, Option(help="reference, cpu or triton (default: by device).")] = None
    tree: Annotated[
        int | None, Option(help="Nodes of the candidate tree (default: the best for the device).", min=1)
    ] = None
    memory_budget: Annotated[
        str | None,
        Option(help="Memory for generation, without the model's weights: 64MiB, 2GiB, ... (default: no limit)."),
    ] = None
    context: Annotated[
        int | None,
        Option(help="Longest text, prompt and reply together, that the budget must hold (default: what fits).", min=2),
    ] = None
    kv_dtype: KVDtype = None


@dataclass(frozen=True, kw_only=True)
class DemoOptions(PatchOptions):
    """Complete real Python files, plain and patched side by side, and compare speed, memory and tokens.

    The files were held out of the bundled model's training. The exit status is 1 if the patched model's tokens
    differ from the plain model's anywhere.
    """

    prompt_file: Annotated[
        list[Path] | None,
        Option(help="Text to complete instead of library files; repeatable.", exists=True, dir_okay=False),
    ] = None
    turns: Annotated[int, Option(help="Library files to complete.", min=1)] = 6
    max_new_tokens: Annotated[int, Option(help="Tokens per completion.", min=1)] = 128
    rounds: Annotated[int, Option(help="Timed runs of each prompt, plain and patched in turns.", min=1)] = 3
    json_out: Annotated[Path | None, Option("--json", help="Also write every figure to this file.")] = None
    seed: Annotated[int, Option(help="Seed for the choice of files and positions.")] = 0
    model: Annotated[
        str | None,
        Option(
            help="A folder with a model and, in its folder heads/, its heads; no hub id, which chat and serve take "
            "(default: the bundled model)."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ModelOptions(PatchOptions):
    """Options of the commands that run any model."""

    model: Annotated[
        str | None,
        Option(
            help="A hub id or a folder, whose drafter --heads names (default: the bundled demo model and its heads)."
        ),
    ] = None
    heads: Annotated[
        str | None,
        Option(
            help="A drafter for that model, such as Medusa heads (a hub id, a folder or a file); mtp for the model's "
            "own MTP layer; or prompt-lookup, which needs no weights."
        ),
    ] = None
    dtype: Annotated[str, Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto"
    head_bits: HeadBits = None
    compress: Annotated[
        bool, Option("--compress", help="Keep bfloat16 weights in 12 bits, without loss; on a CPU.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ChatOptions(ModelOptions):
    """Chat with a model and its heads. Without a chat template the model completes your text."""

    max_new_tokens: Annotated[int, Option(help="Maximum tokens per reply, at most half the context.", min=1)] = 256


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelOptions):
    """Serve a model by OpenAI's API, within the memory budget: completions and chat completions, streamed or whole."""

    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for all of this machine's.")] = "127.0.0.1"
    port: Annotated[int, Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)] = 8000
    api_key: Annotated[
        str | None, Option(help="Key that clients must send (default: none).", envvar="SPECMEMO_API_KEY")
    ] = None
    served_name: Annotated[str | None, Option(help="The model's name for clients (default: its folder or id).")] = None
    batch: Annotated[int, Option(help="Most requests generated at once.", min=1)] = 8
    max_waiting: Annotated[int, Option(help="Most requests that wait; further ones get status 429.", min=1)] = 256
    keep_free: Annotated[str | None, Option(help="Device memory to leave free for other processes: 1GiB, ...")] = None
    max_body: Annotated[int, Option(help="Most bytes of a request's body.", min=1)] = 4 << 20
    max_seconds: Annotated[
        float | None, Option(help="How long an answer may take, waiting included (default: no limit).", min=0.001)
    ] = None
    shutdown_seconds: Annotated[
        float, Option(help="How long running requests may go on after SIGTERM or Ctrl-C.", min=0.0)
    ] = 30.0


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Measure this machine for plans: memory bandwidth, small matrix products, operator overhead."""

    device: Annotated[str, Option(help="A torch device: cpu, cuda, cuda:1, ...")] = "cpu"
    output: Annotated[Path | None, Option(help="A file for the profile (default: in the user's cache).")] = None
    seconds: Annotated[
        float,
        Option(
            help="How long to measure; each product runs at least three times, which takes longer on a busy machine.",
            min=0.1, max=3600,
        ),
    ] = 3.0  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Predict memory and speed of generation, and choose heads, tree and pages for a budget.

    Reads the model's configuration only, and plans for devices of other machines as well. Only --device this, which is
    the default, and --device cuda use a device of this machine.
    """

    model: Annotated[
        str,
        Option(
            help="A known name (llama-3.1-8b, qwen3-4b, ...), a config.json, a folder with one, a .gguf file or a hub "
            "id; no weights are read."
        ),
    ]
    device: Annotated[
        str | None,
        Option(
            help='A known device (rtx-4060, m2-16gb, ...), a description such as "8GiB, 100GB/s, 5TFLOP/s fp16", a '
            "file of specmemo probe, cuda, or this (default: this machine's CPU)."
        ),
    ] = None
    devices: Annotated[
        str | None, Option(help="A device and the number of ranks, as in mi250:8; replaces --device and --tp.")
    ] = None
    memory_budget: Annotated[
        str | None,
        Option(
            help="Memory per device for the model's weights and generation together (default: all of it); in demo, "
            "chat and serve the weights don't count."
        ),
    ] = None
    context: Annotated[int, Option(help="Tokens per sequence, prompt and answer.", min=2)] = 4096
    prompt: Annotated[int | None, Option(help="Prompt tokens per sequence (default: half of --context).", min=1)] = None
    batch: Annotated[int, Option(help="Batch size.", min=1, max=4096)] = 1
    tp: Annotated[int, Option(help="Ranks of tensor parallelism; figures are per rank.", min=1)] = 1
    heads: Annotated[
        str,
        Option(
            help="A drafter or Medusa heads (a folder, a file or a hub id; no weights are read), mtp, prompt-lookup, "
            "or a number: that many Medusa heads, with Vicuna-7B's published accuracies."
        ),
    ] = "5"
    scaling: Annotated[
        Path | None,
        Option(
            help="scaling.json of specmemo train: which drafter size, training volume and batch are worth it.",
            exists=True, dir_okay=False,
        ),
    ] = None  # fmt: skip
    shared_lm_head: Annotated[
        bool, Option("--shared-lm-head", help="With a number of heads: all share the model's lm_head.")
    ] = False
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Option(help="Plan for this dtype of the model (default: as configured)."),
    ] = None
    kv_dtype: KVDtype = None
    head_bits: HeadBits = None
    weight_bits: Annotated[
        float | None,
        Option(help="Plan for layers in this many bits, scales included, whatever the model has.", min=1, max=32),
    ] = None
    as_json: Annotated[bool, Option("--json", help="Print JSON, for programs.")] = False
    plot: Annotated[Path | None, Option(help="Also draw speed over memory to this file: .png, .svg, .pdf, ...")] = None


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a drafter for a model: Medusa heads, Clover-2 or EAGLE-3, whose measured acceptance patch and plan use.

    The model isn't changed. A run that was interrupted goes on when the command is repeated. Under torchrun each
    process trains on its share of the text.
    """

    model: Annotated[str, Option(help="The model: a hub id or a folder.")]
    out: Annotated[Path, Option(help="The drafter's folder.", file_okay=False)]
    drafter: Annotated[str, Option(help="medusa, clover2 or eagle3.")] = "eagle3"
    data: Annotated[
        list[Path] | None,
        Option(
            help="Text: .jsonl files with text, messages, or prompt and answer per line; other files and folders are "
            "plain text. Repeatable.",
            exists=True,
        ),
    ] = None
    self_generate: Annotated[
        list[Path] | None,
        Option(
            help="Prompts that the model answers itself, to train on: .jsonl files with messages, turns or prompt per "
            "line, or plain text. Repeatable.",
            exists=True, dir_okay=False,
        ),
    ] = None  # fmt: skip
    held_out: Annotated[
        list[Path] | None,
        Option(help="Text to measure acceptance on, as --data (default: a sixteenth of the text).", exists=True),
    ] = None
    memory_budget: Annotated[
        str | None, Option(help="Memory for training, beside the model: 2GiB, ... (default: 80 % of what is free).")
    ] = None
    tokens: Annotated[int | None, Option(help="Tokens to train on (default: the text twice).", min=1)] = None
    batch_tokens: Annotated[int, Option(help="Tokens per optimiser step.", min=1)] = 8192
    length: Annotated[int, Option(help="Tokens of a window of text.", min=16)] = 512
    depth: Annotated[int, Option(help="Tokens drafted: heads, or unrolled steps.", min=1, max=8)] = 5
    layers: Annotated[
        int | None, Option(help="Blocks of a Medusa head, or decoder layers (default: as published).", min=1)
    ] = None
    intermediate_size: Annotated[int | None, Option(help="Of the drafter's MLPs (default: the model's).", min=1)] = None
    draft_vocab: Annotated[
        int | None,
        Option(help="eagle3: tokens of its own vocabulary matrix; 0: the model's lm_head (default: 32000).", min=0),
    ] = None
    feature_layer: Annotated[
        list[int] | None,
        Option(help="eagle3: a layer whose input it reads, repeatable (default: 2, L / 2 and L - 3 of L layers)."),
    ] = None
    rate: Annotated[float, Option(help="The highest learning rate.", min=1e-8, max=1.0)] = 1e-3
    scaling: Annotated[
        bool,
        Option(
            "--scaling",
            help="15 runs around these options: four token counts by three sizes, and three that test the scaling "
            "laws fitted to these; writes scaling.json for plan.",
        ),
    ] = False
    answer_tokens: Annotated[
        int | None, Option(help="With --self-generate: most tokens of an answer (default: 256).", min=1)
    ] = None
    temperature: Annotated[
        float | None, Option(help="With --self-generate: 0 for greedy answers (default: 0.8).", min=0.0)
    ] = None
    seed: Annotated[
        int, Option(help="Of new weights, the order of the text and sampled answers.", min=0, max=2**63 - 1)
    ] = 0
    device: Annotated[str, Option(help="A torch device: cpu, cuda, ...")] = "cpu"
    dtype: Annotated[str, Option(help="Of the model: auto (as stored), float32, bfloat16 or float16.")] = "auto"
