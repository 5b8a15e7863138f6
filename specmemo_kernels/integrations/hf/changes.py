"""Checks before each call: whether a patched model may speculate, and whether its cached keys and values are valid.

A speculative step runs packed rows, and usually computes no logits at all. A foreign hook or a replaced ``forward``
would act on other results than in a plain step. Parameters must have the same size, strides, dtype and device as at
patching.
:class:`ModelGuard` checks both; after a change the caller runs the model's own code. :class:`ModelSignature` detects
changes of weights and settings, after which cached pages are dropped. The guard runs before the model is locked, the
signature after, so they don't share a walk over the modules.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig

from specmemo_kernels.integrations.hf.attention import ConfigView, attention_modules
from specmemo_kernels.integrations.hf.checks import STEP_METHODS, refused_module
from specmemo_kernels.integrations.hf.compressed import stored_weight
from specmemo_kernels.integrations.hf.replaced import class_forward
from specmemo_kernels.integrations.hf.target import local_part

#: Packages whose hooks and wrappers keep a module's results (device placement, tensor parallel, torch.compile, ours).
_FRAMEWORKS = frozenset(("torch", "transformers", "accelerate", "specmemo_kernels"))
#: Defines the wrapper of torch that doesn't, as accelerate's mixed precision puts it around ``forward``.
_AUTOCAST = "torch.amp.autocast_mode"
#: Attributes of every module.
_COMMON = frozenset(vars(nn.Module()))
#: Settings that decide which layers run, and what they attend to.
_LAYERS = ("num_hidden_layers", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
#: Part of the names of settings that scale or cap the logits.
_LOGITS = "logit"
_SCALARS = (bool, int, float, str)
#: Elements of each parameter that are compared.
_SAMPLES = 4

Tensor = torch.Tensor
#: A tensor's dtype, shape, strides unless it is contiguous, and device.
TensorFacts = tuple[torch.dtype, torch.Size, tuple[int, ...] | None, torch.device]
#: An lm_head, its class, the class's ``forward``, its weight's class and facts.
HeadFacts = tuple[nn.Module, type, Any, type | None, TensorFacts | None]


class ModelGuard:
    """Compares a completely patched model with its state at patching.

    Args:
        name: the model's name in messages.
        mixers: its modules with recurrent states.
        drafts: its tokens are guesses, which may depend on each other.
    """

    def __init__(
        self, model: Any, name: str = "the model", mixers: Sequence[nn.Module] = (), drafts: bool = False
    ) -> None:
        self.model, self.name, self._drafts = model, name, drafts
        self._head = _head_facts(model)
        self._forward, self._settings = type(model).forward, copy.deepcopy(_settings_of(model))
        tokens = {*map(id, attention_modules(model)), *map(id, mixers)}
        self._token_mixers = {key: _code(m) for key, m in model.named_modules() if id(m) in tokens}
        # Without references to parameters: torch swaps those of some classes only if there are none.
        self._parameters = [
            (name, weakref.ref(module), key, id(p), _facts(p))
            for name, module in model.named_modules() for key, p in module.named_parameters(recurse=False)
        ]  # fmt: skip

    def reason(self) -> str:
        """Why speculative steps would not give the model's own tokens, with the remedy, or an empty string."""
        modules = dict(self.model.named_modules())
        if change := self._change(modules):
            return (
                f"{change} since patching; to speculate again, call specmemo_kernels.unpatch(model), make the change, "
                "and patch again"
            )
        if not self._drafts and (refused := refused_module(modules)):
            return refused
        if attached := foreign_code(self.model):
            return f"{self.name} has {attached}; to speculate again, remove it"
        device = self.model.get_input_embeddings().weight.device.type
        if torch.is_autocast_enabled(device):
            return f"autocast is on for {device}; to speculate, load the model in the wanted dtype instead"
        return ""

    def _change(self, modules: Mapping[str, nn.Module]) -> str:
        head = _head_facts(self.model)
        if head != self._head:
            old, new = _described(self._head), _described(head)
            how = f"changed from {old} to {new}" if old != new else f"been replaced by another {new}, {_code_of(head)}"
            return f"the lm_head of {self.name} has {how}"
        if type(self.model).forward is not self._forward:
            return f"{type(self.model).__name__}.forward has been replaced"
        if (now := _settings_of(self.model)) != self._settings:
            key = next(key for key in now | self._settings if now.get(key) != self._settings.get(key))
            return f"{key} of {self.name} has changed from {self._settings.get(key)} to {now.get(key)}"
        for key, code in self._token_mixers.items():
            if key not in modules or _code(modules[key]) != code:
                return f"{key} of {self.name} has been replaced or changed"
        for name, reference, key, identity, before in self._parameters:
            module = reference()
            if module is None or key not in module._parameters:
                continue
            parameter = module._parameters[key]  # in TorchScript's modules not a dict, without `get`
            if parameter is None or id(parameter) != identity:  # as an adapter's or trained, and checked by its layer
                continue
            if (facts := _facts(parameter)) != before:
                where = f"{name}.{key}" if name else key
                return f"{where} of {self.name} has changed from {_written(before)} to {_written(facts)}"
        return ""


