"""Leaf modules that operators compute: which are replaced, only inside our passes, and left alone otherwise."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from selection import sample
from test_call_corners import falls_back
from test_families import batch, greedy
from test_patch import snapshot
from tiny_models import OracleDrafter, random_heads, tiny_model
from torch import nn
from torch.nn.utils import parametrize
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import specmemo_kernels as sk
from specmemo_kernels import ops
from specmemo_kernels.backends import cpu
from specmemo_kernels.integrations.hf.attention import LeafOperators, attention_call
from specmemo_kernels.integrations.hf.fuse import FusedLeaves, Leaf, _faster, find_leaves
from specmemo_kernels.integrations.hf.probe import like_attention
from specmemo_kernels.integrations.hf.target import run_packed
from specmemo_kernels.planning.memory_tracker import MemoryTracker

LAYER = {
    "self_attn.q_proj": "linear", "self_attn.k_proj": "linear", "self_attn.v_proj": "linear",
    "self_attn.o_proj": "linear", "mlp": "gated_mlp", "input_layernorm": "rms_norm",
    "post_attention_layernorm": "rms_norm",
}  # fmt: skip


def leaves(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    return dict(find_leaves(model, dtype, "cpu", False).names)


def kinds(model: PreTrainedModel) -> set[str]:
    return {f"{operator} {type(model.get_submodule(name)).__name__}" for name, operator in leaves(model).items()}


class CountedCalls:
    """Counts the calls of the cpu backend's operators."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts = {"linear": 0, "gated_mlp": 0, "rms_norm": 0}
        for name in self.counts:
            monkeypatch.setattr(cpu, name, self._counting(name, getattr(cpu, name)))

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.counts[name] += 1
            return function(*args)

        return call

    def taken(self) -> dict[str, int]:
        counts, self.counts = self.counts, dict.fromkeys(self.counts, 0)
        return counts


def test_the_leaves_of_llama() -> None:
    expected = {f"model.layers.{i}.{name}": kind for i in range(2) for name, kind in LAYER.items()}
    assert leaves(tiny_model("llama")) == expected | {"model.norm": "rms_norm", "lm_head": "linear"}


