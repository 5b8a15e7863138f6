"""Models with compressed weights: the same tokens, the model's own weights for everybody else, and the memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import family_model
from selection import sample
from tiny_models import random_heads, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.integrations.hf import compressed, patch
from specmemo_kernels.integrations.hf.compressed import is_plain_linear
from specmemo_kernels.integrations.hf.compressed_matrix import CompressedMatrix
from specmemo_kernels.ops import compressed_weights
from specmemo_kernels.ops.compressed_weights import row_bytes
from specmemo_kernels.planning.mapped_files import MappedFiles

Tensor = torch.Tensor
PROMPTS = torch.randint(3, 60, (2, 21), generator=torch.Generator().manual_seed(1))


def wide_model(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> PreTrainedModel:
    """Wide enough that its matrices get smaller."""
    sizes = {
        "hidden_size": 384,
        "intermediate_size": 512,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    return tiny_model("llama", **(sizes | changes)).to(dtype)


def greedy(model: PreTrainedModel, **options: Any) -> Tensor:
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None} | options
    result: Tensor = model.generate(PROMPTS, attention_mask=torch.ones_like(PROMPTS), pad_token_id=0, **options)
    return result


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def plain_classes(model: nn.Module) -> bool:
    kinds = nn.Linear, nn.Embedding
    return {type(m) for m in model.modules() if isinstance(m, kinds)} == set(kinds)


def same_weights(model: nn.Module, expected: dict[str, Tensor]) -> bool:
    found = model.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def decompressions(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Gets the sizes of the matrices that are decompressed as a whole."""
    sizes: list[torch.Size] = []
    own = CompressedMatrix.decompressed

    def counted(matrix: CompressedMatrix) -> Tensor:
        sizes.append(matrix.shape)
        return own(matrix)

    monkeypatch.setattr(CompressedMatrix, "decompressed", counted)
    return sizes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("drafter", ["prompt-lookup", "heads", "model"])
def test_tokens_are_those_of_the_uncompressed_model(
    drafter: str, invariant: bool, tied: bool, decompressions: list[torch.Size]
) -> None:
    model = wide_model(tie_word_embeddings=tied)
    drafters: dict[str, Any] = {"heads": random_heads(model), "model": wide_model(num_hidden_layers=1)}
    chosen = drafters.get(drafter, drafter)
    written = []
    for compress in (False, True):
        options: dict[str, Any] = {"invariant": invariant, "compress": compress, "memory_budget": "64MiB", "tree": 4}
        with sk.patch(model, chosen, **options) as handle:
            decompressions.clear()  # plain passes, of tests while patching
            written.append(greedy(model))
            torch.manual_seed(3)
            written.append(greedy(model, do_sample=True, temperature=0.8))
            assert handle.stats.graph_steps > 0
            assert not decompressions
            fused = dict(handle.fused)
    assert torch.equal(written[0], written[2])
    assert torch.equal(written[1], written[3])
    assert fused["lm_head"] == "linear"
    assert fused["model.layers.0.mlp"] == "gated_mlp"


