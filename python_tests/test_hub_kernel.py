"""The hub kernel that ``hub/build_kernel.py`` writes: its imports, metadata and files. ``make test-hub`` loads it."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from specmemo_kernels.ops import schema

ROOT = Path(__file__).resolve().parents[1]
TOML = (ROOT / "hub" / "build.toml").read_text()
ALLOWED = set(sys.stdlib_module_names) | {"torch", "triton"}


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "hub")
    import build_kernel

    yield build_kernel
    for name in ("build_kernel", "rewrite"):
        sys.modules.pop(name, None)


@pytest.fixture
def tree(builder: ModuleType, tmp_path: Path) -> Path:
    module = tmp_path / "_cpu.cpython-311-x86_64-linux-gnu.so"
    module.write_bytes(b"a compiled module")
    builder.build(tmp_path / "kernel", TOML, [module])
    return tmp_path / "kernel"


def imports(file: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    return (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import | ast.ImportFrom))


def metadata(tree: Path, variant: str) -> dict[str, str]:
    return json.loads((tree / "build" / variant / "metadata.json").read_text())


def test_variants(tree: Path) -> None:
    compiled = "torch-stable-abi211-cpu-x86_64-linux"
    variants = {path.name for path in (tree / "build").iterdir()}
    assert variants == {"torch-cpu", "torch-cuda", "torch-rocm", compiled}
    assert [path.parent.parent.name for path in tree.rglob("*.so")] == [compiled]
    assert (tree / "build" / compiled / "backends" / "_cpu.cpython-311-x86_64-linux-gnu.so").exists()


def test_imports_are_relative_or_allowed(tree: Path) -> None:
    """Every relative import leads to a file of the variant; one that is compiled may be missing."""
    variant, seen = tree / "build" / "torch-cpu", 0
    for file in variant.rglob("*.py"):
        for node in imports(file):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= ALLOWED, file
            elif not node.level:
                assert (node.module or "").split(".")[0] in ALLOWED, file
            else:
                seen += 1
                folder = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                assert folder.is_relative_to(variant), file
                names = [folder, *(folder / alias.name for alias in node.names)]
                found = any(path.with_suffix(".py").exists() or (path / "__init__.py").exists() for path in names)
                assert found, f"{file}: {ast.unparse(node)}"
    assert seen > 40


def test_operators_have_the_namespace_of_the_variant(tree: Path) -> None:
    """No code names the installed package's operators, ``torch.ops.specmemo``, or its modules."""
    for file in (tree / "build" / "torch-cpu").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            assert not (isinstance(node, ast.Attribute) and node.attr == "specmemo"), file
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value != "specmemo", file
                assert not node.value.startswith("specmemo::"), file
    ids = [metadata(tree, path.name)["id"] for path in (tree / "build").iterdir()]
    assert len(set(ids)) == len(ids)
    for path in (tree / "build").iterdir():
        own = metadata(tree, path.name)["id"]
        assert own.isidentifier()
        assert f'_OPS_NAME = "{own}"' in (path / "_ops.py").read_text()


def test_metadata_and_digest(tree: Path) -> None:
    for folder in (tree / "build").iterdir():
        data = metadata(tree, folder.name)
        assert (data["name"], data["version"], data["license"]) == ("specmemo", 1, "Apache-2.0")
        assert data["python-depends"] == []
        assert data["backend"]["type"] in folder.name.split("-")
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {"metadata.json"}
        assert set(data["digest"]["files"]) == files
        for name, digest in data["digest"]["files"].items():
            assert base64.b64decode(digest) == hashlib.sha256((folder / name).read_bytes()).digest()


