"""Write the figures of ``bench/results/*.json`` into the marked blocks of README.md and docs/.

A block looks like ``<!-- figure: NAME -->...<!-- end -->``: a number inside a sentence, or a whole table.

    python docs/figures.py            rewrite the blocks
    python docs/figures.py --check    exit with status 1 if a block is out of date
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- figure: ([a-z][\w.]*) -->)(.*?)(<!-- end -->)", re.DOTALL)
MIB = 1024**2
Row = dict[str, Any]


def pages() -> list[Path]:
    """Every file that may hold blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(header: Sequence[str], rows: Iterable[Sequence[object]], source: str) -> str:
    """A Markdown table with a caption that names machine, date and file."""
    lines = [header, ["---"] * len(header), *rows]
    body = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
    return f"\n\n{body}\n\n{caption(source)}\n\n"


def caption(source: str) -> str:
    """Machine, versions, date and file of a result."""
    env = load(source)["environment"]
    if source == "ablation_paper":  # the machine doesn't matter
        return f"*Predicted, {env['date']}; `bench/results/{source}.json`*"
    if env.get("gpu", "none") != "none":
        versions = f"{env['gpu']}, torch {env['torch']}, Triton {env['triton']}"
        return f"*{versions}, {env['date']}; `bench/results/{source}.json`*"
    processor, _, threads = env["processor"].rpartition(", torch uses ")
    threads = threads.replace("1 threads", "1 thread")
    return (
        f"*{processor}, {threads}, torch {env['torch']}, transformers {env['transformers']}, {env['date']}; "
        f"`bench/results/{source}.json`*"
    )


def decimals(speed: float) -> str:
    """Tokens per second, slow ones with one decimal."""
    return f"{speed:.1f}" if speed < 20 else f"{speed:.0f}"


def mib(size: float) -> str:
    return f"{size / MIB:.1f} MiB"


def saved(share: float) -> str:
    """A share of the memory as savings: 0.18 is ``-82 %``."""
    return "" if share > 0.995 else f" ({share - 1:+.0%})".replace("%", "\u00a0%")


# --- against Medusa as published -------------------------------------------------------------------------------------


def frontier_name(row: Row) -> str:
    if row["budget"] is not None:
        return f"specmemo, `memory_budget` {mib(row['budget'])}"
    return {
        "plain generate": "plain `generate`",
        "Medusa, our tree": "Medusa, the tree planned here",
        "this, no budget": "specmemo, no budget",
    }.get(row["system"], row["system"])


def frontier(source: str, heads: bool) -> str:
    rows = []
    for row in load(source)["rows"]:
        name = [frontier_name(row)]
        if heads:
            name.append("" if row["heads"] == "none" else row["heads"].split(", ")[1])
        memory = mib(row["peak_generation_bytes"]) + saved(row["memory_vs_medusa"])
        speed = f"{row['tokens_per_s']:.0f} ({row['speed_vs_medusa']:.2f}x)"
        rows.append([*name, row["nodes"], memory, speed, f"{row['tokens_per_step']:.2f}"])
    header = ["", *(["heads"] if heads else []), "nodes", "generation memory", "tokens/s", "tokens per step"]
    return table(header, rows, source)


def headline() -> dict[str, str]:
    """The figures at the top of the README."""
    rows = load("frontier_bundled")["rows"]
    plain, medusa, best = rows[0], rows[1], rows[-1]
    batch = {(r["drafter"], r["batch"], r["dtype"]): r for r in load("batch_cpu")["rows"]}
    many, plain_many = batch["medusa", 8, "fp32"], batch["none (plain HF)", 8, "fp32"]
    ops = attention_ratios("bf16")
    budgeted = next(row for row in load("gpu_frontier")["rows"] if row["budget"] is not None)
    return {
        "headline.memory": f"{1 - best['memory_vs_medusa']:.0%}".replace("%", " %"),
        "headline.speed": f"{best['speed_vs_medusa']:.1f} times",
        "headline.mib": f"{mib(best['peak_generation_bytes'])} instead of {mib(medusa['peak_generation_bytes'])}",
        "headline.plain": f"{best['tokens_per_s'] / plain['tokens_per_s']:.1f} times",
        "headline.batch": f"{many['vs_plain']:.1f} times",
        "headline.batch_memory": (
            f"{mib(many['peak_generation_bytes'])} instead of {mib(plain_many['peak_generation_bytes'])}"
        ),
        "headline.ops": f"{min(ops):.1f} to {max(ops):.1f} times",
        "headline.shapes": str(len(ops)),
        "headline.gpu_speed": f"{budgeted['speed_vs_medusa']:.1f} times",
        "headline.gpu_memory": f"{1 - budgeted['memory_vs_medusa']:.0%}".replace("%", " %"),
    }


# --- steps -----------------------------------------------------------------------------------------------------------


def steps() -> str:
    parts = ["step_ms", "products_ms", "rest_ms", "floor_ms", "vs_floor", "compressed_ms", "llama_cpp_ms"]
    rows = [[row["shape"], row["nodes"], *(f"{row[part]:.3g}" for part in parts)] for row in load("step_cpu")["rows"]]
    header = ["model", "nodes", "step", "products", "rest", "floor", "step / floor", "compressed", "llama.cpp"]
    return table(header, rows, "step_cpu")


def step_parts() -> str:
    parts = ["model matmuls", "attention", "other model operators", "head", "verify", "commit"]
    rows = [
        [row["shape"], row["nodes"], *(f"{row['parts_ms'][part]:.2f}" for part in parts)]
        for row in load("step_cpu")["rows"]
    ]
    return table(["model", "nodes", *(part.replace("head", "heads, lm_head") for part in parts)], rows, "step_cpu")


