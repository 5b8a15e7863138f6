"""Wrong input to ``specmemo``: one line on stderr and exit status 2, no traceback."""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
from interpreter import INTERPRETING
from rich.console import Console
from rich.table import Table
from test_cli import TEMPLATE, save_model
from typer.testing import CliRunner, Result

import specmemo_kernels
from specmemo_kernels.cli import app
from specmemo_kernels.cli.chat import Chat
from specmemo_kernels.cli.common import show_tables
from specmemo_kernels.integrations.hf.chat import ChatSession
from specmemo_kernels.planning.model_spec import ModelSpec

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def run(*args: object, text: str | bytes | None = None, **env: str) -> Result:
    settings = {"COLUMNS": "100", "TERM": "dumb"} | env
    return CliRunner().invoke(app, [str(a) for a in args], input=text, env=settings)


def chat_with(model: Path, text: str | bytes, *args: object) -> Result:
    few = ("--max-new-tokens", 8, "--tree", 4)  # without a tree the machine would be measured first
    return run("chat", "--model", model, "--heads", model / "heads", *few, *args, text=text)


def demo_of(model: Path, *args: object) -> Result:
    return run("demo", "--model", model, "--max-new-tokens", 8, "--tree", 4, "--rounds", 1, "--turns", 1, *args)


def plan_of(model: Path, *args: object) -> Result:
    return run("plan", "--model", model, "--device", "h100", "--context", 256, *args)


def the_line(result: Result, status: int = 2) -> str:
    """The command's only line on stderr, without its name."""
    assert isinstance(result.exception, SystemExit | None), repr(result.exception)
    assert result.exit_code == status, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("specmemo: ")]
    assert len(lines) == 1, result.stderr
    return lines[0].removeprefix("specmemo: ")


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"specmemo {specmemo_kernels.__version__}\n")


def test_the_budget_has_one_name() -> None:
    """The option has the same name in all commands, and its help says whether weights are included."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {
        name: {flag: option.help for option in command.params for flag in option.opts if "budget" in flag}
        for name, command in commands.items()
    }
    assert {name: list(options) for name, options in found.items() if options} == {
        name: ["--memory-budget"] for name in ("demo", "chat", "serve", "plan", "train")
    }
    assert "demo, chat and serve the weights don't count" in " ".join(found["plan"]["--memory-budget"].split())
    assert "without the model's weights" in found["chat"]["--memory-budget"]
    assert "for the model's weights and generation together" in found["plan"]["--memory-budget"]
    assert "beside the model" in found["train"]["--memory-budget"]


def test_a_plan_takes_the_budget(model: Path) -> None:
    result = plan_of(model, "--memory-budget", "1GiB", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["plan"]["budget"] == 1 << 30
    assert "too small" in the_line(plan_of(model, "--memory-budget", "3KiB"))


@pytest.mark.skipif(INTERPRETING, reason="the interpreter runs the kernels on a CPU")
@pytest.mark.parametrize("command", [chat_with, demo_of])
def test_triton_without_a_gpu(model: Path, command: Callable[..., Result]) -> None:
    args = ("hello\n",) if command is chat_with else ()
    line = the_line(command(model, *args, "--backend", "triton", "--device", "cpu"))
    assert "triton" in line
    assert "GPU" in line or "pip install" in line


@no_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:3", "cuda:x", "cuda:-1"])
def test_a_gpu_that_is_not_here(model: Path, name: str) -> None:
    for result in (run("plan", "--model", model, "--device", name), run("probe", "--device", name, "--seconds", 0.1),
                   chat_with(model, "", "--device", name)):  # fmt: skip
        assert f"--device {name}" in the_line(result)


@pytest.mark.parametrize("name", ["meta", "", "[/x]", "cpu:a"])
def test_no_device_that_computes(name: str) -> None:
    assert "--device" in the_line(run("probe", "--device", name))


@pytest.mark.parametrize("bad", [b"\xff\xfe\n", b"caf\xe9\n", b'"""caf\n\xe9"""\n', b"\xed\xa0\x80x\n"])
def test_input_that_is_not_utf8(model: Path, bad: bytes) -> None:
    """Earlier lines are answered; the command ends with the error and never replaces bytes."""
    result = chat_with(model, b"/stats\nhello\n" + bad + b"/stats\n")
    assert "not UTF-8" in the_line(result)
    assert result.stdout.count("accepted at least") == 1
    assert len(result.stdout.splitlines()) > 5, "hello was answered"


def test_odd_input_is_a_message(model: Path) -> None:
    """NUL bytes, line ends of other systems, the end of the input inside triple quotes, characters of several bytes."""
    for text, read in (
        (b"a\x00b\n", ["a\x00b"]),
        (b"one\r\ntwo", ["one", "two"]),
        (b'"""one\ntwo\n', ["one\ntwo"]),
        ("ü \U0001f600\n".encode(), ["ü \U0001f600"]),
        (b"\n \n", []),
        (b"", []),
    ):
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Chat, "reply", lambda self, message, *_, said=said: said.append(message))
            result = chat_with(model, text)
        assert result.exit_code == 0, result.output
        assert said == read


