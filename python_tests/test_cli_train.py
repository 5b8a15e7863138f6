"""``specmemo train``: from files to a drafter that ``patch`` and ``plan`` use; interruptions, processes, errors."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from selection import EXHAUSTIVE, sample
from test_cli import TEMPLATE, run, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import specmemo_kernels as sk
import specmemo_kernels.training.loop as loop
from specmemo_kernels.cli import app, train_scaling
from specmemo_kernels.cli.common import check_output_folder
from specmemo_kernels.drafting.replaced_file import replace_file
from specmemo_kernels.planning.scaling_law import ScalingLaw, ScalingRun
from specmemo_kernels.training.answers import read_answers, read_prompts, write_answers
from specmemo_kernels.training.checkpoint import Progress, TrainingError, load_state, save_state
from specmemo_kernels.training.run import RunFolder
from specmemo_kernels.training.scaling import GridRun
from specmemo_kernels.training.windows import DataError, Windows, read_documents, read_rows

TEXT = "def f(x):\n    return x + 1\n\n\nfor i in range(10):\n    print(f(i))\n"
WEIGHTS = {"medusa": "medusa_lm_head.safetensors", "clover2": "model.safetensors", "eagle3": "model.safetensors"}
#: Fast settings: a drafter of few tokens on short windows.
SMALL = ("--tokens", 2000, "--batch-tokens", 128, "--length", 32, "--depth", 2, "--intermediate-size", 32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with six layers and a chat template."""
    return save_model(tmp_path_factory.mktemp("model"), TEMPLATE, layers=6)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents in a folder: plain text, and every kind of line."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "code.py").write_text(TEXT * 20)
    rows = [{"text": TEXT}, {"prompt": "def g", "answer": "(y):\n    pass\n"}, {"tokens": [5, 6, 7]}]
    rows.append({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def train(model: Path, out: Path, kind: str, *args: object) -> str:
    sizes = SMALL[:-2] if kind == "medusa" else SMALL
    result = run("train", "--model", model, "--out", out, "--drafter", kind, *sizes, *args)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("kind", sample(WEIGHTS, ["medusa"]))
def test_a_trained_drafter_is_used(model: Path, data: Path, tmp_path: Path, kind: str) -> None:
    """Files, summary, picture, table; patch generates the model's tokens with it; plan reads its accuracy."""
    output = train(model, tmp_path, kind, "--data", data)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        ["config.json", WEIGHTS[kind], "training.json", "training.png"]
    )
    summary = json.loads((tmp_path / "training.json").read_text())
    accuracy = summary["held_out"]["accuracy"]
    assert len(accuracy) == 2
    assert json.loads((tmp_path / "config.json").read_text())["cumulative_topk_accuracy"] == accuracy
    assert len(summary["progress"]["losses"]) * 128 == summary["tokens"] == 2048
    assert "training (steps of 128 tokens): 16" in output
    assert "tokens ahead" in output
    assert f"{summary['expected_tokens_per_step']['8']:.2f} with 8 nodes" in output
    target = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([AutoTokenizer.from_pretrained(model)("def f")["input_ids"]])
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    with sk.patch(target, tmp_path, tree=6):
        assert target.generate(ids, max_new_tokens=12, do_sample=False).tolist() == plain.tolist()
    planned = run("plan", "--model", model, "--heads", tmp_path, "--device", "h100", "--context", 64, "--json")
    assert planned.exit_code == 0, planned.output


def test_documents(data: Path, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [tokenizer.decode(ids) for ids in read_documents([data], tokenizer, 257)]
    assert texts[0] == TEXT * 20
    assert texts[1:3] == [TEXT, "def g(y):\n    pass\n"]
    assert texts[3] == tokenizer.decode([5, 6, 7])
    assert texts[4] == "<user>hi<assistant>yes<assistant>"[: len("<user>hi<assistant>yes")] or "yes" in texts[4]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"other": 1}', 'line 1 needs "text"'),
        ('{"text": 5}', 'line 1 needs "text"'),
        ('{"text": "half a smile \\ud83d"}', "line 1 has half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "\\uDE00"}]}', "line 1 has half of a surrogate pair"),
    ],
    ids=["cut", "nested", "other-key", "no-string", "surrogate", "nested-surrogate"],
)
def test_lines_that_are_no_documents(tmp_path: Path, model: Path, line: str, says: str) -> None:
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=says):
        list(read_documents([tmp_path / "rows.jsonl"], AutoTokenizer.from_pretrained(model), 257))