def drafters() -> str:
    names = {"eagle3": "EAGLE-3", "eagle": "EAGLE", "clover2": "Clover-2", "dflash": "DFlash"}
    parts, ratios = ["plain_ms", "static_ms", "dynamic_ms", "coded_ms"], ["dynamic/static", "coded/dynamic"]
    rows = [
        [row["shape"], names[row["drafter"]], row["nodes"], *(f"{row[part]:.1f}" for part in parts)]
        + [f"{row[ratio]:.2f}x" for ratio in ratios]
        for row in load("drafters_cpu")["rows"]
    ]
    sides = ["no drafts", "static trees", "dynamic trees", "dynamic, 4 bits"]
    header = ["model", "drafter", "nodes", *sides, "dynamic / static", "4 bits / stored"]
    return table(header, rows, "drafters_cpu")


def beams() -> str:
    """Tokens per step by the nodes that each depth expands."""
    rows = []
    for row in load("beams_cpu")["rows"]:
        found = {int(key.removeprefix("beam ")): row[key] for key in row if key.startswith("beam ") and row[key]}
        best = max(found, key=lambda beam: found[beam])
        chosen = min(row["default"], max(found))
        tokens = [f"{found[beam]:.2f}" for beam in (chosen, 10)]
        rows.append([row["nodes"], row["depth"], chosen, *tokens, f"{found[best]:.2f} with {best}"])
    header = ["nodes", "depth", "beam", "tokens per step", "with a beam of 10", "best"]
    return table(header, rows, "beams_cpu")


NAMES = {"medusa": "Medusa heads", "clover2": "Clover-2", "eagle3": "EAGLE-3", "plain generate": "plain `generate`"}


def trained() -> str:
    """Tokens per step and speed of drafters trained by ``specmemo train``, by the size of the tree."""
    result = load("trained_cpu")
    sizes = list(dict.fromkeys(row["nodes"] for row in result["rows"]))
    by_side = {(row["side"], row["nodes"]): row for row in result["rows"]}
    rows = []
    for each in result["training"]:
        name = each["name"]
        of_side = [by_side[name, size] for size in sizes]
        rows.append(
            [NAMES[name], f"{each['tokens'] / 1e6:.1f} M", f"{each['seconds'] / 60:.0f} min",
             mib(of_side[0]["drafter_bytes"]),
             *(f"{row['tokens_per_step']:.2f}, {row['tokens_per_s']:.0f} ({row['speedup']:.2f}x)" for row in of_side)]
        )  # fmt: skip
    trees = [f"{size} nodes" if size else "chosen by `patch`" for size in sizes]
    return table(["drafter", "trained on", "training time", "size (float32)", *trees], rows, "trained_cpu")


def trained_accuracy() -> str:
    rows = [
        [NAMES[each["name"]], *(f"{row[0]:.2f}, {row[4]:.2f}" for row in each["accuracy"])]
        for each in load("trained_cpu")["training"]
    ]
    depths = [f"{d} ahead" for d in range(1, len(rows[0]))]
    return table(["drafter", *depths], rows, "trained_cpu")


def small_values() -> dict[str, str]:
    """A model trained from scratch, and heads for it: minutes, and what ``patch`` chooses: tokens per step, speed."""
    result = load("small_cpu")
    (heads,), model = result["training"], result["model"]
    chosen = next(row for row in result["rows"] if row["side"] == heads["name"] and not row["nodes"])
    return {
        "small.minutes": f"{(model['seconds'] + heads['seconds']) / 60:.0f}",
        "small.tokens_per_step": f"{chosen['tokens_per_step']:.2f}",
        "small.speedup": f"{chosen['speedup']:.1f}",
    }


def scaling_values() -> dict[str, str]:
    """A fit of ``specmemo train --scaling``: its coefficients, its residuals and what it predicts."""
    law = load("scaling_cpu")
    fit, runs = law["tokens_per_step"], law["runs"]

    def predicted(run: Row) -> float:
        factors = (run["tokens"], run["parameters"], run["batch"])
        return float(fit["intercept"] + sum(s * math.log(x) for s, x in zip(fit["slopes"], factors, strict=True)))

    errors = [abs(predicted(run) / run["tokens_per_step"] - 1) for run in runs]
    rows = [
        [f"{run['tokens']:,}", f"{run['parameters']:,}", run["batch"], f"{predicted(run):.2f}",
         f"{run['tokens_per_step']:.2f}", f"{predicted(run) / run['tokens_per_step'] - 1:+.1%}".replace("%", "\u00a0%")]
        for run in law["held_out"]
    ]  # fmt: skip
    header = ["training tokens", "parameters", "batch", "predicted", "measured", "error"]
    formula = " ".join(f"{s:+.3f} ln({name})" for s, name in zip(fit["slopes"], ("T", "N", "B"), strict=True))
    return {
        "scaling.formula": f"`{fit['intercept']:.2f} {formula}`",
        "scaling.residuals": f"{sum(errors) / len(errors):.1%} in the mean, at most {max(errors):.1%}".replace(
            "%", " %"
        ),
        "scaling.held_out": table(header, rows, "scaling_cpu"),
    }


