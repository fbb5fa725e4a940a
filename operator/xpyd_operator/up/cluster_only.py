"""What a document says that this machine cannot do, and what only a cluster has a use for.

The document is the same in both places. What local mode could not honour is refused before
anything starts; what has no meaning here (images, volumes, Services) is named and left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from pydantic import BaseModel

from xpyd_core.errors import UserError
from xpyd_operator.document import InferenceFleet, Pool
from xpyd_operator.manifests import template_problems

CLUSTER_ONLY = frozenset(
    {
        "spec.model.secretRef",
        "spec.model.cache",
        "spec.engine.image",
        "spec.engine.env[].valueFrom",
        "spec.pools[].resources.sharedMemory",
        "spec.pools[].template",
        "spec.kvTransfer.sameHostPath",
        "spec.kvTransfer.keySecretRef",
        "spec.router.replicas",
        "spec.router.discoveryPort",
        "spec.router.service",
        "spec.router.template",
        "spec.networkPolicy",
    }
)
"""Fields without effect in local mode; paths without list indexes."""


def check_local(fleet: InferenceFleet, *, source: str) -> None:
    """UserError with all that local mode cannot run; `source` names the document."""
    lines = [
        line for index, pool in enumerate(fleet.spec.pools) for line in _with_gpus(index, pool)
    ]
    lines += template_problems(fleet)
    if lines:
        count = f"{len(lines)} mistakes" if len(lines) > 1 else "1 mistake"
        raise UserError("\n  ".join([f"{source}: {count}", *lines]))


def _with_gpus(index: int, pool: Pool) -> Iterator[str]:
    if gpus := pool.resources.gpus:
        given = "" if "gpus" in pool.resources.model_fields_set else " (the default)"
        yield (
            f"spec.pools[{index}].resources.gpus: {gpus}{given}: local mode runs CPU instances "
            "only; write `resources: {gpus: 0}`"
        )


def cluster_only(fleet: InferenceFleet) -> str:
    """One line that names the document's fields without effect here; "" where there are none."""
    given = [path for path, general in _given(fleet, "", "") if general in CLUSTER_ONLY]
    return f"only in a cluster: {', '.join(given)}" if given else ""


def _given(model: BaseModel, path: str, general: str) -> Iterator[tuple[str, str]]:
    """Path and path without indexes of every field that the document has."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if name not in model.model_fields_set or value is None:
            continue
        here, above = (f"{p}.{field.alias}".removeprefix(".") for p in (path, general))
        yield here, above
        if isinstance(value, BaseModel):
            yield from _given(value, here, above)
        elif isinstance(value, tuple):
            for index, item in enumerate(cast("tuple[object, ...]", value)):
                if isinstance(item, BaseModel):
                    yield from _given(item, f"{here}[{index}]", f"{above}[]")
