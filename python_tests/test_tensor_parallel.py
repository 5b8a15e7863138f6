"""Tensor parallel models over gloo processes on this machine: tokens, memory, messages, faults."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from drafter_oracles import write_clover2, write_dflash, write_eagle1, write_eagle3
from filelock import FileLock
from mtp_models import FAMILIES, random_mtp, save_with_mtp
from packaging.version import Version
from rank_cases import DRAFTERS_OF, SHARED
from selection import EXHAUSTIVE, sample
from served_process import served_process
from tiny_models import VOCAB, tiny_model
from transformers import AutoConfig

from specmemo_kernels.planning.cost import CHECKSUM_BYTES, Pass, step_messages
from specmemo_kernels.planning.drafter_spec import HeadsSpec
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.predicted_shape import weight_bytes

SCRIPT = Path(__file__).with_name("tensor_parallel_session.py")
#: Length at which the session's criteria end a sequence.
PLACE = 22
KINDS = ("greedy", "greedy batch", "sampled", "sampled batch", "aborted", "stopped", "engine", "plain")
MODELS = {
    "model-llama-gqa": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}),
    "model-llama-mha": ("llama", {"num_key_value_heads": 4}),
    "model-qwen3": ("qwen3", {"num_key_value_heads": 4, "num_attention_heads": 8}),
    # fewer key heads than ranks, with what belongs to a head beside its rows: biases, and norms of each head
    "model-qwen3-mqa": ("qwen3", {"num_key_value_heads": 1, "num_attention_heads": 8, "attention_bias": True}),
}
#: In every run: a whole key head per rank, which has most parts of its own.
EVERYDAY = ("model-qwen3-mqa",)
#: Of the long session.
LONG = [*MODELS] if EXHAUSTIVE else ["model-llama-gqa", "model-qwen3"]
#: On four ranks each of its key heads is held by two.
TWO_HEADS = {"model-llama-two-heads": ("llama", {"num_key_value_heads": 2, "num_attention_heads": 8})}


def session(what: str, folder: Path, ranks: int, seconds: float) -> tuple[dict[int, Any], list[int]]:
    """Run a process per rank; each process's output (if any) and exit code. A process that hangs fails the test."""
    if Version(transformers.__version__) < Version("5.23"):
        pytest.skip("older versions of transformers don't divide an odd vocabulary, which these models have")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(ranks)}
    command, processes = [sys.executable, "-X", "faulthandler", "-W", "ignore", str(SCRIPT), what, str(folder)], []
    try:
        for rank in range(ranks):
            env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        errors = [process.communicate(timeout=seconds)[1] for process in processes]
        if errors[0]:
            print(errors[0][-3000:], file=sys.stderr)
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    results = {rank: folder / f"{what}-{rank}.json" for rank in range(ranks)}
    found = {rank: json.loads(path.read_text()) for rank, path in results.items() if path.exists()}
    assert 0 in found, f"rank 0 of {what} left no result; exit codes {codes}"
    return found, codes


def write_models(folder: Path, names: list[str]) -> Path:
    for name in names:
        family, changes = (MODELS | TWO_HEADS)[name]
        tiny_model(family, **changes).save_pretrained(folder / name)
    return folder


def write_drafters(folder: Path, names: list[str]) -> None:
    for name in names:
        DRAFTERS[name](folder / f"drafter-{name}", vocab=VOCAB)


def write_mtp_models(folder: Path) -> None:
    for family, changes in FAMILIES.items():
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4 if family == "deepseek_v3" else 2}
        model = tiny_model(family, **(changes | heads))
        save_with_mtp(model, random_mtp(model), folder / f"mtp-{family}")


def write_other_models(folder: Path) -> None:
    """Models that differ from the first one in a sharded weight, or in a setting that affects no weight."""
    family, changes = MODELS["model-llama-gqa"]
    model: Any = tiny_model(family, **changes)
    model.model.layers[1].self_attn.q_proj.weight.data += 0.01
    model.save_pretrained(folder / "model-other-weights")
    tiny_model(family, **changes, rms_norm_eps=1e-3).save_pretrained(folder / "model-other-config")
    three: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    tiny_model(family, **three).save_pretrained(folder / "model-three-heads")