def hybrids(source: str = "hybrids_cpu") -> str:
    shown: dict[tuple[str, str], dict[str, Row]] = {}
    for row in load(source)["rows"]:
        shown.setdefault((row["shape"], row["dtype"]), {})[row["side"]] = row
    sides = ["no drafts", "chain", "tree", "planned"]
    rows = [
        [f"{shape}, {dtype}", f"{found['plain generate']['tokens_per_s']:.1f}"]
        + [f"{found[side]['tokens_per_s']:.1f} ({found[side]['speedup']:.2f}x)" for side in sides]
        for (shape, dtype), found in shown.items()
    ]
    header = ["model", "plain `generate`", "no drafts", "chain of 2 drafts", "tree of 8 nodes", "chosen by `patch`"]
    return table(header, rows, source)


# --- linear layers ---------------------------------------------------------------------------------------------------


def linear() -> str:
    rows = [
        [
            f"{row['model'].upper()}, {row['dtype']}",
            row["rows"],
            f"{row['ms']:.2f}",
            f"{row['torch_ms']:.2f}",
            f"{row['vs_torch']:.1f}x",
            f"{row['worst_vs_torch']:.1f}x",
            f"{row['floor_fraction']:.2f}",
            f"{row['compressed_ms']:.2f}" if "compressed_ms" in row else "",
            f"{row['compressed_vs_torch']:.1f}x" if "compressed_ms" in row else "",
        ]
        for row in load("linear_cpu")["rows"]
    ]
    header = ["layer of", "rows", "ms", "torch, ms", "faster by", "worst matrix", "floor / time"]
    header += ["compressed, ms", "compressed, faster by"]
    return table(header, rows, "linear_cpu")


# --- engines ---------------------------------------------------------------------------------------------------------


def engines(source: str = "engines_cpu") -> str:
    found = load(source)["rows"]
    with_weights = any(row.get("weights_mib") for row in found)
    rows = [
        [
            row["shape"],
            row["batch"],
            row["engine"],
            decimals(row["tokens_per_s"]),
            decimals(row["decode_per_s"]) if row["decode_per_s"] else "",
            f"{row['tokens_per_step']:.2f}" if row["tokens_per_step"] else "",
            f"{row['mib']:.1f}",
            *([f"{row['weights_mib']:,.0f}"] if with_weights else []),
        ]
        for row in found
    ]
    header = ["model", "batch", "engine", "tokens/s", "after the first token", "tokens per step", "memory, MiB"]
    header += ["weights, MiB"] if with_weights else []
    return table(header, rows, source)


def compressed_gain(engine: str) -> str:
    """Of models of 1B parameters without drafts, after the first token, relative to ``engine``."""
    ratios = []
    for source in ("engines_compressed_cpu", "engines_compressed_long_cpu", "engines_tied_cpu"):
        speed = {row["engine"]: row["decode_per_s"] for row in load(source)["rows"] if row["shape"] != "125m"}
        ratios.append(speed["specmemo, compressed, no drafts"] / speed[engine])
    return f"{min(ratios):.2f} to {max(ratios):.2f} times"


def vllm() -> str:
    rows = [
        [row["dtype"], row["batch"], row["engine"], f"{row['tokens_per_s']:.0f}", f"{row['tokens_per_step'] or 1:.2f}"]
        for row in load("vllm_cpu")["rows"]
    ]
    return table(["dtype", "batch", "engine", "tokens/s", "tokens per step"], rows, "vllm_cpu")


# --- servers ---------------------------------------------------------------------------------------------------------


def servers() -> str:
    found: dict[int, dict[str, Row]] = {}
    for row in load("serve_cpu")["rows"]:
        found.setdefault(row["connections"], {})[row["server"]] = row
    names = ("specmemo", "transformers", "transformers, continuous batching")
    rows = [
        [str(connections)]
        + [f"{by_name[name]['tokens_per_s']:,.0f}" for name in names]
        + [f"{by_name[name]['first_ms']:,.0f} / {by_name[name]['first_p99_ms']:,.0f}" for name in names]
        + [f"{by_name[name]['token_ms']:.1f} / {by_name[name]['token_p99_ms']:.1f}" for name in names]
        for connections, by_name in found.items()
    ]
    header = ["connections"]
    for column in ("tokens/s", "first token, ms", "per token, ms"):
        header += [f"{column}: {name}" for name in ("specmemo", "transformers", "with continuous batching")]
    return table(header, rows, "serve_cpu")


def serving_gain() -> str:
    """Throughput over that of continuous batching, least and most over numbers of connections."""
    rates = {(row["connections"], row["server"]): row["tokens_per_s"] for row in load("serve_cpu")["rows"]}
    gains = [
        rate / rates[connections, "transformers, continuous batching"]
        for (connections, name), rate in rates.items()
        if name == "specmemo"
    ]
    return f"{min(gains):.1f} to {max(gains):.1f} times"


# --- invariant mode --------------------------------------------------------------------------------------------------


def invariant() -> dict[str, str]:
    """Equal outputs over all settings, and the speed of both modes."""
    rows = [row for chunk in (16, 256) for row in load(f"invariant_chunk{chunk}_cpu")["tokens"]]
    equal, prompts = len({row["digest"] for row in rows}) == 1, rows[0]["prompts"]
    costs = [
        [
            row["drafter"],
            row["batch"],
            f"{row['tokens_per_s']:.0f}",
            f"{row['default_tokens_per_s']:.0f}",
            f"{row['relative']:.2f}",
            f"{row['default_identical']} of {row['prompts']}",
        ]
        for row in load("invariant_cost_cpu")["cost"]
    ]
    header = ["drafter", "batch", "tokens/s", "default mode", "ratio", "same outputs in both modes"]
    return {
        "invariant.equal": f"all {prompts} prompts' outputs are" if equal else "not all outputs are",
        "invariant.settings": str(len(rows)),
        "invariant.preemptions": f"{sum(row['preemptions'] for row in rows):,}",
        "invariant.cost": table(header, costs, "invariant_cost_cpu"),
    }