def test_rows_end_at_line_feeds(tmp_path: Path) -> None:
    """Not at the other line ends of str.splitlines, which JSON has in strings; a byte order mark is no text."""
    texts = ["a\u2028b\u0085c", "\u001ed"]
    lines = "\r\n".join(json.dumps(text, ensure_ascii=False) for text in texts)
    (tmp_path / "rows.JSONL").write_bytes(f"\ufeff{lines}\r\n".encode())
    assert [row for _, row in read_rows(tmp_path / "rows.JSONL")] == texts


def test_arguments_of_a_run(tmp_path: Path) -> None:
    """The main process writes them once, when the run begins; unreadable ones are an error that names the file."""
    file = tmp_path / "training" / "arguments.json"
    RunFolder(tmp_path, {"seed": 1}, main_process=False).begin()
    RunFolder(tmp_path, {"seed": 1})
    assert not file.exists()
    RunFolder(tmp_path, {"seed": 1}).begin()
    written = file.stat().st_mtime_ns
    RunFolder(tmp_path, {"seed": 1}).begin()
    assert file.stat().st_mtime_ns == written
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    for content in (b"", b"[1]", b"\xff"):
        file.write_bytes(content)
        with pytest.raises(TrainingError, match=r"arguments\.json doesn't hold a run's arguments"):
            RunFolder(tmp_path, {"seed": 1})


@pytest.mark.parametrize("kept", [0, 9, 60, 400], ids=lambda kept: f"{kept} bytes")
def test_damaged_files_of_a_run(tmp_path: Path, kept: int) -> None:
    """A part of each file is an error that names it and the remedy."""
    windows, state = tmp_path / "windows.safetensors", tmp_path / "state.safetensors"
    Windows(torch.zeros(40, 8, dtype=torch.int32), torch.zeros(1, 8, dtype=torch.int32)).save(windows)
    parameters = {"weight": torch.nn.Parameter(torch.zeros(40, 8))}
    optimizer = torch.optim.AdamW(parameters.values())
    parameters["weight"].grad = torch.ones(40, 8)
    optimizer.step()
    save_state(state, parameters, optimizer, Progress(step=1))
    assert load_state(state, parameters, optimizer) == Progress(step=1)
    assert Windows.load(windows).training.shape == (40, 8)
    for file in (windows, state):
        file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"windows\.safetensors is damaged .*; remove it"):
        Windows.load(windows)
    with pytest.raises(TrainingError, match=r"state\.safetensors is damaged .*; remove it"):
        load_state(state, parameters, optimizer)


@pytest.mark.parametrize("token", [-1, 257, 1 << 40])
def test_tokens_that_the_model_does_not_have(model: Path, tmp_path: Path, token: int) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"tokens": [5] * 99}) + "\n" + json.dumps({"tokens": [5, token]}))
    result = run("train", "--model", model, "--out", tmp_path / "out", "--data", tmp_path / "rows.jsonl")
    assert result.exit_code == 2, result.output
    assert f"rows.jsonl, line 2 has the token {token}, the model's are 0 to 256" in result.stderr
    assert not (tmp_path / "out" / "training" / "windows.safetensors").exists()


