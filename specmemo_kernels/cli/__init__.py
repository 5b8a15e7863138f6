"""The ``specmemo`` command. Importing it is light: torch and transformers load inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specmemo_kernels import __version__
from specmemo_kernels.cli.errors import Commands, importing

app = typer.Typer(
    cls=Commands,
    help="Speculative decoding for Hugging Face models, inside a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Device = Annotated[str, typer.Option(help="A torch device: cpu, cuda, cuda:1, ...")]
Tree = Annotated[int | None, typer.Option(help="Nodes of the candidate tree (default: suits the device).", min=1)]
Budget = Annotated[
    str | None,
    typer.Option(help="Memory for generation, without the model's weights: 64MiB, 2GiB, ... (default: no limit)."),
]
KVDtype = Annotated[
    str | None,
    typer.Option(help="int8 or fp8: keys and values as 8-bit codes, not lossless (default: the model's dtype)."),
]
HeadBits = Annotated[
    int | None,
    typer.Option(help="4: the heads' own vocabulary matrices as 4-bit codes; no token changes (default: as stored)."),
]
Backend = Annotated[str | None, typer.Option(help="reference, cpu or triton (default: by device).")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specmemo {__version__}")
        raise typer.Exit


@app.callback()
def common_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command; the help of all commands is the group's."""


@app.command()
def demo(
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(help="Text to complete instead of library files; repeatable.", exists=True, dir_okay=False),
    ] = None,
    turns: Annotated[int, typer.Option(help="Library files to complete.", min=1)] = 6,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per completion.", min=1)] = 128,
    rounds: Annotated[int, typer.Option(help="Timed runs of each prompt, plain and patched in turns.", min=1)] = 3,
    tree: Tree = None,
    memory_budget: Budget = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write every figure to this file.")] = None,
    seed: Annotated[int, typer.Option(help="Chooses the files and places.")] = 0,
    model: Annotated[
        str | None,
        typer.Option(help="A folder with a model and, in heads/, its heads (default: the bundled model)."),
    ] = None,
    device: Device = "cpu",
    backend: Backend = None,
    kv_dtype: KVDtype = None,
) -> None:
    """Complete real Python files, plain and patched side by side, and compare speed, memory and tokens.

    The bundled model wrote none of them into its weights: the files were held out of its training. Ends with exit
    status 1 if the patched model wrote a different token anywhere.
    """
    with importing():
        from specmemo_kernels.cli.demo import DemoOptions, run_demo

    options = DemoOptions(
        prompt_files=tuple(prompt_file or ()), turns=turns, max_new_tokens=max_new_tokens, rounds=rounds, tree=tree,
        memory_budget=memory_budget, json_out=json_out, seed=seed, model=model, device=device, backend=backend,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    same = run_demo(options)
    if not same:
        raise typer.Exit(1)


@app.command()
def chat(
    model: Annotated[str | None, typer.Option(help="A hub id or a folder (default: the bundled demo model).")] = None,
    heads: Annotated[str | None, typer.Option(help="Medusa heads for that model: a hub id or a folder.")] = None,
    memory_budget: Budget = None,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    device: Device = "cpu",
    backend: Backend = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Most tokens per reply; at most half of what prompt and reply may take.", min=1)
    ] = 256,
    tree: Tree = None,
    kv_dtype: KVDtype = None,
    head_bits: HeadBits = None,
) -> None:
    """Talk to a model with its heads: a chat where the tokenizer has a template, else completion of your text."""
    with importing():
        from specmemo_kernels.cli.chat import ChatOptions, run_chat

    run_chat(
        ChatOptions(
            model=model, heads=heads, memory_budget=memory_budget, dtype=dtype, device=device, backend=backend,
            max_new_tokens=max_new_tokens, tree=tree, kv_dtype=kv_dtype, head_bits=head_bits,
        )
    )  # fmt: skip


@app.command()
def probe(
    device: Device = "cpu",
    output: Annotated[Path | None, typer.Option(help="A file for the profile (default: in the user's cache).")] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure.", min=0.1, max=3600)] = 3.0,
) -> None:
    """Measure this machine, for plans: bandwidth, products of a few rows, the cost of an operator."""
    with importing():
        from specmemo_kernels.cli.probe import run_probe

    run_probe(device, output, seconds)


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="A config.json, a folder with one, or a hub id; no weights are needed.")],
    device: Annotated[
        str | None,
        typer.Option(
            help="titan-rtx, rtx-3060, ..., a file of specmemo probe, cuda, or this (default: this machine's CPU)."
        ),
    ] = None,
    devices: Annotated[
        str | None, typer.Option(help="Instead: a device and how many of them share the model, as in mi250:8.")
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            help="Memory of a device for the model's weights and generation together (default: all that it has); "
            "in chat and demo the weights don't count."
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens per sequence, prompt and answer.", min=2)] = 4096,
    prompt: Annotated[int | None, typer.Option(help="How many of them are prompt (default: half).", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Sequences wanted at once.", min=1, max=4096)] = 1,
    tp: Annotated[int, typer.Option(help="Devices that share the model; figures are for each.", min=1)] = 1,
    heads: Annotated[
        str, typer.Option(help="Heads to plan with: a folder or file (nothing is loaded), or how many like Vicuna's.")
    ] = "5",
    shared_lm_head: Annotated[
        bool, typer.Option("--shared-lm-head", help="So many heads use the model's lm_head instead of owning one each.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="Plan for the model loaded in this dtype (default: as configured).")
    ] = None,
    kv_dtype: KVDtype = None,
    head_bits: HeadBits = None,
    weight_bits: Annotated[
        float | None, typer.Option(help="Plan for layers quantised to so many bits, scales included.", min=1, max=32)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw speed over memory to this .png or .svg.")] = None,
) -> None:
    """Predict what generation will need and how fast it should be, and choose heads, tree and pages for a budget.

    Works from the configuration alone, for devices that aren't here. Nothing is measured but, with --device this,
    the machine itself.
    """
    with importing():
        from specmemo_kernels.cli.plan import PlanOptions, run_plan

    run_plan(
        PlanOptions(
            model=model, device=device, devices=devices, memory_budget=memory_budget, context=context, prompt=prompt,
            batch=batch, tp=tp, heads=heads, shared_lm_head=shared_lm_head, dtype=dtype, kv_dtype=kv_dtype,
            head_bits=head_bits,
            weight_bits=weight_bits, as_json=as_json, plot=plot,
        )
    )  # fmt: skip


@app.command()
def env() -> None:
    """Print versions, devices and backends; paste it into a bug report."""
    with importing():
        from specmemo_kernels.cli.env import collect_env

    facts = collect_env()
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {value}")


def main() -> None:
    """Entry point of the ``specmemo`` command."""
    app(prog_name="specmemo")