# --- batches ---------------------------------------------------------------------------------------------------------

DRAFTERS = {"medusa": "Medusa heads", "lookup": "prompt lookup", "draft": "draft model"}
PLAIN = "none (plain HF)"


def batches() -> str:
    data = load("batch_cpu")["rows"]
    by = {(r["drafter"], r["batch"], r["dtype"]): r for r in data}
    rows = []
    for dtype in ("fp32", "bf16"):
        for batch in sorted({r["batch"] for r in data}):
            plain = by[PLAIN, batch, dtype]
            cells = [by[name, batch, dtype] for name in DRAFTERS]
            rows.append(
                [
                    f"{dtype}, {batch}",
                    f"{plain['tokens_per_s']:.0f}",
                    *(f"{r['tokens_per_s']:.0f} ({r['vs_plain']:.2f}x)" for r in cells),
                    mib(plain["peak_generation_bytes"]),
                    mib(by["medusa", batch, dtype]["peak_generation_bytes"]),
                ]
            )
    header = ["dtype, batch", "plain `generate`", *DRAFTERS.values(), "memory, plain", "memory, heads"]
    return table(header, rows, "batch_cpu")


def batch_scaling() -> str:
    by = {(r["drafter"], r["batch"], r["dtype"]): r for r in load("batch_cpu")["rows"]}
    rows = []
    for name, title in DRAFTERS.items():
        cells = [by[name, 8, dtype] for dtype in ("fp32", "bf16")]
        rows.append([title, *(f"{r[key]:.1f}" for r in cells for key in ("scaling", "allowed"))])
    header = ["", "float32, measured", "float32, roofline", "bfloat16, measured", "bfloat16, roofline"]
    return table(header, rows, "batch_cpu")


def batch_values() -> dict[str, str]:
    data = load("batch_cpu")
    by = {(r["drafter"], r["batch"], r["dtype"]): r for r in data["rows"]}
    again = [r["scaling"] / r["allowed"] for r in data["again"]["rows"] if r["batch"] == 8]
    differ = [by[name, batch, "bf16"]["rows_that_differ"] for name in DRAFTERS for batch in (1, 2, 4, 8, 10, 16)]
    plain = [by[PLAIN, batch, "bf16"]["rows_that_differ"] for batch in (8, 16)]
    all_prompts = load("batch_bf16")["rows"]
    lossless = load("batch_lossless")["rows"]
    same = all(r["exact_match"] == 1 for r in lossless)
    ties = all(r["rows_that_differ"] == r["near_ties"] for r in [*all_prompts, *by.values()] if r["dtype"] == "bf16")
    return {
        "batch.again": f"{min(again):.1f} to {max(again):.1f}",
        "batch.assisted": f"{by['draft (HF assisted)', 1, 'fp32']['vs_plain']:.2f}",
        "batch.differ": f"{min(differ)} or {max(differ)}",
        "batch.differ_plain": f"{min(plain)}" if min(plain) == max(plain) else f"{min(plain)} and {max(plain)}",
        "batch.differ_all": " or ".join(map(str, sorted({r["rows_that_differ"] for r in all_prompts}))),
        "batch.near_ties": "every" if ties else "NOT every",
        "batch.lossless": "exactly" if same else "NOT exactly",
    }


# --- smaller results -------------------------------------------------------------------------------------------------


def adaptive() -> str:
    rows = [
        [
            row["planned_nodes"],
            f"{row['adaptive_nodes']:.1f}",
            f"{row['static_tokens_per_s']:.0f}",
            f"{row['adaptive_tokens_per_s']:.0f}",
            f"{row['ratio']:.2f}x",
            row["prompts"],
        ]
        for row in load("adapt")["rows"]
    ]
    header = ["planned nodes", "nodes verified (mean)", "whole tree, tokens/s", "chosen part, tokens/s", "", "prompts"]
    return table(header, rows, "adapt")


def chat_values() -> dict[str, str]:
    rows = load("chat")["rows"]
    second = [row for row in rows if row["turn"] == 2]
    same = sum(row["equals_fresh"] and row["equals_plain"] for row in rows)
    held = [row for row in rows if "held_pages" in row]
    return {
        "chat.prompt": f"{int(median(row['prompt_tokens'] for row in second))}",
        "chat.reused": f"{median(row['reused'] for row in second):.0f}",
        "chat.seconds": f"{median(row['seconds'] for row in second):.2f}",
        "chat.fresh": f"{median(row['fresh_seconds'] for row in second):.2f}",
        "chat.same": f"{same} of {len(rows)}",
        "chat.held": f"{sum(row['held_pages'] == row['planned_pages'] for row in held)} of {len(held)}",
    }


def quality_values() -> dict[str, str]:
    pages = {row["kv_dtype"]: row for row in load("kv_quality")["rows"]}
    plain, coded = load("head_quality")["rows"]
    values = {
        "heads.stored": f"{plain['tokens_per_step']:.2f}",
        "heads.coded": f"{coded['tokens_per_step']:.2f}",
        "heads.loss": f"{1 - coded['tokens_per_step_ratio']:.1%}".replace("%", " %"),
        "heads.same": "the same tokens" if load("head_quality")["same"] else "other tokens",
    }
    for name, row in pages.items():
        values[f"kv.{name}.changed"] = f"{row['changed']} of {row['continuations']}"
        values[f"kv.{name}.rate"] = f"{row['first_changes_per_1000_tokens']:.1f}"
    return values


