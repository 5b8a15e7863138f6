"""Runs calls in one vLLM engine: a JSON object on stdin, a JSON object on the last line of stdout.

Input: ``engine`` (arguments of ``vllm.LLM``), ``trees`` (arguments of ``tree_options``, optional), ``sabotage``
(optional, see :data:`SABOTAGE`), ``calls``: each has ``prompts`` (texts or lists of tokens), ``params`` (of
``SamplingParams``, one for all or one each), ``alone`` (one request after the other), ``abort_after`` (tokens, for
every other request) and ``prompt_logprobs``. Output: per call ``tokens``, ``logprobs`` and ``seconds``; ``metrics``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def no_commit() -> None:
    """Accepted nodes never reach vLLM's blocks."""
    from specmemo_kernels.integrations.vllm.runner import TreeRunner

    TreeRunner._commit = lambda self: None  # type: ignore[method-assign]


def zeroed(field: str) -> Callable[[], None]:
    """A fault: a tensor of :class:`StepTrees` is zero in each step."""

    def sabotage() -> None:
        from specmemo_kernels.integrations.vllm import runner

        original = runner.step_trees

        def step_trees(*args: Any) -> Any:
            step = original(*args)
            if step is not None:
                getattr(step, field).zero_()
            return step

        runner.step_trees = step_trees

    return sabotage


def version() -> None:
    """Another version of vLLM is installed."""
    from specmemo_kernels.integrations.vllm import versions

    versions.installed_version = lambda: "9.9.9"


#: Faults that the comparison with vLLM's own tokens must find.
SABOTAGE: dict[str, Callable[[], None]] = {
    "no commit": no_commit,
    "causal mask": zeroed("tree_mask"),
    "chain positions": zeroed("depth_offsets"),
    "version": version,
}


def main() -> None:
    given = json.load(sys.stdin)
    os.environ.update(SETTINGS)
    os.environ.update(given.get("environment", {}))
    from vllm import LLM

    options: dict[str, Any] = {"enforce_eager": True, "disable_log_stats": False, "max_model_len": 512}
    if given.get("trees"):
        from specmemo_kernels.integrations.vllm import tree_options

        options |= tree_options(**given["trees"])
    if given.get("sabotage"):
        SABOTAGE[given["sabotage"]]()
    llm = LLM(**options | given["engine"])
    calls = [run(llm, call) for call in given["calls"]]
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    print("\n" + json.dumps({"calls": calls, "metrics": metrics}))


def run(llm: Any, call: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    prompts = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in call["prompts"]]
    given = call["params"]
    params = []
    for one in given if isinstance(given, list) else [given] * len(prompts):
        choices = one.get("choices")
        extra = {"structured_outputs": StructuredOutputsParams(**choices)} if choices else {}
        params.append(SamplingParams(**{k: v for k, v in one.items() if k != "choices"}, **extra))
    begin = time.perf_counter()
    if call.get("abort_after"):
        outputs = with_aborts(llm, prompts, params, call["abort_after"])
    elif call.get("alone"):
        pairs = zip(prompts, params, strict=True)
        outputs = [llm.generate([prompt], own, use_tqdm=False)[0] for prompt, own in pairs]
    else:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return {
        "seconds": time.perf_counter() - begin,
        "tokens": [[list(one.token_ids) for one in output.outputs] for output in outputs],
        "logprobs": [logprobs(output.outputs[0].logprobs) for output in outputs],
        "prompt_logprobs": [logprobs(output.prompt_logprobs) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "reasons": [output.outputs[0].finish_reason for output in outputs],
    }


def logprobs(given: Any) -> Any:
    if given is None:
        return None
    return [
        None if step is None else {str(token): [item.logprob, item.rank] for token, item in step.items()}
        for step in given
    ]


def with_aborts(llm: Any, prompts: list[Any], params: list[Any], after: int) -> list[Any]:
    """Outputs of all requests, of which every other one is aborted once it has ``after`` tokens."""
    engine = llm.llm_engine
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"r{index}", prompt, own)
    last: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
            odd = int(output.request_id.removeprefix("r")) % 2
            if odd and not output.finished and len(output.outputs[0].token_ids) >= after:
                engine.abort_request([output.request_id])
    return [last[f"r{index}"] for index in range(len(prompts))]


if __name__ == "__main__":
    main()