def test_messages_that_are_no_objects(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": ["a"]}')
    for option in ("--self-generate", "--data"):
        result = run("train", "--model", model, "--out", tmp_path / option, option, tmp_path / "rows.jsonl")
        assert result.exit_code == 2, result.output
        assert "line 1 has the message 'a', expected an object" in result.stderr


def test_windows_longer_than_a_table_of_positions(model: Path, data: Path, tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=6, n_head=2)).save_pretrained(
        tmp_path
    )
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    result = run("train", "--model", tmp_path, "--out", tmp_path / "out", "--data", data, "--length", 65)
    assert result.exit_code == 2, result.output
    assert "--length 65: " in result.stderr
    assert "has 64 positions" in result.stderr


def test_prompts(tmp_path: Path, model: Path) -> None:
    """Of conversations, all before the last answer; of turns, the first; plain text in parts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": "x y"}, {"turns": ["one", "two"]}, {"messages": messages}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "p.txt").write_text("z" * 300)
    found = [tokenizer.decode(ids) for ids in read_prompts([tmp_path / "p.jsonl", tmp_path / "p.txt"], tokenizer)]
    assert found[0] == "x y"
    assert "<user>one" in found[1]
    assert found[2] == "<user>a<assistant>"
    assert "".join(found[3:]) == "z" * 300
    assert max(map(len, found[3:])) == 128


@pytest.mark.parametrize("temperature", sample([0.0, 0.8], [0.0]))
def test_answers(tmp_path: Path, model: Path, temperature: float) -> None:
    """The model's own answers; after an interruption the missing ones are added, and they are the same."""
    target = AutoModelForCausalLM.from_pretrained(model)
    prompts = [[5, 6, 7], [8, 9], [10] * 600, [11, 12, 13, 14]]  # the third is too long

    def write(path: Path) -> int:
        ticks: list[int] = []
        skipped = write_answers(
            target, prompts, path, max_new_tokens=9, temperature=temperature, seed=1, memory_budget=None,
            tick=ticks.append,
        )  # fmt: skip
        assert skipped == 1
        return sum(ticks)

    assert write(tmp_path / "a") == 4
    texts = read_answers(tmp_path / "a")
    assert [row[: len(p)] for row, p in zip(texts, [prompts[0], prompts[1], prompts[3]], strict=True)] == [
        prompts[0], prompts[1], prompts[3],
    ]  # fmt: skip
    if not temperature:
        for row, prompt in zip(texts, [prompts[0], prompts[1], prompts[3]], strict=True):
            assert row == target.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)[0].tolist()
    lines = (tmp_path / "a").read_text().splitlines(keepends=True)
    (tmp_path / "b").write_text(lines[1] + lines[0][:10])  # a crash while the second line was written
    write(tmp_path / "b")
    assert read_answers(tmp_path / "b") == texts
    assert not hasattr(target, "specmemo") or target.specmemo is None


@pytest.mark.parametrize(
    "prompts", [[[7], [5, 6], [8, 9]], [[5, 6]], [[5, 6], [8, 10]]], ids=["inserted", "removed", "edited"]
)
def test_answers_to_prompts_that_have_changed(tmp_path: Path, model: Path, prompts: list[list[int]]) -> None:
    """Answers have indices: those of an interrupted run would count for other prompts."""
    loaded, file = AutoModelForCausalLM.from_pretrained(model).eval(), tmp_path / "answers.jsonl"
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0, "seed": 0, "memory_budget": None}
    assert write_answers(loaded, [[5, 6], [8, 9]], file, tick=lambda _: None, **options) == 0
    before = file.read_text()
    with pytest.raises(DataError, match=r"answers\.jsonl has an answer to prompt \d as it was before"):
        write_answers(loaded, prompts, file, tick=lambda _: None, **options)
    assert file.read_text() == before
    assert write_answers(loaded, [[5, 6], [8, 9], [7]], file, tick=lambda _: None, **options) == 0
    assert len(read_answers(file)) == 3


