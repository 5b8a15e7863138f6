"""Quantisation methods with settings of single modules; see :mod:`quantisation_methods` for sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specmemo_kernels.planning.decoder_matrices import Matrix
from specmemo_kernels.planning.module_names import (
    compressed_tensors_names,
    glob,
    is_never_quantised,
    regex,
    skips,
    tag_of,
)
from specmemo_kernels.planning.quantisation_scheme import (
    AT_LOAD,
    GPU_KERNELS,
    NEVER,
    Codec,
    Config,
    Scheme,
    Unpacking,
    linear_scheme,
)


def gptq(config: Config, matrices: Sequence[Matrix], dtype_bits: int) -> Scheme:
    """``qweight``, ``qzeros`` of the same bits, 16-bit ``scales``, and ``g_idx`` of 32 bits per column.

    gptqmodel's ``dynamic`` has regular expressions: ``-:`` leaves modules out, ``+:`` or none changes their settings.
    On a CPU gptqmodel's torch kernels dequantise each matrix.
    """
    tags = set(_flat(config.get("modules_in_block_to_quantize") or ()))
    dynamic = [(str(rule), settings or {}) for rule, settings in (config.get("dynamic") or {}).items()]
    left_out = skips(matrices, config.get("modules_to_not_convert") or ())

    def select(matrix: Matrix) -> Codec | None:
        if is_never_quantised(matrix) or matrix.name in left_out.names:
            return None
        if matrix.part == "lm_head":
            if not config.get("lm_head"):
                return None
        elif tags and tag_of(matrix.name) not in tags:
            return None
        for rule, changes in dynamic:
            if regex(rule.removeprefix("-:").removeprefix("+:")).match(matrix.name):
                return None if rule.startswith("-:") else _gptq_codec({**config, **changes}, column_bits=32)
        return _gptq_codec(config, column_bits=32)

    return Scheme("gptq", select, GPU_KERNELS, left_out.notes("modules_to_not_convert"))


def _gptq_codec(settings: Config, column_bits: int = 0) -> Codec:
    bits, group = int(settings.get("bits", 4)), int(settings.get("group_size", settings.get("q_group_size", 128)))
    return Codec(bits, group, 16 + bits, column_bits=column_bits)


def awq(config: Config, matrices: Sequence[Matrix], dtype_bits: int) -> Scheme:
    """``qweight``, ``qzeros`` and 16-bit ``scales``. lm_head is always left out."""
    left_out = skips(matrices, ["lm_head", *(config.get("modules_to_not_convert") or ())])
    codec = _gptq_codec(config)

    def select(matrix: Matrix) -> Codec | None:
        outside = is_never_quantised(matrix) or matrix.name in left_out.names
        return None if outside else codec

    return Scheme("awq", select, GPU_KERNELS, left_out.notes("modules_to_not_convert"))


def auto_round(config: Config, matrices: Sequence[Matrix], dtype_bits: int) -> Scheme:
    """The layout of gptq without ``g_idx``, or of awq. ``extra_config`` has settings of single modules."""
    extra: Mapping[str, Config] = config.get("extra_config") or {}
    everywhere = bool(config.get("quant_lm_head") or config.get("lm_head"))

    def select(matrix: Matrix) -> Codec | None:
        rule = next((name for name in extra if matrix.name == name or regex(name).fullmatch(matrix.name)), None)
        outside = matrix.part == "lm_head" and not everywhere and rule is None
        settings = {**config, **(extra[rule] if rule is not None else {})}
        if is_never_quantised(matrix) or outside or int(settings.get("bits", 4)) >= 16:
            return None
        return _gptq_codec(settings)

    return Scheme("auto-round", select, GPU_KERNELS)


def hqq(config: Config, matrices: Sequence[Matrix], dtype_bits: int) -> Scheme:
    """A scale and a zero of the model's dtype per group; ten 3-bit codes in 32 bits. Settings per layer tag, or one.

    The pytorch backend dequantises each matrix; three copies were measured.
    """
    settings: Config = config.get("quant_config") or config
    left_out = set(config.get("skip_modules") or ("lm_head",))
    by_tag = not {"weight_quant_params", "nbits"} & set(settings)

    def select(matrix: Matrix) -> Codec | None:
        tag = tag_of(matrix.name)
        chosen = settings.get(tag) if by_tag else settings
        if not matrix.linear or {tag, matrix.name} & left_out or not chosen:
            return None
        weight = chosen.get("weight_quant_params") or chosen
        bits = int(weight.get("nbits", 4))
        meta = sum(_hqq_meta(chosen.get(f"{kind}_quant_params"), dtype_bits) for kind in ("scale", "zero"))
        return Codec(3.2 if bits == 3 else bits, int(weight.get("group_size") or 0), meta)

    experts = any(matrix.part == "experts" for matrix in matrices)
    notes = ("transformers 5.24 doesn't load hqq, earlier versions do",)
    return Scheme(
        "hqq",
        select,
        Unpacking("call", "call", copies=3.0),
        notes + (("hqq leaves experts unquantised",) if experts else ()),
    )


def _hqq_meta(params: Config | None, dtype_bits: int) -> float:
    """Bits of a group's scale or zero, which may be quantised again."""
    if not params:
        return dtype_bits
    group = int(params.get("group_size") or 0)
    return float(params.get("nbits", 8)) + (2 * dtype_bits / group if group else 0)


