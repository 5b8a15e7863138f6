"""Output of ``specmemo plan`` and ``specmemo probe``, offline, from configurations only."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from meta_models import CONFIGS
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner, Result

from specmemo_kernels import MedusaHeads
from specmemo_kernels.cli import app
from specmemo_kernels.cli import probe as cli_probe
from specmemo_kernels.drafting import head_files
from specmemo_kernels.planning.device import DeviceProfile
from specmemo_kernels.planning.memory_plan import parse_bytes


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "100", "TERM": "dumb"})


@pytest.fixture(scope="module")
def vicuna(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vicuna-7b")
    sizes = CONFIGS["Llama-2-7B"] | {"max_position_embeddings": 2048}
    CONFIG_MAPPING["llama"](**sizes, dtype="float16").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-8b")
    CONFIG_MAPPING["llama"](**CONFIGS["Llama-3.1-8B"], dtype="bfloat16").save_pretrained(folder)
    return folder


def plan_json(*args: object) -> dict:
    result = run("plan", *args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_tables(vicuna: Path) -> None:
    """The plan with its parts, reasons and alternatives; labelled as predicted; no line wider than the terminal."""
    result = run("plan", "--model", vicuna / "config.json", "--device", "titan-rtx", "--memory-budget", "16GiB",
                 "--context", 4096)  # fmt: skip
    assert result.exit_code == 0, result.output
    for text in ("all figures are predicted", "budget 16.00 GiB", "64 nodes, depth 3", "kv pages", "12.55 GiB",
                 "Medusa as published", "plain generate", "least that runs"):  # fmt: skip
        assert text in result.output
    tables = [line for line in result.output.splitlines() if line.startswith(("│", "┃", "|"))]
    assert max(map(len, tables)) <= 100


def test_json(vicuna: Path) -> None:
    """Every figure for programs: the plan's parts add up, the frontier rises, alternatives are named."""
    data = plan_json(
        "--model", vicuna, "--device", "titan-rtx", "--memory-budget", "16GiB", "--context", 2048, "--batch", 2
    )
    plan, frontier = data["plan"], data["frontier"]
    assert plan["total_bytes"] == sum(plan["parts"].values()) <= parse_bytes("16GiB") == plan["budget"]
    assert data["predicted"] is True
    assert data["workload"] == {"context": 2048, "prompt": 1024, "batch": 2, "tp": 1}
    speeds = [point["tokens_per_second"] for point in frontier]
    assert speeds == sorted(speeds)
    assert [p["total_bytes"] for p in frontier] == sorted(p["total_bytes"] for p in frontier)
    assert all(sum(p["parts"].values()) == p["total_bytes"] for p in frontier)
    assert plan["tokens_per_second"] == max(
        p["tokens_per_second"] for p in frontier if p["total_bytes"] <= plan["budget"]
    )
    assert [row["name"] for row in data["alternatives"]][-2:] == ["plain generate", "Medusa as published"]


@pytest.mark.slow
def test_options(vicuna: Path, llama: Path) -> None:
    """Each option changes its figures: heads, shared vocabulary matrices, weights, prompt, ranks."""
    base = plan_json("--model", llama, "--device", "h100", "--context", 1024)["plan"]
    shared = plan_json("--model", llama, "--device", "h100", "--context", 1024, "--shared-lm-head")["plan"]
    assert shared["parts"]["heads"] < base["parts"]["heads"] / 10
    few = plan_json("--model", llama, "--device", "h100", "--context", 1024, "--heads", 1)["plan"]
    assert few["heads"] == 1 < base["heads"]
    small = plan_json("--model", llama, "--device", "h100", "--context", 1024, "--weight-bits", 4.5)["plan"]
    assert small["parts"]["weights"] < base["parts"]["weights"] / 2
    short = plan_json("--model", llama, "--device", "h100", "--context", 1024, "--prompt", 100)
    assert short["workload"]["prompt"] == 100
    ranks = plan_json("--model", llama, "--device", "h100", "--context", 1024, "--tp", 4)["plan"]
    assert ranks["parts"]["kv_pages"] == base["parts"]["kv_pages"] // 4
    assert plan_json("--model", llama, "--devices", "h100:4", "--context", 1024)["plan"] == ranks
    wide = [plan_json("--model", llama, "--devices", f"h100:{ranks}", "--context", 1024)["plan"] for ranks in (8, 16)]
    assert wide[0]["parts"]["kv_pages"] == wide[1]["parts"]["kv_pages"], "each of 8 heads is held by two of 16 ranks"


