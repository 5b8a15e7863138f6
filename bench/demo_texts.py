"""Write the demo model's training text, and its held-out text, for ``specmemo train``.

    python bench/demo_texts.py --out build/demo_texts

The sources of Python's standard library, a document per line: ``training.jsonl``, and ``held_out.jsonl`` with the files
that the demo model has never seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from specmemo_kernels.cli.demo_data import is_held_out, library_files


def main(out: Annotated[Path, typer.Option(help="the folder to write to")]) -> None:
    """Write the two files."""
    out.mkdir(parents=True, exist_ok=True)
    training = [file for file in library_files(include_tests=True) if not is_held_out(file)]
    held_out = [file for file in library_files() if is_held_out(file)]
    for name, files in (("training", training), ("held_out", held_out)):
        texts = (file.read_text(encoding="utf-8", errors="ignore") for file in files)
        (out / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


if __name__ == "__main__":
    typer.run(main)