def compressed_tensors(config: Config, matrices: Sequence[Matrix], dtype_bits: int) -> Scheme:
    """``config_groups``: targets and settings each. transformers unpacks all weights in the first forward pass."""
    groups = [
        (compressed_tensors_names(group.get("targets") or ()), _compressed_codec(group, config, dtype_bits))
        for group in (config.get("config_groups") or {}).values()
    ]
    ignored = compressed_tensors_names(config.get("ignore") or ())

    def select(matrix: Matrix) -> Codec | None:
        if is_never_quantised(matrix) or ignored(matrix):
            return None
        return next((codec for targets, codec in groups if targets(matrix)), None)

    return Scheme("compressed-tensors", select, AT_LOAD)


def _compressed_codec(group: Config, config: Config, dtype_bits: int) -> Codec | None:
    """The codec of one of ``config_groups``; ``None``: its weights aren't quantised.

    Integers are packed into int32 (``pack-quantized``, with the shape in two int64) or one per byte. Zero points have
    the codes' bits if packed, else 8. Scales of fp4 and mx formats have 8 bits; nvfp4 adds a float32 per matrix.
    """
    weights, form = group.get("weights"), str(group.get("format") or config.get("format") or "")
    if not weights or form == "dense":
        return None
    bits, columns = int(weights.get("num_bits", 8)), int(weights.get("group_size") or 0)
    strategy = weights.get("strategy") or ("group" if columns > 0 else "channel" if columns else "tensor")
    packed = "pack" in form or "marlin" in form or (not form and bits < 8)
    small_scale = weights.get("type") == "float" and (bits == 4 or form.startswith("mx"))
    scale = 8 if small_scale else dtype_bits
    scale += 0 if weights.get("symmetric", True) else bits if packed else 8
    stored, shape = bits if packed else 8, 128 if packed and not small_scale else 0
    if strategy == "block":
        rows, columns = weights["block_structure"]
        return Codec(stored, int(columns), scale, block_rows=int(rows), matrix_bits=shape)
    if strategy == "tensor":
        return Codec(stored, matrix_bits=scale + shape)
    if strategy == "tensor_group":
        return Codec(stored, columns, scale, matrix_bits=32)
    return Codec(stored, columns if strategy == "group" else 0, scale, matrix_bits=shape)


def modelopt(config: Config, matrices: Sequence[Matrix], dtype_bits: int) -> Scheme:
    """NVIDIA ModelOpt: NVFP4 (an fp8 scale per 16, two float32 per matrix) or FP8 (two float32 per matrix)."""
    settings: Config = config.get("quantization") or config
    algorithm = str(settings.get("quant_algo")).upper()
    codecs = {"NVFP4": Codec(4, 16, 8, matrix_bits=64), "FP8": Codec(8, matrix_bits=64)}
    if algorithm not in codecs:
        raise ValueError(f"quant_algo is {settings.get('quant_algo')!r}, expected NVFP4 or FP8")
    rules = [glob(name) for name in settings.get("ignore") or settings.get("exclude_modules") or ()]

    def select(matrix: Matrix) -> Codec | None:
        outside = is_never_quantised(matrix)
        return None if outside or any(rule.match(matrix.name) for rule in rules) else codecs[algorithm]

    return Scheme("modelopt", select, NEVER, ("transformers 5.24 doesn't load modelopt, vLLM and TensorRT-LLM do",))