@pytest.mark.parametrize(
    "family", sample(["jamba", "longcat_flash", "gpt_oss", "phi3", "deepseek_v3", "gemma3n_text"], ["jamba"])
)
@pytest.mark.filterwarnings("ignore")
def test_families(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jamba and LongCat read the weights of layers in their own code, Gemma 3n its embeddings' dtype."""
    monkeypatch.setattr(compressed, "_MOST_BYTES", 1000)  # they are narrow
    model = family_model(family).to(torch.bfloat16)
    written = []
    for compress in (False, True):
        with sk.patch(model, "prompt-lookup", tree=4, compress=compress) as handle:
            written.append(greedy(model))
            assert bool(handle.compressed.names) == compress
    assert torch.equal(*written)


@pytest.mark.parametrize("family", sample(["mixtral", "qwen3_moe", "gpt_oss"], ["mixtral"]))
def test_experts(family: str, monkeypatch: pytest.MonkeyPatch, decompressions: list[torch.Size]) -> None:
    """GPT-OSS stores them by input: those stay."""
    monkeypatch.setattr(compressed, "_MOST_BYTES", 1000)
    model = family_model(family).to(torch.bfloat16)
    name, module = next((n, m) for n, m in model.named_modules() if hasattr(m, "is_transposed"))
    state, expected, kind = weights(model), model(PROMPTS).logits, type(module)
    written = []
    with sk.patch(model, "prompt-lookup", tree=4, compress=True) as handle:
        assert (name in handle.compressed.names) is not module.is_transposed
        assert handle.fused[name] == "grouped_linear"
        decompressions.clear()
        written.append(greedy(model, max_new_tokens=72))
        assert handle.stats.graph_steps > 0
        assert not [size for size in decompressions if len(size) > 2]
        assert torch.equal(model(PROMPTS).logits, expected)
        assert same_weights(model, state)
        other = copy.deepcopy(model)
        assert same_weights(other, state)
        assert torch.equal(other(PROMPTS).logits, expected)
        assert type(other.get_submodule(name)) is kind
    assert type(module) is kind
    assert same_weights(model, state)
    with sk.patch(model, "prompt-lookup", tree=4):
        written.append(greedy(model, max_new_tokens=72))
    assert torch.equal(*written)


def test_the_loop_over_experts_decompresses_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, decompressions: list[torch.Size]
) -> None:
    monkeypatch.setattr(compressed, "_MOST_BYTES", 1000)
    model = family_model("mixtral").to(torch.bfloat16)
    model.set_experts_implementation("eager")
    embedded = model.get_input_embeddings()(PROMPTS).detach().requires_grad_()
    gradients = []
    for compress in (False, True):
        with sk.patch(model, "prompt-lookup", compress=compress):
            decompressions.clear()
            gradients += torch.autograd.grad(model(inputs_embeds=embedded).logits.float().sum(), embedded)
            sizes = {len(size) for size in decompressions}
    assert torch.equal(*gradients)
    assert sizes == {2}


def test_a_scaled_embedding_decompresses_rows_only(
    monkeypatch: pytest.MonkeyPatch, decompressions: list[torch.Size]
) -> None:
    """It reads its weight's dtype in each pass."""
    monkeypatch.setattr(compressed, "_MOST_BYTES", 1000)
    model = family_model("gemma3n_text").to(torch.bfloat16)
    with sk.patch(model, "prompt-lookup", compress=True) as handle:
        assert "model.embed_tokens_per_layer" in handle.compressed.names
        decompressions.clear()
        greedy(model)
        assert set(decompressions) <= {m.weight.shape for m in model.modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize("tied", [False, True])
def test_others_see_the_models_own_weights(tied: bool, tmp_path: Path) -> None:
    model = wide_model(tie_word_embeddings=tied)
    expected, state = model(PROMPTS).logits, weights(model)
    parameters = dict(model.named_parameters())
    model.lm_head.weight.requires_grad_(False)
    with sk.patch(model, random_heads(model), compress=True) as handle:
        assert len(handle.compressed.names) == 2 * 7 + 2
        assert type(model.lm_head) is not nn.Linear
        assert is_plain_linear(model.lm_head)
        assert torch.equal(model.lm_head.weight, state["lm_head.weight"])
        assert torch.equal(model.get_input_embeddings().weight, state["model.embed_tokens.weight"])
        assert torch.equal(model(PROMPTS).logits, expected)
        assert same_weights(model, state)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(PROMPTS).logits, expected)
            assert (other.lm_head.weight is other.model.embed_tokens.weight) == tied
            assert plain_classes(other)
        model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size == pytest.approx(
        sum(p.nbytes for p in model.parameters()), abs=5000
    )
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), state)
    assert same_weights(model, state)
    assert plain_classes(model)
    found = dict(model.named_parameters())
    assert all(found[name] is parameters[name] for name in parameters)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    frozen = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert [name for name, p in found.items() if not p.requires_grad] == [frozen]


