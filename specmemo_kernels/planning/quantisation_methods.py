"""Quantisation methods by name, as transformers 5.24 and their packages write and read them.

Sources: transformers' ``utils/quantization_config.py``, ``quantizers/`` and ``integrations/``; gptqmodel 7.7,
compressed-tensors 0.20, torchao 0.18, optimum-quanto 0.2.7, hqq 0.2.8, bitsandbytes 0.50, auto-round 0.16. Formulas of
bitsandbytes, quanto, hqq, torchao and compressed-tensors were compared with the tensors of small quantised models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specmemo_kernels.arguments import integer
from specmemo_kernels.planning.decoder_matrices import Matrix
from specmemo_kernels.planning.module_names import regex, skips
from specmemo_kernels.planning.quantisation_groups import (
    auto_round,
    awq,
    compressed_tensors,
    gptq,
    hqq,
    modelopt,
    torchao,
)
from specmemo_kernels.planning.quantisation_scheme import (
    AT_LOAD,
    EACH_CALL,
    GPU_KERNELS,
    NEVER,
    Codec,
    Config,
    Scheme,
    Unpacking,
    linear_scheme,
)

Matrices = Sequence[Matrix]


def stored_matrices(
    config: Config, matrices: Matrices, dtype_bits: int
) -> tuple[Scheme, list[tuple[Matrix, float | None]]]:
    """The scheme of a ``quantization_config``, and each matrix's bytes; ``None`` for one in the model's dtype.

    Args:
        matrices: of the model. dtype_bits: of its dtype.

    Raises:
        ValueError: an unknown method or setting; the message names ``--weight-bits``.
    """
    loaded = config.get("load_in_4bit") or config.get("load_in_8bit")
    method = "bitsandbytes" if loaded else str(config.get("quant_method") or "").lower().replace("_", "-")
    if method not in READERS:
        why = REFUSED.get(method, f"sizes are known for {', '.join(sorted(READERS))}")
        raise ValueError(
            f"quantization_config has quant_method={config.get('quant_method')!r}; {why}; --weight-bits plans for a "
            "number of bits"
        )
    try:
        scheme = READERS[method](config, matrices, dtype_bits)
        codecs = [(matrix, scheme.codec(matrix)) for matrix in matrices]
        return scheme, [(matrix, None if codec is None else codec.nbytes(matrix)) for matrix, codec in codecs]
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"quantization_config of {method} can't be read ({what}); --weight-bits plans for a number of bits"
        ) from error


def _bitsandbytes(config: Config, matrices: Matrices, dtype_bits: int) -> Scheme:
    """4 bits: a float32 scale per 64 elements; nested: 8 bits, and a float32 per 256 of them. 8 bits: one per row.

    4 bits have tables of 16 and 256 float32. ``matmul_4bit`` dequantises a matrix for more than some rows, and on a CPU
    without bfloat16 instructions; ``int8_linear_matmul`` multiplies codes, but converts them to float32 on a CPU
    without AVX512. Plans assume CPUs without them.
    """
    if config.get("load_in_8bit"):
        codec, unpacking = Codec(8, 0, 32), GPU_KERNELS
    elif config.get("bnb_4bit_use_double_quant"):
        codec, unpacking = Codec(4, 64, 8 + 32 / 256, matrix_bits=32 * (16 + 256 + 1)), EACH_CALL
    else:
        codec, unpacking = Codec(4, 64, 32, matrix_bits=32 * 16), EACH_CALL
    return linear_scheme(config, matrices, codec, unpacking, key="llm_int8_skip_modules")


def _fp8(config: Config, matrices: Matrices, dtype_bits: int) -> Scheme:
    """A float32 or 8-bit scale per block of 128 x 128 (mxfp8: 1 x 32), or one per matrix; fp4 experts: 8 bits per 32.

    transformers dequantises at load on a CPU and on GPUs below compute capability 8.9.
    """
    mx = config.get("quant_method") == "mxfp8"
    block = config.get("weight_block_size", (1, 32) if mx else (128, 128))
    codec = Codec(8, matrix_bits=32)
    if block:
        bits = 8 if mx or config.get("scale_fmt") == "ue8m0" else 32
        codec = Codec(8, int(block[1]), bits, block_rows=int(block[0]))
    key = "modules_to_not_convert" if config.get("modules_to_not_convert") is not None else "ignored_layers"
    scheme = linear_scheme(config, matrices, codec, Unpacking("never", "load", 89), key=key, experts=True)
    embeddings = tuple(config.get("modules_to_convert") or ())

    def select(matrix: Matrix) -> Codec | None:
        if matrix.part == "embedding":
            return Codec(8, matrix_bits=32) if embeddings and matrix.name.endswith(embeddings) else None
        found = scheme.codec(matrix)
        fp4 = found is not None and matrix.part == "experts" and config.get("expert_dtype") == "fp4"
        return Codec(4, 32, 8) if fp4 else found

    return replace(scheme, codec=select)


def _fbgemm(config: Config, matrices: Matrices, dtype_bits: int) -> Scheme:
    """A float32 scale per row."""
    return linear_scheme(config, matrices, Codec(8, 0, 32), NEVER, experts=True)


def _mxfp4(config: Config, matrices: Matrices, dtype_bits: int) -> Scheme:
    """Experts alone: 4 bits, an 8-bit exponent per 32. transformers unpacks at load on a CPU or without ``kernels``."""
    names = skips(matrices, config.get("modules_to_not_convert") or ()).names

    def select(matrix: Matrix) -> Codec | None:
        return Codec(4, 32, 8) if matrix.part == "experts" and matrix.name not in names else None

    note = "mxfp4 stays packed with the packages kernels and triton, without them it is unpacked when loaded"
    return Scheme("mxfp4", select, Unpacking("never", "load", 75), (note,))


def _quanto(config: Config, matrices: Matrices, dtype_bits: int) -> Scheme:
    """A scale of the model's dtype per row; int4 and int2: a scale and a shift per 128 columns, or 96, 64, 32.

    Each matrix is dequantised, with the copies that were measured on a CPU. In bfloat16 kernels read int8 on a CPU and
    int4; plans don't count on them.
    """
    kind, copies = config.get("weights", "int8"), {"int8": 1.0, "float8": 2.4, "int4": 4.0, "int2": 4.0}
    bits = {"int8": 8, "float8": 8, "int4": 4, "int2": 2}[kind]
    unpacking = Unpacking("call", "call", copies=copies[kind])
    scheme = linear_scheme(config, matrices, Codec(8, 0, dtype_bits), unpacking)

    def select(matrix: Matrix) -> Codec | None:
        if bits == 8 or scheme.codec(matrix) is None:
            return scheme.codec(matrix)
        group = next((g for g in (128, 96, 64, 32) if matrix.columns > 128 and matrix.columns % g == 0), 0)
        return Codec(bits, group, 2 * dtype_bits)

    return replace(scheme, codec=select)


def _eetq(config: Config, matrices: Matrices, dtype_bits: int) -> Scheme:
    """A float16 scale per row."""
    return linear_scheme(config, matrices, Codec(8, 0, 16), NEVER)


def _bitnet(config: Config, matrices: Matrices, dtype_bits: int) -> Scheme:
    """Four ternary weights in a byte, a scale per matrix. ``autobitlinear`` unpacks at load, ``online`` never packs."""
    automatic = config.get("linear_class") == "autobitlinear"
    codec = None if automatic and config.get("quantization_mode") == "online" else Codec(2, matrix_bits=dtype_bits)
    return linear_scheme(config, matrices, codec, AT_LOAD if automatic else EACH_CALL)


def _table_bits(config: Config, key: str, default: int, most: int) -> int:
    """The bits that index a table of ``2**bits`` entries.

    Raises:
        ValueError: not from 1 to ``most``.
    """
    return integer(key, int(config.get(key, default)), most=most)


def _aqlm(config: Config, matrices: Matrices, dtype_bits: int) -> Scheme:
    """Codes of 8 or 16 bits per codebook and group, 16-bit codebooks per matrix, a 16-bit scale per output group."""
    columns, rows = int(config.get("in_group_size", 8)), int(config.get("out_group_size", 1))
    count, bits = int(config.get("num_codebooks", 1)), _table_bits(config, "nbits_per_codebook", 16, most=16)
    code = count * (8 if bits <= 8 else 16) / (columns * rows)
    codec = Codec(code, 0, 16, block_rows=rows, matrix_bits=16 * count * 2**bits * columns * rows)
    return linear_scheme(config, matrices, codec, GPU_KERNELS, key="linear_weights_not_to_quantize")


def _higgs(config: Config, matrices: Matrices, dtype_bits: int) -> Scheme:
    """A scale of the model's dtype per group, and tables of ``2**bits`` and ``2 * 4**bits`` elements."""
    bits, group = _table_bits(config, "bits", 4, most=8), int(config.get("group_size", 256))
    codec = Codec(bits, group, dtype_bits, matrix_bits=dtype_bits * (2**bits + 2 * 4**bits))
    return linear_scheme(config, matrices, codec, NEVER)


