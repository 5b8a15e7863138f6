"""Results of the Triton attention kernels in Triton's interpreter on the CPU (see ``interpreter.py``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import (
    ATTENTION_CASES,
    QUANTISED_CASES,
    AttentionCase,
    attention_inputs,
    case_budget,
    mask_words,
    one_sequence,
)
from interpreter import INTERPRETING
from selection import EXHAUSTIVE, covering, sample

from specmemo_kernels.backends import reference

pytest.importorskip("triton")
Inputs = dict[str, Any]

# A program costs about 10 ms. Splits multiply them and the merge adds one per row and head, so the cases of more than
# 140 such (gqa8, tree64, wide_mask, causal_chunk, window_chunk) run with the launcher's own split sizes only.
BY_RULE = ATTENTION_CASES
IN_SPLITS = (
    *(case for case in ATTENTION_CASES if sum(case.nodes) * case.num_qo_heads <= 140),
    AttentionCase("short_chunk", (70, 0), (12, 9), window=30, tree=False),
)


#: In every run.
SHORT = ("page_7", "v_narrower", "causal_chunk", "wide_mask", "all_extras")

CODES = tuple(
    case
    for case in QUANTISED_CASES
    if case.name.rpartition("-")[0] in ("page_edges", "ragged", "v_narrower", "head_dim_80", "page_7", "all_extras")
)


EVERYDAY_CODES = [(case, torch.float32) for case in CODES if case.name in ("page_7-int8", "head_dim_80-fp8")]
OVER_CODES = covering(CODES, (torch.float32, torch.float16), first=EVERYDAY_CODES)


def by_name(cases: Iterable[AttentionCase], everyday: Collection[str]) -> list[Any]:
    """The cases; those with other names are slow."""
    return sample(cases, everyday, lambda case: case.name)


def in_splits(place: int, everyday: str) -> list[Any]:
    """The cases of one of three tests in splits: a third of them, or in exhaustive runs all."""
    cases = IN_SPLITS if EXHAUSTIVE else IN_SPLITS[place::3]
    return by_name(dict.fromkeys([*cases, *(case for case in IN_SPLITS if case.name == everyday)]), [everyday])


def problem(case: AttentionCase, dtype: torch.dtype) -> Inputs:
    """The arguments of ``tree_attention``, in order."""
    return dict(attention_inputs(case, dtype))


def small_configs(invariant: bool = False) -> Any:
    """Block sizes with small splits, so that short sequences have several splits."""
    from specmemo_kernels.backends.kernel_config import KernelConfig

    decode = KernelConfig(16, 16, 32, 4, 1, max_nodes=4, resident=40, nodes_n=16, direct_n=16)
    tree = replace(decode, block_m=32, block_n=32, nodes_n=16, direct_n=32, min_nodes=5, max_nodes=2**31 - 1)
    return (replace(tree, min_nodes=1, split_size=64, resident=0, nodes_n=32),) if invariant else (decode, tree)


def run_attention(inputs: Inputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from specmemo_kernels.backends import triton

    return triton.tree_attention(*inputs.values(), **options)


def check_attention(case: AttentionCase, dtype: torch.dtype, **options: Any) -> None:
    inputs = problem(case, dtype)
    budget = case_budget(case, dtype)
    out, lse = run_attention(inputs, **options)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert float((out.double() - budget.out).abs().max()) <= budget.out_error
    assert float((lse.double() - budget.lse).abs().max()) <= budget.lse_error


def chain_step(inputs: Inputs, step: int) -> Inputs:
    """Node ``step`` of a chain decoded alone, after the earlier nodes were committed."""
    length, page_size = int(inputs["seq_lens"][0]), inputs["k_pages"].shape[1]
    result = dict(inputs) | {name: inputs[name].clone() for name in ("k_pages", "v_pages")}
    for node in range(step):
        page, slot = int(inputs["block_table"][0, (length + node) // page_size]), (length + node) % page_size
        for pages, new in (("k_pages", "k_new"), ("v_pages", "v_new")):
            result[pages][page, slot] = inputs[new][node]
    for name in ("q", "k_new", "v_new"):
        result[name] = inputs[name][step : step + 1]
    result["seq_lens"] = torch.tensor([length + step], dtype=torch.int32)
    result["qo_indptr"] = torch.tensor([0, 1], dtype=torch.int32)
    return result | {"tree_mask": None, "max_qo_len": 1, "max_seq_len": length + step}


def chain_inputs(length: int, nodes: int, dtype: torch.dtype) -> Inputs:
    """A chain of drafts after ``length`` tokens, with room in the pages for all of them."""
    case = AttentionCase("chain", (length + nodes,), (nodes,))
    inputs = problem(case, dtype)
    words = mask_words(torch.arange(-1, nodes - 1, dtype=torch.int32), 1)
    lengths = torch.tensor([length], dtype=torch.int32)
    return inputs | {"tree_mask": words, "seq_lens": lengths, "max_seq_len": length}


@pytest.fixture
def ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products summed in the order of k, because some BLAS versions round a row by its position in the matrix."""
    from triton.runtime.interpreter import InterpreterBuilder  # type: ignore[import-untyped,unused-ignore]

    def create_dot(_: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None] * b.data[None, k, :]
        return type(d)(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


class TestInterpreter:
    __test__ = INTERPRETING

    @pytest.mark.parametrize("case", by_name(BY_RULE, SHORT), ids=lambda case: case.name)
    def test_attention(self, case: AttentionCase) -> None:
        check_attention(case, torch.float32)

    @pytest.mark.slow
    @pytest.mark.parametrize("case", [case for case in BY_RULE if case.name in SHORT], ids=lambda case: case.name)
    def test_attention_float16(self, case: AttentionCase) -> None:
        check_attention(case, torch.float16)

    @pytest.mark.parametrize("case", in_splits(0, "ragged"), ids=lambda case: case.name)
    def test_attention_in_splits(self, case: AttentionCase) -> None:
        check_attention(case, torch.float32, configs=small_configs())

    @pytest.mark.slow
    @pytest.mark.parametrize("window", [None, 25])
    def test_nodes_in_several_splits(self, window: int | None) -> None:
        """Splits hold tokens and nodes alike: of 70 and 46 slots in units of 16 some splits have nodes only."""
        case = AttentionCase("nodes", (30, 0), (40, 46), num_qo_heads=2, num_kv_heads=1, window=window)
        decode, _ = small_configs()
        one_class = replace(decode, split_size=16, max_nodes=2**31 - 1)
        check_attention(case, torch.float32, configs=(one_class,))

    def test_the_first_split_starts_at_the_window(self) -> None:
        """Of slots 64 to 98 behind 90 tokens; another sequence's splits start at slot 0."""
        case = AttentionCase("windowed", (90, 3), (9, 5), num_qo_heads=2, num_kv_heads=1, window=25)
        decode, _ = small_configs()
        check_attention(case, torch.float32, configs=(replace(decode, split_size=16, max_nodes=2**31 - 1),))

    @pytest.mark.slow
    def test_tile_of_128_keys(self) -> None:
        """The tiles with nodes begin up to 127 tokens in front of them, more than a mask word has bits."""
        case = AttentionCase("wide_tile", (127, 192, 3), (5, 9, 4), num_qo_heads=2, num_kv_heads=1)
        decode, _ = small_configs()
        config = replace(decode, block_m=32, block_n=128, direct_n=128, split_size=128, max_nodes=2**31 - 1)
        check_attention(case, torch.float32, configs=(config,))

    @pytest.mark.slow
    @pytest.mark.parametrize("case", in_splits(1, "ragged"), ids=lambda case: case.name)
    def test_weights_rounded_by_bits(self, case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
        """As on AMD GPUs: within bfloat16's error budget, and with other bits than the conversion's."""
        from specmemo_kernels.backends.triton import attention

        converted = run_attention(problem(case, torch.bfloat16), configs=small_configs())[0]
        monkeypatch.setattr(attention, "rounds_by_bits", lambda target, dtype: dtype == torch.bfloat16)
        check_attention(case, torch.bfloat16, configs=small_configs())
        rounded = run_attention(problem(case, torch.bfloat16), configs=small_configs())[0]
        assert not torch.equal(converted, rounded), "the interpreter's conversion truncates"

    @pytest.mark.parametrize("case", in_splits(2, "short_chunk"), ids=lambda case: case.name)
    def test_attention_in_fixed_splits(self, case: AttentionCase) -> None:
        check_attention(case, torch.float32, configs=small_configs(invariant=True))

    @pytest.mark.slow
    def test_attention_bfloat16(self) -> None:
        check_attention(next(case for case in ATTENTION_CASES if case.name == "ragged"), torch.bfloat16)

    @pytest.mark.parametrize(
        ("case", "dtype"), sample(OVER_CODES, EVERYDAY_CODES), ids=lambda x: getattr(x, "name", str(x))
    )
    def test_attention_over_codes(self, case: AttentionCase, dtype: torch.dtype) -> None:
        check_attention(case, dtype, configs=small_configs() if dtype == torch.float32 else None)

    @pytest.mark.slow
    def test_bounds_from_shapes(self) -> None:
        inputs = problem(next(case for case in ATTENTION_CASES if case.name == "page_edges"), torch.float32)
        bounded = run_attention(inputs)
        free = run_attention(inputs | {"max_qo_len": None, "max_seq_len": None})
        assert all(torch.equal(x, y) for x, y in zip(bounded, free, strict=True))

    def test_strided_rows_and_causal_rows(self) -> None:
        inputs = problem(AttentionCase("strided", (21, 0), (6, 4)), torch.float32)
        inputs["tree_mask"][6:] = 0
        expected = run_attention(inputs)
        wide = torch.full((10, 9, 64), float("nan"))
        wide[:, 0:4], wide[:, 4:6], wide[:, 6:8] = inputs["q"], inputs["k_new"], inputs["v_new"]
        views = {"q": wide[:, 0:4], "k_new": wide[:, 4:6], "v_new": wide[:, 6:8]}
        assert torch.equal(run_attention(inputs | views)[0], expected[0])
        exact = reference.tree_attention(*inputs.values())[0]
        torch.testing.assert_close(expected[0], exact, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("splits", sample((False, True), [False]), ids=["by_rule", "in_splits"])
    def test_an_invariant_sequence_ignores_its_batch(self, splits: bool) -> None:
        case = AttentionCase("batch", (33, 5, 0, 100), (3, 20, 9, 1), window=60, sinks=True)
        inputs = problem(case, torch.float32) | {"invariant": True}
        options = {"configs": small_configs(invariant=True)} if splits else {}
        together = run_attention(inputs, **options)
        bounds = inputs["qo_indptr"].tolist()
        for index in range(4):
            alone = run_attention(one_sequence(inputs, index), **options)
            for got, wanted in zip(together, alone, strict=True):
                assert torch.equal(got[bounds[index] : bounds[index + 1]], wanted)

    @pytest.mark.parametrize("dtype", sample((torch.float32, torch.float16), [torch.float16]), ids=str)
    @pytest.mark.parametrize("length", sample((27, 128), [27]))
    @pytest.mark.usefixtures("ordered_dots")
    def test_invariant_chain_is_decoding(self, length: int, dtype: torch.dtype) -> None:
        nodes = 9
        inputs = chain_inputs(length, nodes, dtype)
        chain = run_attention(inputs, configs=small_configs(invariant=True))
        for step in range(nodes):
            one = run_attention(chain_step(inputs, step), configs=small_configs(invariant=True))
            for got, wanted in zip(chain, one, strict=True):
                assert torch.equal(got[step], wanted[0]), (step, length)

    @pytest.mark.slow
    @pytest.mark.usefixtures("ordered_dots")
    def test_invariant_by_argument(self) -> None:
        """The operator's argument, in a case where one node and nine nodes are split differently."""
        inputs = chain_inputs(1016, 9, torch.float16)
        equal = []
        for invariant in (False, True):
            chain = run_attention(inputs | {"invariant": invariant})
            ones = [run_attention(chain_step(inputs, step) | {"invariant": invariant}) for step in (0, 4, 8)]
            for step, one in zip((0, 4, 8), ones, strict=True):
                same = all(torch.equal(x[step], y[0]) for x, y in zip(chain, one, strict=True))
                equal.append((invariant, same))
        assert (False, False) in equal, "the fast mode gives the same bits: nothing is tested"
        assert (True, False) not in equal

    def test_classes_that_are_launched(self) -> None:
        """One launch if all sequences are known to be alike."""
        from specmemo_kernels.backends.kernel_config import attention_configs, launched_classes

        classes = attention_configs("sm_90", 128, 128, 4, torch.float16)
        assert [c.max_nodes for c in classes][:2] == [4, 16], "16 and 64 rows"
        assert launched_classes(classes, 8, 8, 1) == classes[:1]
        assert launched_classes(classes, 200, 8, 25) == classes[2:]
        assert launched_classes(classes, 199, 8, 25) == classes
        assert launched_classes(classes, 200, 8, 25, 1) == classes, "a graph that is replayed with fewer nodes"
        assert launched_classes(classes, 128, 8, 16, 5) == classes[1:2]
        assert attention_configs("sm_90", 64, 64, 24, torch.float16)[0].max_nodes == 2, "no class of 16 rows"
        assert len(attention_configs("sm_90", 64, 64, 71, torch.float16)) == 1

    @pytest.mark.parametrize(
        ("rows", "batch", "slots", "kv_heads", "splits"),
        [
            (200, 8, 8192, 8, 2),  # 64 blocks of 100 rows on 132 multiprocessors
            (264, 8, 8192, 9, 3),  # 144 blocks: four waves of a third take less time than two waves
            (25, 1, 8192, 8, 16),
            (25, 1, 1024, 32, 4),
            (25 * 32, 32, 8192, 8, 1),  # 256 programs: two waves
            (25, 1, 100, 8, 1),
        ],
    )
    def test_splits_fill_the_gpu(self, rows: int, batch: int, slots: int, kv_heads: int, splits: int) -> None:
        from specmemo_kernels.backends.kernel_config import SPLIT_UNIT, KernelConfig, num_splits

        one = (KernelConfig(128, 64, SPLIT_UNIT, 8, 4, resident=1),)
        assert num_splits(one, 132, rows, batch, rows // batch, slots, 4, kv_heads) == splits
        fixed = (replace(one[0], resident=0, split_size=1024),)
        assert num_splits(fixed, 132, rows, batch, rows // batch, slots, 4, kv_heads) == -(-slots // 1024)

    def test_workspace_is_bounded(self) -> None:
        """The declared workspace covers the states of every step's splits."""
        from specmemo_kernels.backends.kernel_config import (
            attention_configs,
            launched_classes,
            max_state_bytes,
            num_splits,
        )

        for heads, kv_heads, v_dim in ((8, 2, 64), (32, 1, 128), (16, 16, 32)):
            group = heads // kv_heads
            for target in ("sm_75", "sm_90", "gfx942", "gfx1100"):
                classes = attention_configs(target, 128, v_dim, group, torch.float16)
                for units in (20, 132, 304):
                    bound = max_state_bytes(classes, units, v_dim)
                    for rows, batch, nodes in ((256, 1, 256), (256, 2, 200), (40, 8, 5), (1, 1, 1), (70, 1, 70)):
                        for slots in (nodes, 127, 129, 513, 5000, 32_768):
                            launched = launched_classes(classes, rows, batch, nodes)
                            splits = num_splits(launched, units, rows, batch, nodes, slots, group, kv_heads)
                            assert splits == 1 or 4 * rows * heads * splits * (v_dim + 2) <= bound

    def test_a_capture_needs_the_smallest_node_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise it might compile a kernel, or miss a class that a replay needs."""
        inputs = problem(AttentionCase("small", (3,), (2,)), torch.float32)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ValueError, match="min_qo_len is None in a capture"):
            run_attention(inputs)
        run_attention(inputs | {"min_qo_len": 2})

    def test_invariant_is_one_class(self) -> None:
        from specmemo_kernels.backends.kernel_config import attention_configs
        from specmemo_kernels.backends.kernel_target import TARGETS

        for target in TARGETS:
            assert len(attention_configs(target, 128, 128, 4, torch.float16, True)) == 1

    def test_refusals(self) -> None:
        inputs = problem(AttentionCase("small", (3,), (2,)), torch.float64)
        with pytest.raises(ValueError, match="float64"):
            run_attention(inputs)

    def test_nothing_to_do(self) -> None:
        out, lse = run_attention(problem(AttentionCase("none", (3, 4), (0, 0), tree=False), torch.float32))
        assert out.shape == (0, 4, 64)
        assert lse.shape == (0, 4)