def test_a_change_in_place_is_refused() -> None:
    """Merging an adapter would add to a copy."""
    model = wide_model()
    state = weights(model)
    with sk.patch(model, "prompt-lookup", compress=True):
        for change in (
            lambda: model.lm_head.weight.mul_(2),
            lambda: model.lm_head.weight.data.add_(1),
            lambda: setattr(model.lm_head.weight, "data", torch.zeros(3)),
            lambda: model.lm_head.weight[3].zero_(),
            lambda: model.lm_head.weight.T.chunk(2)[1].zero_(),
            lambda: model.lm_head.weight.detach().copy_(state["lm_head.weight"]),
            lambda: torch.add(state["lm_head.weight"], 1, out=model.lm_head.weight),
            lambda: torch._foreach_mul_([model.lm_head.weight], 2.0),
            lambda: nn.init.zeros_(model.lm_head.weight),
        ):
            with (
                torch.no_grad(),
                pytest.raises(RuntimeError, match=r"would change compressed weights.*unpatch\(model\) first"),
            ):
                change()


@pytest.mark.parametrize("assign", [False, True])
def test_loading_is_refused_before_anything_changes(assign: bool) -> None:
    """Only the uncompressed parameters could be loaded. After unpatch, all are."""
    model, other = wide_model(), wide_model()
    before, state = weights(model), {name: value + 1 for name, value in weights(other).items()}
    with sk.patch(model, "prompt-lookup", compress=True):
        with pytest.raises(RuntimeError, match=r"load_state_dict would change compressed weights.*unpatch\(model\)"):
            model.load_state_dict(state, assign=assign)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        copy.deepcopy(model).load_state_dict(state, assign=assign)
    model.load_state_dict(state, assign=assign)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not model._load_state_dict_pre_hooks


def test_gradients_reach_the_input_and_the_other_parameters() -> None:
    model = wide_model()
    embedded = model.get_input_embeddings()(PROMPTS).detach().requires_grad_()
    norm = model.model.layers[0].input_layernorm.weight
    gradients = []
    for compress in (False, True):
        model.zero_grad()
        embedded.grad = None
        with sk.patch(model, "prompt-lookup", compress=compress):
            model(inputs_embeds=embedded, labels=PROMPTS).loss.backward()
        gradients.append([x.grad.clone() for x in (embedded, norm)])
    assert all(map(torch.equal, *gradients))
    assert all(x.abs().sum() > 0 for x in gradients[0])


@pytest.mark.parametrize("tied", [False, True])
def test_memory_of_the_weights(tied: bool, decompressions: list[torch.Size]) -> None:
    model = wide_model(tie_word_embeddings=tied)
    before = sum(p.nbytes for p in model.parameters())
    kinds = nn.Linear, nn.Embedding
    matrices = {name: m.weight.shape for name, m in model.named_modules() if isinstance(m, kinds)}
    sizes = {name: shape for name, shape in matrices.items() if not (tied and name == "lm_head")}.values()
    with sk.patch(model, "prompt-lookup", compress=True) as handle:
        assert len(decompressions) <= 7  # one layer of each kind, compared with the module's own result
        assert set(handle.compressed.names) == set(matrices)
        assert handle.compressed.nbytes == sum(rows * row_bytes(columns) for rows, columns in sizes)
        assert sum(p.nbytes for p in model.parameters()) == before - handle.compressed.saved_bytes
        assert 0.15 < handle.compressed.saved_bytes / sum(2 * rows * columns for rows, columns in sizes) < 0.25


def test_inference_mode_and_training() -> None:
    """Weights and heads of a model that was patched in inference mode can be trained."""
    model = wide_model()
    heads = random_heads(model).to(torch.bfloat16)
    with torch.inference_mode(), sk.patch(model, heads, compress=True):
        greedy(model)
    assert not any(p.is_inference() for p in (*model.parameters(), *heads.parameters()))
    model(PROMPTS, labels=PROMPTS).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_another_dtype_is_refused() -> None:
    model = wide_model()
    with sk.patch(model, "prompt-lookup", compress=True):
        expected = greedy(model)
        for change in (model.float, model.half, lambda: model.to(torch.float64), model.model.layers[0].mlp.float):
            with pytest.raises(RuntimeError, match=r"would be converted.*unpatch"):
                change()
        assert torch.equal(greedy(model), expected)
        model.to(torch.bfloat16)
        assert torch.equal(greedy(model), expected)
    assert {p.dtype for p in model.float().parameters()} == {torch.float32}