def ranks() -> str:
    rows = [
        [
            row["batch"],
            f"{row['step_seconds'] * 1e3:.0f} ms",
            f"{row['share']:.0%}".replace("%", " %"),
            row["messages"],
            f"{row['alone_seconds'] * 1e3:.0f} ms",
        ]
        for row in load("ranks_cpu")["steps"]
    ]
    header = ["sequences", "step", "inside collectives", "messages a step", "the same messages alone"]
    return table(header, rows, "ranks_cpu")


# --- ablation --------------------------------------------------------------------------------------------------------


def change(size: float, before: float) -> str:
    """The difference in MiB."""
    return f"{(size - before) / MIB:+.0f}"


def ablation_paper(which: str) -> str:
    """Predicted memory and speed at each length; changes from the row above, or from the first row."""
    rows = [row for row in load("ablation_paper")["rows"] if row["table"] == which]
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    by = {(row["system"], row["context"]): row for row in rows}
    lines: list[list[object]] = []
    above: list[Row] = []
    for name in dict.fromkeys(row["system"] for row in rows):
        line: list[object] = [name]
        found = [by[name, context] for context in contexts]
        for row, before in zip(found, above or found, strict=True):
            line.append(f"{row['heads']}, {row['nodes']}")
            line.append(f"{row['generation_bytes'] / MIB:.0f}")
            line.append(change(row["generation_bytes"], before["generation_bytes"]) if above else "")
            line.append(f"{row['tokens_per_s']:.1f}")
        line.append(f"{found[0]['rejected_bytes'] / MIB:.1f}")
        above = found if which == "cumulative" else above or found
        lines.append(line)
    header = [""]
    for context in contexts:
        header += ["heads, nodes", f"MiB, {context} tokens", "", "tokens/s"]
    return table([*header, "rejected, MiB per step"], lines, "ablation_paper")


def ablation_memory(which: str) -> str:
    """Measured memory; changes from the row above, or from the complete lossless system."""
    everything = load("ablation_memory_cpu")["rows"]
    complete = next(row for row in everything if row["system"] == "+ prefix reuse")
    rows = [row for row in everything if row["table"] == which]
    lines, above = [], None if which == "cumulative" else complete["peak_generation_bytes"]
    for row in rows:
        size = row["peak_generation_bytes"]
        parts = [f"{row['bytes_by_part'][part] / MIB:.1f}" for part in ABLATION_PARTS]
        name = [row["system"], row["heads"], row["nodes"]]
        lines.append([*name, f"{size / MIB:.1f}", "" if above is None else change(size, above), *parts])
        above = size if which == "cumulative" else above
    return table(["", "heads", "nodes", "MiB", "", *ABLATION_PARTS], lines, "ablation_memory_cpu")


def ablation_speed() -> str:
    """Measured speed of every system, relative to Medusa as published and to the complete lossless system."""
    rows = load("ablation_speed_cpu")["rows"]
    medusa, complete = rows[0], next(row for row in rows if row["system"] == "+ prefix reuse")
    lines = [
        [row["system"], row["heads"], row["nodes"], f"{row['tokens_per_s']:.1f}",
         f"{row['tokens_per_s'] / medusa['tokens_per_s']:.1f}x",
         f"{row['tokens_per_s'] / complete['tokens_per_s']:.2f}x", f"{row['tokens_per_step']:.2f}"]
        for row in rows
    ]  # fmt: skip
    header = ["", "heads", "nodes", "tokens/s", "vs Medusa", "vs all lossless", "tokens per step"]
    return table(header, lines, "ablation_speed_cpu")


ABLATION_PARTS = ("heads", "KV cache", "candidates' KV", "logits", "activations")


def ablation_sensitivity(axis: str) -> str:
    """Predicted memory and speed of the fastest plan for each value of an axis, by model."""
    rows = [row for row in load("ablation_paper")["sensitivity"] if row["axis"] == axis]
    scales = list(dict.fromkeys(row["scale"] for row in rows))
    cells: dict[tuple[int, str], list[str]] = {}
    for row in rows:
        kind = "int8" if row["kv_dtype"] == "int8" else "16 bits"
        cell = f"{mib(row['generation_bytes'])}, {row['tokens_per_s']:.1f}" + ("" if row["fits"] else " (too large)")
        cells.setdefault((row["value"], kind), []).append(cell)
    lines = [[value, *([kind] if axis == "kv" else []), *found] for (value, kind), found in cells.items()]
    first = ["tokens", "pages"] if axis == "kv" else [axis]
    return table([*first, *scales], lines, "ablation_paper")


# --- operators -------------------------------------------------------------------------------------------------------


def attention_ratios(dtype: str) -> list[float]:
    """Speed relative to the best SDPA, by shape, without the rows of three nodes, which are another series."""
    rows = load("ops_cpu")["rows"]
    return [r["vs_best"] for r in rows if r["op"] == "tree_attention" and r["dtype"] == dtype and r["tree"] != 3]