#: Drafters that read hidden states of two layers.
DRAFTERS: dict[str, Callable[..., Any]] = {
    "eagle3": partial(write_eagle3, draft_vocab=40, eagle_aux_hidden_state_layer_ids=[0, 1, 1]),
    "eagle": write_eagle1,
    "clover2": write_clover2,
    "dflash": write_dflash,
}
Results = tuple[dict[int, Any], Path]
each_model = pytest.mark.parametrize("name", sample(dict.fromkeys([*EVERYDAY, *LONG]), EVERYDAY))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """The output of two ranks, by model and kind of heads: of one session, or of a shorter one for everyday tests.

    pytest's worker processes share it.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    @cache
    def results_of(everyday: bool) -> Results:
        what = "compare-own" if everyday else "compare"
        folder = shared / f"two-{what}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                folder.mkdir()
                write_models(folder, [*(EVERYDAY if everyday else LONG)])
                if not everyday:
                    write_drafters(folder, list(DRAFTERS))
                    write_mtp_models(folder)
                assert session(what, folder, 2, 1000)[1] == [0, 0]
        return {rank: json.loads((folder / f"{what}-{rank}.json").read_text()) for rank in (0, 1)}, folder

    return lambda name, heads="own": results_of(name in EVERYDAY and heads == "own" and not EXHAUSTIVE)


@each_model
def test_two_ranks_write_what_one_process_writes(two: Callable[..., Results], name: str) -> None:
    """Every rank, every kind of call; greedy tokens equal the unpatched model's too. One test, so that pytest's workers
    don't wait for one session.
    """
    long_session = EXHAUSTIVE or name not in EVERYDAY
    both = long_session and name in SHARED
    for heads in ("own", "shared") if both else ("own",):
        results, folder = two(name, heads)
        _check_tokens(results, name, heads)
        _check_messages(results, folder, name, heads)
        _check_share(results, name, heads)
    _check_guesses(results, name)
    _check_features(results, name, DRAFTERS_OF[name] if long_session else ())
    if both:
        _check_chosen_tree(results, name)
    _check_coded(results, folder, name, 2)
    _check_weights(results, folder, name, 2)


def _check_tokens(results: dict[int, Any], name: str, heads: str) -> None:
    for rank, models in results.items():
        found = models[name][heads]
        for kind in KINDS:
            assert found["actual"][kind] == found["expected"][kind], (rank, kind)
        assert found["accepted"] > 0
        reasons = [reason for _, reason in found["actual"]["aborted"]]
        assert reasons == ["aborted" if index == 2 else "length" for index in range(8)]
        assert len(found["actual"]["stopped"][0]) == PLACE


def _check_chosen_tree(results: dict[int, Any], name: str) -> None:
    """A tree that one rank chooses by its clock."""
    first, second = (results[rank][name]["chosen"] for rank in (0, 1))
    assert first["tree"] == second["tree"]
    assert first["actual"] == second["actual"]
    kinds = set(KINDS) - {"plain", "aborted"}  # how far an aborted request comes depends on the tree
    assert all(first["actual"][kind] == first["expected"][kind] for kind in kinds)


def _check_share(results: dict[int, Any], name: str, heads: str) -> None:
    """Pages for half of the KV heads, or for the only one; all blocks of the heads, and half of their own vocabulary
    matrices (31 + 30).
    """
    parts = [results[rank][name][heads] for rank in (0, 1)]
    for part in parts:
        assert part["local_kv_heads"] == [max(1, count // 2) for count in part["kv_heads"]]
    whole = parts[0]["head_bytes"][0]
    blocks = 3 * 4 * (32 * 32 + 32)
    assert sum(part["head_bytes"][1] - blocks for part in parts) == whole - blocks


def _check_coded(results: dict[int, Any], folder: Path, name: str, ranks: int) -> None:
    """Codes are those of one process, so guesses are the same; the planner's bytes are the allocated ones."""
    spec = ModelSpec.from_config(AutoConfig.from_pretrained(folder / name))
    for models in results.values():
        found = models[name]["coded"]
        assert found["actual"] == found["expected"]
        assert found["same"]
    assert results[0][name]["coded"]["bytes"] == HeadsSpec(3, head_bits=4).nbytes(spec, 3, ranks)


