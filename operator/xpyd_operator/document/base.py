"""The base of the document's models, their rules, and the scalar types that several models use.

A bound or a rule is written once, in a field's annotation or as a method of its model. A rule has
a CEL expression for the API server, a Python twin for `xpyd up`, and one message for both: pydantic
runs the twin, `document.crd` writes the expression into the CRD, and `document.mistakes` words the
error. `Transition` rules compare an object with its previous version, so only
`document.fleetpool` runs them. This module knows no field of the document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import (
    CoreSchema,
    InitErrorDetails,
    PydanticCustomError,
    ValidationError,
    core_schema,
)

M = TypeVar("M")
VALIDATIONS = "x-kubernetes-validations"
RULE = "rule"
"""pydantic's error type for our own rules: the message is the text after the path."""
INT_OR_STRING = "x-kubernetes-int-or-string"
"""A schema's extension, and pydantic's error type for a value that is neither."""
DUPLICATE = "duplicate"
"""pydantic's error type for the second of two equal items; `key` in its context is their key."""


def rule_error(text: str) -> PydanticCustomError:
    """The error of a rule that does not hold; `text`: the API server's, after the path."""
    return PydanticCustomError(RULE, "{text}", {"text": text})


def duplicate(key: str, value: str) -> PydanticCustomError:
    """A second item of a list is equal to one before, or has an equal field `key`."""
    return PydanticCustomError(DUPLICATE, "duplicate", {"key": key, "value": value})


def wrong_type_error() -> PydanticCustomError:
    """A value that must be an integer or text is neither."""
    return PydanticCustomError(INT_OR_STRING, "neither an integer nor text")


def mistake(error: PydanticCustomError, *loc: str | int) -> InitErrorDetails:
    """One mistake at `loc`, relative to the value that is being checked."""
    return InitErrorDetails(type=error, loc=loc, input=None)


def raise_all(mistakes: Iterable[InitErrorDetails]) -> None:
    """Raise one ValidationError with all the mistakes, if there are any."""
    if found := list(mistakes):
        raise ValidationError.from_exception_data("rules", found)


@dataclass(frozen=True)
class Numbers(Generic[M]):
    """The values at fault, which a broken rule's message shows at its end in parentheses.

    `text`: with %d and %s, which CEL's format and Python's % read alike; `cel`: the values as CEL,
    `of`: as Python has them.
    """

    text: str
    cel: str
    of: Callable[[M], tuple[int | str, ...]]

    def expression(self, message: str) -> str:
        """`message` with the values, as a CEL expression."""
        quoted = message.replace("\\", "\\\\").replace("'", "\\'").replace("%", "%%")
        return f"'{quoted} ({self.text})'.format([{self.cel}])"


@dataclass(frozen=True)
class _Fields:
    """A rule over fields of a model; `field` names the one at fault, camelCase.

    `in_cluster`: the rule is about pods or nodes, so local mode does not check it.
    """

    cel: str
    message: str
    field: str
    missing: bool
    in_cluster: bool

    def schema(self) -> dict[str, str]:
        """The rule as an entry of x-kubernetes-validations."""
        path = {"fieldPath": f".{self.field}"} if self.field else {}
        # Not the default, FieldValueInvalid: the server would show the type of the whole object.
        reason = "FieldValueRequired" if self.missing else "FieldValueForbidden"
        return {"rule": self.cel, "message": self.message, "reason": reason, **path}

    @property
    def text(self) -> str:
        """The API server's text after the path."""
        return f"{'Required value' if self.missing else 'Forbidden'}: {self.message}"


@dataclass(frozen=True)
class Rule(_Fields, Generic[M]):
    """A method of a model that must hold."""

    holds: Callable[[M], bool]
    numbers: Numbers[M] | None = None

    def schema(self) -> dict[str, str]:
        """As the API server takes it; it falls back to the message where the numbers fail."""
        found = super().schema()
        if self.numbers:
            found["messageExpression"] = self.numbers.expression(self.message)
        return found

    def message_for(self, model: M) -> str:
        """The API server's text for `model`, which breaks the rule, after the path."""
        numbers = self.numbers
        return f"{self.text} ({numbers.text % numbers.of(model)})" if numbers else self.text


