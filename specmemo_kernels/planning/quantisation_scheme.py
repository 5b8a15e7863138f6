"""A quantisation scheme: how many bytes each matrix takes, and when it is unpacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specmemo_kernels.planning.decoder_matrices import Matrix
from specmemo_kernels.planning.module_names import skips

#: A ``quantization_config``.
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Codec:
    """Storage of a quantised matrix, in bits.

    Attributes:
        bits: of a code. group: columns that share a scale; 0: all of a row. group_bits: of a group's scale and zero.
        block_rows: rows that share a scale. column_bits, matrix_bits: further bits of a column and of the matrix.
    """

    bits: float
    group: int = 0
    group_bits: float = 0
    block_rows: int = 1
    column_bits: float = 0
    matrix_bits: float = 0

    def nbytes(self, matrix: Matrix) -> float:
        """Bytes of all ``matrix.count`` matrices."""
        groups = -(-matrix.rows // self.block_rows) * (-(-matrix.columns // self.group) if self.group > 0 else 1)
        bits = matrix.rows * matrix.columns * self.bits + groups * self.group_bits
        return matrix.count * (bits + matrix.columns * self.column_bits + self.matrix_bits) / 8


@dataclass(frozen=True)
class Unpacking:
    """When a method's package writes matrices in the model's dtype.

    ``"never"``; ``"call"``: one matrix at a time, in each pass over several rows; ``"load"``: all of them, once.

    Attributes:
        gpu, cpu: by the kind of device. min_target: GPUs below this compute capability (times ten) unpack at load.
        copies: matrices of the model's dtype that a call holds at once, as temporaries of the package's Python code.
    """

    gpu: str = "never"
    cpu: str = "never"
    min_target: int = 0
    copies: float = 1.0

    def on(self, target: str | None, cpu: bool) -> str:
        """On a CPU, or on a GPU with a Triton target (``"sm_86"``)."""
        if cpu:
            return self.cpu
        nvidia = target is not None and target.startswith("sm_")
        return "load" if nvidia and int(str(target)[3:]) < self.min_target else self.gpu


NEVER, EACH_CALL, AT_LOAD = Unpacking(), Unpacking("call", "call"), Unpacking("load", "load")
#: Kernels for codes on GPUs; on a CPU each matrix is dequantised.
GPU_KERNELS = Unpacking("never", "call")


@dataclass(frozen=True)
class Scheme:
    """A model's quantisation.

    Attributes:
        codec: of a matrix; ``None``: in the model's dtype. notes: sentences for the plan.
    """

    method: str
    codec: Callable[[Matrix], Codec | None]
    unpacking: Unpacking = NEVER
    notes: tuple[str, ...] = ()


def linear_scheme(
    config: Config, matrices: Sequence[Matrix], codec: Codec | None, unpacking: Unpacking, *,
    key: str = "modules_to_not_convert", experts: bool = False,
) -> Scheme:  # fmt: skip
    """Of a method that replaces each ``nn.Linear`` outside of a list of names, by transformers' rule.

    Without a list, lm_head and tied matrices are left out; with a list, only what it names.

    Args:
        key: the list's key. experts: the method has code for experts, which are no ``nn.Linear``.
    """
    method, left_out = str(config.get("quant_method") or "bitsandbytes"), skips(matrices, config.get(key))
    notes = left_out.notes(key)
    if not experts and any(matrix.part == "experts" for matrix in matrices):
        notes += (f"transformers loads experts unquantised: {method} replaces nn.Linear modules only",)

    def select(matrix: Matrix) -> Codec | None:
        inside = matrix.linear or (experts and matrix.part == "experts")
        return codec if inside and matrix.name not in left_out.names else None

    return Scheme(method, select, unpacking, notes)
