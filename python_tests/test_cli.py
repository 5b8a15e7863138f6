"""The ``specmemo`` command, on a tiny random model and on the bundled one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import specmemo_kernels
from specmemo_kernels import MedusaHeads
from specmemo_kernels.cli import app
from specmemo_kernels.cli.demo_runs import Pair
from specmemo_kernels.cli.demo_view import Feed
from specmemo_kernels.tree.choice import TreeChooser

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges: all ids are below 257."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["text"], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    made.chat_template = template
    return made


def save_model(folder: Path, template: str | None = None, hidden_size: int = 64, layers: int = 2) -> Path:
    """A random Llama, its tokenizer, and heads in ``heads/``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=hidden_size, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=0, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    MedusaHeads(hidden_size, 257, 3, own_lm_head=False).save_pretrained(folder / "heads")
    return folder


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("chat"), TEMPLATE)


def run(*args: object, text: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], input=text, env={"COLUMNS": "120", "TERM": "dumb"})


def chat(model: Path, text: str, *args: object) -> Result:
    return run("chat", "--model", model, "--heads", model / "heads", "--max-new-tokens", 12, *args, text=text)


def test_importing_the_command_is_light() -> None:
    code = "import sys, specmemo_kernels.cli; print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_env_names_versions_and_backends() -> None:
    result = run("env")
    assert result.exit_code == 0, result.output
    facts = dict(line.split(maxsplit=1) for line in result.output.splitlines() if not line.startswith("backend"))
    assert facts["specmemo-kernels"] == specmemo_kernels.__version__
    assert facts["torch"] == torch.__version__
    assert "backend reference  available" in result.output
    assert all(f"backend {name} " in result.output for name in ("cpu", "triton"))


@pytest.mark.slow
def test_env_with_an_unknown_instruction_set() -> None:
    env = os.environ | {"SPECMEMO_CPU_ISA": "avx9"}
    command = [sys.executable, "-m", "specmemo_kernels.cli", "env"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "backend cpu        SPECMEMO_CPU_ISA is 'avx9', this machine can run" in done.stdout


def test_chat_replies_with_the_models_own_tokens(plain_model: Path) -> None:
    result = chat(plain_model, "def f(x):\n/stats\n/exit\nnot read\n")
    assert result.exit_code == 0, result.output
    tokenizer = make_tokenizer(None)
    ids = torch.tensor([tokenizer("def f(x):")["input_ids"]])
    model = LlamaForCausalLM.from_pretrained(plain_model)
    own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(own[0, ids.shape[1] :], skip_special_tokens=True) in result.output
    assert "tokens per step" in result.output
    assert "kv_pages" in result.output
    assert "no chat template" in result.output


def test_chat_uses_the_template_and_resets(chat_model: Path) -> None:
    result = chat(chat_model, "hello\n/reset\nhello\n/unknown\n")
    assert result.exit_code == 0, result.output
    first, second = result.output.split("the conversation starts anew\n")
    reply = first.split("\n", 1)[1]
    assert reply.strip()
    assert second.startswith(reply)
    assert "/exit quits" in second


def test_chat_reads_several_lines_as_one_message(plain_model: Path) -> None:
    several = chat(plain_model, '"""def f(x):\n    """\n')
    assert several.exit_code == 0, several.output
    assert len(several.output.splitlines()) >= 2


@pytest.mark.parametrize("text", ['"""/exit"""', '"""/exit\n"""', '"""\nx\n""" ', '"""x"""  '])
def test_quoted_text_is_no_command(plain_model: Path, text: str) -> None:
    """Spaces behind the closing quotes are none of it."""
    result = chat(plain_model, f"{text}\n/stats\n")
    assert result.exit_code == 0, result.output
    assert result.output.count("tokens per step; last reply") == 1


def test_chat_drops_old_turns_when_the_context_is_full(chat_model: Path) -> None:
    result = chat(chat_model, f"{'a' * 300}\n{'b' * 300}\n{'c' * 600}\nd\n")
    assert result.exit_code == 0, result.output
    assert "the message takes" in result.output  # 600 tokens can't fit; the others could


def test_chat_keeps_within_the_budget(plain_model: Path) -> None:
    result = chat(plain_model, f"{'x' * 100}\n/stats\n", "--memory-budget", "600KiB")
    assert result.exit_code == 0, result.output
    assert "budget 600.0 KiB" in result.output
    assert "specmemo:" not in result.output


def test_chat_with_quantised_pages(plain_model: Path) -> None:
    result = chat(plain_model, "def f(x):\n/stats\n", "--kv-dtype", "int8", "--memory-budget", "400KiB")
    assert result.exit_code == 0, result.output
    assert "tokens in int8" in result.output


@pytest.mark.slow
def test_chat_with_heads_in_4_bits(plain_model: Path, tmp_path: Path) -> None:
    MedusaHeads(64, 257, 3).save_pretrained(tmp_path)
    options = ("chat", "--model", plain_model, "--heads", tmp_path, "--head-bits", 4, "--max-new-tokens", 12)
    result = run(*options, text="def f(x):\n/stats\n")
    assert result.exit_code == 0, result.output
    assert "the drafter in 4 bits" in result.output
    plain = chat(plain_model, "def f(x):\n").output
    assert plain.splitlines()[-1] in result.output, "the same reply"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--head-bits", "3"), "--head-bits is 3, expected 4"),
        (("--kv-dtype", "int4"), "'--kv-dtype': 'int4' is not one of 'int8', 'fp8'"),
        (("--memory-budget", "1KiB"), "too small for one page"),
        (("--memory-budget", "many"), "expected bytes or a size"),
        (("--backend", "nonsense"), "unknown backend 'nonsense'"),
        (("--dtype", "int8"), "expected auto, float32"),
        (("--compress",), "no linear layer, embedding or expert has bfloat16 weights"),
        (("--device", "gpu"), "--device gpu: expected cpu, cuda or cuda:N"),
    ],
)
def test_chat_says_in_one_line_what_is_wrong(plain_model: Path, args: tuple[str, ...], says: str) -> None:
    assert_one_line(chat(plain_model, "hello\n", *args), says)


