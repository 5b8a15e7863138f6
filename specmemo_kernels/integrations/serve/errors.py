"""Errors of requests, in OpenAI's form, and messages of wrong fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmemo_kernels.arguments import shown


class BadRequest(ValueError):
    """A request that can't be answered; the message has the value and the limit. ``param``: the wrong field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def field_error(details: Mapping[str, Any]) -> tuple[str, str | None]:
    """The message of a validation error of pydantic, with the value, and the field. Names that clients chose are
    shortened too.
    """
    place = ".".join(shown(str(part))[1:-1] for part in details["loc"])
    if details["type"] == "extra_forbidden":
        return f"unknown field '{place}'", place
    message = str(details["msg"]).removeprefix("Value error, ")
    if details["type"] == "value_error" and not place:  # a sentence about several fields
        return message, getattr(details["ctx"]["error"], "param", None)
    if details["type"] not in ("value_error", "missing"):  # ours have the value, missing ones have none
        message = f"{message.partition(', got ')[0]}, got {shown(details['input'])}"
    return f"{place or 'the body'}: {message}", place or None


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
