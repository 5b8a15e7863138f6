"""The operators on emulated ARM processors: the tests of the ``cpu`` backend, with ``arm_kernels.py`` in its place.

Memory behind every tensor is inaccessible there, so that a read past its end ends the emulator.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from arm_kernels import PROCESSORS, ROOT, Emulator, build, missing

REASON = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

#: Files and their tests of operators.
TESTS = {
    "test_attention.py": ["within_budget"],
    "test_compressed_weights.py": ["weights_come_back", "linear_has_the_bits", "gated_mlp_and_lm_head", "the_most"],
    "test_cpu_kernels.py": [
        "head_dims_that_fill_no_register", "a_sequence_is_the_same_bits_alone_and_in_a_batch",
        "the_number_of_threads_changes_no_bit", "a_path_is_the_same_bits_as_one_token_after_another",
        "few_nodes_have_a_kernel_of_their_own", "rows_are_copied_by_every_instruction_set", "nan_comes_through",
        "lm_head_of_every_instruction_set", "lm_head_takes_nan_for_the_largest_as_torch_does",
        "lm_head_rows_that_are_apart", "sinks_may_have_another_dtype",
    ],
    "test_fusion.py": ["rotary", "add_rms_norm"],
    "test_grouped_linear.py": ["transposed_matrices", "groups_of_rows"],
    "test_linear.py": [
        "linear_of_every_instruction_set", "a_row_has_the_same_bits_beside_any_rows",
        "leading_dimensions_and_strides", "codes", "gated_mlp", "activations_of_large_and_missing_numbers", "rms_norm",
    ],
    "test_nan_logits.py": ["the_best_tokens", "the_best_tokens_by_codes"],
    "test_ops.py": [
        "append_writes_its_slots_only", "append_of_slices", "commit_writes_accepted_slots_only",
        "commit_does_not_depend_on_the_tree_size", "verify_finds_the_greedy_path",
        "verify_takes_the_first_of_equal_siblings", "verify_never_accepts_minus_one", "lm_head_is_exact_on_integers",
        "lm_head_log_probs", "log_probs_of_extreme_logits", "lm_head_rounds_before_it_compares",
        "lm_head_on_real_numbers", "a_sequence_ignores_its_batch", "the_order_of_pages_changes_no_bit",
        "attention_of_views", "a_row_of_zeros_is_causal",
    ],
    "test_quantised_kv.py": [
        "what_codes_lose", "cpu_writes_the_references_bits", "what_is_no_number_stays_seen",
        "codes_survive_a_second_trip", "append_writes_its_slots_only", "commit_writes_accepted_slots_only",
        "a_sequence_ignores_its_batch",
    ],
    "test_weight_codes.py": ["exact_on_integers", "on_real_numbers", "rows_that_are_apart"],
}  # fmt: skip

#: Neither other backends nor cases that take the emulator seconds.
WORDS = (
    "(not reference or references_bits) and not (2100 and not (float32 and 33-)) and not across_splits"
    " and not (900 and not float32) and not 900-9 and not few_mha and not (long and bfloat16 and fp8)"
)


@pytest.fixture(scope="module")
def program() -> Path:
    return build(ROOT / "build" / "arm")


def run_tests(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "arm_kernels", "--arm", isa]
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python_tests")])}
    return subprocess.run(
        [*command, "-m", "not slow", *arguments], check=False, env=os.environ | environment,
        cwd=ROOT / "python_tests", capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("isa", PROCESSORS)
def test_operators(isa: str, program: Path) -> None:
    run = run_tests(isa, "-k", WORDS, *(f"{file}::test_{name}" for file, names in TESTS.items() for name in names))
    print(run.stdout[-4000:])
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


@pytest.fixture
def isas_of(program: Path) -> Iterator[object]:
    """The instruction set in use and all that a processor has, with an environment."""
    emulators = []

    def isas(processor: str, **environment: str) -> list[str]:
        emulators.append(Emulator(program, processor, **environment))
        return emulators[-1].call("isas")

    yield isas
    for emulator in emulators:
        emulator.close()


def test_a_processor_runs_the_best_set_that_it_has(isas_of) -> None:  # type: ignore[no-untyped-def]
    assert isas_of("cortex-a57") == ["neon", "neon"]
    assert isas_of("max") == ["neonbf16", "neonbf16", "neon"]
    assert isas_of("max", SPECMEMO_CPU_ISA="neon") == ["neon", "neonbf16", "neon"]
    with pytest.raises(ValueError, match=r"SPECMEMO_CPU_ISA is 'neonbf16', this machine can run neon$"):
        isas_of("cortex-a57", SPECMEMO_CPU_ISA="neonbf16")
