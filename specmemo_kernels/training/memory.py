"""How many windows a forward pass of training may have within a memory budget."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specmemo_kernels.planning.memory_plan import BudgetError, format_at_least, format_bytes
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.training.objective import Objective
from specmemo_kernels.training.target_states import TargetStates

#: Bytes of a parameter: itself, its gradient and AdamW's two moments, all float32.
_PARAMETER = 16

States = Callable[[torch.Tensor], TargetStates]


def check_parameters(budget: int, parameters: int) -> None:
    """Check that a drafter with at least so many parameters can be trained within ``budget`` bytes beside the model.

    Raises:
        BudgetError: it can't.
    """
    if (least := parameters * _PARAMETER) > budget:
        raise BudgetError(
            f"--memory-budget is {format_bytes(budget)}, but the drafter's weights, gradients and moments need at "
            f"least {format_bytes(least)}; raise the budget, or choose a smaller drafter"
        )


def windows_within(
    budget: int, most: int, objective: Objective, states: States, length: int, processes: int = 1
) -> int:
    """Windows of ``length`` tokens per pass, at most ``most``, within ``budget`` bytes beside the model.

    A pass over one window is measured, then one over two if they fit: bytes are linear in the number of windows.

    Raises:
        BudgetError: not even one window fits.
    """
    parameters = sum(parameter.numel() for parameter in objective.parameters())
    fixed = parameters * (_PARAMETER + 4 * (processes > 1))  # several processes exchange copies of the gradients
    fixed += objective.copied_bytes + 2 * 8 * most * length  # a step's tokens, of all passes
    try:
        pass_bytes(objective, states, 1, length)  # allocates the gradients
        one = pass_bytes(objective, states, 1, length)
        if fixed + one > budget:
            raise BudgetError(
                f"--memory-budget is {format_bytes(budget)}, but training with windows of {length} tokens needs "
                f"{format_at_least(fixed + one)} beside the model ({format_bytes(fixed)} for weights, gradients and "
                "moments); raise the budget, lower --length or --depth, or choose a smaller drafter"
            )
        if most == 1 or fixed + 2 * one > budget:
            return 1
        more = pass_bytes(objective, states, 2, length) - one
    finally:
        objective.zero_grad(set_to_none=True)
    return most if more <= 0 else min(most, 1 + (budget - fixed - one) // more)


def pass_bytes(objective: Objective, states: States, windows: int, length: int) -> int:
    """Peak bytes of a forward and a backward pass, without the gradients that there are already."""
    tokens = torch.zeros(windows, length, dtype=torch.int64, device=objective.drafter.target.device)
    with MemoryTracker() as tracker:
        loss, _ = objective(states(tokens))
        loss.backward()
        del loss
    return int(tracker.peak)
