"""Builds the CustomResourceDefinitions from the models; `make generate` writes them to files.

A CRD's schema has no $ref, no null and no additionalProperties together with properties, and has
extensions of its own. Everything else is the models' JSON schema.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from xpyd_operator.document.base import INT_OR_STRING, VALIDATIONS
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.fleetpool import InferenceFleetPool
from xpyd_operator.document.pod_template import POD_SPEC, pod_schema
from xpyd_operator.document.status import FleetStatus, PoolStatus

GROUP = "xpyd.dev"
VERSION = "v1alpha1"
Schema = dict[str, Any]
_KEPT = (
    "description", "type", "format", "enum", "minimum", "maximum", "minLength", "maxLength",
    "pattern", "minItems", "maxItems", "minProperties", "maxProperties", "required",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-preserve-unknown-fields",
    INT_OR_STRING, VALIDATIONS,
)  # fmt: skip


def crds() -> tuple[Schema, ...]:
    """All CRDs, as JSON-able dicts built fresh."""
    return (fleet_crd(), pool_crd())


def fleet_crd() -> Schema:
    """The CRD of InferenceFleet."""
    fleet = structural(InferenceFleet)
    name_rules = fleet["properties"]["metadata"]["properties"]["name"][VALIDATIONS]
    # Rules may see metadata.name from the root only.
    rules = [{**rule, "fieldPath": ".metadata.name"} for rule in name_rules]
    return _crd(
        kind="InferenceFleet",
        short="fleet",
        spec=fleet["properties"]["spec"],
        status=structural(FleetStatus),
        extra={
            "description": fleet["description"],
            VALIDATIONS: rules,
        },
        columns=(
            _column("Model", ".spec.model.uri", "checkpoint that the fleet serves", wide=True),
            _column("Prefill", ".status.summary.prefill", "ready/wanted prefill instances"),
            _column("Decode", ".status.summary.decode", "ready/wanted decode instances"),
            _column(
                "Aggregated", ".status.summary.aggregated", "ready/wanted instances", wide=True
            ),
            _column("GPUs", ".status.summary.gpus", "GPUs of all instances", kind="integer"),
            _column("Ready", _condition("Ready", "status"), "whether all of it is ready"),
            _column("Reason", _condition("Ready", "reason"), "why it is not, or Ready"),
            _column("Roles", _condition("RolesReady", "reason"), "which role is lost", wide=True),
            _column("Leaving", ".status.summary.leaving", "instances that leave", wide=True),
            _column("Key", _condition("KeyRotated", "reason"), "how far a rotation is", wide=True),
            _column(
                "Other", _condition("OtherRelease", "reason"), "a release stands by", wide=True
            ),
            _column("Endpoint", ".status.endpoint", "URL of its OpenAI API", wide=True),
        ),
    )


def pool_crd() -> Schema:
    """The CRD of InferenceFleetPool, which has /scale."""
    pool = structural(InferenceFleetPool)
    crd = _crd(
        kind="InferenceFleetPool",
        short="fleetpool",
        spec=pool["properties"]["spec"],
        status=structural(PoolStatus),
        extra={"description": pool["description"]},
        columns=(
            _column("Fleet", ".spec.fleetName", "fleet that the pool belongs to"),
            _column("Role", ".spec.role", "what its instances do"),
            _column("Layout", ".status.layout", "ranks of an instance: TP2xPP2"),
            _column("Desired", ".spec.replicas", "instances wanted", kind="integer"),
            _column("Ready", ".status.readyReplicas", "instances that serve", kind="integer"),
            _column("Draining", ".status.drainingReplicas", "instances leaving", kind="integer"),
            _column("Requests", ".status.drainingRequests", "of those", kind="integer", wide=True),
            _column("Leases", ".status.drainingKvLeases", "of those", kind="integer", wide=True),
            _column("Since", ".status.drainingSince", "when the first was asked", wide=True),
        ),
    )
    crd["spec"]["versions"][0]["subresources"]["scale"] = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return crd


def structural(model: type[BaseModel]) -> Schema:
    """The model's schema in the form that a CRD takes."""
    root = model.model_json_schema(by_alias=True)
    return _convert(root, root.get("$defs", {}))


def _crd(
    *,
    kind: str,
    short: str,
    spec: Schema,
    status: Schema,
    extra: Schema,
    columns: tuple[Schema, ...],
) -> Schema:
    singular = kind.lower()
    schema: Schema = {
        **extra,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 253}},
            },
            "spec": spec,
            "status": status,
        },
    }
    age = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
    version: Schema = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [*columns, age],
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{singular}s.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "plural": f"{singular}s",
                "singular": singular,
                "kind": kind,
                "listKind": f"{kind}List",
                "shortNames": [short, f"{short}s"],
                "categories": ["xpyd"],
            },
            "versions": [version],
        },
    }


def _column(
    name: str, path: str, description: str, *, kind: str = "string", wide: bool = False
) -> Schema:
    column = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return {**column, "priority": 1} if wide else column


def _condition(kind: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


def _convert(node: Schema, defs: Schema) -> Schema:
    node = _resolve(node, defs)
    found: Schema = {}
    if "const" in node:
        node = {**node, "enum": [node["const"]]}
    for key in _KEPT:
        if key in node:
            found[key] = node[key]
    if node.get(POD_SPEC):
        found |= pod_schema()
    if "description" in found:
        found["description"] = " ".join(found["description"].split())
    if node.get(INT_OR_STRING):
        del found["type"]
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if found.get("type") == "integer":
        found.setdefault("format", "int32")
    _children(node, found, defs)
    if (default := _default(node, found)) is not None:
        found["default"] = default
    return found


def _children(node: Schema, found: Schema, defs: Schema) -> None:
    if "items" in node:
        found["items"] = _convert(node["items"], defs)
        found.setdefault("x-kubernetes-list-type", "atomic")
    if "properties" in node:
        found["properties"] = {
            name: _convert(child, defs) for name, child in node["properties"].items()
        }
    elif isinstance(node.get("additionalProperties"), dict) and not node.get(POD_SPEC):
        found["additionalProperties"] = _convert(node["additionalProperties"], defs)


def _resolve(node: Schema, defs: Schema) -> Schema:
    """Without $ref and without the null of an optional field; the field's own keywords win."""
    choices = [c for c in node.get("anyOf", ()) if c.get("type") != "null"]
    own = {key: value for key, value in node.items() if key not in ("anyOf", "$ref")}
    if len(choices) > 1:
        # A union of enums, the only union that the models have.
        values = [value for c in choices for value in c.get("enum") or [c["const"]]]
        return {"type": "string", "enum": values, **own}
    if choices:
        return {**_resolve(choices[0], defs), **own}
    if "$ref" in node:
        return {**_resolve(defs[node["$ref"].rpartition("/")[2]], defs), **own}
    return node


def _default(node: Schema, found: Schema) -> object:
    """None: the field has no default. That of an object is {}: its fields have their own."""
    default = node.get("default")
    if found.get("type") == "object":
        return {} if isinstance(default, dict) and "properties" in found else None
    return None if default in ("", [], {}) else default