@dataclass(frozen=True)
class Transition(_Fields, Generic[M]):
    """A rule over a model and its value before."""

    holds: Callable[[M, M], bool]


def rule(
    cel: str,
    message: str,
    *,
    field: str = "",
    missing: bool = False,
    in_cluster: bool = False,
    numbers: Numbers[M] | None = None,
) -> Callable[[Callable[[M], bool]], Rule[M]]:
    """Makes a method of an ApiModel the twin of `cel`: True where the rule holds.

    `missing`: the rule is broken because `field` is absent. `in_cluster`: not checked by local
    mode.
    """
    return lambda holds: Rule(cel, message, field, missing, in_cluster, holds, numbers)


def transition(
    cel: str, message: str, *, field: str
) -> Callable[[Callable[[M, M], bool]], Transition[M]]:
    """As `rule`; the method gets the model and the model before the change."""
    return lambda holds: Transition(
        cel, message, field, missing=False, in_cluster=False, holds=holds
    )


@dataclass(frozen=True)
class _SchemaRule:
    """The half of a rule over one value that goes into the CRD."""

    cel: str
    message: str

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        found = handler(schema)
        found.setdefault(VALIDATIONS, []).append({"rule": self.cel, "message": self.message})
        return found


@dataclass(frozen=True)
class Check(_SchemaRule):
    """A rule over one value, for `Annotated`. Checked only where the value has the right type.

    `kind`: the value's type in the schema, which the API server shows.
    """

    holds: Callable[[Any], bool]
    kind: str = "string"

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: object) -> object:
        if not self.holds(value):
            raise rule_error(_invalid(self.kind, self.message))
        return value


def other_port(taken: int, who: str) -> Check:
    """A port that is not `taken`; `who` listens there."""
    message = f"must not be {taken}: {who}"
    return Check(f"self != {taken}", message, lambda port: port != taken, kind="integer")