def attention_rows(name: str, measured: list[Row]) -> str:
    rows = []
    for nodes in (1, 3, 8, 25, 32):
        found = [r for r in measured if r["op"] == "tree_attention" and r["tree"] == nodes]
        mid = {key: median(r[key] for r in found) for key in found[0] if key.startswith(("ms", "vs_", "floor"))}
        rows.append(
            [
                nodes,
                f"{mid['ms']:.2f}",
                f"{mid['ms_near']:.2f}",
                f"{mid['vs_best']:.1f}x",
                f"{mid['vs_sdpa']:.3g}x" if mid["vs_sdpa"] >= 10 else f"{mid['vs_sdpa']:.1f}x",
                f"{mid['floor_fraction']:.2f}",
            ]
        )
    header = ["nodes", "ms", "ms, pages in cache", "vs the best SDPA", "vs SDPA as usually called", "of the floor"]
    return table(header, rows, name)


def ops_values() -> dict[str, str]:
    runs = load("ops_cpu_first_table")["runs"]
    first = [r for run in runs for r in run]

    def mid(op: str, nodes: int, key: str) -> float:
        return median(r[key] for r in first if r["op"] == op and r["tree"] == nodes)

    floor = [r["floor_fraction"] for r in first if r["op"] == "tree_attention" and r["tree"] == 1]
    every = [ratio for dtype in ("bf16", "fp32") for ratio in attention_ratios(dtype)]
    values = {
        "ops.argmax": f"{mid('lm_head_argmax', 25, 'vs_best'):.1f} (25 nodes) to "
        f"{mid('lm_head_argmax', 1, 'vs_best'):.1f} (one node)",
        "ops.commit": f"{1 / mid('commit_paged_kv', 3, 'vs_best'):.1f} times (three nodes) and "
        f"{1 / mid('commit_paged_kv', 1, 'vs_best'):.1f} times (one node)",
        "ops.commit_ms": f"{mid('commit_paged_kv', 3, 'ms'):.1f} ms",
        "ops.floor": f"{min(floor):.2f} to {max(floor):.2f}",
        "ops.faster": f"{sum(ratio > 1 for ratio in every)} of {len(every)}",
    }
    for dtype in ("bf16", "fp32"):
        found = attention_ratios(dtype)
        values[f"ops.{dtype}"] = f"{min(found):.1f} to {max(found):.1f}"
    return values


def compiled() -> dict[str, str]:
    rows = load("aot")["rows"]
    return {
        "aot.variants": str(len(rows)),
        "aot.targets": ", ".join(f"`{name}`" for name in dict.fromkeys(row["target"] for row in rows)),
        "aot.spills": str(sum(row["spills"] > 0 for row in rows)),
        "aot.problems": str(sum(bool(row["problem"]) for row in rows)),
        "aot.fractions": fractions(rows),
    }


def fractions(rows: list[Row]) -> str:
    """The predicted share of copy bandwidth by target and nodes: heads of 128, four query heads per KV head.

    The next to last count also for one sequence instead of eight, and for pages of 64 tokens.
    """
    found: dict[str, dict[int, Row]] = {}
    wide: dict[tuple[str, int], Row] = {}
    for row in rows:
        if (row["head_dim"], row["gqa"]) != (128, 4):
            continue
        if row["kernel"] == "tree_attention":
            found.setdefault(row["target"], {})[row["nodes"]] = row
        elif row["kernel"] == "tree_attention_pages_of_64":
            wide[row["target"], row["nodes"]] = row
    nodes = sorted({count for by_nodes in found.values() for count in by_nodes})
    counts = [f"{count} node{'s' * (count > 1)}" for count in nodes]
    last = nodes[-2]
    extra = (f"{last} nodes, pages of 64", f"{last} nodes, 1 sequence", f"{last} nodes: tile, registers, instructions")
    heads = ("target", *counts, *extra)

    def kernel(row: Row) -> str:
        block = row["config"]
        return f"{block['block_m']} x {block['block_n']}, {row['registers']}, {row['loop_instructions']}"

    cells = [
        (
            target,
            *(f"{by_nodes[count]['predicted_fraction']:.2f}" for count in nodes),
            f"{wide[target, last]['predicted_fraction']:.2f}",
            f"{by_nodes[last]['predicted_alone']:.2f}",
            kernel(by_nodes[last]),
        )
        for target, by_nodes in found.items()
    ]
    return table(heads, cells, "aot")


def sampled_steps() -> str:
    """Steps with a temperature: eager, and with a recorded pass."""
    eager = {(row["shape"], row["dtype"]): row["step_ms"] for row in load("step_sampled_eager_cpu")["rows"]}
    cells = [
        (row["shape"], row["dtype"], f"{eager[row['shape'], row['dtype']]:.1f}", f"{row['step_ms']:.1f}")
        for row in load("step_sampled_cpu")["rows"]
    ]
    return table(("model", "dtype", "eager", "recorded pass"), cells, "step_sampled_cpu")