@pytest.mark.slow
def test_several_devices(tmp_path: Path) -> None:
    """Llama-2-70B on eight devices: each device's share, the ranks' messages, and gains computed from the rows."""
    CONFIG_MAPPING["llama"](**CONFIGS["Llama-2-70B"], dtype="float16").save_pretrained(tmp_path)
    options = ("--model", tmp_path, "--devices", "mi250:8", "--context", 1024)
    one, ten = plan_json(*options), plan_json(*options, "--batch", 10)
    assert 68.9e9 * 2 / 8 < one["plan"]["parts"]["weights"] < 68.9e9 * 2 / 8 * 1.05
    pages = 2 * 80 * 128 * 2  # of one of eight key/value heads
    assert one["plan"]["parts"]["kv_pages"] == pages * one["plan"]["page_size"] * one["plan"]["max_pages"]
    for data, batch in ((one, 1), (ten, 10)):
        nodes, heads = (1 + len(data["plan"]["tree"])) * batch, data["plan"]["heads"]
        sent = 161 * nodes * 8192 * 2 + 32 + 16 * nodes + 16 * heads * batch * 10
        assert data["communication"]["bytes"] == sent
        assert data["communication"]["messages"] == 161 + 2 + heads
        assert 161 * (12e-6 + 14 * 0.8e-6) < data["communication"]["seconds"] < data["plan"]["step_seconds"]
    plain = next(row for row in ten["alternatives"] if row["name"] == "plain generate")
    gain = ten["plan"]["tokens_per_second"] / plain["tokens_per_second"]
    more = ten["plan"]["tokens_per_second"] / one["plan"]["tokens_per_second"]
    printed = run("plan", *options, "--batch", 10).output
    for text in ("each of 8 ranks", f"{gain:.2f} times plain generate, 10 sequences", "messages of a step",
                 f"{more:.2f} times the plan for one sequence"):  # fmt: skip
        assert text in printed


@pytest.mark.slow
def test_quantised_pages(vicuna: Path) -> None:
    """int8 pages are a labelled alternative, and chosen only by option."""
    options = ("--model", vicuna, "--device", "titan-rtx", "--context", 4096)
    plain, coded = plan_json(*options), plan_json(*options, "--kv-dtype", "int8")
    assert (plain["plan"]["kv_dtype"], coded["plan"]["kv_dtype"]) == (None, "int8")
    (offered,) = [row for row in plain["alternatives"] if row["name"] == "int8 pages, not lossless"]
    for name in ("total_bytes", "generation_bytes", "tokens_per_second", "heads"):
        assert offered[name] == coded["plan"][name]
    assert offered["generation_bytes"] < plain["plan"]["generation_bytes"]
    assert not any("int8" in row["name"] for row in coded["alternatives"])
    result = run("plan", *options, "--kv-dtype", "fp8")
    assert "tokens, fp8" in result.output
    assert "tokens may differ" in result.output


