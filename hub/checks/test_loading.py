"""How ``kernels`` loads the tree: variants, metadata, digests, and several kernels in one process."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import REPO, ROOT, TREE, build, run
from kernels import get_kernel, get_local_kernel
from kernels._rust import Backend, Build, Digest, DigestAlgorithm, Metadata
from kernels.variants import get_variants_local, resolve_variant

VARIANTS = sorted(path.name for path in (TREE / "build").iterdir())
COMPILED = f"torch-stable-abi211-cpu-{platform.machine()}-linux"
#: Loads the kernel at a path, and prints attention's result and its namespaces.
CALL = """
import json, sys, torch
from pathlib import Path
from kernels import get_local_kernel
def total(k):
    g = torch.Generator().manual_seed(0)
    q, key, value = (torch.randn(1, 2, n, 8, generator=g) for n in (3, 9, 9))
    return k.tree_attention_forward(torch.nn.Identity(), q, key, value, None)[0]
def namespaces():
    names = {s.name.split("::")[0] for s in torch._C._jit_get_all_schemas() if s.name.endswith("::tree_attention")}
    return sorted(names)
"""


def test_the_package_is_not_installed() -> None:
    assert importlib.util.find_spec("specmemo_kernels") is None


def test_the_compiled_variant_is_chosen(kernel: ModuleType, plain_kernel: ModuleType) -> None:
    chosen, _ = resolve_variant(get_variants_local(TREE / "build"))
    assert chosen is not None
    assert chosen.variant_str == COMPILED
    assert kernel.unavailable("cpu") is None
    assert kernel.backend_name(None, torch.device("cpu")) == "cpu"
    assert kernel.__name__ != plain_kernel.__name__
    reason = plain_kernel.unavailable("cpu")
    assert "no C++ module for this Python and system" in reason
    assert plain_kernel.backend_name(None, torch.device("cpu")) == "reference"
    with pytest.raises(plain_kernel.BackendUnavailable, match="no C\\+\\+ module"):
        plain_kernel.rms_norm(torch.ones(1, 8), torch.ones(8), eps=1e-6, backend="cpu")


@pytest.mark.parametrize(("backend", "variant"), [("cpu", COMPILED), ("cuda", "torch-cuda"), ("rocm", "torch-rocm")])
def test_variant_of_each_backend(backend: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a torch for CUDA or ROCm the matching variant is the best one."""
    from kernels import backends, variants
    from packaging.version import Version

    system = {"cpu": backends.CPU(), "cuda": backends.CUDA(Version("13.0")), "rocm": backends.ROCm(Version("7.1"))}
    found, _ = variants._resolve_variant_for_system(
        get_variants_local(TREE / "build"), system[backend], platform.machine(), "linux", Version("2.13"), True, None
    )
    assert found[0].variant_str == variant


def test_another_system_or_an_older_torch_gets_the_plain_variant() -> None:
    from kernels import backends, variants
    from packaging.version import Version

    for machine, torch_version in (("riscv64", "2.13"), (platform.machine(), "2.10")):
        found, _ = variants._resolve_variant_for_system(
            get_variants_local(TREE / "build"), backends.CPU(), machine, "linux", Version(torch_version), True, None
        )
        assert [variant.variant_str for variant in found] == ["torch-cpu"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_metadata_and_digest(variant: str) -> None:
    folder = TREE / "build" / variant
    metadata = Metadata.read_from_file(folder / "metadata.json")
    assert (str(metadata.name), metadata.version, metadata.license) == ("specmemo", 1, "Apache-2.0")
    assert metadata.id.isidentifier()
    assert str(metadata.backend.backend_type).lower() in variant.replace("stable-abi", "")
    assert metadata.digest is not None
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))


def test_build_toml_is_what_the_builder_reads() -> None:
    """It raises ``ValueError`` for a field that is missing, misspelt or of another edition."""
    assert Build.open(TREE).all_kernel_depends(Backend.CUDA) == []


def test_all_names_are_there(kernel: ModuleType) -> None:
    assert all(hasattr(kernel, name) for name in kernel.__all__)


def test_local_kernels_variable(kernel: ModuleType) -> None:
    assert get_kernel(REPO, version=1) is kernel