def test_some_layers_are_left_alone() -> None:
    """Also a matrix that a module of another kind shares."""
    model = wide_model()
    model.another = nn.Bilinear(1, 1, 1)
    model.another.weight = model.lm_head.weight
    model.model.embed_tokens.max_norm = 1.0
    first, second = model.model.layers
    noise = torch.randint(0, 1 << 16, first.mlp.up_proj.weight.shape, generator=torch.Generator().manual_seed(0))
    hook = second.self_attn.q_proj.register_forward_hook(lambda *_: None)
    second.self_attn.k_proj.weight.data = second.self_attn.k_proj.weight.data.T.contiguous().T
    kept = first.mlp.up_proj.weight.data.clone()
    first.mlp.up_proj.weight.data = noise.to(torch.uint16).view(torch.bfloat16)
    undo: list[Any] = []
    names = compressed.compress_weights(model, undo).names
    everything = {name for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    assert everything - set(names) == {
        "lm_head", "model.embed_tokens", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.k_proj",
    }  # fmt: skip
    for step in undo:
        step()
    hook.remove()
    first.mlp.up_proj.weight.data = kept
    assert plain_classes(model)


@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.up_proj"])
def test_matrices_that_cannot_be_compressed_beside_others(name: str) -> None:
    """Queries, keys and values are one operator, and gate and up too, if they are stored alike."""
    model = wide_model()
    weight = model.model.layers[0].get_submodule(name).weight
    exponents = torch.randint(-60, -2, weight.shape, generator=torch.Generator().manual_seed(0))
    weight.data = (weight.data.sign() * 2.0**exponents).bfloat16()
    written = []
    for compress in (False, True):
        with sk.patch(model, "prompt-lookup", tree=4, compress=compress) as handle:
            written.append(greedy(model))
            assert handle.stats.graph_steps > 0
            assert (f"model.layers.0.{name}" in handle.compressed.names) is False
            assert ("model.layers.1.mlp.up_proj" in handle.compressed.names) == compress
    assert torch.equal(*written)


def test_a_failure_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_model()
    state, own, calls = weights(model), compressed.compress, iter(range(100))

    def compress(*args: Any) -> Tensor | None:
        if next(calls) == 5:
            raise MemoryError("no memory left")
        return own(*args)

    monkeypatch.setattr(compressed, "compress", compress)
    with pytest.raises(MemoryError, match="no memory left"):
        sk.patch(model, "prompt-lookup", compress=True)
    assert same_weights(model, state)
    assert plain_classes(model)
    sk.patch(model, "prompt-lookup", compress=True).undo()


@pytest.mark.parametrize("again", [sk.unpatch, lambda model: sk.patch(model, "prompt-lookup").undo()])
def test_a_failed_patch_is_undone_later(again: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some steps fail for lack of memory: the others run, the error is ``patch``'s own, and the next call goes on."""
    model = wide_model()
    before, own, calls = weights(model), CompressedMatrix.decompressed, iter(range(99))

    def decompress(*args: Any) -> Tensor:
        if next(calls) in (1, 3):
            raise MemoryError("no memory left")
        return own(*args)

    def no_plan(*_: object, **__: object) -> None:
        patched.setattr(CompressedMatrix, "decompressed", decompress)
        raise ValueError("no plan")

    with monkeypatch.context() as patched:
        patched.setattr(patch, "make_plan", no_plan)
        with pytest.raises(ValueError, match="no plan") as raised:
            sk.patch(model, "prompt-lookup", compress=True)
    assert len(raised.value.__notes__) == 2
    assert "unpatch(model)" in raised.value.__notes__[0]
    compressed_ones = [m for m in model.modules() if "_matrices" in vars(m)]
    assert len(compressed_ones) == 2
    again(model)
    assert plain_classes(model)
    assert same_weights(model, before)
    assert not [name for name in vars(model) if "specmemo" in name]


def test_unpatching_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_model()
    state = weights(model)
    handle, own, calls = sk.patch(model, "prompt-lookup", compress=True), CompressedMatrix.decompressed, iter(range(99))

    def decompress(*args: Any) -> Tensor:
        if next(calls) == 3:
            raise MemoryError("no memory left")
        return own(*args)

    with monkeypatch.context() as patched:
        patched.setattr(CompressedMatrix, "decompressed", decompress)
        with pytest.raises(MemoryError, match="no memory left"):
            handle.undo()
    handle.undo()
    assert same_weights(model, state)
    assert plain_classes(model)


def test_a_new_weight_replaces_the_compressed_one() -> None:
    model = wide_model()
    layer = model.model.layers[0].self_attn.o_proj
    with sk.patch(model, "prompt-lookup", tree=4, compress=True):
        layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
        assert not layer(torch.randn(2, 384).bfloat16()).any()
        changed = greedy(model)
    assert not layer.weight.any()
    with sk.patch(model, "prompt-lookup", tree=4):
        assert torch.equal(greedy(model), changed)


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        ({"backend": "reference"}, torch.bfloat16, "backend='reference', fuse=True"),
        ({"fuse": False}, torch.bfloat16, "backend='cpu', fuse=False"),
        ({}, torch.float32, r"no linear layer, embedding or expert has bfloat16 weights .* layers: torch.float32\)"),
        ({"compress": 1}, torch.bfloat16, "compress is 1"),
    ],
    ids=["backend", "fuse", "dtype", "type"],
)
def test_refused(options: dict[str, Any], dtype: torch.dtype, message: str) -> None:
    model = wide_model(dtype)
    with pytest.raises((ValueError, TypeError), match=message):
        sk.patch(model, "prompt-lookup", **({"compress": True} | options))
    assert plain_classes(model)
    sk.patch(model, "prompt-lookup").undo()