@pytest.mark.slow
def test_heads_in_4_bits(vicuna: Path, tmp_path: Path) -> None:
    """Heads in 4 bits are an alternative; chosen by option or if stored so."""
    options = ("--model", vicuna, "--device", "titan-rtx", "--context", 512)
    plain, coded = plan_json(*options), plan_json(*options, "--head-bits", 4)
    assert (plain["plan"]["head_bits"], coded["plan"]["head_bits"]) == (None, 4)
    (offered,) = [row for row in plain["alternatives"] if row["name"] == "heads in 4 bits"]
    for name in ("total_bytes", "generation_bytes", "tokens_per_second", "heads"):
        assert offered[name] == coded["plan"][name]
    assert offered["tokens_per_second"] > plain["plan"]["tokens_per_second"], "fewer bytes are read"
    assert not any("4 bits" in row["name"] for row in coded["alternatives"])
    shared = plan_json(*options, "--shared-lm-head")
    assert any("4 bits" in row["name"] for row in shared["alternatives"])
    ranks = plan_json(*options, "--tp", 2, "--head-bits", 4)
    (divided,) = [row for row in plan_json(*options, "--tp", 2)["alternatives"] if row["name"] == "heads in 4 bits"]
    assert divided["total_bytes"] == ranks["plan"]["total_bytes"]
    for data, rows in ((coded, 32000), (ranks, 16000)):
        each = 4096 * 2 + (rows + 4096) * 4096 // 64 * 34
        assert data["plan"]["parts"]["heads"] == data["plan"]["heads"] * each
    assert ", in 4 bits" in run("plan", *options, "--head-bits", 4).output
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    CONFIG_MAPPING["llama"](**sizes, vocab_size=500, max_position_embeddings=512).save_pretrained(tmp_path / "model")
    for bits, asked in ((4, ()), (4, ("--head-bits", 4)), (None, ("--head-bits", 4))):
        MedusaHeads(64, 500, 2, head_bits=bits).save_pretrained(tmp_path / "heads")
        small = ("--model", tmp_path / "model", "--device", "h100", "--context", 256, "--heads", tmp_path / "heads")
        plan = plan_json(*small, *asked)["plan"]
        assert plan["head_bits"] == 4
        assert plan["parts"]["heads"] == plan["heads"] * (4 * 64 + (500 + 64) * 34)
    result = run("plan", *options, "--head-bits", 3)
    assert result.exit_code == 2
    assert "--head-bits is 3, expected 4" in result.output


def test_dtypes(llama: Path) -> None:
    """bfloat16 on a GPU without it is an error with the remedy, which is an option that works."""
    options = ("--model", llama, "--device", "titan-rtx", "--context", 1024)
    result = run("plan", *options)
    assert result.exit_code == 2
    assert "sm_75 has no bfloat16 arithmetic; load the model in torch.float16" in result.output
    assert plan_json(*options, "--dtype", "float16")["model"]["dtype"] == "float16"


def test_a_folder_of_heads(vicuna: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Number, blocks, vocabulary matrices and accuracies are those of the files, and no weight is read."""
    model, heads = tmp_path / "model", tmp_path / "heads"
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 500, "max_position_embeddings": 512}
    CONFIG_MAPPING["llama"](**sizes, dtype="float32").save_pretrained(model)
    made = MedusaHeads(64, 500, 3, 2)
    made.cumulative_topk_accuracy = [[0.9, 0.95], [0.8, 0.85], [0.0, 0.0]]
    made.save_pretrained(heads)
    monkeypatch.setattr(head_files.Entry, "read", lambda _: pytest.fail("weights were read"))
    options = ("--model", model, "--device", "h100", "--context", 256, "--heads")
    data = plan_json(*options, heads)["plan"]
    assert data["heads"] == 2, "the third guesses nothing right"
    assert data["tokens_per_step"] > 1 + 0.9 + 0.9 * 0.8 > plan_json(*options, 3)["plan"]["tokens_per_step"]
    assert data["parts"]["heads"] == 4 * 2 * (2 * 64 * 65 + 500 * 64)
    for args, message in (
        ((*options, heads, "--shared-lm-head"), "decide this already"),
        ((*options, tmp_path / "none"), "neither a number nor"),
        ((*options, "-1"), "neither a number nor"),
        ((*options, tmp_path), "no file of heads in it"),
        (("--model", vicuna, "--device", "h100", "--heads", heads), "but the model needs"),
    ):
        result = run("plan", *args)
        assert result.exit_code == 2
        assert message in result.output


@pytest.mark.slow
def test_pictures(vicuna: Path, tmp_path: Path) -> None:
    """The file has the format of its ending and isn't empty; an unknown ending is a one-line error."""
    for name, start in (("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")):
        file = tmp_path / name
        result = run("plan", "--model", vicuna, "--device", "titan-rtx", "--context", 512, "--plot", file)
        assert result.exit_code == 0, result.output
        assert file.read_bytes().startswith(start)
        assert file.stat().st_size > 10_000
    result = run("plan", "--model", vicuna, "--device", "titan-rtx", "--plot", tmp_path / "plan.nonsense")
    assert result.exit_code == 2
    assert "--plot" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [(("--device", "gtx-970"), "unknown device 'gtx-970'"), (("--memory-budget", "lots"), "--memory-budget is 'lots'"),
     (("--memory-budget", "4GiB"), "the largest part is weights"), (("--tp", "5"), "tp is 5"),
     (("--context", "100", "--prompt", "100"), "prompt < context"), (("--device", "none.json"), "none.json"),
     (("--devices", "h100"), "as in mi250:8"), (("--devices", "h100:2"), "give one or the other"),
     (("--devices", "h100:0"), "as in mi250:8")],
)  # fmt: skip
def test_one_line_errors(vicuna: Path, args: tuple[str, ...], message: str) -> None:
    options = ("--device", "titan-rtx") if "--device" not in args else ()
    result = run("plan", "--model", vicuna, *options, *args)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    result = run("plan", "--model", tmp_path / "config.json", "--device", "titan-rtx")
    assert result.exit_code == 2
    assert "a config.json, a folder with one, a .gguf file or a hub id" in result.output


