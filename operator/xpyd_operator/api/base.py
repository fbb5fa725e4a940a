"""The pieces that the document's models are made of: the base model, scalar types, list rules.

A field says what is allowed in it once: the bounds of its type, or `allowed=` where those would not
tell a person what to write. xpyd_operator.api.problems turns either into the error text.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Annotated, Any, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import (
    InitErrorDetails,
    PydanticCustomError,
    ValidationError,
)

DNS_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_SIZE = r"[0-9]+(\.[0-9]+)?([eE][0-9]{1,2}|[kMGTPE]|[KMGTPE]i)?"
_PERCENT = "[1-9][0-9]?%"
_MAX_SIZE_TEXT = 64
RULE = "rule"
"""pydantic's error type for the rules that are ours: their message says all."""


class ApiModel(BaseModel):
    """Base: camelCase names, no unknown field, no silent conversion, never changed once read."""

    model_config = ConfigDict(
        alias_generator=to_camel, extra="forbid", frozen=True, strict=True, populate_by_name=True
    )


def allowed(text: str) -> dict[str, Any]:
    """`json_schema_extra` of a field: what a person may write there."""
    return {"allowed": text}


def _size_text(value: object) -> object:
    """YAML reads 8.0e+9 as a float and 8e9 as text: all spellings of a size become text."""
    if isinstance(value, float) and value.is_integer() and 0 <= value < 2**63:
        return str(int(value))
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return str(value)
    return value


Size = Annotated[
    str,
    BeforeValidator(_size_text),
    Field(
        max_length=_MAX_SIZE_TEXT,
        pattern=f"^{_SIZE}$",
        json_schema_extra=allowed("bytes such as 1073741824, 8e9, 4Gi or 500M"),
    ),
]
SizeOrPercent = Annotated[
    str,
    BeforeValidator(_size_text),
    Field(
        max_length=_MAX_SIZE_TEXT,
        pattern=f"^({_SIZE}|{_PERCENT})$",
        json_schema_extra=allowed("bytes such as 1073741824, 8e9, 4Gi or 500M, or 1% to 99%"),
    ),
]


def no_null(value: object) -> object:
    """Refuse an explicit null where a field may be left out: the API server does so too."""
    if value is None:
        raise rule("given null; leave the field out instead")
    return value


def rule(message: str) -> PydanticCustomError:
    """One of our own rules is broken; raised by a field's validator."""
    return PydanticCustomError(RULE, "{text}", {"text": message})


def mistake(message: str, *loc: str | int) -> InitErrorDetails:
    """One broken rule at `loc`, relative to the field that is being checked."""
    return InitErrorDetails(type=rule(message), loc=loc, input=None)


def also(check: Callable[[list[Any]], Iterable[InitErrorDetails]]) -> WrapValidator:
    """A rule over a whole list, reported beside the mistakes of its items, not instead of them.

    `check` sees the raw list, whose items may be anything.
    """

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        raw = cast("list[Any]", value) if isinstance(value, list) else []
        broken = list(check(raw))
        try:
            result: object = handler(value)
        except ValidationError as error:
            broken = [*_details(error), *broken]
        else:
            if not broken:
                return result
        raise ValidationError.from_exception_data("list", broken)

    return WrapValidator(validate)


def _details(error: ValidationError) -> list[InitErrorDetails]:
    return [
        InitErrorDetails(
            type=rule(item["msg"]) if item["type"] == RULE else item["type"],
            loc=item["loc"],
            input=item["input"],
            ctx=item.get("ctx", {}),
        )
        for item in error.errors(include_url=False)
    ]


def unique(*key: str) -> Callable[[list[Any]], Iterable[InitErrorDetails]]:
    """Items, or their field `key`, must differ; the second of two equal ones is at fault."""

    def check(raw: list[Any]) -> Iterable[InitErrorDetails]:
        seen: set[Hashable] = set()
        for index, item in enumerate(raw):
            value = cast("dict[str, Any]", item).get(key[0]) if key and _is_map(item) else item
            if not isinstance(value, str):
                continue
            if value in seen:
                yield mistake(f"Duplicate value {value!r}", index, *key)
            seen.add(value)

    return check


def _is_map(item: object) -> bool:
    return isinstance(item, dict)