@pytest.mark.slow
def test_a_long_message_is_refused_and_a_long_conversation_says_what_it_drops(model: Path, tmp_path: Path) -> None:
    """36,000 tokens don't fit in 512. 300 fit, twice 300 don't: the second turn prints the number of dropped tokens."""
    for folder in (model, save_model(tmp_path, TEMPLATE)):
        long = chat_with(folder, f"{'a' * 36000}\nhello\n")
        assert long.exit_code == 0, long.output
        assert "there is room for 504 beside max_new_tokens=8" in long.stderr
        assert "left out" not in long.stderr
        several = chat_with(folder, "".join(f"{letter * 300}\n" for letter in "abc"))
        assert several.exit_code == 0, several.output
        assert several.stderr.count("left out") == 2
        assert chat_with(folder, f"{'a' * 200}\n{'b' * 200}\n").stderr.count("left out") == 0


def test_replies_shorter_than_asked_for_are_announced(model: Path) -> None:
    assert "at most 256 tokens" in chat_with(model, "", "--max-new-tokens", 10**9).stderr
    assert "at most" not in chat_with(model, "", "--max-new-tokens", 256).stderr


@pytest.mark.parametrize("name", ["/no/such/place", "./no such", "../x/y", "~/nothing-here", "~nobody-has-this-name/x",
                                  "x/", "a/b/c", "model.gguf", "heads.safetensors", "", "[/x]", "a\nb"])  # fmt: skip
def test_paths_that_do_not_exist(model: Path, name: str) -> None:
    """The same rule for every option that takes a folder or an id: only possible hub ids are looked up."""
    heads = model / "heads"
    for args in (
        ("plan", "--model", name, "--device", "h100"),
        ("plan", "--model", model, "--device", "h100", "--heads", name),
        ("chat", "--model", name, "--heads", heads),
        ("chat", "--model", model, "--heads", name),
        ("demo", "--model", name),
    ):
        line = the_line(run(*args))
        assert line.startswith(f"there is no {' '.join(name.split(chr(10))) or repr(name)}; --"), line
        assert "epo id" not in line


def test_an_id_that_is_not_on_the_hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for args in (("plan", "--model", "org/none"), ("chat", "--model", "org/none", "--heads", model / "heads"),
                 ("chat", "--model", model, "--heads", "org/none")):  # fmt: skip
        assert "there is no" not in the_line(run(*args))


