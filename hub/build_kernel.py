"""Writes the operators as a kernel that the ``kernels`` library loads, with its variants built.

::

    python hub/build_kernel.py --out build/hub-kernel

The folder has the sources for ``kernel-builder`` (``build.toml``, ``torch-ext/``, ``tests/``), and in ``build/`` the
variants: pure Python for each backend, and with the C++ module one for each processor that a module was given for.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import string
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rewrite import collect

HUB = Path(__file__).resolve().parent
ROOT = HUB.parent
PACKAGE = ROOT / "specmemo_kernels"
#: Modules of the package that a kernel has in any case; others are found by their imports. ``""``: hub/package.
FOLDERS = ("ops", "backends")
ROOTS = ("", "tree.draft_tree")
COPIED = ("flake.nix", "tests/__init__.py", "tests/test_operators.py", "benchmarks/benchmark.py")
#: ``_cpu.cpython-311-x86_64-linux-gnu.so``: the suffix that its Python looks for, and no other one.
MODULE_NAME = re.compile(r"_cpu\.cpython-\d+-(?P<arch>\w+)-linux-gnu\.so")
#: Files of a variant by path.
Files = dict[PurePosixPath, bytes]

OPS = '''"""The ``torch.library`` namespace of this build."""

import torch

_OPS_NAME = "{id}"

ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    """``<namespace>::<op_name>``."""
    return f"{{_OPS_NAME}}::{{op_name}}"
'''

COMPATIBLE = '''"""For versions of ``kernels`` that import this folder: the same names as the folder above."""

import importlib.util
import sys
from pathlib import Path

_NAME = "{id}"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).parent.parent / "__init__.py")
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])
__all__ = sys.modules[_NAME].__all__
globals().update({{name: getattr(sys.modules[_NAME], name) for name in __all__}})
'''


@dataclass(frozen=True)
class Kernel:
    """What ``build.toml`` says about a kernel."""

    name: str
    version: int
    license: str
    backends: tuple[str, ...]
    repo: str

    @classmethod
    def read(cls, toml: str) -> Kernel:
        general = tomllib.loads(toml)["general"]
        name = general["name"]
        if not re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", name):
            raise ValueError(f"the kernel's name is {name!r}; use lower-case letters, digits and dashes")
        repo = general["hub"]["repo-id"]
        if not re.fullmatch(rf"[\w.-]+/{re.escape(name)}", repo):
            raise ValueError(f"repo-id is {repo!r}; expected <organisation>/{name}, the kernel's name")
        return cls(name, general["version"], general["license"], tuple(general["backends"]), repo)

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")


def sources() -> Files:
    """The Python files of every variant."""
    names = [
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for folder in FOLDERS
        for path in sorted((PACKAGE / folder).rglob("*.py"))
    ]
    modules = collect([*ROOTS, *names], (HUB / "package", PACKAGE))
    return {path: module.source.encode() for path, module in modules.items()}


def compiled_modules(files: Iterable[Path]) -> dict[str, Files]:
    """C++ modules by processor.

    Raises:
        ValueError: a file that isn't named as a module of CPython on Linux.
    """
    found: dict[str, Files] = {}
    for file in files:
        match = MODULE_NAME.fullmatch(file.name)
        if match is None:
            raise ValueError(f"{file.name} is no C++ module for Linux, expected _cpu.cpython-<version>-<system>.so")
        found.setdefault(match["arch"], {})[PurePosixPath("backends", file.name)] = file.read_bytes()
    return found


def write_variant(folder: Path, kernel: Kernel, backend: str, files: Files) -> str:
    """Write one variant; returns its id, which is also the namespace of its operators."""
    hashed = hashlib.sha256(f"{kernel.version}".encode())
    for path in sorted(files):
        hashed.update(f"\n{path}\n".encode() + files[path])
    kernel_id = f"_{kernel.module}_{backend}_{hashed.hexdigest()[:10]}"
    written = files | {
        PurePosixPath("_ops.py"): OPS.format(id=kernel_id).encode(),
        PurePosixPath(kernel.module, "__init__.py"): COMPATIBLE.format(id=kernel_id).encode(),
    }
    digest = {str(path): base64.b64encode(hashlib.sha256(written[path]).digest()).decode() for path in sorted(written)}
    metadata = {
        "name": kernel.name,
        "id": kernel_id,
        "version": kernel.version,
        "license": kernel.license,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digest},
    }
    write(folder, written | {PurePosixPath("metadata.json"): (json.dumps(metadata, indent=2) + "\n").encode()})
    return kernel_id


def write(folder: Path, files: Mapping[PurePosixPath, bytes]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def lowest_torch() -> str:
    """The package's lowest torch version, ``211`` for 2.11."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = [re.fullmatch(r"torch>=(\d)\.(\d+)", line) for line in dependencies]
    return next(match[1] + match[2] for match in found if match)


