"""README and docs: every Python block runs; every figure, option and relative link is right."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import typer
from selection import sample
from server import serving
from transformers import AutoModelForCausalLM, AutoTokenizer

import specmemo_kernels
from specmemo_kernels import MedusaHeads
from specmemo_kernels.cli import app
from specmemo_kernels.planning import device_probe, known_devices

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROSE = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"))]
DEMO = Path(specmemo_kernels.__file__).parent / "demo_model"
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
TEMPLATE = "{% for m in messages %}# {{ m['content'] }}\n{% endfor %}"
#: Launchers of the program whose options are checked.
LAUNCHERS = {"python", "torchrun"}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(page.read_text()) if found == language]


def commands(page: Path) -> list[list[str]]:
    """Every command line: of shell blocks, and of code spans in sentences."""
    text = page.read_text()
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    spans = (" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", text)))
    lines += [span for span in spans if re.match(r"(specmemo|make|python|torchrun) ", span)]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def links(page: Path) -> list[str]:
    found = LINK.findall(FENCE.sub("", page.read_text()))
    return [link for link in found if not re.match(r"\w+:", link)]


# --- blocks of Python ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for every hub id: the bundled model, and heads with vocabulary matrices of their own."""
    folder = tmp_path_factory.mktemp("hub")
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    shared = MedusaHeads.from_pretrained(DEMO / "heads", dtype=torch.float32)
    heads = MedusaHeads(shared.hidden_size, shared.vocab_size, 2, num_layers=shared.num_layers)
    for head in range(2):
        for layer in range(shared.num_layers):
            heads.linear(head, layer).load_state_dict(shared.linear(head, layer).state_dict())
        heads.own_tensors(head)[0].data.copy_(model.get_output_embeddings().weight.data)
    heads.save_pretrained(folder)
    return folder


@pytest.fixture
def known_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plan trees for a known device, so that this one isn't measured."""
    monkeypatch.setattr(device_probe, "probe", lambda *_, **__: known_devices.known_device("cpu"))
    device_probe.profile_of.cache_clear()
    yield
    device_probe.profile_of.cache_clear()


@pytest.fixture
def names(hub: Path, tmp_path: Path, known_device: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that a page's blocks may use, in a temporary folder, without downloads."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(DEMO / "config.json", tmp_path)
    load_model, load_tokenizer = AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained

    def model(source: str | Path, **_: Any) -> Any:
        return load_model(source if Path(source).exists() else DEMO, dtype=torch.float32)

    def tokenizer(source: str | Path, **_: Any) -> Any:
        loaded = load_tokenizer(source if Path(source).exists() else DEMO)
        loaded.chat_template = TEMPLATE
        return loaded

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tokenizer)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(hub))
    words = tokenizer("demo")
    prompts = [words(text).input_ids for text in ("import os\n", "def main():\n    ", "class Node:\n")]
    return {
        "specmemo_kernels": specmemo_kernels,
        "model": model("demo"),
        "tokenizer": words,
        "heads": DEMO / "heads",
        "inputs": words("def read_lines(path):\n", return_tensors="pt"),
        "prompts": prompts,
    }


WITH_CODE = [page for page in PAGES if blocks(page, "python")]


