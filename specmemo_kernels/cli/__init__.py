"""The ``specmemo`` command. torch and transformers are imported inside the commands, which keeps ``--help`` fast."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Annotated, Any

import typer

from specmemo_kernels import __version__
from specmemo_kernels.cli.errors import Commands, importing
from specmemo_kernels.cli.options import (
    ChatOptions,
    DemoOptions,
    PlanOptions,
    ProbeOptions,
    ServeOptions,
    TrainOptions,
)

app = typer.Typer(
    cls=Commands,
    help="Speculative decoding for Hugging Face models, inside a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"specmemo {__version__}")
        raise typer.Exit


@app.callback()
def common_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


def _add_command(name: str, options: type) -> None:
    """Register ``run_NAME`` of module NAME; its parameters are the fields of the dataclass ``options``."""

    def command(**values: Any) -> None:
        with importing():
            run = getattr(import_module(f"specmemo_kernels.cli.{name}"), f"run_{name}")
        run(options(**values))

    command.__signature__ = inspect.signature(options, eval_str=True)  # type: ignore[attr-defined]
    app.command(name, help=options.__doc__)(command)


_COMMANDS: dict[str, type] = {
    "demo": DemoOptions,
    "chat": ChatOptions,
    "serve": ServeOptions,
    "probe": ProbeOptions,
    "plan": PlanOptions,
    "train": TrainOptions,
}
for _name, _options in _COMMANDS.items():
    _add_command(_name, _options)


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