def _settings_of(model: Any) -> dict[str, Any]:
    """The settings of the model and its configuration that were measured at patching."""
    config = model.config.get_text_config()
    names = (*_LAYERS, *(name for name in vars(config) if _LOGITS in name))
    found = {f"{name} of the configuration": getattr(config, name, None) for name in names}
    own = {name: value for name, value in vars(model).items() if _LOGITS in name and isinstance(value, _SCALARS)}
    return found | own


def _code(module: nn.Module) -> tuple[Any, ...]:
    """What a module of attention or states computes with, and in which layer, besides its parts."""
    replaced = vars(module).get("forward")
    own = replaced is None or not _foreign_origin(replaced)
    viewed = isinstance(vars(module).get("config"), ConfigView)
    place = vars(module).get("layer_idx"), vars(module).get("sliding_window")
    return module, type(module), class_forward(module), None if own else replaced, viewed, place


def _head_facts(model: Any) -> HeadFacts:
    head = model.get_output_embeddings()
    weight = stored_weight(head)
    tensor = (type(weight), _facts(weight)) if isinstance(weight, Tensor) else (None, None)
    return head, type(head), class_forward(head), *tensor


def foreign_code(model: Any) -> str:
    """The first hook or replaced method that is neither the model's own nor a framework's, or an empty string.

    Hooks count on every module, because they may change packed rows, and so does autocast around a ``forward``. Another
    replaced ``forward`` counts on the model and its lm_head only, whose logits a speculative step doesn't compute. In
    other modules it runs inside the step.
    """
    for name in STEP_METHODS:
        method = vars(model).get(name)
        if method is not None and _function(method) is not getattr(type(model), name, None):
            return f"a replaced {name} ({_origin(method)})"
    head = model.get_output_embeddings()
    for kind, function in _hooks(global_hooks._global_forward_hooks, global_hooks._global_forward_pre_hooks):
        if origin := _foreign_origin(function):
            return f"a global {kind} ({origin})"
    for module in model.modules():
        for kind, function in _attached(module, module is model or module is head):
            if origin := _foreign_origin(function, class_forward(module)):
                where = next(key for key, other in model.named_modules() if other is module)
                return f"a {kind} on {where or type(model).__name__} ({origin})"
    return ""


def _hooks(hooks: Mapping[int, Any], pre_hooks: Mapping[int, Any]) -> Iterator[tuple[str, Any]]:
    yield from (("forward hook", function) for function in hooks.values())
    yield from (("forward pre-hook", function) for function in pre_hooks.values())


def _attached(module: nn.Module, check_forward: bool) -> Iterator[tuple[str, Any]]:
    if module._forward_hooks or module._forward_pre_hooks:
        yield from _hooks(module._forward_hooks, module._forward_pre_hooks)
    attributes = vars(module)
    if "_hf_hook" in attributes:  # accelerate's; a sequential hook has a list of hooks
        for hook in getattr(attributes["_hf_hook"], "hooks", (attributes["_hf_hook"],)):
            yield "hook of accelerate", hook
    forward = attributes.get("forward")
    if forward is not None and (check_forward or _AUTOCAST in _origins(forward, class_forward(module))):
        yield "replaced forward", forward


def _foreign_origin(function: Any, own: Callable[..., Any] | None = None) -> str:
    """The first of :func:`_origins` that may change results, or an empty string."""
    origins = _origins(function, own)
    return next((o for o in origins if o.partition(".")[0] not in _FRAMEWORKS or o == _AUTOCAST), "")