def _metal(config: Config, matrices: Matrices, dtype_bits: int) -> Scheme:
    """A scale and a bias of the model's dtype per group. Only Apple GPUs keep the codes."""
    codec = Codec(int(config.get("bits", 4)), int(config.get("group_size", 64)), 2 * dtype_bits)
    return linear_scheme(config, matrices, codec, Unpacking("never", "load", 1000))


def _gemma(config: Config, matrices: Matrices, dtype_bits: int) -> Scheme:
    """A float32 scale per row and two per matrix; bits by regular expressions; embeddings if set."""
    rules = [(regex(name), settings) for name, settings in (config.get("module_quant_configs") or {}).items()]
    scheme = linear_scheme(config, matrices, Codec(8), EACH_CALL)

    def select(matrix: Matrix) -> Codec | None:
        if scheme.codec(matrix) is None and not (matrix.part == "embedding" and config.get("quantize_embeddings")):
            return None
        settings: Config = next((settings for rule, settings in rules if rule.search(matrix.name)), {})
        bits = int(settings.get("num_bits") or config.get("num_bits", 4))
        return Codec(bits, 0, 32, matrix_bits=0 if matrix.part == "embedding" else 64)

    return replace(scheme, codec=select)


def _fp4(config: Config, matrices: Matrices, dtype_bits: int) -> Scheme:
    """nvfp4: an 8-bit scale per 16, a float32 per matrix; mxfp4: an 8-bit scale per 32. Kernels of Blackwell GPUs.

    transformers' own nvfp4 keeps the scales in two orders. Master weights and pseudo-quantisation keep the dtype.
    """
    kind = config.get("forward_dtype") or config.get("weight_dtype") or config.get("dtype") or "nvfp4"
    plain = any(config.get(key) for key in ("store_master_weights", "keep_master_weights", "pseudoquantization"))
    codec = {"nvfp4": Codec(4, 16, 8, matrix_bits=32), "mxfp4": Codec(4, 32, 8)}[kind]
    if config.get("quant_method") == "nvfp4":
        codec = replace(codec, group_bits=16)
    if config.get("quant_method") != "nvfp4" and config.get("modules_to_not_convert") is None:
        config = {**config, "modules_to_not_convert": ["lm_head"]}
    return linear_scheme(config, matrices, None if plain else codec, NEVER)


#: Readers by method, with hyphens for underscores.
READERS: dict[str, Callable[[Config, Matrices, int], Scheme]] = {
    "aqlm": _aqlm, "auto-round": auto_round, "autoround": auto_round, "awq": awq, "bitnet": _bitnet,
    "bitsandbytes": _bitsandbytes, "compressed-tensors": compressed_tensors, "eetq": _eetq, "fbgemm-fp8": _fbgemm,
    "fouroversix": _fp4, "fp-quant": _fp4, "fp8": _fp8, "gemma": _gemma, "gptq": gptq, "higgs": _higgs, "hqq": hqq,
    "metal": _metal, "modelopt": modelopt, "mxfp4": _mxfp4, "mxfp8": _fp8, "nvfp4": _fp4, "quanto": _quanto,
    "torchao": torchao,
}  # fmt: skip
#: Why other methods of transformers are refused.
REFUSED = {
    "gguf": "sizes are in the .gguf file, give it as the model",
    "quark": "its formats aren't in transformers but in AMD's package",
    "sinq": "its scales' layout isn't in transformers but in its package",
    "spqr": "its sizes depend on the number of outliers",
    "vptq": "its codebooks differ from layer to layer",
}
