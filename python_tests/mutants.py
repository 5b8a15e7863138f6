"""Mutation check: changes one expression at a time and runs everyday tests, which must fail.

``python python_tests/mutants.py [PART OF A FILE'S NAME ...]`` works in a scratch copy of the repository and prints a
table in Markdown. Exits with 1 if a mutant survives or if its text doesn't occur exactly once. Mutants for ARM run in
an emulator (``arm_kernels.py``), if there is one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing.queues import Queue
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TRITON = "specmemo_kernels", "specmemo_kernels/backends/triton"
LIMIT_S = 600


class Mutant(NamedTuple):
    """``old`` occurs once in ``file`` and becomes ``new``; ``tests`` are a file and a part of its tests' names."""

    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant(f"{TRITON}/tiles.py", "total * decay + tl.sum", "total + tl.sum", "triton_interpreter test_attention"),
    Mutant(f"{TRITON}/attention_kernels.py", "packed % GROUP", "0", "triton_interpreter test_attention"),
    Mutant(f"{TRITON}/attention_kernels.py", "(length + node - lowest) // size + 1", "(length + node - lowest) // size",
           "triton_interpreter test_attention_in_fixed"),
    Mutant(f"{TRITON}/attention_kernels.py", "begin = lowest + split * size", "begin = split * size",
           "triton_interpreter first_split"),
    Mutant(f"{TRITON}/primitives.py", "cdiv(length + nodes - lowest, SPLIT_SIZE)", "cdiv(length - lowest, SPLIT_SIZE)",
           "triton_interpreter test_attention"),
    Mutant(f"{TRITON}/layers.py", "wide * (weight + offset)", "wide * weight", "triton_layers test_rms_norm"),
    Mutant(f"{TRITON}/layers.py", "(b * low_sin)", "(b * high_sin)", "triton_layers test_rotary"),
    Mutant(f"{TRITON}/layers.py", "tl.store(keys_ptr + place, new_low", "tl.store(keys_ptr + place, new_high",
           "triton_layers rotary_stored"),
    Mutant(f"{TRITON}/layers.py", "(token * more_heads + first) * V", "(token * more_heads) * V",
           "triton_layers rotary_stored"),
    Mutant(f"{TRITON}/primitives.py", "count = node - first + 1", "count = node - first",
           "triton_interpreter test_attention"),
    Mutant(f"{TRITON}/codes.py", "((wide & 0x80) << 8)", "((wide & 0x80) << 7)",
           "triton_interpreter test_attention_over_codes"),
    Mutant(f"{TRITON}/codes.py", "((magnitude >> 20) & 1)", "0", "triton_steps of_codes"),
    Mutant(f"{TRITON}/paged.py", "depth > tl.load(accept", "depth >= tl.load(accept", "triton_steps test_commit"),
    Mutant(f"{TRITON}/paged.py", "head * next_head * DIM + column", "head * DIM + column", "triton_steps test_append"),
    Mutant(f"{TRITON}/verify.py", "start = node + 1", "start = node + 2", "triton_steps test_verify"),
    Mutant(f"{TRITON}/lm_head.py", "bits < 0, -magnitude", "bits < 0, magnitude", "triton_steps test_lm_head"),
    Mutant(f"{TRITON}/lm_head.py", "base + tl.log(total)", "base", "triton_steps log_probs"),
    Mutant(f"{TRITON}/products.py", "weight_values(codes & 15", "weight_values(codes >> 4", "triton_steps of_codes"),
    Mutant(f"{PACKAGE}/backends/reference.py", "[None, :] < window", "[None, :] <= window", "attention is_attention"),
    Mutant(f"{PACKAGE}/backends/reference.py", "<= accept_length[:, None]", "< accept_length[:, None]", "ops commit"),
    Mutant(f"{PACKAGE}/backends/reference.py", "rows.abs().amax(-1)", "rows.amax(-1)", "quantised_kv codes"),
    Mutant(f"{PACKAGE}/cache/paged_kv.py", "return -(-tokens // page_size)", "return tokens // page_size", "paged_kv"),
    Mutant(f"{PACKAGE}/cache/paged_kv.py", "self._users[page] -= 1", "self._users[page] -= 2", "kept_pages"),
    Mutant(f"{PACKAGE}/cache/prefix_index.py", "min(start + length, last)", "start + length", "kept_pages"),
    Mutant(f"{PACKAGE}/engine/scheduler.py", "+ growing - pool.free_pages", "- pool.free_pages", "scheduler"),
    Mutant(f"{PACKAGE}/engine/scheduler.py", "bisect.insort(self._waiting, sequence, key=_arrival)",
           "self._waiting.append(sequence)", "scheduler"),
    Mutant(f"{PACKAGE}/engine/verify.py", "[row[: row[-1] + 1]", "[row[: row[-1] + 2]", "decode test"),
    Mutant(f"{PACKAGE}/engine/tree_pass.py", "tokens[start + 1 : start + size + 1]", "tokens[start : start + size]",
           "feature_drafters prefix"),
    Mutant(f"{PACKAGE}/cache/paged_kv.py", "a << 32 | b for a, b in", "a for a, b in", "kept_pages"),
    Mutant(f"{PACKAGE}/drafting/growth.py", "parent, beam_token = best // width", "parent, beam_token = best % width",
           "tree_growth eagle2"),
    Mutant(f"{PACKAGE}/drafting/growth.py", "torch.where(order < width, 0", "torch.where(order < 0, 0",
           "tree_growth eagle2"),
    Mutant(f"{PACKAGE}/drafting/decoder_layer.py", "torch.cat([above, new], dim=1)", "above",
           "feature_drafters log_probabilities"),
    Mutant(f"{PACKAGE}/cache/state_pool.py", "for slot, rows in self.accepted.items() if slot not in included",
           "for slot, rows in self.accepted.items()", "hybrids pool"),
    Mutant(f"{PACKAGE}/integrations/hf/mixer_pass.py", "           new = False", "           new = new",
           "hybrids preemption"),
    Mutant(f"{PACKAGE}/integrations/hf/mixer_pass.py", "states = [state[above] for state in states]",
           "states = [state[above * 0] for state in states]", "hybrids faster_way"),
    Mutant(f"{PACKAGE}/forward/batch.py", "mask.gather(1, parents) | own", "mask | own", "tree_growth ancestors"),
    Mutant(f"{PACKAGE}/integrations/hf/features.py", "set(self.ids)", "set(self.ids[1:])", "feature_drafters dynamic"),
    Mutant(f"{PACKAGE}/engine/walk.py", "self.tokens[child] == token)", "self.tokens[child] >= token)",
           "sampling lossless"),
    Mutant(f"{PACKAGE}/tree/acceptance.py", "push(path[:-1], index + 1", "push(path[:-1], index + 2",
           "acceptance best_first"),
    Mutant(f"{PACKAGE}/planning/search.py", "min(totals)", "max(totals)", "planner no_plan"),
    Mutant(f"{PACKAGE}/planning/search.py", "workload.context + sizes.heads", "workload.context", "planner no_plan"),
    # C++ last: nothing runs after them with what they have built.
    Mutant("csrc/verify.cpp", "child = node + 1", "child = node + 2", "ops test_verify"),
    Mutant("csrc/visibility.cpp", "length_ + node + 1 - base", "length_ + node - base", "attention cpu"),
    Mutant("csrc/visibility.cpp", "nodes < count && is_child(first + nodes)", "nodes < count", "cpu_kernels path_is"),
    Mutant("csrc/vec_math.h", "_CMP_NLT_UQ", "_CMP_GE_OQ", "cpu_kernels nan_comes_through"),
    Mutant("csrc/pack.h", "w + i * WORDS)", "w + i)", "attention cpu"),
    Mutant("csrc/softmax.h", "state.sum[r] * keep + part", "state.sum[r] + part", "attention cpu"),
    Mutant("csrc/quantise.cpp", "x < -limit ? -limit", "x < -limit ? limit", "quantised_kv bits"),
    Mutant("csrc/quantise.cpp", "0x7ffffu + ((magnitude >> 20) & 1u)", "0x7ffffu", "quantised_kv bits"),
    Mutant("csrc/row_products.h", "i = whole_; i <", "i = whole_ + 1; i <", "ops test_lm_head"),
    Mutant("csrc/stored_weights.h", "column - first", "column", "compressed_weights test_linear_has"),
    Mutant("csrc/compressed_tile.h", "next = std::min(next, rows[v]", "next = std::min(next, rows[0]",
           "compressed_weights test_linear_has"),
    Mutant("csrc/compressed.cpp", "head.exceptions == kMostExceptions", "head.exceptions + 1 == kMostExceptions",
           "compressed_weights test_the_most"),
    Mutant("csrc/column_products.h", "begin < args_.inputs; begin +=", "begin + 1 < args_.inputs; begin +=",
           "grouped_linear transposed_matrices"),
    Mutant("csrc/lm_head.h", "first_lanes(count - i) ? load<VecF>(values + i) : splat(kMinusInf)",
           "load<VecF>(values + i)", "ops log_probs"),
    Mutant("csrc/lm_head.h", "any_better(row, count, ", "any_better(row, count - 1, ", "ops test_lm_head"),
    Mutant("csrc/gated_mlp.h", "down.x_stride = gate.outputs", "down.x_stride = gate.inputs", "linear gated_mlp"),
    Mutant("csrc/activation.h", "x < VecF{} ? small : splat(1.0f)", "splat(1.0f)", "linear gated_mlp"),
    Mutant("csrc/norm.h", "(w + args.offset)", "w", "linear rms_norm"),
    Mutant("csrc/fold.h", "vpaddq_f32(pair(rows[0], rows[1])", "vpaddq_f32(pair(rows[0], -rows[1])", "arm operators"),
    Mutant("csrc/tile.h", "vbfdotq_lane_f32((float32x4_t)sum", "vbfdotq_lane_f32(-(float32x4_t)sum", "arm operators"),
    Mutant("csrc/pack.h", "vzip2q_u16(low, high)", "vzip1q_u16(low, high)", "arm operators"),
    Mutant("csrc/packed_rows.h", "static_cast<size_t>(v_dim * static_cast<int64_t>(sizeof(Raw)))",
           "static_cast<size_t>(columns_ * static_cast<int64_t>(sizeof(Raw)))", "arm operators"),
    Mutant(f"{PACKAGE}/integrations/hf/fuse.py", "operators is None or not supported", "not supported",
           "fuse another_thread"),
    Mutant(f"{PACKAGE}/integrations/hf/fuse.py", "in self.leaves if leaf.unchanged]", "in self.leaves]",
           "fuse adapter"),
    Mutant(f"{PACKAGE}/engine/host_capture.py", "if _depends_on_values(func, args):", "if False:",
           "host_capture values_that"),
    Mutant(f"{PACKAGE}/engine/program.py", "if view == self._whole[view.name]:", "if True:",
           "host_capture random_functions"),
    Mutant(f"{PACKAGE}/engine/fusion.py", "call.written & names", "False", "fusion not_fused"),
    Mutant(f"{PACKAGE}/engine/fusion.py", "program.uses(written", "False and program.uses(written", "fusion stored"),
    Mutant(f"{PACKAGE}/engine/device_step.py", "batch.tokens.view(self._drafts.shape)", "-1",
           "host_capture all_kinds"),
    Mutant(f"{PACKAGE}/engine/fusion.py", "len(self._readers[value.name]) > 1", "False", "fusion not_fused"),
    Mutant(f"{PACKAGE}/engine/direct_calls.py", "if _key(seen.args) == _key((call.function, args, kwargs)):",
           "if seen.args[0] is call.function:", "direct_calls others_stay"),
    Mutant(f"{PACKAGE}/training/distillation.py", "log_p.exp() - target", "target - log_p.exp()",
           "training test_distillation"),
    Mutant(f"{PACKAGE}/training/objective.py", "depth - 1 - d : depth", "depth - d : depth",
           "training test_the_objective"),
    Mutant(f"{PACKAGE}/training/objective.py", "alive & own[:, d : d + rows]", "alive", "training test_the_objective"),
    Mutant(f"{PACKAGE}/training/attention.py", ".triu(1)", ".triu(2)", "training test_unrolled"),
    Mutant(f"{PACKAGE}/training/trainable.py", "positions + step", "positions", "training test_unrolled"),
    Mutant(f"{PACKAGE}/training/checkpoint.py", "torch.tensor(float(progress.step),", "torch.tensor(0.0,",
           "training test_an_interrupted"),
    Mutant(f"{PACKAGE}/training/windows.py", "_mixed(seed, epoch)", "seed", "training test_an_epoch"),
)  # fmt: skip