def test_chat_refuses_heads_for_another_model(plain_model: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path, hidden_size=32)
    assert_one_line(run("chat", "--model", plain_model, "--heads", other / "heads", text="hello\n"), "32")


def test_chat_says_that_a_folder_is_missing(plain_model: Path) -> None:
    missing = plain_model / "nothing"
    assert_one_line(run("chat", "--model", missing, "--heads", missing, text="hello\n"), f"there is no {missing}")


def test_chat_needs_heads_for_a_model_and_a_model_for_heads(plain_model: Path) -> None:
    assert_one_line(run("chat", "--model", plain_model, text="hello\n"), "needs --heads: a drafter, or prompt-lookup")
    heads = plain_model / "heads"
    assert_one_line(run("chat", "--heads", heads, text="hello\n"), f"--heads {heads} needs --model; leave both out")


def test_chat_with_the_bundled_model_and_prompt_lookup() -> None:
    few = ("--max-new-tokens", 4, "--tree", 2)
    result = run("chat", "--heads", "prompt-lookup", *few, text="import os\n/stats\n")
    assert result.exit_code == 0, result.output
    assert "tokens per step" in result.output


def assert_one_line(result: Result, says: str) -> None:
    """Status 2, and one line on stderr that begins with the command's name (after transformers' own output)."""
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("specmemo: ")]
    assert len(lines) == 1, result.stderr
    assert says in lines[0], result.stderr
    assert "Traceback" not in result.output


def test_demo_on_a_users_file(plain_model: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "mine.txt", tmp_path / "out.json"
    file.write_text("once upon a time there was a page of tokens\n")
    few = ("--max-new-tokens", 16, "--rounds", 1, "--tree", 5)
    result = run("demo", "--model", plain_model, "--prompt-file", file, "--json", out, *few)
    assert result.exit_code == 0, result.output
    assert "mine.txt" in result.output
    assert "1 of 1 prompts" in result.output
    figures = json.loads(out.read_text())
    assert figures["equal_prompts"] == 1
    assert figures["tree_nodes"] == 5
    assert figures["prompts"][0]["new_tokens"] <= 16
    assert figures["memory_bytes"]["patched"]["heads"] > 0


@pytest.mark.slow
def test_demo_with_quantised_pages(plain_model: Path, tmp_path: Path) -> None:
    """One byte per element and two scales per head instead of four bytes; the exit status is 1 if tokens differ."""
    file, sizes = tmp_path / "mine.txt", []
    file.write_text("once upon a time there was a page of tokens\n" * 3)
    for args in ((), ("--kv-dtype", "int8")):
        out = tmp_path / "out.json"
        few = ("--max-new-tokens", 8, "--rounds", 1, "--tree", 5)
        result = run("demo", "--model", plain_model, "--prompt-file", file, "--json", out, *few, *args)
        figures = json.loads(out.read_text())
        assert result.exit_code == (figures["equal_prompts"] != 1), result.output
        sizes.append(figures["memory_bytes"]["patched"]["KV cache"])
    assert sizes[1] * 4 * 2 * 16 == sizes[0] * (2 * 16 + 2 * 4)


def test_demo_fails_when_tokens_differ(plain_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("once upon a time\n")
    generate = Pair.generate

    def other_tokens(self: Pair, side: str, *args: object, **kwargs: object) -> object:
        output = generate(self, side, *args, **kwargs)  # type: ignore[arg-type]
        return output + 1 if side == "patched" and isinstance(output, torch.Tensor) else output

    monkeypatch.setattr(Pair, "generate", other_tokens)
    result = run("demo", "--model", plain_model, "--prompt-file", file, "--max-new-tokens", 8, "--rounds", 1)
    assert result.exit_code == 1, result.output
    assert "NO" in result.output
    assert "0 of 1 prompts" in result.output


@pytest.mark.slow
def test_demo_completes_held_out_files_with_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeChooser, "tree_for", lambda self, *_: self.tree)  # whatever the machine's times say
    out = tmp_path / "out.json"
    result = run("demo", "--turns", 2, "--max-new-tokens", 48, "--rounds", 1, "--tree", 8, "--json", out)
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text())
    assert figures["equal_prompts"] == 2
    assert figures["tokens_per_step"] > 1.5  # the heads are of use on files that they never saw


def test_streamed_text_marks_accepted_drafts() -> None:
    steps = iter([0, 1, 1, 1, 2])
    feed = Feed(lambda ids: "".join(map(chr, ids)), lambda: next(steps))
    assert feed.text().plain == ""  # drawn before the first token is there
    feed.put(torch.tensor([[120, 121]]))  # the prompt
    for token in b"abcde":
        feed.put(torch.tensor([token]))
    feed.end()
    text = feed.text()
    assert (text.plain, feed.steps) == ("abcde", 3)
    assert [text.plain[s.start : s.end] for s in text.spans if s.style == "green"] == ["b", "c"]


def test_demo_rejects_a_completion_longer_than_the_context(plain_model: Path) -> None:
    assert_one_line(
        run("demo", "--model", plain_model, "--max-new-tokens", 500), "--max-new-tokens 500 leaves 12 of 512"
    )
