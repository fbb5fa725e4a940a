"""spec.model and spec.engine: what every engine serves, and how it is started."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xpyd_operator.document.base import ApiModel, DnsName, HostPath, KeyName, Plain
from xpyd_operator.document.rules import Check, Unique, matching, rule


class SecretRef(ApiModel):
    """A key of a Secret in the fleet's namespace."""

    name: DnsName
    """Name of the Secret."""
    key: KeyName = "token"
    """Key in the Secret."""


class ModelCache(ApiModel):
    """Where engines in a cluster find or keep checkpoints; it is mounted at /models."""

    type: Literal["None", "HostPath", "PersistentVolumeClaim"] = "None"
    """None: nothing is kept; a pod with an hf:// model downloads it into an emptyDir."""
    claim_name: DnsName = ""
    """Name of a PersistentVolumeClaim in the fleet's namespace."""
    path: HostPath = ""
    """Folder on the node. Pod security 'restricted' forbids hostPath."""
    read_only: bool = True
    """Engines may not write to it; an hf:// model must then be in it already."""

    @rule(
        "!has(self.type) || self.type != 'PersistentVolumeClaim' || has(self.claimName)",
        "type PersistentVolumeClaim needs the claim's name",
        field="claimName",
        missing=True,
    )
    def _has_claim(self) -> bool:
        return self.type != "PersistentVolumeClaim" or bool(self.claim_name)

    @rule(
        "!has(self.type) || self.type != 'HostPath' || has(self.path)",
        "type HostPath needs the folder's path",
        field="path",
        missing=True,
    )
    def _has_path(self) -> bool:
        return self.type != "HostPath" or bool(self.path)


class Model(ApiModel):
    """Which checkpoint the fleet serves, and under which names."""

    uri: Annotated[
        str,
        Field(max_length=512),
        Plain,
        matching("(hf|file)://.+", "must be hf://ORG/NAME or file://FOLDER"),
    ]
    """hf://ORG/NAME (downloaded, or from the cache) or file://FOLDER. A relative folder begins at
    the document's own in local mode and at /models in a cluster."""
    revision: Annotated[str, Field(max_length=128), Plain] = ""
    """Branch, tag or commit of an hf:// model."""
    served_names: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256), Plain], ...],
        Field(strict=False, max_length=8),
        Unique(),
    ] = ()
    """Names that requests may use; none: the checkpoint's own name."""
    secret_ref: SecretRef | None = None
    """Secret with the token of an hf:// model that is not public."""
    cache: ModelCache = ModelCache()
    """Where engines in a cluster find or keep checkpoints."""


class FieldRef(ApiModel):
    """A field of the pod."""

    api_version: Annotated[str, Field(max_length=16)] = "v1"
    """Version of the schema that fieldPath is written in."""
    field_path: Annotated[str, Field(min_length=1, max_length=256)]
    """Path of the field, such as metadata.name, spec.nodeName or status.podIP."""


class KeyRef(ApiModel):
    """A key of a Secret or ConfigMap in the fleet's namespace."""

    name: DnsName
    """Name of the object."""
    key: KeyName
    """Key in it."""
    optional: bool = False
    """The pod starts also without it."""


class EnvSource(ApiModel):
    """Where a variable's value comes from; exactly one of the fields."""

    field_ref: FieldRef | None = None
    """A field of the pod."""
    secret_key_ref: KeyRef | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""

    @rule(
        "[has(self.fieldRef), has(self.secretKeyRef), has(self.configMapKeyRef)]"
        ".filter(given, given).size() == 1",
        "needs exactly one of fieldRef, secretKeyRef and configMapKeyRef",
    )
    def _is_one(self) -> bool:
        given = (self.field_ref, self.secret_key_ref, self.config_map_key_ref)
        return sum(source is not None for source in given) == 1


class EnvVar(ApiModel):
    """One environment variable of every engine."""

    name: Annotated[
        str,
        Field(max_length=256),
        matching("[ -<>-~]+", "must be printable ASCII without '='"),
        Check(
            "!self.startsWith('XPYD_')",
            "must not begin with XPYD_: xpyd sets these variables itself",
            lambda name: not name.startswith("XPYD_"),
        ),
    ]
    """Name of the variable; XPYD_* is reserved."""
    value: Annotated[str, Field(max_length=32768), Plain] = ""
    """Its value; Kubernetes expands $(NAME) of a variable before it."""
    value_from: EnvSource | None = None
    """Where its value comes from, instead of value."""

    @rule(
        "!has(self.value) || self.value == '' || !has(self.valueFrom)",
        "value and valueFrom exclude each other: leave one out",
        field="valueFrom",
    )
    def _is_one(self) -> bool:
        return not self.value or self.value_from is None


_OF_POOLS = ("-t", "-tp", "-p", "-pp", "--tensor-parallel-size", "--pipeline-parallel-size")
"""The worker's flags that pools give, with one dash also cut short as argparse takes them: the pods
of an instance follow from them."""


class Engine(ApiModel):
    """What every engine gets beside what the fleet decides."""

    image: Annotated[
        str,
        Field(max_length=512),
        matching("[^ \\x00-\\x1f]+", "must be an image such as registry.example/worker:1.0"),
    ] = ""
    """Image of the engines in a cluster; none: the operator's default."""
    args: Annotated[
        tuple[
            Annotated[
                str,
                Field(max_length=1024),
                Plain,
                Check(
                    f"!self.matches('^({'|'.join(_OF_POOLS)})(=|$)')",
                    "must not say how an instance splits the model: use spec.pools[].parallelism",
                    lambda arg: arg.partition("=")[0] not in _OF_POOLS,
                ),
            ],
            ...,
        ],
        Field(strict=False, max_length=128),
    ] = ()
    """Flags of `xpyd worker`; they come last, so they win."""
    env: Annotated[
        tuple[EnvVar, ...],
        Field(strict=False, max_length=128),
        Unique("name"),
    ] = ()
    """Environment of every engine."""
