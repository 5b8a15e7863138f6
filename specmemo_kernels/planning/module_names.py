"""Module names in quantisation settings, matched with a decoder's matrices."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specmemo_kernels.planning.decoder_matrices import Matrix

#: Parts of names of modules that a decoder's matrices don't include: vision and audio towers, norms, MTP layers.
_ELSEWHERE = re.compile(r"vision|visual|image|audio|projector|norm|mtp|embed_vision|shared_head|eh_proj|indexer")


def decoder_name(pattern: str) -> str:
    """A setting's pattern with the names of transformers' Llama: no prefix of a language model, ``mlp`` for experts."""
    pattern = pattern.replace("model.language_model.", "model.").replace("language_model.", "")
    return pattern.replace("block_sparse_moe", "mlp").replace("mlp.router", "mlp.gate").removesuffix(".weight")


@functools.cache
def regex(pattern: str) -> re.Pattern[str]:
    """A compiled pattern of a configuration; one that is no regular expression stands for itself."""
    try:
        return re.compile(pattern)
    except re.error:
        return re.compile(re.escape(pattern))


def tag_of(name: str) -> str:
    """A name without ``model``, ``layers`` and numbers (hqq's tags): ``self_attn.q_proj``."""
    return ".".join(word for word in name.split(".") if word not in ("model", "layers") and not word.isdecimal())


def is_never_quantised(matrix: Matrix) -> bool:
    """Whether no method quantises this matrix: an embedding, a mixture's router, a filter of a recurrent layer."""
    return matrix.part == "embedding" or (matrix.part in ("attention", "feed_forward") and not matrix.linear)


@dataclass(frozen=True)
class Skips:
    """Matrices that a list of names leaves unquantised, and the names that match none."""

    names: frozenset[str]
    unmatched: tuple[str, ...] = ()

    def notes(self, key: str) -> tuple[str, ...]:
        """A sentence about names that match no matrix."""
        if not self.unmatched:
            return ()
        more = f" and {len(self.unmatched) - 3} more" if len(self.unmatched) > 3 else ""
        return (f"names in {key} match no matrix of the decoder: {', '.join(self.unmatched[:3])}{more}",)


def skips(matrices: Sequence[Matrix], patterns: Iterable[str] | None) -> Skips:
    """The matrices that transformers leaves out for these patterns (``should_convert_module``).

    A pattern matches a name from its start up to a module's end, as a regular expression, or as the name's end.
    ``None``: lm_head, and a tied embedding.
    """
    names = [matrix.name for matrix in matrices]
    if patterns is None:
        return Skips(frozenset(("lm_head", "model.embed_tokens")))
    matched, unmatched = set(), []
    for given in dict.fromkeys(patterns):
        pattern = decoder_name(given)
        rule = regex(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))")
        hits = [name for name in names if rule.match(name) or name.endswith(pattern)]
        matched.update(hits)
        if not hits and not _ELSEWHERE.search(given):
            unmatched.append(given)
    return Skips(frozenset(matched), tuple(unmatched))


def compressed_tensors_names(patterns: Iterable[str]) -> Callable[[Matrix], bool]:
    """Whether a matrix is a target of compressed-tensors: a name, a class, or ``re:`` and a regular expression."""
    given = [decoder_name(pattern) for pattern in patterns]
    exact = {pattern for pattern in given if not pattern.startswith("re:")}
    rules = [regex(pattern[3:]) for pattern in given if pattern.startswith("re:")]

    def matches(matrix: Matrix) -> bool:
        if matrix.name in exact or ("Linear" in exact and matrix.part != "embedding"):
            return True
        return any(rule.match(matrix.name) for rule in rules)

    return matches


def glob(pattern: str) -> re.Pattern[str]:
    """A name with ``*`` for any text, as modelopt writes it."""
    return regex(re.escape(decoder_name(pattern)).replace(r"\*", ".*"))