def gpu_attention() -> dict[str, str]:
    """Attention on a GPU and SDPA in one run; FlashInfer's kernels, and two and three stages, in an earlier one."""
    now, earlier = (
        {(row["batch"], row["tree"]): row for row in load(name)["rows"][1:]}
        for name in ("gpu_attention_now", "gpu_attention")
    )
    cells = [
        (
            f"{row['batch']} x {row['context']:,}",
            row["tree"],
            f"{1e3 * row['ms']:.1f}",
            f"{row['floor_fraction']:.2f}",
            f"{1e3 * row['peers_ms']['sdpa']:.1f}",
            *(f"{1e3 * earlier[case]['peers_ms'][name]:.1f}" for name in ("flashinfer", "xqa")),
        )
        for case, row in sorted(now.items(), key=lambda item: (-item[0][0], item[0][1]))
    ]
    heads = (
        "sequences x tokens",
        "nodes",
        "us",
        "of copying",
        "SDPA, dense, us",
        "FlashInfer prefill, us",
        "FlashInfer XQA, us",
    )
    stages = {
        row["config"]["num_stages"]: row["ms"]
        for row in load("gpu_sweep")["rows"]
        if "ms" in row and "selected" not in row and (row["case"], row["page_size"]) == ("llama3-8b-8192-b8-t25", 16)
        if (row["config"]["block_n"], row["config"]["nodes_n"], row["config"]["direct_n"]) == (128, 32, 64)
    }
    return {
        "gpu.attention": table(heads, cells, "gpu_attention_now"),
        "gpu.two": f"{1e3 * stages[2]:.0f}",
        "gpu.three": f"{1e3 * stages[3]:.0f}",
        "gpu.tree_share": f"{now[8, 25]['floor_fraction']:.2f}",
        "gpu.alone_share": f"{now[1, 25]['floor_fraction']:.2f}",
        "gpu.vs_xqa": f"{earlier[8, 25]['peers_ms']['xqa'] / now[8, 25]['ms']:.1f}",
    }


def gpu_linear() -> str:
    """The linear layers of a transformer layer on a GPU and torch's."""
    cells = [
        (
            row["model"],
            row["rows"],
            f"{1e3 * row['ms']:.0f}",
            f"{1e3 * row['torch_ms']:.0f}",
            f"{row['vs_torch']:.2f}x",
            f"{row['floor_fraction']:.2f}",
        )
        for row in load("gpu_linear_now")["rows"]
    ]
    return table(("model", "rows", "us", "torch, us", "torch / this", "of copying"), cells, "gpu_linear_now")


#: Parts of :func:`gpu_step` and pieces of their kernels' names.
_GPU_PARTS = {
    "linear layers": ("nvjet_sm90_tst_128x32", "nvjet_sm90_tst_64", "splitKreduce", "linear_kernel", "gate_kernel"),
    "attention": ("tree_attention", "merge_splits"),
    "lm_head, heads": ("lm_head", "128x8"),
    "norms": ("rms_norm",),
    "rotary": ("rotary",),
    "copies": ("memcpy",),
}


def gpu_step() -> str:
    """A step's kernels by part, before and after the kernels for linear layers."""
    before, after = load("gpu_step")["rows"]

    def spent(row: Row, pieces: Sequence[str]) -> str:
        used = [us for name, (us, _) in row["us_and_launches"].items() if any(piece in name for piece in pieces)]
        return f"{sum(used):,.0f}"

    cells = [(part, spent(before, pieces), spent(after, pieces)) for part, pieces in _GPU_PARTS.items()]
    cells += [("all kernels", *(f"{row['busy_us']:,}" for row in (before, after)))]
    cells += [("first start to last end", *(f"{row['wall_us']:,}" for row in (before, after)))]
    cells += [("number of kernels", *(str(row["kernels"]) for row in (before, after)))]
    return table(("us per step", "torch's products", "own kernels"), cells, "gpu_step")


def gpu_overlap() -> str:
    """Variants of a step that were measured in turns."""
    cells = [(row["variant"], f"{row['us']:,}", f"{row['ratio']:.3f}") for row in load("gpu_overlap")["steps"]]
    return table(("kernels", "us per step", "ratio"), cells, "gpu_overlap")


def gpu_step_now() -> dict[str, str]:
    """The present step, greedy and sampled."""
    greedy, sampled = load("gpu_step_now")["rows"]
    return {
        "gpu.step_us": f"{1e3 * greedy['ahead_ms']:,.0f}",
        "gpu.vs_floor": f"{greedy['vs_floor']:.2f}",
        "gpu.sampled_us": f"{1e3 * sampled['step_ms']:,.0f}",
        "gpu.alone_us": f"{1e3 * greedy['step_ms']:,.0f}",
    }


def gpu_choice() -> str:
    """Tokens per second by how passes are timed for the tree chooser."""
    cells = [
        (row["passes"], f"{row['nodes']:.0f}", f"{row['tokens_per_step']:.2f}", f"{row['tokens_per_s']:.0f}")
        for row in load("gpu_choice")["rows"]
    ]
    return table(("passes, or tree", "nodes", "tokens per step", "tokens/s"), cells, "gpu_choice")


def gpu_batch() -> str:
    """Tokens per second of each round of batches, by model, steps and batch size."""
    by_batch: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in load("gpu_batch")["rows"]:
        by_batch.setdefault((row["model"], row["steps"], row["batch"]), {})[row["system"]] = row
    cells = []
    for (model, steps, batch), systems in by_batch.items():
        speeds = (
            ", ".join(f"{systems[name]['tokens'] / seconds:,.0f}" for seconds in systems[name]["seconds"])
            for name in ("plain generate", "specmemo, no drafts", "specmemo, heads")
        )
        memory = (systems[name]["peak_generation_bytes"] / 2**20 for name in ("plain generate", "specmemo, heads"))
        cells.append((model, steps, str(batch), *speeds, *(f"{size:,.0f}" for size in memory)))
    header = ("model", "steps", "batch", "plain `generate`, tokens/s", "no drafts", "heads", "plain, MiB", "heads, MiB")
    return table(header, cells, "gpu_batch")


def padded_steps() -> str:
    """Predicted tokens per second of batches that follow each other."""
    cells = [
        (str(row["batch"]), row["steps"], str(len(row["sizes"])), f"{row['tokens_per_s']:,.0f}", f"{row['warm']:,.0f}",
         f"{row['captures']:.1f}")
        for row in load("padded_steps")["rows"]
    ]  # fmt: skip
    header = ("batch", "steps", "sizes of trees", "tokens/s, ten batches", "the last three", "captures")
    return table(header, cells, "padded_steps")