def _check_weights(results: dict[int, Any], folder: Path, name: str, ranks: int) -> None:
    """Bytes of the plan, also with replicated KV heads; the model's own beam search ran meanwhile; saved whole;
    unpatching restored everything.
    """
    spec = ModelSpec.from_config(AutoConfig.from_pretrained(folder / name))
    for models in results.values():
        found = models[name]["weights"]
        assert found["beams"][0] == found["beams"][1]
        assert found["saved"]
        assert found["after"]
        assert found["held after"]
        assert found["workers"] == 1  # in the group of the model's collectives; two may write freed memory
    # Vectors count as whole; those of divided projections' biases and of each head's norms are the difference.
    assert results[0][name]["weights"]["bytes"] == pytest.approx(weight_bytes(spec, ranks), rel=0.02)


def _check_guesses(results: dict[int, Any], name: str) -> None:
    """The guesses of a user's drafter are rank 0's."""
    for models in results.values():
        assert models[name]["wild"]["actual"] == models[name]["wild"]["expected"]
    accepted = {models[name]["wild"]["accepted"] for models in results.values()}
    assert len(accepted) == 1
    assert accepted.pop() > 0


def _check_features(results: dict[int, Any], name: str, drafters: Sequence[str]) -> None:
    """Tokens are those of one process with heads, greedy ones the unpatched model's; accepted guesses those of one
    process with the same drafter.
    """
    for models in results.values():
        found, plain = models[name]["features"], models[name]["own"]["expected"]
        static = {"drafter-eagle3, static, 4 bits"} if "eagle3" in drafters else set()
        assert set(found) == static | {f"drafter-{drafter}, dynamic" for drafter in drafters}
        for drafter, part in found.items():
            _check_drafter(part, plain, drafter)


@pytest.mark.slow
def test_a_drafter_of_the_everyday_model(tmp_path: Path) -> None:
    """EAGLE-3's trees take half of a session, so the everyday session is without them."""
    write_drafters(write_models(tmp_path, [*EVERYDAY]), ["eagle3"])
    results, codes = session("compare-own", tmp_path, 2, 1000)
    assert codes == [0, 0]
    for name in EVERYDAY:
        _check_features(results, name, ["eagle3"])