def card(kernel: Kernel, init: str, layers: str, variants: Iterable[str]) -> str:
    """The repository's card; functions and layers are read from their sources."""
    values = {
        "repo": kernel.repo,
        "version": kernel.version,
        "license": kernel.license.lower(),
        "package_version": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
        "functions": bullets(name for name in re.findall(r'^    "(\w+)",$', init, re.MULTILINE) if name != "layers"),
        "layers": bullets(re.findall(r"^class (\w+)\(nn\.Module\)", layers, re.MULTILINE)),
        "variants": bullets(variants),
    }
    return string.Template((HUB / "CARD.md").read_text()).substitute(values)


def bullets(names: Iterable[str]) -> str:
    return "\n".join(f"- `{name}`" for name in names)


def build(out: Path, toml: str, modules: Iterable[Path]) -> dict[str, str]:
    """Write the kernel to ``out``, replacing an earlier one; returns the id of each variant.

    Raises:
        FileExistsError: ``out`` has other files.
    """
    kernel, files = Kernel.read(toml), sources()
    compiled = compiled_modules(modules)
    if out.exists() and any(out.iterdir()):
        if not (out / "torch-ext").is_dir():
            raise FileExistsError(f"{out} has files that are no kernel; remove them or choose another --out")
        shutil.rmtree(out)
    write(out / "torch-ext" / kernel.module, files)
    # They import the kernel by its name.
    copied = {name: re.sub(r"\bspecmemo\b", kernel.module, (HUB / name).read_text()) for name in COPIED}
    write(out, {PurePosixPath(name): text.encode() for name, text in copied.items()})
    (out / "build.toml").write_text(toml)
    ids = {}
    for backend in kernel.backends:
        variant = f"torch-{backend}"
        ids[variant] = write_variant(out / "build" / variant, kernel, backend, files)
    for arch, extra in compiled.items():
        # The module calls no function of torch's libraries, so it fits every later version too.
        variant = f"torch-stable-abi{lowest_torch()}-cpu-{arch}-linux"
        ids[variant] = write_variant(out / "build" / variant, kernel, "cpu", files | extra)
    init, layers = (files[PurePosixPath(name)].decode() for name in ("__init__.py", "layers.py"))
    (out / "CARD.md").write_text(card(kernel, init, layers, ids))
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the operators as a hub kernel, with its variants built.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hub-kernel")
    parser.add_argument("--repo", help="<organisation>/<name> on the Hub; else that of hub/build.toml")
    parser.add_argument("--version", type=int, help="the kernel's version; else that of hub/build.toml")
    parser.add_argument(
        "--cpu-module",
        type=Path,
        action="append",
        metavar="FILE",
        help="a C++ module to ship, once for each Python; else those built in place",
    )
    arguments = parser.parse_args()
    toml = (HUB / "build.toml").read_text()
    if arguments.repo is not None:
        toml = re.sub(r"(?m)^repo-id = .*", lambda _: f'repo-id = "{arguments.repo}"', toml)
        toml = re.sub(r"(?m)^name = .*", lambda _: f'name = "{arguments.repo.rpartition("/")[2]}"', toml)
    if arguments.version is not None:
        toml = re.sub(r"(?m)^version = .*", f"version = {arguments.version}", toml)
    modules = arguments.cpu_module
    if modules is None:
        modules = [
            path for path in sorted((PACKAGE / "backends").glob("_cpu.*.so")) if MODULE_NAME.fullmatch(path.name)
        ]
    for variant, kernel_id in build(arguments.out, toml, modules).items():
        print(f"{variant}: {kernel_id}")


if __name__ == "__main__":
    main()
