"""The outer shape of a pod template; what its spec holds is Kubernetes' own and checked there."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from xpyd_operator.document.base import ApiModel


def _drop_nulls(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {k: v for k, v in cast("dict[str, object]", value).items() if v is not None}


Labels = Annotated[
    dict[str, Annotated[str, Field(max_length=63)]],
    Field(max_length=64),
    BeforeValidator(_drop_nulls),
]
Annotations = Annotated[
    dict[str, Annotated[str, Field(max_length=16384)]],
    Field(max_length=64),
    BeforeValidator(_drop_nulls),
]


class PodMetadata(ApiModel):
    """Metadata of the pods, beside what the operator sets."""

    labels: Labels = Field(default_factory=dict[str, str])
    """Labels of the pods; the operator's own cannot be set."""
    annotations: Annotations = Field(default_factory=dict[str, str])
    """Annotations of the pods."""


class PodTemplate(ApiModel):
    """Merged strategically into the pods: lists by name, maps key by key."""

    metadata: PodMetadata | None = None
    """Labels and annotations of the pods."""
    spec: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )
    """A PodSpec: nodeSelector, tolerations, affinity, topologySpreadConstraints, volumes,
    containers, ... Fields that the operator owns are refused by a condition."""


class _ShapedLike:
    """See shaped_like()."""

    def __init__(self, model: type[ApiModel]) -> None:
        self._model = model

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        model = handler.generate_schema(self._model)
        checked = core_schema.no_info_wrap_validator_function(_as_map, model)
        return core_schema.nullable_schema(
            checked, serialization=core_schema.simple_ser_schema("any")
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(schema)


def _as_map(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    checked: ApiModel = handler(value)
    return checked.model_dump(by_alias=True, exclude_unset=True)


def shaped_like(model: type[ApiModel]) -> _ShapedLike:
    """The value is checked as `model` is, and kept as a map of what it has."""
    return _ShapedLike(model)