def published() -> str:
    """Predicted and measured times of published decode kernels."""
    cells = [
        (
            f"[{row['kernel']}]({row['source']})",
            row["gpu"],
            f"{row['batch']} x {row['tokens']:,}",
            f"{row['query_heads']}/{row['kv_heads']}",
            f"{row['predicted_us']:.1f} ({row['limit']})",
            f"{row['measured_us']:.1f}",
            f"{row['error']:+.0%}",
        )
        for row in load("gpu_published")["rows"]
    ]
    heads = ("kernel", "GPU", "sequences x tokens", "heads", "predicted us", "measured us", "error")
    return table(heads, cells, "gpu_published")


def published_values() -> dict[str, str]:
    """Errors of long calls whose pages suit the kernel, and the fixed times of the calls for one sequence."""
    rows = [row for row in load("gpu_published")["rows"] if "pages of 8" not in row["kernel"]]
    long = [row["error"] for row in rows if row["measured_us"] >= 100 and row["limit"] == "memory"]
    fixed: dict[str, list[float]] = {"predicted_us": [], "measured_us": []}
    for kernel in dict.fromkeys(row["kernel"] for row in rows if row["batch"] == 1):
        of_one = [row for row in rows if row["kernel"] == kernel and row["batch"] == 1]
        for column, values in fixed.items():
            tokens, times = [row["tokens"] for row in of_one], [row[column] for row in of_one]
            values.append(statistics.linear_regression(tokens, times).intercept)
    return {
        "published.long": f"{min(long):+.0%} to {max(long):+.0%}",
        "published.fixed": f"{min(fixed['measured_us']):.0f} to {max(fixed['measured_us']):.0f}",
        "published.fixed_predicted": f"{max(fixed['predicted_us']):.0f}",
    }


def figures() -> dict[str, str]:
    """The content of each block, by name."""
    return {
        "frontier.bundled": frontier("frontier_bundled", heads=False),
        "frontier.125m": frontier("frontier_125m", heads=True),
        "steps": steps(),
        "steps.parts": step_parts(),
        "drafters": drafters(),
        "beams": beams(),
        "hybrids": hybrids(),
        "experts": hybrids("experts_avx512_cpu"),
        "servers": servers(),
        "headline.serve": serving_gain(),
        "headline.compressed": compressed_gain("llama.cpp"),
        "headline.compressed.stored": compressed_gain("specmemo, no drafts"),
        "train.compared": trained(),
        "train.accuracy": trained_accuracy(),
        "linear": linear(),
        "engines": engines(),
        "engines.long": engines("engines_long_cpu"),
        "engines.compressed": engines("engines_compressed_cpu"),
        "engines.compressed.long": engines("engines_compressed_long_cpu"),
        "engines.compressed.within": engines("engines_compressed_within_cpu"),
        "engines.compressed.tied": engines("engines_tied_cpu"),
        "engines.avx512": engines("engines_avx512_cpu"),
        "engines.avx512.1b": engines("engines_avx512_1b_cpu"),
        "vllm": vllm(),
        "batches": batches(),
        "batch.scaling": batch_scaling(),
        "adaptive": adaptive(),
        "ranks": ranks(),
        "attention": attention_rows(
            "ops_cpu_first_table", [row for run in load("ops_cpu_first_table")["runs"] for row in run]
        ),
        "attention_avx512": attention_rows("ops_avx512_cpu", load("ops_avx512_cpu")["rows"]),
        "ablation.paper": ablation_paper("cumulative"),
        "ablation.paper_left_out": ablation_paper("left out"),
        "ablation.speed": ablation_speed(),
        "ablation.memory": ablation_memory("cumulative"),
        "ablation.memory_left_out": ablation_memory("left out"),
        **{f"ablation.by_{axis}": ablation_sensitivity(axis) for axis in ("heads", "nodes", "kv")},
        "chat.source": f"\n\n{caption('chat')}\n\n",
        "kv.source": f"\n\n{caption('kv_quality')}\n\n",
        "heads.source": f"\n\n{caption('head_quality')}\n\n",
        **headline(),
        **batch_values(),
        **invariant(),
        **chat_values(),
        **quality_values(),
        **ops_values(),
        **compiled(),
        "steps.sampled": sampled_steps(),
        **gpu_attention(),
        "gpu.linear": gpu_linear(),
        "gpu.step": gpu_step(),
        "gpu.overlap": gpu_overlap(),
        **gpu_step_now(),
        "gpu.choice": gpu_choice(),
        "gpu.batch": gpu_batch(),
        "gpu.padded": padded_steps(),
        "gpu.frontier": frontier("gpu_frontier", heads=True),
        "published": published(),
        **published_values(),
        **scaling_values(),
        **small_values(),
    }


def filled(text: str, values: dict[str, str]) -> str:
    """``text`` with the current figure in each block.

    Raises:
        KeyError: a block's name is unknown.
    """
    return BLOCK.sub(lambda m: m[1] + values[m[2]] + m[4], text)


def main() -> int:
    values, stale = figures(), []
    for page in pages():
        old = page.read_text()
        new = filled(old, values)
        if new != old:
            stale.append(page)
            if "--check" not in sys.argv:
                page.write_text(new)
    check = "--check" in sys.argv
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'out of date; run python docs/figures.py' if check else 'rewritten'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