def _origins(function: Any, own: Callable[..., Any] | None = None) -> Iterator[str]:
    """The modules that define a callable and the callables that it wraps, from the outside.

    ``own``: the ``forward`` of the module's class, which a framework's wrapper calls; it is left out.
    """
    if own is not None and _function(function) is _function(own):
        return
    yield _origin(function)
    # Decorators (torch.no_grad) and partial objects of frameworks call other functions.
    for inner in (getattr(function, "func", None), getattr(_function(function), "__wrapped__", None)):
        if callable(inner):
            yield from _origins(inner, own)


def _function(function: Any) -> Any:
    """The function of a bound method."""
    return getattr(function, "__func__", function)


def _origin(function: Any) -> str:
    """The module that defines a callable; names that ``functools.wraps`` copies are ignored."""
    while isinstance(function, partial):
        function = function.func
    function = _function(function)
    module: Callable[[], str] | str = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
    return str(module)


def _facts(tensor: torch.Tensor) -> TensorFacts:
    local = local_part(tensor)
    usual = local.layout != torch.strided or local.is_contiguous()
    return local.dtype, local.shape, None if usual else local.stride(), local.device


def _written(facts: TensorFacts) -> str:
    dtype, shape, strides, device = facts
    layout = "" if strides is None else f" of strides {strides}"
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}{layout} on {device}"


def _described(head: HeadFacts) -> str:
    _, kind, _, _, facts = head
    return f"{kind.__name__} ({'no weight tensor' if facts is None else _written(facts)})"


def _code_of(head: HeadFacts) -> str:
    """The modules that define an lm_head's class and its ``forward``."""
    _, kind, forward, _, _ = head
    return f"of {kind.__module__} with forward of {getattr(forward, '__module__', 'TorchScript')}"


class ModelSignature:
    """The state of a model that determines its keys and values; equal signatures mean that cached pages are valid.

    - Each parameter and buffer: its identity, address, dtype, shape and version (torch counts changes in place), and
      four of its elements, because torch doesn't count changes through ``.data`` (merged adapters, some optimizers).
    - Each module: its class and its attributes besides tensors and modules, such as an adapter's switches.
    - The configuration's values, which some models read in each pass.

    Not detected: changes through ``.data`` that miss these elements, and values that a replaced function reads from
    elsewhere. Hooks aren't included: models with foreign hooks don't speculate (:func:`foreign_code`).
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._facts: list[Hashable] = []
        samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for module in model.modules():
            attributes = vars(module)
            kind: Any = type(module)
            self._facts += id(module), kind, class_forward(module)
            for name in attributes.keys() - _COMMON:
                self._facts += name, _plain(attributes[name])
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._add(tensor, samples)
        self._facts.append(_settings(getattr(model, "config", None)))
        self._samples = {kind: torch.cat(parts).view(torch.uint8) for kind, parts in samples.items()}

    def _add(self, tensor: Tensor, samples: dict[tuple[torch.device, torch.dtype], list[Tensor]]) -> None:
        """Add a tensor's facts, and elements from all over it, by device and dtype."""
        identity, tensor = id(tensor), local_part(tensor)
        # Elements on the meta device, or in a quantised tensor's parts, can't be read.
        readable = not tensor.is_meta and not is_traceable_wrapper_subclass(tensor)
        version = 0 if tensor.is_inference() else tensor._version
        self._facts += identity, tensor.data_ptr() if readable else 0, tensor.dtype, tensor.shape, version
        count = tensor.numel()
        if count and readable and tensor.is_contiguous():
            some = tensor.as_strided((min(count, _SAMPLES),), (max(1, count // _SAMPLES),))
            samples.setdefault((tensor.device, tensor.dtype), []).append(some)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelSignature):
            return NotImplemented
        return (
            self._facts == other._facts
            and self._samples.keys() == other._samples.keys()
            and all(torch.equal(sample, other._samples[kind]) for kind, sample in self._samples.items())
        )

    __hash__ = None  # type: ignore[assignment]  # it holds tensors


def _settings(config: Any) -> Any:
    """The public attributes of a configuration and of those inside of it."""
    if not isinstance(config, PreTrainedConfig):
        return _plain(config)
    return tuple((name, _settings(value)) for name, value in vars(config).items() if not name.startswith("_"))


def _plain(value: Any) -> Any:
    """A value that changes with ``value``: the contents of containers, the identity of other objects."""
    kind = type(value)  # isinstance would read __class__, which configurations look up slowly
    if value is None or issubclass(kind, _SCALARS):
        return value
    if issubclass(kind, dict):
        return tuple((str(key), _plain(content)) for key, content in value.items())
    if issubclass(kind, (list, tuple, set)):
        return tuple(map(_plain, value))
    return id(value)