def torchao(config: Config, matrices: Sequence[Matrix], dtype_bits: int) -> Scheme:
    """``quant_type`` has one configuration, or one per module name (``FqnToConfig``).

    ``include_input_output_embeddings`` adds the lm_head, and an embedding only if configurations are by name.
    Codes are converted to the activations' dtype in each call, except with dynamic activations and in int4 kernels. The
    copies at once were measured on a CPU, where ``torch._int_mm`` of dynamic activations copies as well.
    """
    chosen = config["quant_type"]
    chosen = chosen.get("default", chosen)
    embeddings = bool(config.get("include_input_output_embeddings"))
    left_out = linear_scheme(config, matrices, Codec(8), NEVER)
    single: Mapping[str, Any] = {_DEFAULT: chosen}
    entries = single
    if chosen["_type"] in ("FqnToConfig", "ModuleFqnToConfig"):
        data = chosen["_data"]
        entries = data.get("fqn_to_config") or data.get("module_fqn_to_config") or {}
        entries = entries.get("_data", entries)
    codecs = {name: _torchao_codec(entry, dtype_bits) for name, entry in entries.items() if entry}

    def select(matrix: Matrix) -> Codec | None:
        name = _torchao_name(entries, matrix.name)
        if matrix.part == "embedding":
            inside = entries is not single and (embeddings or name != _DEFAULT)
        else:
            inside = left_out.codec(matrix) is not None or (embeddings and matrix.part == "lm_head")
        codec = codecs.get(name)
        return codec(matrix) if inside and codec is not None else None

    copies = max((_AO_COPIES.get(entries[name]["_type"], 0.0) for name in codecs), default=0.0)
    unpacking = Unpacking("call", "call", copies=copies) if copies else NEVER
    if not copies and any(entries[name]["_type"] == "Int8DynamicActivationInt8WeightConfig" for name in codecs):
        unpacking = Unpacking("never", "call", copies=2.4)
    return Scheme("torchao", select, unpacking, left_out.notes)


_DEFAULT = "_default"
_AO_COPIES = {
    "Int8WeightOnlyConfig": 1.2, "IntxWeightOnlyConfig": 2.5, "Int8DynamicActivationIntxWeightConfig": 2.5,
    "Float8WeightOnlyConfig": 5.9,
}  # fmt: skip


def _torchao_name(entries: Mapping[str, Any], module: str) -> str:
    """The key of a module's settings. ``FqnToConfig``'s order: parameter, module, ``re:`` for either, the default."""
    names = (f"{module}.weight", module)
    exact = next((name for name in names if name in entries), None)
    rules = (key for name in names for key in entries if key.startswith("re:") and regex(key[3:]).fullmatch(name))
    return exact or next(rules, _DEFAULT)


def _torchao_codec(entry: Config, dtype_bits: int) -> Callable[[Matrix], Codec | None]:
    """Of a serialised ``AOBaseConfig``.

    int4: scale and zero point of the model's dtype per group, if groups divide the columns. int8: float32 scale, int8
    zero point. intx: a byte per code, scale of the model's dtype, int8 zero point. float8: float32 scale.

    Raises:
        ValueError: another configuration.
    """
    kind, data = str(entry["_type"]), entry.get("_data") or {}
    granularity = _group(data.get("weight_granularity") or data.get("granularity"))
    group = int(data.get("group_size") or granularity)
    if kind in ("Int4WeightOnlyConfig", "Float8DynamicActivationInt4WeightConfig"):
        group = int(data.get("group_size") or 128)
        return lambda matrix: None if matrix.columns % group else Codec(4, group, 2 * dtype_bits)
    if kind.startswith("NVFP4"):
        return lambda matrix: Codec(4, 16, 8, matrix_bits=32)
    if kind == "MXDynamicActivationMXWeightConfig":
        bits = 4 if "float4" in str(data.get("weight_dtype")) else 8
        return lambda matrix: Codec(bits, 32, 8)
    if kind in ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"):
        default = 32 if kind.startswith("Int8") and not (data.get("weight_granularity") or {}) else group
        return lambda matrix: Codec(8, default, dtype_bits + 8)
    if kind.startswith("Int8"):
        return lambda matrix: Codec(8, group, 32 + 8)
    if kind.startswith("Float8"):
        return lambda matrix: Codec(8, group, 32)
    raise ValueError(f"quant_type is {kind}, whose sizes aren't known")


def _group(granularity: Any) -> int:
    """Columns per scale of a granularity: 0 for rows, axes and whole tensors (a scale per row is assumed)."""
    if isinstance(granularity, list | tuple):
        granularity = granularity[-1]
    data = (granularity or {}).get("_data") or {}
    return int(data.get("group_size") or 0)


def _flat(names: Iterable[Any]) -> Iterable[str]:
    for name in names:
        yield from (name if isinstance(name, list | tuple) else [name])