@pytest.mark.parametrize(
    ("family", "some"),
    [
        ("gemma", {"rms_norm GemmaRMSNorm", "gated_mlp GemmaMLP"}),
        ("gpt_oss", {"rms_norm GptOssRMSNorm", "linear Linear"}),
        ("qwen3", {"rms_norm Qwen3RMSNorm", "gated_mlp Qwen3MLP"}),
        ("phi3", {"gated_mlp Phi3MLP", "linear Linear", "rms_norm Phi3RMSNorm"}),
        ("glm4", {"gated_mlp Glm4MLP", "rms_norm Glm4RMSNorm"}),
        ("stablelm", {"gated_mlp StableLmMLP", "linear Linear"}),
        ("deepseek_v3", {"gated_mlp DeepseekV3MLP", "rms_norm DeepseekV3RMSNorm"}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_families_have_leaves(family: str, some: set[str], dtype: torch.dtype) -> None:
    model = tiny_model(family).to(dtype)
    found = {f"{op} {type(model.get_submodule(name)).__name__}" for name, op in leaves(model, dtype).items()}
    assert some <= found


class GatedMLP(nn.Module):
    """Gate and up in one matrix, or three matrices; ``swapped``: up comes first."""

    def __init__(self, packed: bool, bias: bool, activation: Callable[..., Any] | None, swapped: bool = False) -> None:
        super().__init__()
        names = {"gate_up_proj": (13, 2 * 21), "down_proj": (21, 13)}
        for name, sizes in (names if packed else {"w1": (13, 21), "w3": (13, 21), "w2": (21, 13)}).items():
            setattr(self, name, nn.Linear(*sizes, bias=bias))
        self.swapped = swapped
        if activation is not None:
            self.activation_fn = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = [layer for _, layer in self.named_children() if isinstance(layer, nn.Linear)]
        gate, up = layers[0](x).chunk(2, dim=-1) if len(layers) == 2 else (layers[0](x), layers[1](x))
        gate, up = (up, gate) if self.swapped else (gate, up)
        result: torch.Tensor = layers[-1](getattr(self, "activation_fn", nn.functional.silu)(gate) * up)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, nn.SiLU(), nn.functional.relu], ids=["inline", "module", "function"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gated_layers_by_other_names(packed: bool, bias: bool, activation: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(GatedMLP(packed, bias, activation)).to(dtype)
    found = find_leaves(model, dtype, "cpu", False)
    assert found.names == {"0": "gated_mlp"}
    x = torch.randn(3, 13).to(dtype)
    wide = copy.deepcopy(model).double()(x.double())
    result = found.leaves[0].call(ops.kernels("cpu", x.device), x)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result.double(), wide, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("target", "dtype", "own"),
    [("sm_90", torch.bfloat16, True), ("sm_90", torch.float32, False), ("sm_80", torch.bfloat16, False),
     ("gfx942", torch.float16, False)],
    ids=str,
)  # fmt: skip
def test_linear_layers_of_gpus(target: str, dtype: torch.dtype, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where they have a kernel, else torch's product without a call in between."""
    runtime = pytest.importorskip("specmemo_kernels.backends.triton.runtime")
    monkeypatch.setattr(runtime, "target_of", lambda _: target)
    assert ("linear" in _faster("triton", torch.device("cpu"), dtype)) == own


def test_another_order_of_gate_and_up_is_left_alone() -> None:
    found = find_leaves(nn.Sequential(GatedMLP(True, False, None, swapped=True)), torch.float32, "cpu", False)
    assert found.names == {"0.gate_up_proj": "linear", "0.down_proj": "linear"}


class ClampedMLP(GatedMLP):
    """``limit``: of the activations, a number or a tensor."""

    def __init__(self, limit: Any, scale: float) -> None:
        super().__init__(False, False, None)
        self.limit = limit
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = nn.functional.silu(self.w1(x)), self.w3(x)
        result: torch.Tensor = self.w2(gate.clamp(max=self.limit) * up.clamp(-self.limit, self.limit))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("limit", "scale"), [(7.0, 1.0), (7.0, 0.01), (100.0, 0.1), (7.0, 0.0)])
def test_clamped_layers_are_left_alone(limit: float, scale: float, dtype: torch.dtype) -> None:
    """Also where present weights are too small for the limit: others may be loaded later."""
    torch.manual_seed(0)
    first, second = ClampedMLP(limit, scale), ClampedMLP(limit, 1.0)
    found = find_leaves(nn.Sequential(first, second).to(dtype), dtype, "cpu", False)
    assert set(found.names.values()) == {"linear"}


@pytest.mark.parametrize("seed", range(4))
def test_clamped_experts(seed: int) -> None:
    """Of large inputs the clamps of GPT-OSS leave a few elements, with the rounding errors of large products."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING["gpt_oss"](hidden_size=512, intermediate_size=1024, num_local_experts=8)
    config._experts_implementation = "grouped_mm"
    experts = GptOssExperts(config).eval()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.05)
    found = find_leaves(nn.Sequential(experts), torch.float32, "cpu", False)
    assert found.names == {"0": "grouped_linear"}


def test_layers_with_other_attributes_are_compared_alone() -> None:
    """A limit may be a tensor, and one layer's another than the next one's."""
    torch.manual_seed(0)
    model = nn.Sequential(*(ClampedMLP(torch.tensor(limit), 1.0) for limit in (1e30, 7.0, 1e30)))
    assert {n: o for n, o in find_leaves(model, torch.float32, "cpu", False).names.items() if "." not in n} == {
        "0": "gated_mlp", "2": "gated_mlp",
    }  # fmt: skip


def test_passes_use_the_operators_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    inputs = batch((9, 5))
    expected = greedy(model, inputs, 12)
    plain = model(**inputs).logits
    before = snapshot(model)
    with sk.patch(model, random_heads(model), tree=6, graph=False) as handle:  # recorded steps fuse further
        assert set(handle.fused.values()) == {"linear", "gated_mlp", "rms_norm"}
        calls = CountedCalls(monkeypatch)
        assert torch.equal(greedy(model, inputs, 12), expected)
        steps = calls.taken()
        assert steps["gated_mlp"] % 2 == 0
        assert steps["linear"] == 4 * steps["gated_mlp"] + steps["gated_mlp"] // 2  # and the lm_head, of no rows
        assert steps["rms_norm"] == 2 * steps["gated_mlp"] + steps["gated_mlp"] // 2
        assert torch.equal(model(**inputs).logits, plain)
        model.train()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        model.eval()
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert all(torch.equal(other(**inputs).logits, plain) for other in copies)
        assert not any(calls.taken().values())
        assert not any("forward" in vars(module) for module in model.modules())
    model.zero_grad()
    assert snapshot(model) == before


def test_fuse_false(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    expected = greedy(model, batch((9, 5)), 12)
    with sk.patch(model, random_heads(model), tree=6, fuse=False) as handle:
        assert handle.fused == {}
        calls = CountedCalls(monkeypatch)
        assert torch.equal(greedy(model, batch((9, 5)), 12), expected)
        assert not any(calls.taken().values())
    with sk.patch(model, random_heads(model), tree=6, backend="reference") as handle:
        assert handle.fused == {}


def test_a_plain_pass_of_another_thread_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the model's own modules, also while a step runs."""
    model = tiny_model("llama")
    inputs = batch((9, 5))
    plain = model(**inputs).logits
    results: list[torch.Tensor] = []
    own = cpu.gated_mlp

    def beside(*args: Any) -> Any:
        worker = threading.Thread(target=lambda: results.append(model(**inputs).logits))
        worker.start()
        worker.join()
        return own(*args)

    with sk.patch(model, random_heads(model), tree=6):
        monkeypatch.setattr(cpu, "gated_mlp", beside)
        greedy(model, inputs, 4)
    assert len(results) >= 4
    assert all(torch.equal(result, plain) for result in results)


def hooked(model: PreTrainedModel) -> set[str]:
    layer = model.model.layers[0]
    layer.self_attn.q_proj.register_forward_hook(lambda *_: None)
    layer.mlp.up_proj.register_forward_pre_hook(lambda *_: None)
    layer.input_layernorm.register_full_backward_hook(lambda *_: None)
    return {"self_attn.q_proj", "mlp.up_proj", "mlp", "input_layernorm"}


def adapted(model: PreTrainedModel) -> set[str]:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.low = base, nn.Linear(base.in_features, base.out_features)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.low(x)

    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    attention.q_proj, mlp.down_proj = Adapter(attention.q_proj), Adapter(mlp.down_proj)
    return {"self_attn.q_proj", "mlp.down_proj", "mlp"}


def quantised(model: PreTrainedModel) -> set[str]:
    attention = model.model.layers[0].self_attn
    attention.q_proj = torch.ao.nn.quantized.dynamic.Linear(32, 32)
    attention.k_proj.weight.data = attention.k_proj.weight.data.double()
    attention.v_proj.weight = nn.Parameter(attention.v_proj.weight.detach().T.contiguous().T)
    return {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}


def replaced(model: PreTrainedModel) -> set[str]:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class ClampedMLP(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).clamp(-7, 7)

    class CentredRMSNorm(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - x.mean(-1, keepdim=True))

    layer = model.model.layers[0]
    layer.self_attn.q_proj = Scaled(32, 32, bias=False)
    layer.mlp.__class__, layer.input_layernorm.__class__ = ClampedMLP, CentredRMSNorm
    layer.post_attention_layernorm.forward = lambda x: x
    layer.self_attn.o_proj = nn.utils.parametrizations.weight_norm(layer.self_attn.o_proj)
    return {"self_attn.q_proj", "mlp", "input_layernorm", "post_attention_layernorm", "self_attn.o_proj"}


@pytest.mark.parametrize("change", [hooked, adapted, quantised, replaced], ids=lambda f: f.__name__)
def test_changed_leaves_are_left_alone(change: Callable[[PreTrainedModel], set[str]]) -> None:
    model = tiny_model("llama")
    all_names = set(leaves(model))
    alone = {f"model.layers.0.{name}" for name in change(model)}
    found = set(leaves(model))
    assert not found & alone
    others = {name for name in all_names if not any(name.startswith(each) for each in alone)}
    assert others <= found  # the rest still is


def test_an_adapter_that_comes_after_patching_counts() -> None:
    """The gated MLP's own layers run as soon as one of them is another module."""
    model = tiny_model("llama")
    with sk.patch(model, random_heads(model), tree=6, reuse_prefix=False) as handle:
        before = greedy(model, batch((9,)), 12)
        adapted(model)
        with sk.patch(copy.deepcopy(model), random_heads(model), tree=6, fuse=False) as other:
            expected = greedy(other.model, batch((9,)), 12)
        assert torch.equal(greedy(model, batch((9,)), 12), expected)
        assert not torch.equal(expected, before)
        assert handle.stats.steps > 0


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * -2


def another_class(model: Any, _: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp.gate_proj.__class__ = Scaled


def another_forward(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(model.model.layers[0].mlp.act_fn)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: own(self, x) * -0.7)


def another_function(model: Any, _: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn.act = torch.tanh


def another_epsilon(model: Any, _: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 0.5


@pytest.mark.parametrize(
    ("family", "change"),
    [("llama", another_class), ("llama", another_forward), ("gemma2", another_function), ("llama", another_epsilon)],
)
def test_code_that_changes_inside_of_a_leaf_counts(
    family: str, change: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own = tiny_model(family), tiny_model(family)
    with sk.patch(model, random_heads(model), tree=6) as handle:
        before = greedy(model, batch((9,)), 12)
        change(model, monkeypatch)
        change(own, monkeypatch)
        expected, steps = greedy(own, batch((9,)), 12), handle.stats.steps
        assert not torch.equal(expected, before)
        assert torch.equal(greedy(model, batch((9,)), 12), expected)
        assert handle.stats.steps > steps


def test_a_forward_of_all_linear_layers_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the lm_head too, whose module steps don't call."""
    model, own = tiny_model("llama"), tiny_model("llama")
    with sk.patch(model, random_heads(model), tree=6):
        greedy(model, batch((9,)), 12)
        forward = nn.Linear.forward
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * -0.7)
        with falls_back("lm_head of the model has been replaced by another Linear"):
            found = greedy(model, batch((9,)), 12)
        assert torch.equal(found, greedy(own, batch((9,)), 12))


@pytest.mark.parametrize("swapped", [False, True])
def test_weights_move_while_patched(swapped: bool) -> None:
    """Also where torch exchanges tensors, as it does with those of some classes: that needs them unreferenced."""
    model, other = tiny_model("llama"), tiny_model("llama", seed=5)
    torch.__future__.set_swap_module_params_on_conversion(swapped)
    try:
        with sk.patch(model, random_heads(model), tree=6) as handle:
            expected = greedy(model, batch((9,)), 12)
            assert torch.equal(greedy(model.to("cpu"), batch((9,)), 12), expected)
            model.load_state_dict(other.state_dict())
            assert torch.equal(greedy(model, batch((9,)), 12), greedy(other, batch((9,)), 12))
            assert handle.stats.steps > 0
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_weights_that_change_after_patching_count() -> None:
    model = tiny_model("llama")
    with sk.patch(model, random_heads(model), tree=6) as handle:
        greedy(model, batch((9,)), 12)
        other = tiny_model("llama", seed=5)
        model.load_state_dict(other.state_dict())
        assert torch.equal(greedy(model, batch((9,)), 12), greedy(other, batch((9,)), 12))
        assert handle.stats.steps > 0


def test_a_replaced_parameter_runs_the_module_itself() -> None:
    """If it is of another size or dtype: the operators don't check tensors."""
    model = tiny_model("llama")
    with sk.patch(model, random_heads(model), tree=6, reuse_prefix=False) as handle:
        before = greedy(model, batch((9,)), 12)
        layer = model.model.layers[0]
        layer.mlp.up_proj.weight = nn.Parameter(2 * layer.mlp.up_proj.weight.detach())
        layer.self_attn.q_proj.bias = nn.Parameter(torch.ones(32))
        result = greedy(model, batch((9,)), 12)
        assert handle.stats.steps > 0
    assert not torch.equal(result, before)
    assert torch.equal(result, greedy(model, batch((9,)), 12))
    with sk.patch(model.bfloat16(), random_heads(model), invariant=True) as handle:
        layer.mlp.up_proj.weight = nn.Parameter(2 * layer.mlp.up_proj.weight.detach())
        greedy(model, batch((9,)), 3)
        assert handle.stats.steps > 0  # another parameter of the same kind
        layer.mlp.up_proj.bias = nn.Parameter(torch.ones_like(layer.mlp.up_proj.weight[:, 0]))
        with pytest.warns(UserWarning, match=r"invariant is True, and parameters or modules of model.layers.0.mlp"):
            greedy(model, batch((9,)), 3)


def test_rows_of_another_dtype_run_the_module_itself() -> None:
    """A norm of float32 states in a bfloat16 model, for one."""
    model = tiny_model("llama").to(torch.bfloat16)
    leaf = next(
        leaf for leaf in find_leaves(model, torch.bfloat16, "cpu", False).leaves if leaf.kind.operator == "rms_norm"
    )
    x = torch.randn(3, 32)
    operators = LeafOperators(ops.kernels("cpu", x.device))
    with attention_call(lambda *_, **__: x, operators=operators):
        assert torch.equal(leaf.forward(x), leaf.module(x))
        assert leaf.forward(x).dtype == torch.float32
        short = x.to(torch.bfloat16)
        assert torch.equal(leaf.forward(short), leaf.call(ops.kernels("cpu", x.device), short))


def test_autocast_inside_of_a_pass_runs_the_module_itself() -> None:
    model = tiny_model("llama")
    x = torch.randn(1, 3, 32)
    with attention_call(lambda *_, **__: x, operators=LeafOperators(ops.kernels("cpu", x.device))):
        for leaf in find_leaves(model, torch.float32, "cpu", False).leaves:
            with torch.autocast("cpu", torch.bfloat16):
                own, found = type(leaf.module).forward(leaf.module, x), leaf.forward(x)
            assert found.dtype == own.dtype
            assert torch.equal(found, own)


class Negative(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return -weight


class WithNegative(nn.Module):
    """Calls a module with a negative parameter, by a parametrization that is there only meanwhile, as some of PEFT."""

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__()
        self.base, self.name = base, name

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self.base, self.name, Negative())
        try:
            return self.base(*args)  # type: ignore[no-any-return]
        finally:
            parametrize.remove_parametrizations(self.base, self.name, leave_parametrized=False)


@pytest.mark.parametrize("before", [True, False], ids=["before patching", "after patching"])
@pytest.mark.parametrize(
    ("family", "parent", "part", "parameter"),
    [
        ("mixtral", "model.layers.0.mlp", "experts", "gate_up_proj"),
        ("llama", "model.layers.0.mlp", "up_proj", "weight"),
        ("llama", "model.layers.0.self_attn", "o_proj", "weight"),
    ],
)
def test_parametrizations_inside_of_a_pass_count(
    family: str, parent: str, part: str, parameter: str, before: bool
) -> None:
    def change(model: PreTrainedModel) -> None:
        module = model.get_submodule(parent)
        setattr(module, part, WithNegative(module.get_submodule(part), parameter))

    model, own = tiny_model(family), tiny_model(family)
    change(own)
    expected = greedy(own, batch((9,)), 40)
    assert not torch.equal(expected, greedy(model, batch((9,)), 40))
    if before:
        change(model)
    with sk.patch(model, random_heads(model), tree=6) as handle:
        if not before:
            greedy(model, batch((9,)), 40)
            change(model)
        steps = handle.stats.steps
        for _ in range(4):
            assert torch.equal(greedy(model, batch((9,)), 40), expected)
        assert handle.stats.steps > steps


@pytest.mark.parametrize("before", [True, False], ids=["before patching", "after patching"])
def test_parametrizations_inside_of_an_invariant_pass(before: bool) -> None:
    model = tiny_model("llama").bfloat16()
    layer, inputs = model.model.layers[0], batch((9,))
    if before:
        layer.mlp.up_proj = WithNegative(layer.mlp.up_proj, "weight")
        with pytest.raises(sk.UnsupportedModel, match=r"parameters of model.layers.0.mlp.up_proj.base"):
            sk.patch(model, "prompt-lookup", invariant=True)
        return
    with sk.patch(model, "prompt-lookup", invariant=True):
        layer.self_attn.o_proj = WithNegative(layer.self_attn.o_proj, "weight")
        with pytest.raises(sk.UnsupportedModel, match=r"parameters of model.layers.0.self_attn.o_proj"):
            greedy(model, inputs, 3)


def noted(leaves: FusedLeaves) -> tuple[FusedLeaves, dict[str, tuple[str, int]]]:
    """The same leaves, and of each that a pass computes the operator and the number of rows."""
    found: dict[str, tuple[str, int]] = {}

    def note(leaf: Leaf) -> Leaf:
        def call(kernels: ops.Kernels, x: torch.Tensor) -> torch.Tensor:
            found[leaf.name] = leaf.kind.operator, x.shape[1]
            return leaf.call(kernels, x)

        return replace(leaf, call=call)

    return FusedLeaves([note(leaf) for leaf in leaves.leaves], leaves.backend, max_rows=leaves.max_rows), found


@pytest.mark.parametrize("rows", sample([1, 3, 128, 129], [3, 129]))
@pytest.mark.parametrize("products", [True, False])
def test_a_fused_pass_is_the_models_within_rounding(rows: int, products: bool) -> None:
    model = tiny_model("llama")
    leaves, found = noted(sk.patch(model, "prompt-lookup").facts.leaves)
    tokens = torch.arange(rows) % 50 + 3
    with torch.inference_mode():
        own = run_packed(model, tokens, tokens, like_attention, None)
        fused = run_packed(model, tokens, tokens, like_attention, None, leaves=leaves, products=products)
    torch.testing.assert_close(fused, own, rtol=1e-4, atol=1e-4)
    called = {operator for operator, _ in found.values()}
    assert called == {"linear", "gated_mlp", "rms_norm"}


def test_products_of_many_rows_are_seen_by_a_tracker() -> None:
    """A pass as of more rows than our products compute: torch's operators, whose temporaries are counted."""
    model = tiny_model("llama", intermediate_size=4000)
    leaves, tokens = sk.patch(model, "prompt-lookup").facts.leaves, torch.arange(9) + 3
    peaks = {}
    for products in (True, False):
        with torch.inference_mode(), MemoryTracker() as tracker:
            run_packed(model, tokens, tokens, like_attention, None, leaves=leaves, products=products)
        peaks[products] = tracker.peak
    gates = 9 * 4000 * 4
    assert peaks[True] < gates < 2 * gates <= peaks[False] < 3 * gates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recorded_steps_of_more_rows_than_pay(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch multiplies their first rows."""
    monkeypatch.setattr(cpu, "few_rows", lambda *_: 8)
    model = tiny_model("llama").to(dtype)
    results = []
    for graph in (False, True):
        with sk.patch(model, random_heads(model), tree=37, graph=graph) as handle:
            assert handle.facts.leaves.max_rows == 8
            results += [greedy(model, batch((9,)), 24) for _ in range(3)]
            assert (handle.stats.graph_steps > 0) == graph
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("rows", sample([10, 200], [10]))
@pytest.mark.parametrize("kept", [[], [9], [7, 3]], ids=str)
def test_only_kept_rows_are_computed_behind_the_last_attention(rows: int, kept: list[int]) -> None:
    model = tiny_model("llama")
    facts = sk.patch(model, "prompt-lookup").facts
    leaves, found = noted(facts.leaves)
    tokens, keep = torch.arange(rows) % 50 + 3, torch.tensor(kept, dtype=torch.int64)
    with torch.inference_mode():
        expected = run_packed(model, tokens, tokens, like_attention, keep)
        last = facts.last_attention, keep
        result = run_packed(model, tokens, tokens, like_attention, keep, leaves=leaves, last=last)
    assert result.shape == expected.shape
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    behind = {f"model.layers.1.{name}" for name in ("self_attn.o_proj", "post_attention_layernorm", "mlp")}
    behind |= {"model.norm", "lm_head"}
    assert {name: count for name, (_, count) in found.items() if name in behind} == dict.fromkeys(behind, len(kept))
    assert {count for name, (_, count) in found.items() if name not in behind} == {rows}


def test_a_prompts_pass_computes_one_row_behind_the_last_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny_model("llama"), torch.arange(3, 43)[None]
    expected = greedy(model, {"input_ids": tokens}, 3)
    counts: list[int] = []
    with sk.patch(model, "prompt-lookup", tree=1, prefill_chunk=16, graph=False):
        gated_mlp = cpu.gated_mlp
        monkeypatch.setattr(cpu, "gated_mlp", lambda x, *rest: (counts.append(x.shape[1]), gated_mlp(x, *rest))[1])
        assert torch.equal(greedy(model, {"input_ids": tokens}, 3), expected)
    assert counts == [16, 0, 16, 0, 8, 1, 1, 1, 1, 1]


def test_a_fused_draft_model() -> None:
    model, small = tiny_model("llama"), tiny_model("llama", seed=3, num_hidden_layers=1)
    inputs = batch((9, 5))
    expected = greedy(model, inputs, 15)
    with sk.patch(model, sk.DraftModel(small, tokens=3)) as handle:
        assert handle.drafter.facts.leaves.names
        assert torch.equal(greedy(model, inputs, 15), expected)
    with sk.patch(model, sk.DraftModel(small, tokens=3), fuse=False) as handle:
        assert not handle.drafter.facts.leaves.names


@pytest.mark.parametrize(("name", "value"), [("fuse", 1), ("fuse", None), ("invariant", "yes")])
def test_flags(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} is"):
        sk.patch(tiny_model("llama"), OracleDrafter([], 1.0), **{name: value})
