"""The model of ``bench/gpu_model.py`` against measured times of published decode kernels. The predictions are ours.

    python bench/gpu_published.py --json bench/results/gpu_published.json

No published kernel is compiled here: the model gets our kernel's machine code for one node (``bench/results/aot.json``)
and the published batch, lengths and heads, so a row compares memory, waves, states and fixed times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_model import GPUS, Case, Gpu, Kernel, seconds
from machine_code import Loop
from timing import write_result

from specmemo_kernels.backends.kernel_config import KernelConfig

AOT = Path(__file__).resolve().parent / "results" / "aot.json"
#: Copies reach this share of a data sheet's bandwidth, as on the H200 of ``GPUS``.
COPY_SHARE = GPUS["sm_90"].copy_bytes_s / 4.8e12
H200 = GPUS["sm_90"]
H100 = replace(H200, name="H100 SXM", copy_bytes_s=COPY_SHARE * 3.35e12)
GH200 = replace(H200, name="GH200, 96 GB", copy_bytes_s=COPY_SHARE * 4.0e12)


@dataclass(frozen=True)
class Source:
    """Where times were published, by which kernel on which GPU; ``assumed``: what the source doesn't say."""

    kernel: str
    gpu: Gpu
    address: str
    assumed: str = ""


_VLLM = "https://github.com/vllm-project/vllm/pull/43232"
_GPU_AND_HEADS = (
    "An H200, because 1.07 GB in 253.5 us are more than an H100's bandwidth; 32 query and 8 KV heads of 128, pages of "
    "16, as in that benchmark's configuration"
)
FLASH_ATTENTION = Source("FlashAttention-3, vLLM's", H200, _VLLM, _GPU_AND_HEADS)
XQA = Source("FlashInfer XQA", H200, _VLLM, _GPU_AND_HEADS)
XQA_FP8 = Source(
    "FlashInfer XQA, fp8 pages of 64", GH200, "https://github.com/flashinfer-ai/flashinfer/pull/4904",
    "The GH200 with 96 GB of HBM3",
)  # fmt: skip
MLA = Source(
    "FlashMLA", H100, "https://github.com/ai-bot-pro/achatbot/pull/123",
    "576 shared elements of a token as keys and values of 288",
)  # fmt: skip
PAGES_OF_8 = Source(
    "FlashAttention-3, pages of 8", H100, "https://github.com/Dao-AILab/flash-attention/issues/1572", "An H100 SXM"
)

#: Microseconds of a call with one node per sequence, in bfloat16 unless the source says fp8.
_TIMES: tuple[tuple[Source, dict[str, int], dict[tuple[int, int], float]], ...] = (
    (FLASH_ATTENTION, {}, {
        (1, 1024): 11.0, (1, 4096): 14.5, (1, 16384): 27.2, (1, 32768): 43.5, (8, 1024): 17.5, (8, 4096): 41.6,
        (8, 16384): 132.7, (8, 32768): 253.5, (16, 4096): 70.4,
    }),
    (XQA, {}, {
        (1, 1024): 10.8, (1, 4096): 14.0, (1, 16384): 26.8, (1, 32768): 46.0, (8, 1024): 16.3, (8, 4096): 44.2,
        (8, 16384): 155.6, (8, 32768): 305.4, (16, 4096): 81.0,
    }),
    (XQA_FP8, {"kv_heads": 1, "group": 8, "kv_bytes": 1}, {(32, 32768): 81.3}),
    (MLA, {"kv_heads": 1, "group": 16, "head_dim": 288}, {(128, 4096): 215.0}),
    (PAGES_OF_8, {"kv_heads": 32, "group": 1}, {(16, 128): 27.6, (16, 2000): 292.0, (16, 4000): 567.2}),
)  # fmt: skip


def compiled(case: Case) -> Kernel:
    """Our kernel for one node on sm_90, from the committed resources; its loop stands for that over nodes too."""
    kind = "tree_attention_codes" if case.kv_bytes == 1 else "tree_attention"
    setup = {"target": "sm_90", "kernel": kind, "head_dim": 128, "nodes": 1}
    setup |= {"kv_dtype": "fp8"} if case.kv_bytes == 1 else {"gqa": min(8, case.group)}
    row = next(row for row in json.loads(AOT.read_text())["rows"] if all(row[key] == setup[key] for key in setup))
    config = KernelConfig(**row["config"])
    scores = config.block_m * config.block_n // (32 * config.num_warps)
    loop = Loop(row["loop_instructions"], 1 + round(row["exp_per_score"] * scores), 0, ())
    return Kernel(config, row["registers"], row["shared_bytes"], loop, loop)


def rows() -> Iterator[dict[str, Any]]:
    """Predicted and measured microseconds of each published time, and the prediction's relative error."""
    for source, shape, times in _TIMES:
        for (batch, tokens), measured in times.items():
            case = Case(batch, tokens, 1, **shape)
            parts = seconds(compiled(case), source.gpu, case)
            predicted = 1e6 * parts["total"]
            yield {
                "kernel": source.kernel, "gpu": source.gpu.name, "source": source.address, "assumed": source.assumed,
                "batch": batch, "tokens": tokens, "query_heads": case.kv_heads * case.group,
                "kv_heads": case.kv_heads, "limit": "compute" if parts["compute"] > parts["memory"] else "memory",
                "predicted_us": round(predicted, 1), "measured_us": measured,
                "error": round(predicted / measured - 1, 3),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    found = list(rows())
    for row in found:
        print(
            f"{row['kernel']:32} {row['gpu']:14} {row['batch']:4} x {row['tokens']:5}  {row['predicted_us']:6.1f} us "
            f"predicted  {row['measured_us']:6.1f} us measured  {row['error']:+.0%}"
        )
    if args.json:
        write_result(args.json, {"rows": found})


if __name__ == "__main__":
    main()