CONFIGS = {
    "a list": "[1, 2]", "a string": '"x"', "no JSON": "{nope", "binary": os.urandom(99), "deep": "[" * 10**6,
    "text": {"hidden_size": "64"}, "zero": {"num_key_value_heads": -2}, "words": {"num_key_value_heads": "two"},
    "nested": {"text_config": "x"}, "quantised": {"quantization_config": "zap"},
    "infinite": {"intermediate_size": float("inf")}, "listed": {"head_dim": [1]},
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_broken_configurations(model: Path, tmp_path: Path, kind: str) -> None:
    """The message of each command names the folder."""
    folder, content = tmp_path / "broken", CONFIGS[kind]
    shutil.copytree(model, folder)
    file = folder / "config.json"
    if isinstance(content, dict):
        content = json.dumps(json.loads(file.read_text()) | content)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert "broken" in the_line(plan_of(folder))
    if kind in ("a list", "text", "quantised", "binary"):
        assert "broken" in the_line(chat_with(folder, "hello\n"))
        assert "broken" in the_line(demo_of(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_broken_files_of_a_model(model: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(model, folder)
    (folder / name).write_bytes(os.urandom(300))
    assert "broken can't be loaded" in the_line(chat_with(folder, "hello\n"))


def test_a_model_file_without_permission(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' error is that the file is missing."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("no file named model.safetensors")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    assert "no file named" in the_line(chat_with(model, ""))
    file, access = model / "model.safetensors", os.access
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and (path != file or mode != os.R_OK))
    assert the_line(chat_with(model, "")).endswith(f"can't be loaded: no permission to read {file}")


def test_a_broken_template_ends_no_conversation(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text("{% for m in %}")
    result = chat_with(tmp_path / "m", "hello\n/stats\n")
    assert "chat template fails" in the_line(result, status=0)
    assert "tokens per step" in result.stdout


def test_a_model_with_its_own_code_asks_nothing(model: Path, tmp_path: Path) -> None:
    """transformers would prompt on the terminal to run it, and read the answer from the messages."""
    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('the code was run')\n")
    result = chat_with(folder, "y\ny\n")
    assert "can't be loaded" in the_line(result)
    assert "y/N" not in result.output


def test_a_file_is_no_folder_and_not_every_file_is_a_configuration(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF" + os.urandom(500))
    assert "weights.gguf is a file" in the_line(run("chat", "--model", file, "--heads", file))
    assert "weights.gguf is a file" in the_line(demo_of(file))
    assert "/dev/null is neither a folder nor a file" in the_line(run("plan", "--model", "/dev/null"))
    assert "weights.gguf has a broken or unknown gguf header" in the_line(plan_of(file))
    assert "weights.gguf" in the_line(chat_with(model, "", "--heads", file))
    assert "weights.gguf" in the_line(run("plan", "--model", model, "--device", file))
    assert "weights.gguf" in the_line(demo_of(model, "--prompt-file", file))


def test_only_the_beginning_of_a_large_file_is_read(tmp_path: Path) -> None:
    """A checkpoint of many gigabytes isn't a configuration, and isn't read completely to detect that."""
    file = tmp_path / "weights.safetensors"
    with file.open("wb") as stream:
        stream.truncate(1 << 42)
    with pytest.raises(ValueError, match="is not JSON"):
        ModelSpec.load(file)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--tp", "1000"), "tp is 1000"), (("--batch", "99999999"), "--batch"), (("--batch", "0"), "--batch"),
        (("--context", "1"), "--context"), (("--context", "many"), "--context"), (("--weight-bits", "99"), "--weight"),
        (("--heads", "99999"), "up to 5 heads"), (("--nonsense",), "--nonsense"),
        (("--dtype", "fp16"), "'--dtype': 'fp16' is not one of 'float32'"),
        (("--plot", "x"), "--plot x"), (("--plot", "/no/such/place/x.png"), "--plot /no/such/place/x.png"),
        (("--plot", "x.nonsense"), "--plot x.nonsense"), (("--device", "none.json"), "none.json"),
        (("--kv-dtype", "int4"), "'--kv-dtype': 'int4' is not one of 'int8', 'fp8'"),
        (("--head-bits", "8"), "--head-bits is 8, expected 4"), (("--plot", "x.foo"), "svg"),
        (("--device", "rtx-9999"), "unknown device 'rtx-9999'; did you mean rtx-4090"),
        (("--device", ""), "unknown device ''"), (("--memory-budget", "nan"), "'nan'"), (("extra",), "extra"),
    ],
)  # fmt: skip
def test_wrong_values_of_plan(model: Path, args: tuple[str, ...], says: str) -> None:
    assert says in the_line(plan_of(model, *args))


@pytest.mark.slow
def test_a_plan_names_files_that_are_no_configuration(model: Path, tmp_path: Path) -> None:
    line = the_line(plan_of(model / "model.safetensors"))
    assert line == f"--model {model / 'model.safetensors'} is a weights file; give its folder or config.json"
    (tmp_path / "config.json").write_text('{"model_type": "t5", "d_model": 64, "vocab_size": 99}')
    for path in (model / "tokenizer.json", tmp_path):
        assert the_line(plan_of(path)) == f"{path} is not a decoder's config.json (no hidden_size)"


def test_a_plan_checks_the_device_before_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmemo_kernels.cli.plan.ModelSpec.load", lambda *_: pytest.fail("the hub is asked"))
    assert "unknown device 'typo'" in the_line(run("plan", "--model", "org/none", "--device", "typo"))


def test_a_budget_above_the_device(model: Path) -> None:
    args = ("--model", "llama-3.1-8b", "--device", "rtx-3060", "--memory-budget", "20GiB")
    assert the_line(run("plan", *args)).startswith("--memory-budget is 20GiB, but the device has 12.00 GiB: ")


def test_a_context_above_the_models_is_noted(model: Path) -> None:
    assert "--context 600 is above the 512 positions" in plan_of(model, "--context", 600).stderr
    assert plan_of(model).stderr == ""


def test_a_plan_without_a_drafter_assumes_no_acceptance(model: Path) -> None:
    with_heads, without = (run("plan", "--model", model, "--device", "h100", "--heads", n) for n in ("2", "0"))
    assert "acceptance is assumed" in with_heads.output
    assert without.exit_code == 0
    assert "acceptance is assumed" not in without.output


def test_memory_that_can_not_be_kept_free(model: Path) -> None:
    serve = ("serve", "--model", model, "--heads", model / "heads", "--keep-free")
    assert the_line(run(*serve, "100000GiB")).startswith("--keep-free 100000GiB: cpu has ")
    assert "--keep-free is 'much'" in the_line(run(*serve, "much"))


def test_a_server_that_would_never_stop() -> None:
    assert "--shutdown-seconds is inf, it must be finite" in the_line(run("serve", "--shutdown-seconds", "inf"))


def test_empty_keys() -> None:
    """They would admit every client."""
    for line in (run("serve", "--api-key", ""), run("serve", SPECMEMO_API_KEY="")):
        assert the_line(line).startswith("--api-key or SPECMEMO_API_KEY is empty")


@pytest.mark.parametrize("name", ["host", "served-name", "model", "heads", "memory-budget", "keep-free", "device"])
def test_a_server_with_an_empty_option(name: str) -> None:
    for value in ("", " "):
        assert the_line(run("serve", f"--{name}", value)) == f"--{name} is empty; give a value, or leave it out"


def test_wrong_defaults_of_a_served_model(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"top_p": 3.0}')
    line = the_line(run("serve", "--model", tmp_path / "model", "--heads", model / "heads", "--tree", 4))
    assert line == "generation_config.json: top_p: Input should be less than or equal to 1, got 3.0"


def test_addresses_that_can_not_be_listened_on(model: Path) -> None:
    serve = ("serve", "--model", model, "--heads", model / "heads", "--tree", 4)
    assert the_line(run(*serve, "--host", "999.1.1.1")).startswith("--host 999.1.1.1 --port 8000 can't be listened on")


@pytest.mark.parametrize(
    "args",
    [("nonsense",), ("plan",), ("demo", "--turns", "0"), ("demo", "--seed", "x"), ("demo", "--prompt-file", "/none"),
     ("chat", "--tree", "-1"), ("probe", "--seconds", "inf"), ("probe", "--seconds", "x"), ("env", "x"), ("--none",)],
)  # fmt: skip
def test_wrong_command_lines(args: tuple[str, ...]) -> None:
    assert "--help" in the_line(run(*args))


@pytest.mark.parametrize("name", ["float64", "int8", "float8_e4m3fn", "Tensor", ""])
def test_dtypes_that_nothing_computes_in(model: Path, name: str) -> None:
    assert f"--dtype is {name!r}" in the_line(chat_with(model, "", "--dtype", name))


@pytest.mark.parametrize("args", [("--memory-budget", "lots"), ("--kv-dtype", "int4"), ("--backend", "nonsense")])
def test_options_are_checked_before_a_model_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, str]
) -> None:
    monkeypatch.setattr("specmemo_kernels.cli.common.load_model", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr("specmemo_kernels.cli.demo_runs.load_model", lambda *_: pytest.fail("loaded"))
    assert args[1] in the_line(chat_with(model, "", *args))
    assert args[1] in the_line(demo_of(model, *args))


@pytest.mark.parametrize("name", ["none/x.json", "", "file/x.json"])
def test_outputs_are_checked_before_the_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "file").write_text("")
    output = tmp_path / name
    monkeypatch.setattr("specmemo_kernels.cli.demo.Pair", lambda *_: pytest.fail("the demo began"))
    assert f"--json {output}" in the_line(demo_of(model, "--json", output))
    if name != "none/x.json":  # probe makes folders
        monkeypatch.setattr(
            importlib.import_module("specmemo_kernels.cli.probe"), "probe", lambda *_: pytest.fail("measured")
        )
        assert f"--output {output}" in the_line(run("probe", "--output", output))


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a probe without --output has what to do instead."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and mode != os.W_OK)
    line = the_line(run("probe", XDG_CACHE_HOME=str(tmp_path)))
    assert line.startswith(f"the profile {tmp_path}/specmemo_kernels/device-cpu.json: no permission to write to ")
    assert line.endswith("; give --output FILE, or set XDG_CACHE_HOME")
    line = the_line(run("probe", "--output", tmp_path / "x.json"))
    assert line == f"--output {tmp_path}/x.json: no permission to write to {tmp_path}"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is still printed; the file's error comes last."""
    prompt = tmp_path / "x.txt"
    prompt.write_text("once upon a time " * 8)
    result = demo_of(model, "--prompt-file", prompt, "--json", "/dev/full")
    assert the_line(result) == "--json /dev/full: No space left on device"
    assert "1 of 1 prompts" in result.stdout
    full = tmp_path / "full.png"
    full.symlink_to("/dev/full")
    result = plan_of(model, "--plot", full)
    assert the_line(result) == f"--plot {full}: No space left on device"
    assert "Medusa as published" in result.stdout


def specmemo(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specmemo_kernels.cli", *args]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, **options)  # type: ignore[call-overload]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_stdout() -> None:
    with open("/dev/full", "w") as full:
        done = specmemo("--version", stdout=full)
    assert (done.returncode, done.stderr) == (2, "specmemo: output: No space left on device\n")


@pytest.mark.parametrize("args", [("--version",), ("--help",)])
def test_a_closed_pipe_behind_stdout(args: tuple[str, ...]) -> None:
    """As with ``| head -1``: no error message."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = specmemo(*args, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_output_in_another_encoding() -> None:
    """Characters that the terminal's encoding lacks become question marks."""
    done = specmemo("--help", stdout=subprocess.PIPE, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "Speculative decoding" in done.stdout


def test_interrupts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a command, and a piped chat, with the status of shells."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("specmemo_kernels.cli.plan.ModelSpec.load", interrupt)
        assert the_line(plan_of(model), status=130) == "interrupted"
    with monkeypatch.context() as patch:
        patch.setattr(ChatSession, "ask", interrupt)
        assert the_line(chat_with(model, "hello\nagain\n"), status=130) == "interrupted"


def test_an_interrupt_that_an_import_would_swallow() -> None:
    """Modules with a bare ``except`` continue after Ctrl-C; the command ends."""
    code = """
import os, signal
from specmemo_kernels.cli.errors import importing
with importing():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        pass
    print("went on")
"""
    # Jobs in the background of a shell inherit an ignored SIGINT.
    restored = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, preexec_fn=restored
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "specmemo: interrupted\n")


def test_bugs_keep_their_traceback(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (KeyError("x"), ValueError("x"), RuntimeError("x")):

        def fail(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(ChatSession, "ask", fail)
        assert chat_with(model, "hello\n").exception is error


def test_memory_that_runs_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), cpu):

        def fail(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
        assert the_line(chat_with(model, "hello\n")) in (str(error), "MemoryError")


def test_narrow_terminals_lose_no_value(model: Path) -> None:
    args = ("plan", "--model", model, "--device", "rtx-4090", "--context", 256)
    wide = run(*args, COLUMNS="300")
    assert wide.exit_code == 0, wide.output
    words = {word for word in wide.stdout.split() if any(map(str.isalnum, word))}
    for columns in (1, 20, 40, 60, 80, 100):
        assert words <= set(run(*args, COLUMNS=str(columns)).stdout.split()), columns


@pytest.mark.parametrize("no_wrap", [False, True])
def test_tables(no_wrap: bool) -> None:
    """Side by side where there is room, otherwise below each other; values keep their words, or their line."""

    def lines(width: int) -> list[str]:
        console, tables = Console(width=width, file=io.StringIO()), [Table(box=None), Table(box=None)]
        for table, value in zip(tables, ("two words", "1,234,567"), strict=True):
            table.add_column("name", no_wrap=no_wrap)
            table.add_row(value)
        show_tables(console, *tables)
        return [line.strip() for line in console.file.getvalue().splitlines()]

    assert [line.split() for line in lines(40)] == [["name", "name"], ["two", "words", "1,234,567"]]
    first = ["two words"] if no_wrap else ["two", "words"]
    assert lines(4) == ["name", *first, "name", "1,234,567"]


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["1", "5", "20"])
def test_names_and_widths(model: Path, tmp_path: Path, columns: str) -> None:
    """Brackets in names are no markup, and a narrow terminal is no error."""
    folder, prompt = tmp_path / "[/b]:smile:", tmp_path / "[/x].txt"
    shutil.copytree(model, folder)
    prompt.write_text("once upon a time " * 8)
    planned = run("plan", "--model", folder, "--device", "h100", "--context", 256, COLUMNS=columns, NO_COLOR="1")
    assert planned.exit_code == 0, planned.output
    assert "[/b]:smile:" in planned.stdout
    assert chat_with(folder, "hello\n").exit_code == 0
    if columns == "5":
        args = ("--max-new-tokens", 8, "--tree", 4, "--rounds", 1, "--prompt-file", prompt)
        for env in ({}, {"TTY_COMPATIBLE": "1", "FORCE_COLOR": "1"}):
            result = run("demo", "--model", folder, *args, COLUMNS=columns, **env)
            assert result.exit_code == 0, result.output