@pytest.mark.parametrize(
    "line",
    ["7", "{}", "[", '{"index": -1, "tokens": [3]}', '{"index": 0, "tokens": 5}', '{"index": 0, "tokens": ["a"]}'],
)
def test_damaged_answers(tmp_path: Path, line: str) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"index": 1, "tokens": [3, 4]}\n' + line + "\n")
    with pytest.raises(DataError, match=r"answers\.jsonl:2 is no answer of this run"):
        read_answers(file)


def test_prompts_that_a_budget_does_not_hold(tmp_path: Path, model: Path) -> None:
    target, ticks = AutoModelForCausalLM.from_pretrained(model), list[int]()
    with pytest.raises(sk.BudgetError, match=r"at least [0-9.]+ KiB") as caught:
        sk.patch(target, "prompt-lookup", memory_budget=1, max_batch_size=8)
    least = float(str(caught.value).split("at least ")[1].split(" KiB")[0]) * 1024
    skipped = write_answers(
        target, [[5, 6, 7], [8] * 300, [9, 10]], tmp_path / "a", max_new_tokens=9, temperature=0, seed=1,
        memory_budget=int(1.3 * least), tick=ticks.append,
    )  # fmt: skip
    assert skipped == 1
    assert [row[:2] for row in read_answers(tmp_path / "a")] == [[5, 6], [9, 10]]
    assert sum(ticks) == 3


