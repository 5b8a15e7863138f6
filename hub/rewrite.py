"""The package's modules as those of a hub kernel: which ones it needs, with relative imports only.

A hub kernel is imported under a name of its own, several versions in one process, so it can't import itself by name.
Every rule here reads the syntax tree; an import that no rule allows raises ``ImportRuleError``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PACKAGE = "specmemo_kernels"
#: What a hub kernel may import besides itself.
ALLOWED = frozenset(sys.stdlib_module_names) | {"torch", "triton"}


class ImportRuleError(ValueError):
    """An import that a hub kernel can't have; the message has the file, the line and the fix."""


@dataclass(frozen=True)
class Module:
    """A Python file: its path relative to the package, and its source."""

    path: PurePosixPath
    source: str

    def error(self, node: ast.stmt | ast.expr, reason: str) -> ImportRuleError:
        return ImportRuleError(f"{self.path}:{node.lineno}: {reason}")


def collect(roots: Iterable[str], folders: Iterable[Path]) -> dict[PurePosixPath, Module]:
    """``roots`` and every module that they import, rewritten, by path.

    Args:
        roots: module names relative to the package, such as ``ops.schema``.
        folders: where modules are looked up; the first folder that has one wins.

    Raises:
        ImportRuleError: an import that a hub kernel can't have.
    """
    folders, waiting = tuple(folders), [*roots]
    found: dict[PurePosixPath, Module] = {}
    while waiting:
        name = waiting.pop()
        module = _find(name, folders)
        if module.path in found:
            continue
        found[module.path] = Module(module.path, relative(module, folders))
        waiting += _imported(module, folders)
        waiting += [name.rpartition(".")[0]] if name else []  # the packages above it
    return found


def _file(name: str, folders: Iterable[Path]) -> tuple[Path, PurePosixPath] | None:
    """The source of a module by its name relative to the package (``""``: the package itself)."""
    base = PurePosixPath(*filter(None, name.split(".")))
    candidates = [base / "__init__.py", *([base.with_suffix(".py")] if name else [])]
    for folder in folders:
        for path in candidates:
            if (folder / path).is_file():
                return folder / path, path
    return None


def _find(name: str, folders: Iterable[Path]) -> Module:
    found = _file(name, folders)
    if found is None:
        raise ImportRuleError(f"there is no module {PACKAGE}.{name}; a root or an import names it")
    file, path = found
    return Module(path, file.read_text())


def _compiled(name: str, folders: Iterable[Path]) -> bool:
    """Whether a module has a type stub only: it is compiled, and added to the variants that can load it."""
    return any((folder / PurePosixPath(*name.split("."))).with_suffix(".pyi").is_file() for folder in folders)


def _statements(module: Module) -> Iterator[ast.AST]:
    """All nodes, without the blocks for type checkers."""
    waiting: list[ast.AST] = [ast.parse(module.source)]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not _for_type_checkers(child)]


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _own(module: Module, node: ast.ImportFrom) -> str | None:
    """The imported module's name relative to the package, or ``None`` for another package's."""
    parts = (node.module or "").split(".")
    if not node.level:
        return ".".join(parts[1:]) if parts[0] == PACKAGE else None
    anchor = module.path.parent.parts
    if node.level > len(anchor) + 1:
        raise module.error(node, f"the import of level {node.level} leaves the kernel; import {PACKAGE}.<module>")
    return ".".join([*anchor[: len(anchor) + 1 - node.level], *filter(None, parts)])


def _imported(module: Module, folders: tuple[Path, ...]) -> list[str]:
    """The kernel's own modules that ``module`` imports."""
    names: list[str] = []
    for node in _statements(module):
        if not isinstance(node, ast.ImportFrom) or (name := _own(module, node)) is None:
            continue
        for alias in node.names:
            inner = f"{name}.{alias.name}".lstrip(".")
            if _file(inner, folders) is not None:
                names.append(inner)
            elif not name:
                raise module.error(node, f"{alias.name} is no module of the kernel; import it from where it is defined")
            elif not _compiled(inner, folders) and not _generated(name):
                names.append(name)
    return names


def _generated(name: str) -> bool:
    """``_ops`` is written for each variant."""
    return name == "_ops"


def relative(module: Module, folders: tuple[Path, ...]) -> str:
    """The module's source with relative imports of the kernel's own modules, and without imports for type checkers."""
    lines = module.source.splitlines(keepends=True)
    for node in _statements(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _check(module, node, alias.name)
        elif isinstance(node, ast.ImportFrom):
            name = _own(module, node)
            if name is None:
                _check(module, node, node.module or "")
            elif not node.level:
                line, dots = lines[node.lineno - 1], "." * len(module.path.parts)
                pattern = re.compile(rf"(from\s+){PACKAGE}(?:\.{re.escape(name)})?(?=\s+import\b)")
                match = pattern.match(line, node.col_offset)
                if match is None:
                    raise module.error(node, "write `from <module> import` on one line")
                lines[node.lineno - 1] = line[: match.start()] + match[1] + dots + name + line[match.end() :]
        elif isinstance(node, ast.Constant) and _names_the_package(node.value):
            raise module.error(node, f"the string {node.value!r} names the package; use a relative name")
    return "".join(_without_type_checking(module, lines))


def _check(module: Module, node: ast.stmt, name: str) -> None:
    root = name.split(".")[0]
    if root == PACKAGE:
        raise module.error(node, f"`import {name}` can't be made relative; use `from {name} import ...`")
    if root not in ALLOWED:
        raise module.error(
            node, f"imports {name}; a hub kernel may import the standard library, torch, triton and itself only"
        )


def _names_the_package(value: object) -> bool:
    """Whether a string is the name of the package or of one of its modules, to be imported at run time."""
    return isinstance(value, str) and re.fullmatch(rf"{PACKAGE}(\.\w+)*", value) is not None


def _without_type_checking(module: Module, lines: list[str]) -> list[str]:
    for node in ast.parse(module.source).body:
        if isinstance(node, ast.If) and _for_type_checkers(node):
            if node.orelse:
                raise module.error(node, "`if TYPE_CHECKING` has an else, which would be lost; use two statements")
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return lines
