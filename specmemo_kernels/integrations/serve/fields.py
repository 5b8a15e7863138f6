"""Types of the fields of requests, and what all parts of requests have in common."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator, model_validator

from specmemo_kernels.arguments import shown


def _number(value: Any) -> Any:
    """Pydantic takes ``true`` as 1 and ``"5"`` as 5."""
    if isinstance(value, bool | str):
        raise ValueError(f"expected a number, got {shown(value)}")
    return value


def _flag(value: Any) -> Any:
    """Pydantic takes 1 for ``true`` where only ``true`` is allowed."""
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {shown(value)}")
    return value


def _digits(key: Any) -> Any:
    """Keys of JSON are texts; pydantic takes ``" 5 "`` and ``"5_0"`` too."""
    if isinstance(key, str) and not (key.isascii() and key.isdigit()):
        raise ValueError(f"expected a token id, got {shown(key)}")
    return key


Integer = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number)]
Flag = Annotated[bool, Field(strict=True)]
One = Annotated[Literal[1], BeforeValidator(_number)]
OnlyTrue = Annotated[Literal[True], BeforeValidator(_flag)]
OnlyFalse = Annotated[Literal[False], BeforeValidator(_flag)]
TokenId = Annotated[int, BeforeValidator(_digits)]
#: The first wrong member is enough: errors of a million members take seconds, in which no other thread runs.
FirstError = Field(fail_fast=True)
TokenIds = Annotated[list[Annotated[Integer, Field(ge=0)]], FirstError]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
Several = Field(max_length=10_000, fail_fast=True)


def expecting(expected: str) -> WrapValidator:
    """A validator with one sentence instead of an error for each member of a union."""

    def check(value: Any, inner: Any) -> Any:
        try:
            return inner(value)
        except ValidationError as error:
            raise ValueError(f"expected {expected}, got {shown(value)}") from error

    return WrapValidator(check)


def _in_parts(value: Any, inner: Any) -> Any:
    """Check an object up to the first wrong part, as older versions of pydantic have no ``fail_fast`` for objects."""
    if not isinstance(value, dict):
        return inner(value)
    checked: dict[Any, Any] = {}
    members = iter(value.items())
    while part := dict(islice(members, 16)):
        checked |= inner(part)
    return checked


FewErrors = WrapValidator(_in_parts)


class Fields(BaseModel):
    """``null`` is a field's default, also of those that would be refused otherwise; of unknown ones one is an error."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name in [name for name in given if name not in cls.model_fields][1:]:
            del given[name]
        return given