class Failures:
    """pytest plugin: the tests that failed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report) -> None:  # type: ignore[no-untyped-def]
        if report.failed:
            self.names.append(report.nodeid)


def run_tests(copy: Path, tests: str, interpreter: bool, results: Queue[tuple[int, list[str]]]) -> None:
    """Run pytest on the copy up to the first failure, in another process."""
    import pytest

    os.chdir(copy)
    sys.path[:0] = [str(copy), str(copy / "python_tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    if interpreter:
        os.environ["TRITON_INTERPRET"] = "1"
    name, _, words = tests.partition(" ")
    marks = "not four_ranks" if name == "arm" else "not slow and not four_ranks"
    options = ["-qx", "-p", "no:cacheprovider", "-m", marks, f"python_tests/test_{name}.py"]
    failures = Failures()
    with Path(copy, "output.txt").open("w") as file, contextlib.redirect_stdout(file):
        code = pytest.main([*options, *(["-k", words] if words else [])], plugins=[failures])
    results.put((int(code), failures.names))


def outcome(copy: Path, mutant: Mutant) -> tuple[int, str]:
    """pytest's exit status and the test that failed."""
    context = multiprocessing.get_context("forkserver")
    results: Queue[tuple[int, list[str]]] = context.Queue()
    process = context.Process(target=run_tests, args=(copy, mutant.tests, "triton_" in mutant.tests, results))
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
        return 1, "no end"
    if process.exitcode:
        return 1, f"exit status {process.exitcode}"
    code, names = results.get()
    return code, names[0].split("::", 1)[1] if names else ""