def _check_drafter(part: dict[str, Any], plain: dict[str, Any], drafter: str) -> None:
    for kind in set(KINDS) - {"plain", "aborted"}:
        assert part["actual"][kind] == plain[kind], (drafter, kind)
    assert part["actual accepted"] == part["expected accepted"], drafter
    assert sum(part["actual accepted"]) > 0
    assert part["actual bytes"] == part["expected bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_mtp_on_two_ranks(two: Callable[..., Results], family: str) -> None:
    for models in two("model-llama-gqa")[0].values():
        _check_drafter(models[f"mtp-{family}"], models[f"mtp-{family}"]["plain"], family)


def _check_messages(results: dict[int, Any], folder: Path, name: str, heads: str) -> None:
    spec = ModelSpec.from_config(AutoConfig.from_pretrained(folder / name))
    traffic = results[0][name][heads]["traffic"]
    expected: dict[str, list[int]] = {"reduce": [], "gather": []}
    for rows, lm_rows, depth, head_rows, width in traffic["passes"]:
        run = Pass(rows, max(1, head_rows), 0, lm_rows, depth, head_rows, width)
        for message in step_messages(spec, run, HeadsSpec(depth, own_lm_head=heads == "own")):
            expected["gather" if message.gathered else "reduce"] += [message.nbytes] * message.count
    expected["gather"].append(CHECKSUM_BYTES)  # the end of the call
    # transformers gathers the logits of no rows at all: a message, no bytes
    found = {kind: sorted(size for size in sizes if size) for kind, sizes in traffic["found"].items()}
    assert found == {kind: sorted(sizes) for kind, sizes in expected.items()}
    assert traffic["own"] == sum(expected["gather"])


@pytest.mark.parametrize("own", [True, False])
def test_no_message_grows_with_the_vocabulary(own: bool) -> None:
    """Nor with nodes times vocabulary; each message grows at most as the rows do."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    small, large = (
        ModelSpec.from_config(AutoConfig.for_model("llama", **sizes, vocab_size=vocab)) for vocab in (500, 128_000)
    )
    heads = HeadsSpec(3, own_lm_head=own)
    few, many = Pass(8, 1, 0, 8, 3, 1), Pass(80, 10, 0, 80, 3, 10)
    for run in (few, many):
        assert step_messages(small, run, heads) == step_messages(large, run, heads)
    for one, ten in zip(step_messages(large, few, heads), step_messages(large, many, heads), strict=True):
        assert ten.nbytes <= 10 * one.nbytes
        assert ten.count == one.count


@pytest.mark.four_ranks
def test_four_ranks_write_what_one_process_writes(tmp_path: Path) -> None:
    """The same on four ranks: ``pytest -m four_ranks``."""
    results, codes = session("compare", write_models(tmp_path, list(MODELS | TWO_HEADS)), 4, 1500)
    assert codes == [0] * 4
    for name in MODELS | TWO_HEADS:
        for heads in ("own", "shared") if name in SHARED else ("own",):
            _check_tokens(results, name, heads)
            assert all(results[rank][name][heads]["local_kv_heads"] == [1, 1] for rank in range(4))
            _check_messages(results, tmp_path, name, heads)
        _check_coded(results, tmp_path, name, 4)
        _check_weights(results, tmp_path, name, 4)


@pytest.mark.slow
def test_ranks_that_differ_fail_or_stall_end_all_with_an_error(tmp_path: Path) -> None:
    """Every rank raises within seconds and returns no tokens; an error that all ranks raise alike breaks nothing."""
    write_models(tmp_path, ["model-llama-gqa"])
    write_other_models(tmp_path)
    results, _ = session("stalled", tmp_path, 2, 300)
    found, other = results[0], results[1]
    for rank in (0, 1):
        assert results[rank]["other-weights"]["error"] == results[rank]["version"]["error"] == "RankError"
        assert "the checkpoint's model.safetensors is" in results[rank]["other-weights"]["text"]
        assert "config.rms_norm_eps is 1e-06 and 0.001" in results[rank]["other-config"]["text"]
        assert "version of transformers is" in results[rank]["version"]["text"]
        assert results[rank]["three-heads"]["error"] == "UnsupportedModel"
        assert (
            "has 6 query and 3 key/value heads, which 2 ranks can't share; start 1 or 3 or 6 instead"
            in results[rank]["three-heads"]["text"]
        )
        assert results[rank]["alike"]["error"] == "KeyError"
        assert results[rank]["after alike"]["error"] == ""
        assert results[rank]["apart"]["error"] == "KeyError"
        assert results[rank]["interrupted"]["error"] == "KeyboardInterrupt"
        for name in ("apart", "interrupted"):
            assert results[rank][f"{name}, once more"]["error"] == "RankError"
        assert results[rank]["unpatched"]["text"].startswith("the model was unpatched")
        assert results[rank]["groups"][0] == results[rank]["groups"][1], "unpatched, also after errors"
        assert results[rank]["left"]["error"] == "", results[rank]["left"]
    assert found["heads"]["error"] == found["arguments"]["error"] == found["file"]["error"] == "RankError"
    assert "don't run the same: heads' 0.0.linear.weight" in found["heads"]["text"]
    assert "page_size is 16 and 17" in found["arguments"]["text"]
    assert "loading heads failed on rank 1" in found["file"]["text"]
    assert other["file"]["error"] == "HeadsError"
    assert found["too long"]["error"] == "BudgetError"
    assert found["after it"]["error"] == ""
    assert other["failed"]["error"] == "KeyError"
    _check_error(found, "failed", "rank 1 failed (its own error says why)")
    assert (found["asked"]["error"], other["asked"]["error"]) == ("KeyError", "RankError")
    assert other["asked"]["seconds"] < 30
    assert other["consumer"]["error"] == "KeyError"
    _check_error(found, "consumer", "rank 1 failed (its own error says why)")
    _check_pieces(found)
    _check_error(found, "stalled", "was silent for more than 2 s")
    assert other["stalled"]["error"] == "RankError"


@pytest.mark.slow
def test_a_killed_rank_ends_the_other_with_an_error(tmp_path: Path) -> None:
    results, codes = session("killed", write_models(tmp_path, ["model-llama-gqa"]), 2, 120)
    assert 1 not in results
    assert codes[1] == -9
    _check_error(results[0], "killed", "lost touch with another rank")
    _check_pieces(results[0])


def _check_pieces(found: dict[str, Any]) -> None:
    assert len(found["pieces"]) == 8
    assert all(reason == "aborted" and tokens < 12 for reason, tokens in found["pieces"])


@pytest.mark.slow
def test_chat_under_torchrun(tmp_path: Path) -> None:
    """Rank 0 reads and writes for both ranks: the conversation of one process."""
    arguments = ["--max-new-tokens", "8", "--tree", "6"]
    command = [sys.executable, "-m", "specmemo_kernels.cli", "chat", *arguments]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    together = [*launch, "-m", "specmemo_kernels.cli", "chat", *arguments]
    said = "import os\n/reset\nfor i in range(\n/nonsense\n"
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    outputs = []
    for each in (command, together):
        done = subprocess.run(each, input=said, capture_output=True, text=True, env=env, timeout=200, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        outputs.append(done.stdout)
    assert outputs[0].count("\n") > 3
    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_serve_under_torchrun() -> None:
    """Rank 0 serves for both: the answers of one process; SIGTERM ends running requests first, then both ranks."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    answers = []
    for together in ([], launch):
        with served_process("--memory-budget", "32MiB", launch=together) as server:
            bodies = [{"prompt": p, "max_tokens": 20, "temperature": 0} for p in ("import os", "def f(", "a = [")]
            with httpx.Client(base_url=f"{server.address}/v1", timeout=60) as client, ThreadPoolExecutor(4) as threads:
                first = [client.post("/completions", json=body).json()["choices"][0]["text"] for body in bodies]
                later = {"max_tokens": 300, "ignore_eos": True}
                running = [threads.submit(client.post, "/completions", json=body | later) for body in bodies]
                while server.state["running"] < 2:
                    time.sleep(0.01)
                os.kill(server.pid, signal.SIGTERM)
                answers.append((first, [each.result().json()["choices"][0]["text"] for each in running]))
            server.wait_until_gone()
    assert answers[0] == answers[1]
    assert all(len(text) > 300 for text in answers[0][1])


@pytest.mark.slow
def test_a_rank_that_never_patches_is_missed(tmp_path: Path) -> None:
    results, _ = session("absent", write_models(tmp_path, ["model-llama-gqa"]), 2, 120)
    found = results[0]["absent"]
    assert found["error"] == "RankError"
    assert "lost touch with another rank" in found["text"]
    assert found["seconds"] < 30


def _check_error(found: dict[str, Any], name: str, text: str) -> None:
    assert found[name]["error"] == "RankError", found[name]
    assert text in found[name]["text"]
    assert found[name]["seconds"] < 30
    assert found[f"{name}, once more"]["error"] == "RankError"