def test_answers_of_a_model_without_a_number_of_positions(tmp_path: Path, model: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(model)
    del target.config.max_position_embeddings
    write_answers(
        target, [[]], tmp_path / "a", max_new_tokens=9, temperature=0, seed=1, memory_budget=None, tick=lambda _: None
    )
    assert read_answers(tmp_path / "a") == []


@pytest.mark.slow
def test_training_on_own_answers(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text(TEXT * 8)
    output = train(
        model, tmp_path / "out", "medusa", "--self-generate", tmp_path / "prompts.txt", "--answer-tokens", 40
    )
    assert "writing answers" in output
    assert (tmp_path / "out" / "medusa_lm_head.safetensors").exists()


def test_prompts_that_are_skipped(model: Path, tmp_path: Path) -> None:
    """Too long with the answers behind them: their number is printed; an error if none is left."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    rows = [{"prompt": TEXT}] * 8 + [{"prompt": "a" * 400}] * 3
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("train", "--model", model, "--out", out, "--drafter", "medusa", *SMALL[:-2])
    result = run(*arguments, "--self-generate", prompts, "--answer-tokens", 600)
    assert result.exit_code == 2
    assert "11 of 11 prompts are skipped" in (said := " ".join(result.stderr.split()))
    assert "--answer-tokens 600 longer than the model's 512 positions" in said
    assert not out.exists()
    output = train(model, out, "medusa", "--self-generate", prompts, "--answer-tokens", 120)
    assert "3 of 11 prompts are skipped" in " ".join(output.split())


def test_windows_longer_than_the_model_was_made_for(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 100)
    output = train(model, tmp_path / "out", "medusa", "--data", tmp_path / "text.txt", "--length", 600)
    assert "--length 600 is above the 512 positions" in " ".join(output.split())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "give text by --data, or prompts by --self-generate"),
        (("--data", "DATA", "--drafter", "hydra"), "--drafter hydra: expected one of medusa, clover2, eagle3"),
        (("--data", "DATA", "--dtype", "int8"), "--dtype int8: expected one of"),
        (("--data", "DATA", "--length", 17, "--depth", 8, "--memory-budget", "10KiB"), "--memory-budget is 10.0 KiB"),
        (("--data", "DATA", "--memory-budget", "much"), "--memory-budget is 'much'"),
        (("--data", "DATA", "--length", 100000), "less than a window of 100000 tokens"),
        (("--data", "DATA", "--drafter", "medusa", "--intermediate-size", 8), "--intermediate-size 8: Medusa heads"),
        (("--data", "DATA", "--drafter", "clover2", "--draft-vocab", 0), "--draft-vocab 0: only EAGLE-3 has it"),
        (("--data", "DATA", "--drafter", "medusa", "--feature-layer", 1), "--feature-layer 1: only EAGLE-3 has it"),
        (("--data", "DATA", "--temperature", 0), "--temperature 0.0: only answers have it"),
        (("--data", "DATA", "--answer-tokens", 9), "--answer-tokens 9: only answers have it"),
        (("--data", "DATA", "--feature-layer", 7), "feature layers [7] don't exist"),
        (
            ("--data", "DATA", "--scaling", "--tokens", 64, "--batch-tokens", 512),
            "are 1, 1, 1, 1 training steps, which",
        ),
        (
            ("--data", "DATA", "--tokens", 100),
            "--tokens 100: an optimiser step takes 8192 tokens with --batch-tokens 8192; raise --tokens to them, or",
        ),
        (("--data", "DATA", "--tokens", 50, "--batch-tokens", 50, "--length", 64), "an optimiser step takes 64 tokens"),
        (("--data", "DATA", "--device", "meta"), "--device meta: its tensors hold no data; expected cpu"),
    ],
)
def test_errors_in_one_line(model: Path, data: Path, tmp_path: Path, args: tuple[object, ...], says: str) -> None:
    filled = [data if arg == "DATA" else arg for arg in args]
    result = run("train", "--model", model, "--out", tmp_path / "out", *filled)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.split())
    assert len([line for line in result.stderr.splitlines() if line.startswith("specmemo: ")]) == 1


@pytest.mark.parametrize("option", ["--data", "--self-generate"])
def test_data_that_is_refused_begins_no_run(model: Path, data: Path, tmp_path: Path, option: str) -> None:
    """The command with other data isn't refused as another run's."""
    bad, out = tmp_path / "rows.jsonl", tmp_path / "out"
    bad.write_text("{")
    command = ("train", "--model", model, "--out", out, "--drafter", "medusa", option)
    for _ in range(2):
        result = run(*command, bad)
        assert result.exit_code == 2
        assert "is not JSON" in " ".join(result.stderr.split())
    assert not out.exists()
    again = run(*command[:-1], "--data", data, "--length", 100000)
    assert "less than a window of 100000 tokens" in " ".join(again.stderr.split())


def test_a_grid_has_one_process(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run("train", "--model", model, "--out", tmp_path / "out", "--data", data, "--scaling")
    assert result.exit_code == 2
    assert "--scaling: a grid of runs has one process" in " ".join(result.stderr.split())


@pytest.mark.parametrize(("refused", "right"), [("--memory-budget 1KiB", "--memory-budget 1GiB"),
                                                ("--feature-layer 7", "--feature-layer 6")])  # fmt: skip
def test_a_refused_option_can_be_corrected(refused: str, right: str, model: Path, data: Path, tmp_path: Path) -> None:
    """An option that is refused after the text was read leaves no run that refuses the corrected command."""
    args = ("train", "--model", model, "--out", tmp_path / "out", *SMALL, "--data", data)
    result = run(*args, *refused.split())
    assert result.exit_code == 2
    assert refused.split()[1] in result.stderr or "1.0 KiB" in result.stderr
    assert not (tmp_path / "out").exists()
    corrected = run(*args, *right.split())
    assert corrected.exit_code == 0, corrected.output


def test_windows_without_a_place_for_all_depths(model: Path, data: Path, tmp_path: Path) -> None:
    """No loss would be computed: 16 tokens have no place that heads 1 to 8 all predict."""
    args = ("train", "--model", model, "--out", tmp_path / "out", "--data", data, "--drafter", "medusa", "--depth", 8)
    result = run(*args, "--length", 16)
    assert result.exit_code == 2
    assert "windows need more than 2 * --depth = 16 tokens" in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_grid_run_without_measurements_is_not_finished(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or Ctrl-C before the measurements are written leaves a run that the repeated command continues."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sizes = ("--drafter", "medusa", *SMALL[:-2])
    args = ("train", "--scaling", "--model", model, "--out", tmp_path, "--data", data, *sizes)
    monkeypatch.setattr(train_scaling, "store_runs", full)
    for _ in range(2):
        result = run(*args)
        assert result.exit_code == 2
        assert "No space left on device" in " ".join(result.stderr.split())


def made_up(_: Any, folder: Path, each: GridRun, windows: Windows, tokens: int, parameters: int) -> list[ScalingRun]:
    """Measurements without generation."""
    return [ScalingRun(tokens, parameters, batch, 32 // batch, 1.5) for batch in each.batches]


def test_a_grid_has_runs_of_the_same_arguments(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error behind finished runs keeps the grid's arguments; without them, each result is beside its own."""

    def fails_at_the_third(*args: Any) -> list[ScalingRun]:
        if args[1].name == "1-1000":
            raise ValueError("no measurement")
        return made_up(*args)

    out, other = tmp_path / "laws", tmp_path / "other.txt"
    other.write_text(TEXT[::-1] * 20)
    args = ("train", "--scaling", "--model", model, "--out", out, "--drafter", "medusa", *SMALL[:-2], "--data")
    monkeypatch.setattr(train_scaling, "measured", fails_at_the_third)
    for command, says in (
        ((*args, data), "no measurement"),
        ((*args, other, "--seed", 7), "laws has an unfinished run with other arguments (data, seed)"),
        ((*args, data), "no measurement"),
    ):
        result = run(*command)
        assert result.exit_code == 2, result.output
        assert says in " ".join(result.stderr.split())
    results = sorted(out.glob("*/measured.json"))
    assert [file.parent.name for file in results] == ["1-250", "1-500"]
    shutil.rmtree(out / "training")
    for command, says in (
        ((*args, other), "1-250 has an unfinished run with other arguments (text)"),
        ((*args, data, "--rate", 0.1), "1-250 has an unfinished run with other arguments (rate)"),
        ((*args, data), "no measurement"),
    ):
        shutil.rmtree(out / "training", ignore_errors=True)
        assert says in " ".join(run(*command).stderr.split())
    shutil.rmtree(out / "training")
    weights = AutoModelForCausalLM.from_pretrained(model)
    weights.lm_head.weight.data[0] += 1
    with monkeypatch.context() as patched:
        patched.setattr("specmemo_kernels.cli.train._load", lambda *_: weights)
        assert "other arguments (model)" in " ".join(run(*args, data).stderr.split())
    for content in ("", "[]", "{}", '{"arguments": {}, "runs": [1]}'):
        results[0].write_text(content)
        assert "measured.json is damaged" in " ".join(run(*args, data).stderr.split())


def test_a_grid_whose_largest_run_needs_more_memory(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before the first run."""
    out, layers, needs = tmp_path / "laws", list[int](), list[int]()
    args = ("train", "--scaling", "--model", model, "--out", out, "--drafter", "medusa", *SMALL[:-2], "--data", data)

    def record(budget: int, most: int, objective: Any, *rest: Any) -> int:
        layers.append(objective.drafter.heads.num_layers)
        needs.append(16 * sum(p.numel() for p in objective.parameters()))
        raise DataError("recorded")

    with monkeypatch.context() as patched:
        patched.setattr("specmemo_kernels.training.run.windows_within", record)
        assert "recorded" in run(*args).stderr
    assert layers == [4]
    result = run(*args, "--memory-budget", needs[0])
    assert result.exit_code == 2, result.output
    assert "raise the budget" in " ".join(result.stderr.split())
    assert "run 1 of" not in result.output
    assert not out.exists()


@pytest.mark.slow
def test_scaling(model: Path, data: Path, tmp_path: Path) -> None:
    """A grid is trained, measured and fitted; a run that is finished isn't repeated; plan reads the laws."""
    out = tmp_path / "laws"
    args = ("train", "--scaling", "--model", model, "--out", out, "--drafter", "medusa", *SMALL[:-2], "--data", data)
    assert run(*args).exit_code == 0
    law = ScalingLaw.load(out / "scaling.json")
    assert len(law.drafters) == 12
    assert len(law.runs) == 48
    assert len(law.held_out) == 3
    assert all(run.nodes * run.batch == 32 for run in law.runs)
    (out / "training.json").unlink()  # as if the last step had been interrupted
    weights = {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}
    again = run(*args)
    assert again.exit_code == 0, again.output
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")} == weights
    assert ScalingLaw.load(out / "scaling.json") == law
    planned = run("plan", "--model", model, "--scaling", out / "scaling.json", "--device", "h100", "--context", 64)
    assert planned.exit_code == 0, planned.output
    assert "worth training" in planned.output


def test_folders_of_other_runs_are_kept(model: Path, data: Path, tmp_path: Path) -> None:
    train(model, tmp_path, "medusa", "--data", data)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    result = run("train", "--model", model, "--out", tmp_path, "--drafter", "medusa", "--data", data)
    assert result.exit_code == 2
    assert "has a trained drafter" in result.stderr
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("length", [32, 100_000], ids=["trained", "refused"])
def test_a_users_folder_with_the_name_of_a_runs_is_kept(model: Path, tmp_path: Path, length: int) -> None:
    """A finished or refused run would remove it."""
    files = tmp_path / "training"
    files.mkdir()
    (files / "arguments.json.new").write_text("{")  # of a run that was killed when it began
    (files / "text.txt").write_text(TEXT * 20)
    options = ("--drafter", "medusa", *SMALL[:-2], "--length", length, "--batch-tokens", length, "--tokens", length)
    result = run("train", "--model", model, "--out", tmp_path, "--data", files, *options)
    assert result.exit_code == 2, result.output
    assert "training has text.txt, which is of no run; name another folder with --out" in " ".join(
        result.stderr.split()
    )
    assert (files / "text.txt").read_text() == TEXT * 20
    (files / "text.txt").rename(tmp_path / "text.txt")
    train(model, tmp_path, "medusa", "--data", tmp_path / "text.txt")
    assert not files.exists()


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_model_is_never_overwritten(model: Path, data: Path, kind: str) -> None:
    before = {file.name: file.read_bytes() for file in model.iterdir() if file.is_file()}
    result = run("train", "--model", model, "--out", model, "--drafter", kind, "--data", data)
    assert result.exit_code == 2
    assert "has config.json of another model; name another folder with --out" in " ".join(result.stderr.split())
    assert {file.name: file.read_bytes() for file in model.iterdir() if file.is_file()} == before


@pytest.mark.parametrize("name", ["windows.safetensors", "state.safetensors", "model.safetensors"])
def test_a_full_disk(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One line that names the file; the command goes on later."""

    def full(tensors: Any, path: Path, *metadata: Any) -> None:
        if Path(path).name == f"{name}.new":
            Path(path).write_bytes(b"a part")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, path, *metadata)

    command = ("train", "--model", model, "--out", tmp_path / "out", "--drafter", "eagle3", *SMALL, "--data", data)
    with monkeypatch.context() as patched:
        for module in ("windows", "checkpoint", "saved"):
            patched.setattr(f"specmemo_kernels.training.{module}.save_file", full)
        result = run(*command)
    assert result.exit_code == 2, result.output
    assert f"{name} can't be written: I/O error: No space left" in " ".join(result.stderr.split())
    assert not list((tmp_path / "out").rglob("*.new"))
    assert run(*command).exit_code == 0


def test_errors_of_written_files_have_a_name(tmp_path: Path) -> None:
    """Python's errors of a write have none."""

    def full(path: Path) -> None:
        path.write_text("a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left on device") as raised:
        replace_file(tmp_path / "x.json", full)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, f"{tmp_path}/x.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no /proc, which has a file that can't be read")
def test_text_that_can_not_be_read() -> None:
    with pytest.raises(DataError, match=r"^/proc/self/mem can't be read: "):
        list(read_rows(Path("/proc/self/mem")))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc, where even root makes no folder")
def test_a_folder_that_takes_no_files(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error before the model is loaded. The check leaves no folder behind."""
    monkeypatch.setattr("specmemo_kernels.cli.train._load", lambda *_: pytest.fail("loaded"))
    (tmp_path / "file").write_text("")
    for out in (Path("/proc/x"), Path("/proc/self"), tmp_path / "file" / "x"):
        result = run("train", "--model", model, "--out", out, "--data", data)
        assert result.exit_code == 2, result.output
        assert f"--out {out} can't be written to: " in " ".join(result.stderr.split())
    (tmp_path / "kept").mkdir()
    for name in ("", "kept", "a/b"):
        check_output_folder("--out", tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "kept"]


def test_an_unfinished_run_needs_its_arguments(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "arguments.json").write_text('{"drafter": "medusa", "seed": 5}')
    result = run("train", "--model", model, "--out", tmp_path, "--drafter", "medusa", "--data", data)
    assert result.exit_code == 2
    assert "unfinished run with other arguments" in " ".join(result.stderr.split())
    assert "seed" in result.stderr


def arguments(model: Path, data: Path, out: Path, *args: object) -> list[str]:
    given = ["train", "--model", model, "--out", out, "--drafter", "eagle3", "--data", data, *SMALL, *args]
    return [str(arg) for arg in given]


def train_here(output: str, args: list[str]) -> None:
    """Run the command in this process, with a checkpoint twenty times a second."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    loop.CHECKPOINT_SECONDS = 0.05
    app(args)


def start(model: Path, data: Path, out: Path, *args: object) -> Any:
    """A process that trains EAGLE-3, forked from one that has imported what takes seconds; its output is in a file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["specmemo_kernels.cli.train", "transformers.models.llama.modeling_llama", "accelerate"]
    )
    process = context.Process(target=train_here, args=(f"{out}.log", arguments(model, data, out, *args)), daemon=True)
    process.start()
    return process


def finished(process: Any, out: Path) -> None:
    process.join(300)
    assert process.exitcode == 0, Path(f"{out}.log").read_text()


@pytest.mark.slow
def test_killed_several_times(model: Path, data: Path, tmp_path: Path) -> None:
    """kill -9 at random moments, then the same command: the weights of an undisturbed run, bit by bit."""
    longer, plain, killed = ("--tokens", 75_000), tmp_path / "plain", tmp_path / "killed"
    finished(start(model, data, plain, *longer), plain)
    source, state = random.Random(0), killed / "training" / "state.safetensors"
    for _ in range(10 if EXHAUSTIVE else 4):
        before = state.stat().st_mtime_ns if state.exists() else None
        process = start(model, data, killed, *longer)
        while not state.exists() or state.stat().st_mtime_ns == before:
            assert process.is_alive(), Path(f"{killed}.log").read_text()
            time.sleep(0.01)
        time.sleep(source.uniform(0, 0.2))
        assert process.is_alive(), "the run has ended before it was killed"
        process.kill()
        process.join()
    finished(start(model, data, killed, *longer), killed)
    one, other = (load_file(folder / "model.safetensors") for folder in (plain, killed))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_two_processes(model: Path, data: Path, tmp_path: Path) -> None:
    """Under torchrun: the weights of one process, up to the order of sums."""
    alone = start(model, data, tmp_path / "1")
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom test_cli_train import train_here\ntrain_here(sys.argv[1], sys.argv[2:])\n")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", script, tmp_path / "2.log"]
    command = [sys.executable, *map(str, torchrun), *arguments(model, data, tmp_path / "2")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, Path(f"{tmp_path}/2.log").read_text() + done.stderr
    finished(alone, tmp_path / "1")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("1", "2"))
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=5e-3, atol=2e-4)