def test_a_compressed_matrix_is_a_tensor() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(11, 300, generator=generator).bfloat16()
    rows = compressed_weights.compress(weight)
    assert rows is not None
    matrix = CompressedMatrix(nn.Parameter(rows, requires_grad=False), 300)
    assert (matrix.dtype, matrix.shape, matrix.device) == (weight.dtype, weight.shape, weight.device)
    assert (matrix.numel(), len(matrix), matrix.nbytes) == (weight.numel(), len(weight), weight.nbytes)
    assert not matrix.requires_grad
    x = torch.randn(2, 5, 300, generator=generator).bfloat16().requires_grad_()
    tokens = torch.tensor([[3, 10, 0], [0, 0, 7]])
    for function in (
        lambda w: nn.functional.linear(x, w), lambda w: nn.functional.embedding(tokens, w), lambda w: w[2:4, 7],
        lambda w: x.detach() @ w.T, lambda w: torch.cat([w, w]), lambda w: w.float() + 1, lambda w: w.sum(0),
        lambda w: nn.functional.embedding(tokens[:, :0], w), lambda w: w.detach().clone(), lambda w: 2 * w,
        lambda w: w.T.chunk(3)[1].mT + 1, lambda w: w.view(torch.int16)[tokens], lambda w: torch.zeros(11, 300).add_(w),
        lambda w: copy.deepcopy(w), lambda w: pickle.loads(pickle.dumps(w)), lambda w: torch.tensor(w.tolist()),
    ):  # fmt: skip
        expected, found = function(weight), function(matrix)
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype
    gradients = [torch.autograd.grad(nn.functional.linear(x, w).sum(), x)[0] for w in (weight, matrix)]
    assert torch.equal(*gradients)
    with pytest.raises(IndexError):
        nn.functional.embedding(torch.tensor([11]), matrix)
    first = matrix.plain()
    assert matrix.plain() is first
    with torch.no_grad():
        first.zero_()
    assert torch.equal(matrix.plain(), weight)


def test_pages_of_a_file_are_read_again(tmp_path: Path) -> None:
    values = torch.arange(1 << 20, dtype=torch.int32)
    values.numpy().tofile(tmp_path / "values")
    mapped = torch.from_file(str(tmp_path / "values"), shared=False, size=len(values), dtype=torch.int32)
    mapped[7] = -1  # a page that isn't the file's
    files = MappedFiles()
    for tensor in (mapped, mapped[1000:90000], values, mapped[:0]):
        files.page_out(tensor)
    assert mapped[7] == -1
    mapped[7] = 7
    assert torch.equal(mapped, values)
