"""Scaling laws: fits recover known coefficients, bad files are refused, plans use the law."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples
from test_cli import run, save_model

from specmemo_kernels.planning.scaling_law import LogLinear, ScalingLaw, ScalingRun, TrainedDrafter
from specmemo_kernels.training.recipes import DrafterSizes
from specmemo_kernels.training.run import Recipe
from specmemo_kernels.training.scaling import BATCHES, ROWS, GridRun, grid

SLOPE = st.floats(-2, 2)


def made(volumes: tuple[int, ...] = (1000, 2000, 4000, 8000), noise: float = 0.0) -> ScalingLaw:
    """A law of made-up Medusa heads for the model of :func:`save_model`."""
    source = random.Random(0)
    runs, drafters = [], []
    for tokens, layers in itertools.product(volumes, (1, 2, 4)):
        parameters = layers * 2 * 64 * 65
        value = 0.2 * math.log(tokens) + 0.1 * math.log(parameters)
        accuracy = tuple(tuple((value / 4) ** depth * (0.4 + 0.1 * k) for k in range(3)) for depth in (1, 2))
        config = {"medusa_num_heads": 2, "medusa_num_layers": layers, "own_lm_head": False}
        drafters.append(TrainedDrafter(tokens, parameters, accuracy, config, {}))
        for batch in BATCHES:
            measured = value - 0.15 * math.log(batch) + noise * source.uniform(-1, 1)
            runs.append(ScalingRun(tokens, parameters, batch, ROWS // batch, measured))
    held_out = [ScalingRun(3000, 2 * 2 * 64 * 65, 2, 16, 2.2)]
    return ScalingLaw.fitted("medusa", (64, 257), ROWS, runs, held_out, drafters)


@settings(max_examples=examples(60), deadline=None)
@given(intercept=SLOPE, slopes=st.tuples(SLOPE, SLOPE, SLOPE), seed=st.integers(0, 9))
def test_fits_recover_the_coefficients(intercept: float, slopes: tuple[float, ...], seed: int) -> None:
    source = random.Random(seed)
    rows = [[source.uniform(1, 1e6), source.uniform(1, 1e4), source.choice([1, 2, 4, 8])] for _ in range(20)]
    values = [intercept + sum(s * math.log(x) for s, x in zip(slopes, row, strict=True)) for row in rows]
    law = LogLinear.fitted(rows, values)
    assert law.intercept == pytest.approx(intercept, abs=1e-6)
    assert law.slopes == pytest.approx(slopes, abs=1e-6)
    assert law.at(*rows[3]) == pytest.approx(values[3], abs=1e-6)


def test_a_relative_fit_has_the_least_relative_errors() -> None:
    source = random.Random(1)
    rows = [[source.uniform(1, 1e6), source.choice([1, 2, 4, 8])] for _ in range(30)]
    values = [source.uniform(0.5, 8) for _ in rows]

    def loss(law: LogLinear) -> float:
        return sum((law.at(*row) / value - 1) ** 2 for row, value in zip(rows, values, strict=True))

    law = LogLinear.fitted(rows, values, relative=True)
    assert loss(law) < loss(LogLinear.fitted(rows, values))
    for change in (-1e-3, 1e-3):
        assert loss(law) < loss(LogLinear(law.intercept + change, law.slopes))
        for i, slope in enumerate(law.slopes):
            slopes = (*law.slopes[:i], slope + change, *law.slopes[i + 1 :])
            assert loss(law) < loss(LogLinear(law.intercept, slopes))


@pytest.mark.parametrize("rows", [[[2.0, 3.0]] * 3, [[2.0, 4.0], [4.0, 16.0], [8.0, 64.0]], [[2.0, 3.0], [3.0, 5.0]]])
def test_factors_that_dont_vary_are_refused(rows: list[list[float]]) -> None:
    """Constant factors, factors that vary together, too few rows."""
    with pytest.raises(ValueError, match="don't determine 3 coefficients"):
        LogLinear.fitted(rows, [1.0] * len(rows))


def test_a_law_is_fitted_saved_and_read(tmp_path: Path) -> None:
    law = made()
    assert law.tokens_per_step.slopes == pytest.approx((0.2, 0.1, -0.15), abs=1e-9)
    assert max(abs(law.residual(run)) for run in law.runs) < 1e-9
    assert law.volumes == (1000, 8000)
    law.save(tmp_path / "law.json", {"date": "today"})
    assert ScalingLaw.load(tmp_path / "law.json") == law
    noisy = made(noise=0.05)
    residuals = torch.tensor([noisy.residual(run) for run in noisy.runs])
    assert 0.003 < residuals.abs().mean() < 0.03


def test_predicted_accuracies_are_accuracies() -> None:
    """Within 0 and 1 and rising with k, however far outside of the measured runs."""
    law = made()
    for tokens, parameters in ((1, 1), (3000, 20000), (10**15, 10**12)):
        for row in law.accuracy_at(tokens, parameters):
            assert all(0 <= a <= b <= 1 for a, b in itertools.pairwise(row))
    inside = law.accuracy_at(2000, law.drafters[0].parameters)
    measured = next(d for d in law.drafters if (d.tokens, d.parameters) == (2000, law.drafters[0].parameters))
    assert inside[0] == pytest.approx(measured.accuracy[0], abs=1e-9)  # this row is exactly linear


@pytest.mark.parametrize("content", ["", "[]", '{"kind": "medusa"}', '{"runs": [{"tokens": 1}]}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "law.json").write_text(content)
    with pytest.raises(ValueError, match=r"isn't a file of specmemo train --scaling"):
        ScalingLaw.load(tmp_path / "law.json")


@pytest.mark.parametrize("kind", ["medusa", "clover2", "eagle3"])
def test_the_grid(kind: str) -> None:
    """At least twelve runs with three sizes and four volumes, and three held-out ones that are none of them."""
    runs = grid(Recipe(kind, DrafterSizes(4, 1), 800_000, 4096, 1e-3, 0), 768, 512)
    fitted, held_out = ([run for run in runs if run.held_out is kind_] for kind_ in (False, True))
    assert len(fitted) == 12
    assert len(held_out) == 3
    points = {(run.recipe.tokens, run.recipe.sizes) for run in fitted}
    assert len(points) == 12
    assert len({sizes for _, sizes in points}) == 3
    assert not points & {(run.recipe.tokens, run.recipe.sizes) for run in held_out}
    assert len({run.name for run in runs}) == 15


@pytest.mark.parametrize(("batch_tokens", "length"), [(64, 64), (100, 64), (4096, 512), (40, 64)])
def test_volumes_of_a_grid_are_different_steps(batch_tokens: int, length: int) -> None:
    """Fewer tokens than the error names are refused, as many make a grid; with one volume no law is determined."""

    def tried(tokens: int) -> list[GridRun]:
        return grid(Recipe("medusa", DrafterSizes(4, 1), tokens, batch_tokens, 1e-3, 0), 768, length)

    step = max(1, round(batch_tokens / length)) * length
    for tokens in (1, batch_tokens, 4 * step, 5 * step):
        with pytest.raises(ValueError, match=f"^--tokens {tokens} with --batch-tokens {batch_tokens} ") as caught:
            tried(tokens)
        least = int(str(caught.value).split("at least ")[1].split(",")[0])
        assert least == 6 * step
    fitted = [run.recipe.portions(length)[0] for run in tried(least) if not run.held_out]
    assert fitted == [1, 2, 3, 6] * 3


@pytest.mark.slow
def test_plan_names_what_is_worth_it(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    made().save(tmp_path / "law.json", {"date": "today"})
    result = run("plan", "--model", model, "--scaling", tmp_path / "law.json", "--device", "h100", "--context", 64)
    assert result.exit_code == 0, result.output
    assert "predicted from 12 training runs of 1,000 to 8,000 tokens" in result.output
    assert "worth training:" in result.output
    assert result.output.count("extrapolated") == 3
    assert result.output.count("fastest") == 1
    assert "by batch" in result.output


def test_plan_refuses_laws_of_another_model(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", hidden_size=32)
    made().save(tmp_path / "law.json", {"date": "today"})
    result = run("plan", "--model", model, "--scaling", tmp_path / "law.json", "--device", "h100", "--context", 64)
    assert result.exit_code == 2
    assert "hidden size 64 and 257 tokens" in " ".join(result.stderr.split())
    (tmp_path / "other.json").write_text(json.dumps({}))
    result = run("plan", "--model", model, "--scaling", tmp_path / "other.json", "--device", "h100", "--context", 64)
    assert result.exit_code == 2
    assert "isn't a file of specmemo train --scaling" in " ".join(result.stderr.split())


@pytest.mark.parametrize("option", [("--json",), ("--plot", "x.png"), ("--head-bits", 4), ("--heads", "prompt-lookup")])
def test_options_that_the_tables_leave_unread(tmp_path: Path, option: tuple[object, ...]) -> None:
    made().save(tmp_path / "law.json", {"date": "today"})
    result = run("plan", "--model", "llama-3.1-8b", "--device", "h100", "--scaling", tmp_path / "law.json", *option)
    assert result.exit_code == 2
    assert f"leave out {option[0]}" in " ".join(result.stderr.split())