def test_older_versions_of_kernels_import_the_inner_folder() -> None:
    """They load ``build/<variant>/<name>/__init__.py`` under any name."""
    code = f"""
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("any_name", r"{TREE}/build/torch-cpu/specmemo/__init__.py")
module = sys.modules["any_name"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.rms_norm(torch.ones(1, 8), torch.ones(8), eps=0.0).sum().item(), len(module.__all__))
"""
    assert run(code) == f"8.0 {len(get_local_kernel(TREE).__all__)}"


def test_a_module_for_another_python_is_passed_over(tmp_path: Path) -> None:
    """The variant is chosen by system and torch; its module may be for other versions of Python."""
    (module,) = (TREE / "build" / COMPILED / "backends").glob("_cpu.*.so")
    other = tmp_path / re.sub(r"cpython-\d+", "cpython-399", module.name)
    shutil.copy(module, other)
    ids = build(tmp_path / "other", "--cpu-module", str(other))
    kernel = get_local_kernel(tmp_path / "other")
    assert kernel.__name__ == ids[COMPILED]
    assert "no C++ module for this Python and system" in kernel.unavailable("cpu")
    assert kernel.rms_norm(torch.ones(1, 8), torch.ones(8), eps=0.0).tolist() == [[1.0] * 8]


def test_beside_the_installed_package() -> None:
    """Both register their operators, in either order, and give the same bits."""
    package = "from specmemo_kernels import ops\n"
    load = f"k = get_local_kernel(Path(r'{TREE}'))\n"
    check = """
x, w = torch.randn(3, 64), torch.randn(64)
assert torch.equal(k.rms_norm(x, w, eps=1e-6), ops.rms_norm(x, w, eps=1e-6))
assert ops.__name__ == "specmemo_kernels.ops" and ops.unavailable("cpu") is None and k.unavailable("cpu") is None
print(len(namespaces()), "specmemo" in namespaces(), k.__name__ in namespaces())
"""
    for code in (CALL + package + load + check, CALL + load + package + check):
        assert run(code, PYTHONPATH=str(ROOT)) == "2 True True"


def test_two_versions_at_once(tmp_path: Path) -> None:
    """A later version in one process with this one: each has its modules and operators."""
    ids = build(tmp_path / "later", "--version", "2")
    code = f"""{CALL}
first, second = get_local_kernel(Path(r'{TREE}')), get_local_kernel(Path(r'{tmp_path}/later'))
assert torch.equal(total(first), total(second))
assert first.DraftTree is not second.DraftTree
print(json.dumps([first.__name__, second.__name__, len(namespaces())]))
"""
    own = json.loads((TREE / "build" / COMPILED / "metadata.json").read_text())["id"]
    assert json.loads(run(code)) == [own, ids[COMPILED], 2]
    assert own != ids[COMPILED]


def test_a_copy_of_the_same_version_loads_too(tmp_path: Path) -> None:
    """The same id twice, as from the Hub's cache and from a folder: the copy shares modules and operators."""
    build(tmp_path / "copy")
    code = f"""{CALL}
first, second = get_local_kernel(Path(r'{TREE}')), get_local_kernel(Path(r'{tmp_path}/copy'))
assert torch.equal(total(first), total(second))
print(len(namespaces()))
"""
    assert run(code) == "1"


def test_the_trees_own_test(tmp_path: Path) -> None:
    """As ``kernel-builder`` runs it: the variant is on the path."""
    path = str(TREE / "build" / COMPILED)
    code = f"import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', r'{TREE / 'tests'}']))"
    assert "4 passed" in run(code, PYTHONPATH=path)


def test_the_trees_benchmark(kernel: ModuleType) -> None:
    """As ``kernels benchmark`` runs it."""
    spec = importlib.util.spec_from_file_location("benchmark", TREE / "benchmarks" / "benchmark.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    benchmark = module.AttentionBenchmark()
    benchmark.kernel = kernel
    benchmark.setup()
    benchmark.benchmark_attention()
    torch.testing.assert_close(benchmark.out, benchmark.verify_attention(), rtol=1e-4, atol=1e-4)


def test_the_documentations_code() -> None:
    """The blocks of docs/hub-kernels.md that need this environment."""
    text = (ROOT / "docs" / "hub-kernels.md").read_text()
    blocks = [
        code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if code.startswith("# needs kernels")
    ]
    assert len(blocks) == 2
    norm, attention = (f"import os; os.chdir(r'{ROOT}')\n{code}" for code in blocks)
    assert "torch.Size([2, 64])" in run(norm)
    generate = "print(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).shape)"
    assert run(f"{attention}\nimport torch\n{generate}").endswith("torch.Size([1, 7])")
