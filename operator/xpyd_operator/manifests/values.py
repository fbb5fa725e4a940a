"""What rendering needs beside the document: the fleet's place and the operator's settings. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]
"""A Kubernetes object or a part of one, as JSON has it."""


@dataclass(frozen=True)
class Settings:
    """The operator's own flags that reach the pods."""

    worker_image: str
    """Image of engines whose document names none."""
    router_image: str
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets in the fleet's namespace."""


@dataclass(frozen=True)
class Site:
    """Where one fleet's objects go: its namespace and `uid`, that of the InferenceFleet object."""

    namespace: str
    uid: str
    settings: Settings