@pytest.mark.slow
def test_probe_and_plan_for_what_it_found(vicuna: Path, tmp_path: Path) -> None:
    """A profile is measured and written, and a plan is made for it."""
    file = tmp_path / "device.json"
    result = run("probe", "--output", file, "--seconds", 0.2)
    assert result.exit_code == 0, result.output
    profile = DeviceProfile.load(file)
    assert "one operator" in result.output
    assert profile.source == "measured"
    big = DeviceProfile.from_json(profile.to_json() | {"memory": 1 << 40})
    big.save(file)
    data = plan_json("--model", vicuna, "--device", file, "--context", 256)
    assert data["model"]["dtype"] == "float32", "float16 products weren't measured here"


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full halfway leaves an earlier profile as it was, and no file where there was none."""
    profile = DeviceProfile("x", 1 << 34, 1e10, {"float32": 1e12}, 1e-6)
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    profile.save(old)
    before = old.read_bytes()
    write_text = Path.write_text

    def full(path: Path, text: str) -> int:
        write_text(path, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cli_probe, "probe", lambda *_: profile)
    monkeypatch.setattr(Path, "write_text", full)
    for file in (old, new):
        result = run("probe", "--output", file)
        assert result.exit_code == 2
        assert "No space left on device" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["old.json"]
    assert old.read_bytes() == before


def test_probe_of_no_device() -> None:
    result = run("probe", "--device", "gpu7")
    assert result.exit_code == 2
    assert "gpu7" in result.output


def test_known_model_on_a_described_device() -> None:
    """Without a file, a network or a table's entry; the result names what isn't counted."""
    data = plan_json("--model", "Qwen3-4B", "--device", "8GiB, 100GB/s, 5TFLOP/s fp16", "--weight-bits", 4.5)
    assert data["device"]["read_rate"] == 1e11
    assert data["model"]["quantised"]["method"] == "4.5 bits"
    assert data["plan"]["total_bytes"] < 8 << 30
    assert "its family isn't given" in " ".join(data["plan"]["reasons"])


def test_weights_of_the_plan(llama: Path, tmp_path: Path) -> None:
    """The table has the quantisation, and whether the codes are kept."""
    config = json.loads((llama / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for device, expected in (("rtx-4090", "fp8, others bfloat16"), ("rtx-3090", "fp8, dequantised to bfloat16")):
        result = run("plan", "--model", tmp_path, "--device", device, "--context", 256)
        assert expected in result.output


@pytest.mark.slow
def test_a_quantisation_that_is_not_known(llama: Path, tmp_path: Path) -> None:
    """One line with the remedy, which works."""
    config = json.loads((llama / "config.json").read_text()) | {"quantization_config": {"quant_method": "vptq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("plan", "--model", tmp_path, "--device", "rtx-3060")
    assert result.exit_code == 2
    assert "quant_method='vptq'; its codebooks differ from layer to layer; --weight-bits" in result.output
    assert plan_json("--model", tmp_path, "--device", "rtx-3060", "--weight-bits", 2.5)["model"]["quantised"]["method"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda", "for a GPU that isn't here, name it (rtx-3060) or describe it"), ("mps", "name it (m2-16gb, arc-b580)"),
     ("xpu:0", "its rates can't be measured"), ("8GiB", "lacks bandwidth and a rate")],
)  # fmt: skip
def test_devices_that_are_not_here(device: str, message: str) -> None:
    result = run("plan", "--model", "llama-3.2-1b", "--device", device)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