@contextmanager
def client_of_the_bundled_model(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that OpenAI's client asks, whatever address it is given."""
    client = openai.OpenAI
    with (
        specmemo_kernels.patch(model, DEMO / "heads"),
        serving(model, tokenizer, name="specmemo-demo") as address,
        monkeypatch.context() as patched,
    ):
        patched.setattr(openai, "OpenAI", lambda base_url, **rest: client(base_url=f"{address}/v1", **rest))
        yield


@pytest.mark.parametrize("page", sample(WITH_CODE, ["README.md"], name), ids=name)
def test_blocks_run(page: Path, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order; blocks with a ``# needs`` line are only compiled."""
    context: AbstractContextManager[None] = nullcontext()
    if name(page) == "docs/serving.md":
        context = client_of_the_bundled_model(names["model"], names["tokenizer"], monkeypatch)
    with context:
        run_blocks(page, names)


def run_blocks(page: Path, names: dict[str, Any]) -> None:
    for number, block in enumerate(blocks(page, "python"), start=1):
        code = compile(block, f"{name(page)}, block {number}", "exec")
        if not block.startswith("# needs "):
            exec(code, names)


def test_few_blocks_are_left_out() -> None:
    left = [name(page) for page in PAGES for block in blocks(page, "python") if block.startswith("# needs ")]
    assert left == [
        "docs/devices.md", "docs/hub-kernels.md", "docs/hub-kernels.md", "docs/integrating.md", "docs/small-devices.md",
        "docs/vllm.md",
    ]  # fmt: skip


def test_blocks_use_known_languages() -> None:
    """A misspelt language would hide a block from the tests above."""
    found = {language for page in PROSE for language, _ in FENCE.findall(page.read_text())}
    assert found <= {"python", "sh", "text"}


# --- figures, commands, links ----------------------------------------------------------------------------------------


def test_figures_are_up_to_date() -> None:
    figures = runpy.run_path(str(ROOT / "docs" / "figures.py"))
    values, used = figures["figures"](), set()
    for page in PAGES:
        text = page.read_text()
        used |= {found[1] for found in figures["BLOCK"].findall(text)}
        assert figures["filled"](text, values) == text, f"{name(page)} is out of date; run python docs/figures.py"
    assert used == set(values)


def test_figures_are_no_html_blocks() -> None:
    """A line that begins with a comment ends a paragraph of Markdown."""
    for page in PAGES:
        for line in page.read_text().splitlines():
            assert not re.match(r"[\s-]*<!-- figure: [\w.]+ -->\S", line), f"{name(page)}: {line}"


def test_commands_and_links_are_found() -> None:
    """Known ones are found, so an empty result of the other tests means something."""
    found = commands(ROOT / "docs" / "planning.md")
    assert ["specmemo", "probe"] in found
    assert ["python", "bench/predicted_steps.py", "--threads", "2"] in found
    assert "docs/quickstart.md" in links(ROOT / "README.md")


@pytest.mark.parametrize("page", PROSE, ids=name)
def test_commands_have_these_options(page: Path) -> None:
    """Options and commands of ``specmemo``, of the programs in ``bench/``, and targets of make."""
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(page):
        if words[0] == "make":
            chosen = [word for word in words[1:] if "=" not in word]
            assert set(chosen) <= targets, words
            continue
        if words[0] in LAUNCHERS:
            start = next((i for i, word in enumerate(words) if word.startswith("bench/")), None)
            if start is not None:
                source = (ROOT / words[start]).read_text()
                for option in options(words[start:]):
                    assert f'"{option}"' in source or f"{option[2:].replace('-', '_')}:" in source, (words, option)
                continue
            if "specmemo_kernels.cli" not in words:
                continue
            words = ["specmemo", *words[words.index("specmemo_kernels.cli") + 1 :]]
        if words[0] == "specmemo" and words[1] not in ("COMMAND", "--help", "--version"):
            has = {option for parameter in known[words[1]].params for option in parameter.opts} | {"--help"}
            assert set(options(words[2:])) <= has, words


@pytest.mark.parametrize("page", PROSE, ids=name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        assert (page.parent / link).exists(), f"{name(page)} links to {link}"


def files_of_architecture() -> set[str]:
    """The modules in the table of folders, relative to the package."""
    folder, found = "", set()
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        if line.count("|") == 4:
            first, files = line.split("|")[1:3]
            folder = "" if first.strip() == "---" else first.strip(" `") or folder
            found |= {folder + file for file in SPAN.findall(files) if folder.endswith("/") or not folder}
    return found


def test_architecture_names_every_module() -> None:
    named = files_of_architecture()
    assert {file for file in named if not (DEMO.parent / file).exists()} == set()
    modules = {str(path.relative_to(DEMO.parent)) for path in DEMO.parent.rglob("*.py") if path.name != "__init__.py"}
    left = {m for m in modules - named if not m.startswith(("cli/", "backends/triton/"))}
    assert left == set()


def test_pages_are_in_the_navigation() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES[1:]:
        assert str(page.relative_to(ROOT / "docs")) in menu, name(page)


def test_hooks_have_the_versions_of_make_lint() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    for tool in re.findall(r"^LINTERS := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split():
        name, _, version = tool.partition("==")
        assert tool in hooks or f"{name} # {version}" in hooks


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
