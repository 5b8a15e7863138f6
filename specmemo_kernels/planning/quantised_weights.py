"""How many bytes of a model's matrices are codes, by part, from its ``quantization_config``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from specmemo_kernels.planning.decoder_matrices import Matrix
from specmemo_kernels.planning.quantisation_methods import stored_matrices
from specmemo_kernels.planning.quantisation_scheme import NEVER, Unpacking

PARTS = ("attention", "feed_forward", "experts", "lm_head", "embedding")


@dataclass(frozen=True)
class PartBytes:
    """Storage of a part's matrices.

    Attributes:
        plain: share of the elements in the model's dtype.
        coded: bytes of the others, scales and zero points included, per element of the whole part.
    """

    plain: float = 1.0
    coded: float = 0.0

    def per_element(self, dtype_bytes: int) -> float:
        """Mean bytes per element."""
        return self.plain * dtype_bytes + self.coded


PLAIN = PartBytes()


@dataclass(frozen=True)
class QuantisedWeights:
    """Storage of a model's matrices.

    Attributes:
        method: the quantisation's name; empty: there is none.
        attention, feed_forward, experts, lm_head, embedding: by part; feed-forward layers with shared experts and
            routers. Recurrent layers count as attention.
        unpacking: when the method's package writes matrices in the model's dtype.
        largest: elements of the largest matrix that each pass dequantises; 0: none.
        notes: sentences for the plan.
    """

    method: str = ""
    attention: PartBytes = PLAIN
    feed_forward: PartBytes = PLAIN
    experts: PartBytes = PLAIN
    lm_head: PartBytes = PLAIN
    embedding: PartBytes = PLAIN
    unpacking: Unpacking = NEVER
    largest: int = 0
    notes: tuple[str, ...] = ()

    @classmethod
    def uniform(cls, bits: float) -> Self:
        """The layers' matrices in ``bits`` bits, scales included, which kernels read as they are."""
        part = PartBytes(0.0, bits / 8)
        return cls(f"{bits:g} bits", part, part, part)

    @classmethod
    def read(cls, config: Mapping[str, Any], matrices: Sequence[Matrix], dtype_bytes: int) -> Self:
        """From a ``quantization_config`` for ``matrices`` of a model in a dtype of ``dtype_bytes``.

        Raises:
            ValueError: unknown method or setting; the message names ``--weight-bits``.
        """
        scheme, stored = stored_matrices(config, matrices, 8 * dtype_bytes)
        return cls.of_matrices(scheme.method, stored, scheme.unpacking, scheme.notes)

    @classmethod
    def of_matrices(
        cls,
        method: str,
        stored: Iterable[tuple[Matrix, float | None]],
        unpacking: Unpacking,
        notes: tuple[str, ...] = (),
    ) -> Self:
        """From the bytes of each matrix; ``None`` for one in the model's dtype."""
        elements = dict.fromkeys(PARTS, 0)
        plain, coded, largest = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0.0), 0
        for matrix, nbytes in stored:
            elements[matrix.part] += matrix.elements
            if nbytes is None:
                plain[matrix.part] += matrix.elements
            else:
                coded[matrix.part] += nbytes
                largest = max(largest, matrix.rows * matrix.columns)
        parts = {name: PartBytes(plain[name] / n, coded[name] / n) for name, n in elements.items() if n}
        return cls(method=method, unpacking=unpacking, largest=largest, notes=notes, **parts)

    @property
    def in_codes(self) -> bool:
        """Whether any matrix is in codes."""
        return any(getattr(self, part).coded for part in PARTS)

    def only_coded(self) -> Self:
        """Storage of the quantised elements alone, dequantised."""
        parts: dict[str, Any] = {name: PartBytes(1 - getattr(self, name).plain) for name in PARTS}
        return replace(self, **parts)

    def on(self, target: str | None, cpu: bool) -> Self:
        """The weights in use on a CPU, or on a GPU with a Triton target: as stored, or unpacked."""
        when = self.unpacking.on(target, cpu)
        if when == "load":
            plain: dict[str, Any] = dict.fromkeys(PARTS, PLAIN)
            return replace(self, **plain, largest=0)
        return self if when == "call" else replace(self, largest=0)


#: A model without quantisation.
UNQUANTISED = QuantisedWeights()