@dataclass(frozen=True)
class ListCheck(_SchemaRule):
    """As Check, over a whole list, reported together with the mistakes of its items.

    `holds` sees the raw list, whose items may be anything.
    """

    holds: Callable[[list[Any]], bool]

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(source))

    def _check(self, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        fine = self.holds(_items(value))
        text = _invalid("array", self.message)
        return _validated([] if fine else [mistake(rule_error(text))], value, handler)


@dataclass(frozen=True)
class Unique:
    """Items of a list, or their field `key`, must differ; the second of two equal ones is at
    fault."""

    key: str = ""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        found = handler(schema)
        found["x-kubernetes-list-type"] = "map" if self.key else "set"
        if self.key:
            found["x-kubernetes-list-map-keys"] = [self.key]
        return found

    def _check(self, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        return _validated(list(self._duplicates(_items(value))), value, handler)

    def _duplicates(self, raw: list[Any]) -> Iterable[InitErrorDetails]:
        seen: set[Hashable] = set()
        for index, item in enumerate(raw):
            value: object = item
            if self.key and isinstance(item, dict):
                value = cast("dict[str, object]", item).get(self.key)
            if not isinstance(value, str):
                continue
            if value in seen:
                yield mistake(duplicate(self.key, value), index)
            seen.add(value)


def _invalid(kind: str, message: str) -> str:
    return f'Invalid value: "{kind}": {message}'


def _items(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _validated(
    mistakes: list[InitErrorDetails], value: object, handler: ValidatorFunctionWrapHandler
) -> object:
    """The validated value; else its own mistakes, followed by `mistakes`."""
    try:
        result: object = handler(value)
    except ValidationError as error:
        raise_all([*_details(error), *mistakes])
        raise
    raise_all(mistakes)
    return result


def _details(error: ValidationError) -> Iterable[InitErrorDetails]:
    for item in error.errors(include_url=False):
        kind, context = item["type"], item.get("ctx", {})
        found: str | PydanticCustomError = kind
        if kind == RULE:
            found, context = rule_error(item["msg"]), {}
        elif kind == DUPLICATE:
            found, context = duplicate(context["key"], context["value"]), {}
        elif kind == INT_OR_STRING:
            found, context = wrong_type_error(), {}
        yield InitErrorDetails(type=found, loc=item["loc"], input=item["input"], ctx=context)


def matching(pattern: str, message: str) -> Check:
    """The whole text must match `pattern`, which Python and RE2 read alike."""
    quoted = pattern.replace("\\", "\\\\").replace("'", "\\'")
    found = re.compile(pattern, re.ASCII)
    return Check(f"self.matches('^({quoted})$')", message, lambda v: bool(found.fullmatch(v)))


LOCAL = "local"
"""pydantic's context of a document for local mode: rules about pods and nodes are not checked."""
DNS_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_SIZE = r"[0-9]+(\.[0-9]+)?([eE][0-9]{1,2}|[kMGTPE]|[KMGTPE]i)?"
_PERCENT = "[1-9][0-9]?%"
_DNS_NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"


class ApiModel(BaseModel):
    """Base: camelCase names, no unknown field, no silent conversion, frozen."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        strict=True,
        populate_by_name=True,
        use_attribute_docstrings=True,
        ignored_types=(Rule, Transition),
    )
    rules: ClassVar[tuple[Rule[Any], ...]] = ()
    transitions: ClassVar[tuple[Transition[Any], ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        members = [member for kind in reversed(cls.__mro__) for member in vars(kind).values()]
        cls.rules = tuple(cast("Rule[Any]", m) for m in members if isinstance(m, Rule))
        cls.transitions = tuple(
            cast("Transition[Any]", m) for m in members if isinstance(m, Transition)
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> JsonSchemaValue:
        found = handler.resolve_ref_schema(handler(core_schema))
        if entries := [rule.schema() for rule in (*cls.rules, *cls.transitions)]:
            found[VALIDATIONS] = entries
        return found

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        """null counts as absent, as for the API server; an unknown field with null stays
        unknown."""
        if not isinstance(value, dict):
            return value
        known = {field.alias for field in cls.model_fields.values()}
        fields = cast("dict[str, object]", value)
        return {k: v for k, v in fields.items() if v is not None or k not in known}

    @model_validator(mode="after")
    def _keeps_its_rules(self, info: ValidationInfo) -> Self:
        is_local = info.context == LOCAL
        raise_all(
            mistake(
                rule_error(rule.message_for(self)), *rule.field.split(".") if rule.field else ()
            )
            for rule in self.rules
            if not (rule.in_cluster and is_local) and not rule.holds(self)
        )
        return self


def _size_text(value: object) -> object:
    """A size may be an integer; every spelling becomes text."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise wrong_type_error()


def _size(pattern: str, message: str) -> Check:
    quoted = pattern.replace("\\", "\\\\")
    twin = matching(pattern, message)
    cel = f"type(self) == int ? int(self) >= 0 : string(self).matches('^({quoted})$')"
    return Check(cel, twin.message, twin.holds, kind="")


_A_SIZE = "a size in bytes such as 1073741824, 8e9, 4Gi or 500M"
Size = Annotated[
    str,
    Field(max_length=64, json_schema_extra={INT_OR_STRING: True}),
    BeforeValidator(_size_text),
    _size(_SIZE, f"must be {_A_SIZE}"),
]
SizeOrPercent = Annotated[
    str,
    Field(max_length=64, json_schema_extra={INT_OR_STRING: True}),
    BeforeValidator(_size_text),
    _size(f"{_SIZE}|{_PERCENT}", f"must be {_A_SIZE}, or 1% to 99%"),
]
Plain = Check("!self.contains('\\x00')", "must not contain NUL characters", lambda v: "\0" not in v)
"""NUL is in no command line, environment or file name."""
HostPath = Annotated[
    str,
    Field(max_length=1024),
    Plain,
    Check(
        "self.startsWith('/') && !self.split('/').exists(part, part == '..')",
        "must be an absolute path without '..'",
        lambda path: path.startswith("/") and ".." not in path.split("/"),
    ),
]
DnsName = Annotated[
    str,
    Field(max_length=253),
    matching(
        _DNS_NAME,
        "must be the name of a Kubernetes object: lower-case letters, digits, '-' and '.'",
    ),
]
KeyName = Annotated[
    str,
    Field(max_length=253),
    matching("[-._a-zA-Z0-9]+", "must be a key's name: letters, digits, '-', '_' and '.'"),
]
