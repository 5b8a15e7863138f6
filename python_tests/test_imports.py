"""The import rule, checked in the sources, and the modules that importing the package loads."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import specmemo_kernels
from specmemo_kernels.engine.sequence import SequenceState

PACKAGE = Path(specmemo_kernels.__file__).parent
NAME = "specmemo_kernels"
SOURCES = {path.relative_to(PACKAGE): path for path in sorted(PACKAGE.rglob("*.py"))}
PARTS = {path.name for path in PACKAGE.iterdir() if path.is_dir()} | {path.stem for path in PACKAGE.glob("*.py")}

#: Folders and modules of the package root: each imports only from those further left. ``ops`` loads backends on use.
ORDER = (
    "arguments", "tree", "cache", "ops", "backends", "forward", "planning", "drafting", "engine", "integrations",
    "training", "cli",
)  # fmt: skip


def part(module: str) -> str:
    """``specmemo_kernels.ops.checks`` -> ``ops``; the package itself -> ``__init__``."""
    return module.split(".")[1] if "." in module else "__init__"


def owner(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """Modules of the package that a file imports, and whether it does so on its own import (not in a function).

    Imports for type checkers are left out. Names that dispatch and ``__init__`` load by string are tested by
    :func:`test_lazy_names_are_the_public_ones` and :func:`test_ops_load_backends_lazily`.
    """
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, eager: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, eager) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                anchor = (NAME, *path.parent.parts)
                module = ".".join([*anchor[: len(anchor) - node.level + 1], *filter(None, [module])])
            found.extend(
                (f"{module}.{a.name}" if module == NAME and a.name in PARTS else module, eager) for a in node.names
            )
        eager = eager and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, eager)

    visit(ast.parse(SOURCES[path].read_text()), True)
    return [(module, eager) for module, eager in found if module == NAME or module.startswith(NAME + ".")]


def targets(path: Path) -> set[str]:
    return {part(module) for module, _ in imports(path)} - {owner(path)}


def test_the_walk_sees_imports() -> None:
    """Known imports are found, so an empty result of the other tests means something."""
    assert {"forward", "cache", "drafting", "tree"} <= targets(Path("engine/decode.py"))
    assert ("specmemo_kernels.tree.draft_tree", True) in imports(Path("forward/batch.py"))
    assert imports(Path("arguments.py")) == []


def test_every_part_has_its_place() -> None:
    assert PARTS - {"__init__", "__pycache__", "demo_model"} == set(ORDER)
    # A build in place adds the compiled module to backends/, and Python its caches.
    assert len([path for path in PACKAGE.iterdir() if path.name != "__pycache__"]) <= 15


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_go_left(path: Path) -> None:
    """Only from folders further left, also in functions."""
    if owner(path) != "__init__":
        allowed = {"__init__", *ORDER[: ORDER.index(owner(path))]}  # of the front, __version__ alone
        assert targets(path) <= allowed, f"{path} imports {sorted(targets(path) - allowed)}"


def test_no_circles() -> None:
    """No module imports itself through others; imports in functions don't count."""
    names = {NAME + "." + ".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}
    needs = {name: {m for m, eager in imports(path) if eager and m in names} - {name} for name, path in names.items()}
    while free := [name for name, needed in needs.items() if not needed & needs.keys()]:
        for name in free:
            del needs[name]
    assert not needs, f"import circles among {sorted(needs)}"


def test_backends_stand_alone() -> None:
    """A backend imports itself, a compiled module and what all backends share, but no other backend."""
    for path in SOURCES:
        if owner(path) != "backends" or len(path.parts) < 2:
            continue
        backend = f"{NAME}.backends.{path.parts[1].removesuffix('.py')}"
        for module, _ in imports(path):
            compiled = module.rpartition(".")[2].startswith("_") and module.startswith(f"{NAME}.")
            names = ("backends.kernel_config", "backends.kernel_target", "backends.layers", "cache.page_order")
            shared = [f"{NAME}.{name}" for name in names]
            inside = module in (backend, *shared) or module.startswith(backend + ".")
            if module == f"{NAME}.backends":
                compiled = "cpu" in path.parts[1]
            assert inside or compiled, f"{path} imports {module}"


@pytest.mark.slow
def test_ops_load_backends_lazily() -> None:
    """Importing ops loads no backend; of the compiled module only the cache of calls is used."""
    code = f"import {NAME}.ops, sys; print(sorted(m for m in sys.modules if m.startswith('{NAME}.backends.')))"
    assert run(code) in ("[]", f"['{NAME}.backends._cpu']")


def test_nobody_imports_the_top() -> None:
    """No other folder imports integrations, training or cli; ``__init__`` names them in strings that load on use."""
    for path in SOURCES:
        if owner(path) not in {"integrations", "training", "cli"}:
            assert not targets(path) & {"integrations", "training", "cli"}, path
        if owner(path) in {"integrations", "training"}:
            assert "cli" not in targets(path), path
        if owner(path) == "__init__":
            assert not imports(path)


def test_type_checkers_see_the_public_names() -> None:
    """The imports for type checkers and the literal list agree with the lazy names."""
    front = ast.parse(SOURCES[Path("__init__.py")].read_text())
    blocks = [node for node in front.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {(node.module, a.name) for block in blocks for node in block.body for a in node.names}
    assert seen == {(f"{NAME}.{home}", name) for name, home in specmemo_kernels._HOME.items()}
    lists = [ast.literal_eval(n.value) for n in front.body if ast.unparse(n).startswith("__all__ = ")]
    assert lists == [specmemo_kernels.__all__]


def test_the_package_itself_is_no_source_of_names() -> None:
    """Inside the package only ``__version__`` is imported from the package root; other names from their modules."""
    for path, file in SOURCES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == NAME and owner(path) != "backends":
                names = {alias.name for alias in node.names} - PARTS - {"__version__"}
                assert not names, f"{path} imports {sorted(names)} from {NAME}"


def run(code: str, *, fails: bool = False) -> str:
    """The output of a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120
    )
    assert (result.returncode != 0) == fails, result.stderr
    return result.stdout.strip()


def test_import_is_light() -> None:
    """Importing the package loads neither torch nor transformers, triton or the C++ extension."""
    code = (
        f"import {NAME}, sys; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'triton')])"
    )
    assert run(code) == "[]"
    assert run(f"import {NAME}, sys; print([m for m in sys.modules if m.startswith('{NAME}')])") == f"['{NAME}']"


def test_core_needs_neither_transformers_nor_triton_nor_compiler() -> None:
    """Without all three the loop imports and a reference operator runs."""
    code = f"""
import sys
blocked = ("transformers", "triton", "{NAME}.backends.cpu", "{NAME}.backends.triton")
for name in blocked:
    sys.modules[name] = None
import torch
from {NAME} import ops, drafting
from {NAME}.backends import kernel_config
from {NAME}.drafting import medusa
from {NAME}.engine import decode, stats
from {NAME}.planning import memory_plan, memory_tracker, planner
from {NAME}.tree import acceptance
print(ops.lm_head_argmax(torch.eye(3), torch.eye(3)).tolist(), ops.unavailable("triton") is not None)
print(kernel_config.attention_configs("sm_90", 128, 128, 4, torch.float16)[1].block_m)
"""
    assert run(code) == "[0, 1, 2] True\n64"


def test_lazy_names_are_the_public_ones() -> None:
    """Each public name is in the module that ``__init__`` gives; other names raise AttributeError."""
    assert set(specmemo_kernels.__all__) >= {"patch", "unpatch", "Drafter", "DraftTree", "MedusaHeads", "BudgetError"}
    for name in specmemo_kernels.__all__:
        assert getattr(specmemo_kernels, name) is not None
    assert {*specmemo_kernels._HOME, "__version__"} == set(specmemo_kernels.__all__)
    assert specmemo_kernels.DraftTree.__module__ == f"{NAME}.tree.draft_tree"
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        specmemo_kernels.nonsense  # noqa: B018


def test_only_a_sequence_changes_its_fields() -> None:
    """Every change of a sequence is in a method of its class."""
    fields = {f.name for f in dataclasses.fields(SequenceState)}
    for file in sorted((PACKAGE / "engine").glob("*.py")):
        if file.name == "sequence.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in (inner for t in targets if t is not None for inner in ast.walk(t)):
                if isinstance(target, ast.Attribute) and target.attr in fields and isinstance(target.value, ast.Name):
                    assert target.value.id == "self", f"{file.name}:{node.lineno} assigns {ast.unparse(target)}"  # type: ignore[attr-defined]
