"""The base of the document's models and the scalar types that several of them use.

A bound or rule is written down once, here or in a field's annotation: pydantic checks it for
`xpyd up`, `document.crd` writes it into the CRD, `document.problems` puts it into words.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from xpyd_operator.document.rules import (
    INT_OR_STRING,
    VALIDATIONS,
    Check,
    Rule,
    Transition,
    broken,
    matching,
    mistake,
    neither,
    raise_all,
)

LOCAL = "local"
"""pydantic's context of a document for local mode: rules about pods and nodes are not asked."""
DNS_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_SIZE = r"[0-9]+(\.[0-9]+)?([eE][0-9]{1,2}|[kMGTPE]|[KMGTPE]i)?"
_PERCENT = "[1-9][0-9]?%"
_DNS_NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"


class ApiModel(BaseModel):
    """Base: camelCase names, no unknown field, no silent conversion, never changed once read."""

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
        members = list(vars(cls).values())
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
        """null is no value, as for the API server; an unknown field stays unknown with it."""
        if not isinstance(value, dict):
            return value
        known = {field.alias for field in cls.model_fields.values()}
        fields = cast("dict[str, object]", value)
        return {k: v for k, v in fields.items() if v is not None or k not in known}

    @model_validator(mode="after")
    def _keeps_its_rules(self, info: ValidationInfo) -> Self:
        is_local = info.context == LOCAL
        raise_all(
            mistake(broken(rule.told(self)), *rule.field.split(".") if rule.field else ())
            for rule in self.rules
            if not (rule.in_cluster and is_local) and not rule.holds(self)
        )
        return self


def _size_text(value: object) -> object:
    """A size may be an integer; all spellings become text."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise neither()


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
"""What no command line, environment or file name can hold."""
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