@pytest.mark.slow
def test_the_id_follows_version_and_sources(
    builder: ModuleType, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ids(toml: str) -> dict[str, str]:
        return builder.build(tmp_path / "other", toml, [])

    first = ids(TOML)
    assert first == ids(TOML)
    assert first["torch-cpu"] == metadata(tree, "torch-cpu")["id"]
    assert not set(first.values()) & set(ids(TOML.replace("version = 1", "version = 2")).values())
    package = tmp_path / "specmemo_kernels"
    shutil.copytree(builder.PACKAGE, package, ignore=shutil.ignore_patterns("demo_model", "*.so", "__pycache__"))
    monkeypatch.setattr(builder, "PACKAGE", package)
    assert ids(TOML) == first
    (package / "ops" / "checks.py").write_text((package / "ops" / "checks.py").read_text() + "# changed\n")
    assert not set(first.values()) & set(ids(TOML).values())


def test_public_names(tree: Path) -> None:
    """``__all__`` has every operator; the card lists functions, layers and variants."""
    init = ast.parse((tree / "torch-ext" / "specmemo" / "__init__.py").read_text())
    names = next(
        ast.literal_eval(n.value)
        for n in init.body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
    )
    assert set(schema.SCHEMAS) | {"tree_attention_forward", "layers", "unavailable"} <= set(names)
    card = (tree / "CARD.md").read_text()
    for name in [*(set(names) - {"layers"}), "LlamaRMSNorm", "torch-cuda"]:
        assert f"- `{name}`\n" in card
    assert "$" not in card


def test_another_name(builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--repo`` names the kernel, its folders, and what its test imports."""
    arguments = [
        "build_kernel.py",
        "--out",
        str(tmp_path / "kernel"),
        "--repo",
        "our-lab/tree-kernels",
        "--version",
        "7",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    builder.main()
    data = metadata(tmp_path / "kernel", "torch-cuda")
    assert (data["name"], data["version"]) == ("tree-kernels", 7)
    assert data["id"].startswith("_tree_kernels_cuda_")
    assert (tmp_path / "kernel" / "torch-ext" / "tree_kernels" / "ops" / "schema.py").exists()
    assert (tmp_path / "kernel" / "build" / "torch-cuda" / "tree_kernels" / "__init__.py").exists()
    test = (tmp_path / "kernel" / "tests" / "test_operators.py").read_text()
    assert "import tree_kernels\n" in test
    assert "specmemo" not in test
    assert "our-lab/tree-kernels:tree_attention_forward" in (tmp_path / "kernel" / "CARD.md").read_text()


@pytest.mark.slow
def test_it_runs_without_the_package(tree: Path) -> None:
    """Imported from a folder under its id, in a process that doesn't find specmemo_kernels."""
    variant, name = tree / "build" / "torch-cpu", metadata(tree, "torch-cpu")["id"]
    code = f"""
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("{name}", r"{variant / "__init__.py"}")
kernel = sys.modules["{name}"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
query, keys = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8)
out, _ = kernel.tree_attention_forward(torch.nn.Identity(), query, keys, keys, None)
mask = torch.ones(3, 9, dtype=torch.bool).tril(6)
expected = torch.nn.functional.scaled_dot_product_attention(query, keys, keys, attn_mask=mask, enable_gqa=True)
torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
assert "no C++ module" in kernel.unavailable("cpu")
assert not [module for module in sys.modules if module.startswith("specmemo_kernels.")]
print(hasattr(torch.ops.specmemo, "rms_norm"), hasattr(torch.ops.{name}, "rms_norm"))
"""
    found = subprocess.run([sys.executable, "-P", "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    assert found.stdout == "False True\n", found.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import numpy", r"ops/probe.py:1: imports numpy; a hub kernel may import the standard library, torch"),
        ("def f():\n    from transformers import Cache", r"ops/probe.py:2: imports transformers"),
        ("import specmemo_kernels.ops", r"`import specmemo_kernels.ops` can't be made relative"),
        ("from specmemo_kernels import DraftTree", r"DraftTree is no module of the kernel"),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import torch", r"ops/probe.py:1: `if TYPE_CHECKING` has an else"),
        ("from specmemo_kernels.nothing import there", r"there is no module specmemo_kernels.nothing"),
        ("from ....ops import checks", r"the import of level 4 leaves the kernel"),
        ("NAME = 'specmemo_kernels.ops'", r"the string 'specmemo_kernels.ops' names the package"),
    ],
)
def test_imports_that_no_rule_allows(builder: ModuleType, source: str, message: str, tmp_path: Path) -> None:
    """A new import in ops/ or backends/ fails here until the rules know it."""
    import rewrite

    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "probe.py").write_text(source)
    with pytest.raises(rewrite.ImportRuleError, match=message):
        rewrite.collect(["ops.probe"], (tmp_path, builder.PACKAGE))


def test_rewritten_imports(builder: ModuleType, tmp_path: Path) -> None:
    """Names, comments and everything else stay; blocks for type checkers go, with what only they import."""
    import rewrite

    source = """import torch, math
from typing import TYPE_CHECKING
from specmemo_kernels.ops import checks, weight_codes  # a comment
from specmemo_kernels import arguments
if TYPE_CHECKING:
    from specmemo_kernels.engine.decode import Decoder
    import transformers
def late():
    from specmemo_kernels.backends.triton.paged import (
        append_paged_kv,
    )
"""
    (tmp_path / "ops" / "inner").mkdir(parents=True)
    (tmp_path / "ops" / "inner" / "__init__.py").touch()
    (tmp_path / "ops" / "inner" / "probe.py").write_text(source)
    found = rewrite.collect(["ops.inner.probe"], (tmp_path, builder.PACKAGE))
    lines = found[rewrite.PurePosixPath("ops/inner/probe.py")].source.splitlines()
    assert lines == [
        "import torch, math",
        "from typing import TYPE_CHECKING",
        "from ...ops import checks, weight_codes  # a comment",
        "from ... import arguments",
        "def late():",
        "    from ...backends.triton.paged import (",
        "        append_paged_kv,",
        "    )",
    ]
    names = {str(path) for path in found}
    assert {"arguments.py", "ops/checks.py", "backends/triton/paged.py", "backends/triton/codes.py"} <= names
    assert not [name for name in names if name.startswith("engine")]


@pytest.mark.slow
def test_refusals(builder: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="has files that are no kernel"):
        builder.build(tmp_path / "mine", TOML, [])
    assert (tmp_path / "mine" / "thesis.txt").exists()
    with pytest.raises(ValueError, match=r"_cpu\.pyd is no C\+\+ module for Linux"):
        builder.build(tmp_path / "new", TOML, [tmp_path / "_cpu.pyd"])
    with pytest.raises(ValueError, match="the kernel's name is 'Spec_Memo'"):
        builder.build(tmp_path / "new", TOML.replace('"specmemo"', '"Spec_Memo"'), [])
    with pytest.raises(ValueError, match="repo-id is 'someone/else'"):
        builder.build(tmp_path / "new", TOML.replace("specmemo/specmemo", "someone/else"), [])
    assert not (tmp_path / "new").exists()
