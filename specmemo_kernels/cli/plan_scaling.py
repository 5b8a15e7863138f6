"""``specmemo plan --scaling``: which drafter size, training volume and batch are worth it on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specmemo_kernels.cli.common import show_tables
from specmemo_kernels.cli.errors import UserError
from specmemo_kernels.cli.options import PlanOptions
from specmemo_kernels.drafting.published import config_of
from specmemo_kernels.drafting.published_spec import drafter_spec
from specmemo_kernels.planning.drafter_spec import DrafterSpec, HeadsSpec
from specmemo_kernels.planning.memory_plan import BudgetError, MemoryPlan, format_bytes
from specmemo_kernels.planning.planner import choose, plan_request
from specmemo_kernels.planning.scaling_law import ScalingLaw, TrainedDrafter
from specmemo_kernels.planning.search import PlanRequest, candidates

#: Volumes are doubled so often beyond the largest one of the fit: three doublings beyond it, a fit to 240,000 tokens
#: promised 3.7 tokens per step, 2.6 were measured. Batches are multiplied by up to so much.
_DOUBLINGS, _BATCHES = 1, (1, 2, 4, 8)
#: A doubled training volume is worth it while it adds this much speed.
_WORTH = 0.02


@dataclass(frozen=True)
class _Offer:
    """A drafter size and a training volume, with the best plan for them."""

    drafter: TrainedDrafter
    tokens: int
    extrapolated: bool
    plan: MemoryPlan

    @property
    def speed(self) -> float:
        return self.plan.tokens_per_second or 0.0


def show_scaling(console: Console, options: PlanOptions, request: PlanRequest) -> None:
    """Print predicted speed by drafter size and training volume, and by batch.

    Raises:
        UserError: the law is of drafters for a model of another size. ValueError: not a file of laws.
        BudgetError: no plan fits.
    """
    assert options.scaling is not None
    law = ScalingLaw.load(options.scaling)
    spec = request.spec
    if (law.hidden_size, law.vocab_size) != (spec.hidden_size, spec.vocab_size):
        raise UserError(
            f"--scaling {options.scaling} is of a model with hidden size {law.hidden_size} and {law.vocab_size} "
            f"tokens, {spec.name} has {spec.hidden_size} and {spec.vocab_size}; fit a law for this model"
        )
    console.print(
        f"{law.kind} for {Path(spec.name).name} on {request.device.name}, {request.workload.batch} x "
        f"{request.workload.context} tokens; predicted from {len(law.drafters)} training runs of {law.volumes[0]:,} to "
        f"{law.volumes[1]:,} tokens",
        soft_wrap=True,
    )
    offers = _offers(law, request, options.memory_budget)
    if not offers:
        raise BudgetError("no drafter of these laws fits the budget; raise --memory-budget or lower --context")
    measured = [offer for offer in offers if not offer.extrapolated] or offers
    best = max(measured, key=lambda offer: offer.speed)
    show_tables(console, _volumes(offers, best))
    console.print(_advice(offers, best), soft_wrap=True)
    show_tables(console, _batches(law, request, options.memory_budget, best.tokens))


def _offers(law: ScalingLaw, request: PlanRequest, budget: str | None) -> list[_Offer]:
    """All sizes of the fit at doubled volumes, in order; sizes that don't fit the budget are left out."""
    sizes = {drafter.parameters: drafter for drafter in law.drafters}
    first, last = law.volumes
    volumes = [first]
    while volumes[-1] < last * 2**_DOUBLINGS:
        volumes.append(volumes[-1] * 2)
    offers = []
    for _, drafter in sorted(sizes.items()):
        for tokens in volumes:
            try:
                plan = _plan(law, request, budget, drafter, tokens)
            except BudgetError:
                continue
            offers.append(_Offer(drafter, tokens, tokens > last, plan))
    return offers


def _plan(
    law: ScalingLaw, request: PlanRequest, budget: str | None, drafter: TrainedDrafter, tokens: int
) -> MemoryPlan:
    table = law.accuracy_at(tokens, drafter.parameters)
    heads = _spec(law.kind, drafter, law.vocab_size)
    asked = plan_request(
        request.spec, request.device, request.workload, heads=heads, accuracy=table, tp=request.tp,
        kv_dtype=request.kv_dtype,
    )  # fmt: skip
    return choose(asked, candidates(asked), budget)


def _spec(kind: str, drafter: TrainedDrafter, vocab_size: int) -> DrafterSpec:
    config: Mapping[str, Any] = drafter.config
    if kind == "medusa":
        return HeadsSpec(config["medusa_num_heads"], config["medusa_num_layers"], config["own_lm_head"])
    return drafter_spec(config_of("the law's drafter", config, drafter.elements), drafter.elements, vocab_size)


def _volumes(offers: list[_Offer], best: _Offer) -> Table:
    table = Table(title="by drafter size and training volume")
    for name in ("parameters", "trained on", "nodes", "tokens/step", "tokens/s", "drafter", ""):
        table.add_column(name, justify="right")
    for offer in offers:
        notes = [*(["extrapolated"] if offer.extrapolated else []), *(["fastest"] if offer is best else [])]
        table.add_row(
            f"{offer.drafter.parameters:,}", f"{offer.tokens:,}", str(offer.plan.tree.size),
            f"{offer.plan.tokens_per_step or 1:.2f}", f"{offer.speed:.4g}", format_bytes(offer.plan.parts["heads"]),
            ", ".join(notes),
        )  # fmt: skip
    return table


def _advice(offers: list[_Offer], best: _Offer) -> str:
    """The size to train, and how far doubling its volume pays."""
    same = [offer for offer in offers if offer.drafter.parameters == best.drafter.parameters]
    worth = same[0]
    for before, after in pairwise(same):
        if after.speed < before.speed * (1 + _WORTH):
            break
        worth = after
    note = ", beyond the measured volumes" if worth.extrapolated else ""
    volume = f"worth training: {worth.drafter.parameters:,} parameters on {worth.tokens:,} tokens{note}"
    if worth is same[-1]:
        return f"{volume}; every doubling up to it adds at least {_WORTH:.0%} of speed"
    return f"{volume}; twice as many would add less than {_WORTH:.0%} of speed"


def _batches(law: ScalingLaw, request: PlanRequest, budget: str | None, tokens: int) -> Table:
    """The fastest size at growing batches."""
    table = Table(title=f"by batch, trained on {tokens:,} tokens")
    for name in ("batch", "parameters", "nodes", "tokens per step", "tokens/s"):
        table.add_column(name, justify="right")
    sizes = {drafter.parameters: drafter for drafter in law.drafters}
    for factor in _BATCHES:
        work = replace(request.workload, batch=request.workload.batch * factor)
        plans = []
        for parameters, drafter in sorted(sizes.items()):
            try:
                plans.append((parameters, _plan(law, replace(request, workload=work), budget, drafter, tokens)))
            except BudgetError:
                continue
        if plans:
            parameters, plan = max(plans, key=lambda pair: pair[1].tokens_per_second or 0.0)
            table.add_row(
                str(work.batch), f"{parameters:,}", str(plan.tree.size), f"{plan.tokens_per_step or 1:.2f}",
                f"{plan.tokens_per_second or 0:.4g}",
            )  # fmt: skip
    return table
