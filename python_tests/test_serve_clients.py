"""Clients that people have: ``llm`` and lm-eval-harness, with the bundled model (OpenAI's is in test_serve.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served_process import ServedProcess, served_process

from specmemo_kernels.cli.common import demo_model_folder, load_model, load_tokenizer

pytestmark = pytest.mark.slow

ITEMS = [
    {"text": text, "choices": choices, "answer": i % 2}
    for i, (text, choices) in enumerate(
        (f"def {name}({argument}):\n    return {argument}", [f" + {argument}", f".{name}()"])
        for name in ("add", "double", "sum_of", "next_value", "run")
        for argument in ("x", "value", "self", "a, b")
    )
]
TASK = """
task: returns
dataset_path: json
dataset_kwargs: {data_files: {test: ITEMS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with served_process("--memory-budget", "32MiB") as served:
        yield served


def test_llm(server: ServedProcess, tmp_path: Path) -> None:
    """The command: the same text streamed and whole, which is the unpatched model's."""
    tokenizer = load_tokenizer(demo_model_folder())
    model = load_model(demo_model_folder(), torch.float32, torch.device("cpu"))
    inputs = tokenizer("def main(", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    expected = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    entry = {"model_id": "demo", "model_name": "specmemo-demo", "api_base": f"{server.address}/v1"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    command = [sys.executable, "-m", "llm", "-m", "demo", "--key", "none", "-o", "temperature", "0"]
    for options in ([], ["--no-stream"]):
        run = subprocess.run(
            [*command, "-o", "max_tokens", "20", *options, "def main("],
            capture_output=True, text=True, check=True, env=os.environ | {"LLM_USER_PATH": str(tmp_path)},
        )  # fmt: skip
        assert run.stdout.rstrip("\n") == expected.rstrip("\n")


def test_lm_eval(server: ServedProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 items by ``local-completions``: log-likelihoods and greedy flags as lm-eval's own transformers model."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    items = tmp_path / "items.jsonl"
    items.write_text("\n".join(map(json.dumps, ITEMS)))
    (tmp_path / "returns.yaml").write_text(TASK.replace("ITEMS", str(items)))
    folder = str(demo_model_folder())
    models = {
        "served": LocalCompletionsAPI(
            base_url=f"{server.address}/v1/completions", model="specmemo-demo", tokenizer=folder, num_concurrent=4,
            max_retries=1, max_length=1024,
        ),
        "transformers": HFLM(pretrained=folder, device="cpu", dtype="float32", max_length=1024),
    }  # fmt: skip
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    answers: dict[str, list[Any]] = {}
    for name, model in models.items():
        found = lm_eval.simple_evaluate(model=model, tasks=["returns"], task_manager=manager, bootstrap_iters=0)
        assert found is not None
        samples = sorted(found["samples"]["returns"], key=lambda sample: sample["doc_id"])
        answers[name] = [response for sample in samples for response in sample["filtered_resps"]]
        answers[f"{name} score"] = [found["results"]["returns"]["acc,none"]]
    assert len(answers["served"]) == 2 * len(ITEMS) == 40
    for (own, own_greedy), (wanted, greedy) in zip(answers["served"], answers["transformers"], strict=True):
        assert float(own) == pytest.approx(float(wanted), abs=1e-4)
        assert str(own_greedy) == str(greedy)
    assert answers["served score"] == answers["transformers score"]
