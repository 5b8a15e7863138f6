"""The options of all commands: the fields of a dataclass are the parameters of its command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

KVDtype = Annotated[
    str | None, Option(help="int8 or fp8: keys and values as 8-bit codes, not lossless (default: the model's dtype).")
]
HeadBits = Annotated[
    int | None,
    Option(help="4: the heads' own vocabulary matrices as 4-bit codes; no token changes (default: as stored)."),
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
        str | None, Option(help="A folder with a model and, in heads/, its heads (default: the bundled model).")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ChatOptions(PatchOptions):
    """Chat with a model and its heads. Without a chat template the model completes your text."""

    model: Annotated[str | None, Option(help="A hub id or a folder (default: the bundled demo model).")] = None
    heads: Annotated[
        str | None, Option(help="A drafter for that model, such as Medusa heads: a hub id, a folder or a file.")
    ] = None
    dtype: Annotated[str, Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto"
    max_new_tokens: Annotated[int, Option(help="Maximum tokens per reply, at most half the context.", min=1)] = 256
    head_bits: HeadBits = None


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Measure this machine for plans: memory bandwidth, small matrix products, operator overhead."""

    device: Annotated[str, Option(help="A torch device: cpu, cuda, cuda:1, ...")] = "cpu"
    output: Annotated[Path | None, Option(help="A file for the profile (default: in the user's cache).")] = None
    seconds: Annotated[float, Option(help="How long to measure.", min=0.1, max=3600)] = 3.0


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Predict memory and speed of generation, and choose heads, tree and pages for a budget.

    Reads the model's configuration only, and plans for devices of other machines as well. Only --device this, which is
    the default, and --device cuda use a device of this machine.
    """

    model: Annotated[str, Option(help="A config.json, a folder with one, or a hub id; no weights are needed.")]
    device: Annotated[
        str | None,
        Option(help="titan-rtx, rtx-3060, ..., a file of specmemo probe, cuda, or this (default: this machine's CPU)."),
    ] = None
    devices: Annotated[
        str | None, Option(help="A device and the number of ranks, as in mi250:8; replaces --device and --tp.")
    ] = None
    memory_budget: Annotated[
        str | None,
        Option(
            help="Memory per device for the model's weights and generation together (default: all of it); in chat and "
            "demo the weights don't count."
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
            "or a number of heads like Vicuna's."
        ),
    ] = "5"
    shared_lm_head: Annotated[
        bool, Option("--shared-lm-head", help="With a number of heads: all share the model's lm_head.")
    ] = False
    dtype: Annotated[str | None, Option(help="Plan for this dtype of the model (default: as configured).")] = None
    kv_dtype: KVDtype = None
    head_bits: HeadBits = None
    weight_bits: Annotated[
        float | None, Option(help="Plan for layers quantised to this many bits, scales included.", min=1, max=32)
    ] = None
    as_json: Annotated[bool, Option("--json", help="Print JSON, for programs.")] = False
    plot: Annotated[Path | None, Option(help="Also draw speed over memory to this .png or .svg.")] = None