def build(copy: Path) -> None:
    """Build the copy's C++ module incrementally."""
    import pybind11

    command = [
        "cmake", "-S", copy, "-B", copy / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={copy / PACKAGE / 'backends'}",
    ]  # fmt: skip
    for each in (command, ["cmake", "--build", copy / "build"]):
        subprocess.run(each, check=True, stdout=subprocess.DEVNULL)


def main(parts: list[str]) -> int:
    from arm_kernels import build as build_arm  # not above: test processes import this file, then the copy's module
    from arm_kernels import missing

    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "transformers", "hypothesis"])
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__"))
        print("| file | text | becomes | killed by | s |\n| --- | --- | --- | --- | --- |", flush=True)
        for mutant in MUTANTS:
            if parts and not any(part in mutant.file for part in parts):
                continue
            emulated = mutant.tests.startswith("arm ")
            if emulated and (reason := missing()):
                print(f"| {mutant.file} | `{mutant.old}` | `{mutant.new}` | not run, {reason} | |", flush=True)
                continue
            file, begin = copy / mutant.file, time.monotonic()
            text = file.read_text()
            if text.count(mutant.old) != 1:
                code, by = 0, f"**TEXT OCCURS {text.count(mutant.old)} TIMES**"
            else:
                file.write_text(text.replace(mutant.old, mutant.new))
                if emulated:
                    build_arm(copy / "build" / "arm", copy)
                elif mutant.file.startswith("csrc"):
                    build(copy)
                code, by = outcome(copy, mutant)
                name = mutant.tests.split()[0]
                by = f"`test_{name}.py::{by}`" if code == 1 else f"**SURVIVED** (pytest: {code})"
                file.write_text(text)
            wrong += code != 1
            seconds = time.monotonic() - begin
            print(f"| {mutant.file} | `{mutant.old}` | `{mutant.new}` | {by} | {seconds:.0f} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
