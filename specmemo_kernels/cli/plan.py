"""``specmemo plan``: predict memory and speed of generation before anything is loaded."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path

from specmemo_kernels.cli.common import check_head_bits, existing_or_hub, setting_up, terminal, torch_device
from specmemo_kernels.cli.errors import UserError
from specmemo_kernels.cli.options import PlanOptions
from specmemo_kernels.cli.plan_plot import check_plot, draw
from specmemo_kernels.cli.plan_report import alternatives, show, to_json
from specmemo_kernels.cli.plan_scaling import show_scaling
from specmemo_kernels.drafting.base import MTP, PROMPT_LOOKUP
from specmemo_kernels.drafting.load_heads import describe_heads
from specmemo_kernels.drafting.prompt_lookup import PromptLookupDrafter
from specmemo_kernels.drafting.published import check_target, open_drafter
from specmemo_kernels.drafting.published_spec import drafter_spec
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.described_device import described_device, is_description
from specmemo_kernels.planning.device import DeviceProfile
from specmemo_kernels.planning.device_probe import profile_of
from specmemo_kernels.planning.drafter_spec import DrafterSpec, HeadsSpec, PromptLookupSpec
from specmemo_kernels.planning.known_devices import KNOWN_DEVICES, known_device
from specmemo_kernels.planning.memory_plan import BudgetError, MemoryPlan, format_bytes, parse_bytes
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.mtp_spec import mtp_spec
from specmemo_kernels.planning.planner import choose, plan_request
from specmemo_kernels.planning.search import PlanCandidate, PlanRequest, candidates, in_compute_dtype
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, Accuracy

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
MODEL_HELP = "--model takes a known name (llama-3.1-8b), a config.json, a folder with one, a .gguf file or a hub id"


def run_plan(options: PlanOptions) -> None:
    """Choose a plan, compare it with the alternatives, print and draw.

    Raises:
        UserError: an unknown model or device, or an impossible workload.
        BudgetError: no plan fits the budget; the message names the smallest budget that works.
    """
    if options.scaling is not None:
        check_scaling(options)
    if options.plot is not None:
        check_plot(options.plot)
    model = existing_or_hub(options.model, MODEL_HELP, files=True)
    if model.endswith(WEIGHTS) and Path(model).is_file():
        raise UserError(f"--model {options.model} is a weights file; give its folder or config.json")
    with setting_up():
        if options.memory_budget is not None:
            parse_bytes(options.memory_budget, "--memory-budget")
        device, tp = devices_of(options)
        spec = load_spec(model, options.weight_bits)
        if options.dtype is not None:
            spec = spec.with_dtype(options.dtype)
        if spec.recurrent:
            # Imported here, because transformers' caches and models take a second.
            from specmemo_kernels.integrations.hf.hybrid_sizes import recurrent_spec

            spec = recurrent_spec(in_compute_dtype(spec, device), model)
        workload = Workload(options.context, options.batch, options.prompt or 0)
        heads, accuracy = heads_of(options, spec)
        request = plan_request(spec, device, workload, heads=heads, accuracy=accuracy, tp=tp, kv_dtype=options.kv_dtype)
        choices = candidates(request)
        plan = chosen_plan(request, choices, options.memory_budget)
    if options.context > spec.max_context:
        note = f"--context {options.context} is above the {spec.max_context} positions that {spec.name} was made for"
        terminal(stderr=True).print(note, soft_wrap=True)
    if options.scaling is not None:
        with setting_up():
            show_scaling(terminal(), options, request)
        return
    rows = alternatives(request, choices, plan)
    if options.as_json:
        print(json.dumps(to_json(request, choices, plan, rows), indent=1))
    else:
        show(terminal(), request, choices, plan, rows)
    if options.plot is not None:
        draw(options.plot, request, choices, plan, rows)


def check_scaling(options: PlanOptions) -> None:
    """Check that no option is given that ``--scaling``, whose answer is tables for drafters of the laws, leaves unread.

    Raises:
        UserError: one is.
    """
    given = {
        "--json": options.as_json, "--plot": options.plot is not None, "--heads": options.heads != "5",
        "--shared-lm-head": options.shared_lm_head, "--head-bits": options.head_bits is not None,
    }  # fmt: skip
    if unread := [name for name, is_given in given.items() if is_given]:
        raise UserError(
            f"--scaling {options.scaling} prints tables for the drafters of its laws; leave out {', '.join(unread)}"
        )


def load_spec(model: str, weight_bits: float | None) -> ModelSpec:
    """The sizes of a model.

    Raises:
        UserError, ValueError: no configuration of a decoder.
    """
    try:
        return ModelSpec.load(model, weight_bits)
    except ValueError as error:
        if "hidden_size=None" not in str(error):
            raise
        raise UserError(f"{model} is not a decoder's config.json (no hidden_size)") from error


def chosen_plan(request: PlanRequest, choices: list[PlanCandidate], budget: str | None) -> MemoryPlan:
    """:func:`choose` with a message that names the device where its memory is the limit.

    Raises:
        BudgetError: nothing fits. ValueError: not a budget.
    """
    try:
        return choose(request, choices, budget)
    except BudgetError as error:
        device = request.device
        if budget is None or parse_bytes(budget) <= device.memory:
            raise
        raise BudgetError(
            f"--memory-budget is {budget}, but the device has {format_bytes(device.memory)}: {error}"
        ) from error


def device_profile(name: str) -> DeviceProfile:
    """The profile of a known or described device, of a file of ``specmemo probe``, or of this machine.

    Raises:
        UserError, ValueError: none of these, or a device that this machine doesn't have.
    """
    if name.casefold() in KNOWN_DEVICES:
        return known_device(name)
    kind = name.split(":")[0]
    if kind in ("mps", "xpu"):
        raise UserError(f"--device {name}: its rates can't be measured; name it (m2-16gb, arc-b580) or {_DESCRIBE}")
    if name == "this" or kind == "cuda":
        try:
            return profile_of("cpu" if name == "this" else str(torch_device(name)))
        except UserError as error:
            raise UserError(f"{error}; for a GPU that isn't here, name it (rtx-3060) or {_DESCRIBE}") from error
    path = Path(os.path.expanduser(name))
    if path.suffix == ".json" or path.is_file():
        return DeviceProfile.load(path)
    if is_description(name):
        return described_device(name)
    try:
        return known_device(name)
    except ValueError as error:
        close = difflib.get_close_matches(name.casefold(), KNOWN_DEVICES, n=3)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UserError(
            f"unknown device {name!r}; {hint}docs/planning.md lists the known ones; measure others with specmemo "
            f"probe, or {_DESCRIBE}"
        ) from error


_DESCRIBE = 'describe it: --device "8GiB, 100GB/s, 5TFLOP/s fp16"'


def devices_of(options: PlanOptions) -> tuple[DeviceProfile, int]:
    """The device profile and the tensor-parallel degree.

    Raises:
        UserError: ``--devices`` isn't a name and a number, or is given with ``--device`` or ``--tp``.
    """
    if options.devices is None:
        return device_profile("this" if options.device is None else options.device), options.tp
    name, _, count = options.devices.rpartition(":")
    if not name or not count.isdecimal() or int(count) < 1:
        raise UserError(f"--devices {options.devices}: expected a device and how many of them, as in mi250:8")
    if options.device is not None or options.tp != 1:
        raise UserError(f"--devices {options.devices} replaces --device and --tp; give one or the other")
    return device_profile(name), int(count)


def heads_of(options: PlanOptions, spec: ModelSpec) -> tuple[DrafterSpec, Accuracy | None]:
    """Sizes and accuracies of the drafter: of files, of prompt lookup, or of a number of heads like Vicuna's.

    Raises:
        UserError: neither a number nor a source, or an option that is for other drafters.
        HeadsError: no drafter in the files, or one for another model.
    """
    check_head_bits(options.head_bits)
    if options.heads.isdecimal():
        if int(options.heads) > len(DEFAULT_ACCURACY):
            raise UserError(f"--heads is {options.heads}; accuracies are known for up to {len(DEFAULT_ACCURACY)} heads")
        return HeadsSpec(int(options.heads), 1, not options.shared_lm_head, options.head_bits), None
    if options.heads == PROMPT_LOOKUP:
        check_stored_options(options, "prompt lookup has no weights")
        return PromptLookupSpec(PromptLookupDrafter().max_depth), None
    if options.heads == MTP:
        check_stored_options(options, "MTP layers are loaded as stored")
        return mtp_spec(spec), None
    source = existing_or_hub(
        options.heads, f"--heads is neither a number nor {PROMPT_LOOKUP}, a folder, a file or a hub id", files=True
    )
    published = open_drafter(source)
    if published is None:
        return stored_heads_of(options, source, spec)
    check_target(published, spec.hidden_size, spec.vocab_size)
    sizes = drafter_spec(published.config, published.elements, spec.vocab_size, options.head_bits)
    if options.shared_lm_head:
        raise UserError(f"--shared-lm-head is for Medusa heads; {options.heads} is {sizes.kind}")
    return sizes, published.accuracy


def stored_heads_of(options: PlanOptions, source: str, spec: ModelSpec) -> tuple[HeadsSpec, Accuracy | None]:
    """:func:`heads_of` for files of Medusa heads."""
    if options.shared_lm_head:
        raise UserError(f"--shared-lm-head is for a number of heads; the files in {options.heads} decide this already")
    stored = describe_heads(source, spec.hidden_size, spec.vocab_size)
    bits = options.head_bits or stored.head_bits
    return HeadsSpec(stored.num_heads, stored.num_layers, stored.own_lm_head, bits), stored.accuracy


def check_stored_options(options: PlanOptions, reason: str) -> None:
    """Check that no option for drafters with files of their own is given.

    Raises:
        UserError: one is; the message ends with ``reason``.
    """
    if options.shared_lm_head:
        raise UserError(f"--shared-lm-head is for Medusa heads; {reason}")
    if options.head_bits is not None:
        raise UserError(f"--head-bits is for Medusa heads and published drafters; {reason}")
