"""A client that costs little: it shares the cores with what it measures.

One connection that is kept open, JSON in and out, one call at a time.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

_TIMEOUT_S = 60.0
_MERGE = "application/merge-patch+json"
_TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


class CallFailed(RuntimeError):
    """The API server refused a call; the text has its answer."""


class Client:
    """Calls as the user of a kubeconfig that the harness wrote."""

    def __init__(self, kubeconfig: Path) -> None:
        document = yaml.safe_load(kubeconfig.read_text())
        cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
        context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        context.load_cert_chain(user["client-certificate"], user["client-key"])
        url = urlsplit(cluster["server"])
        self._connection = http.client.HTTPSConnection(
            str(url.hostname), url.port, timeout=_TIMEOUT_S, context=context
        )

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def get(self, path: str) -> Any:
        """The JSON at `path`. Raises CallFailed."""
        return self._call("GET", path)

    def find(self, path: str) -> Any:
        """The JSON at `path`, None where there is nothing."""
        return self._call("GET", path, missing=True)

    def rows(self, path: str) -> list[dict[str, Any]]:
        """A list as `kubectl get` prints it, by column: a small part of what the objects are."""
        table = self._call("GET", f"{path}?includeObject=None", accept=_TABLE)
        columns = [column["name"] for column in table["columnDefinitions"]]
        return [dict(zip(columns, row["cells"], strict=True)) for row in table["rows"] or ()]

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Create an object."""
        return self._call("POST", path, body)

    def merge(self, path: str, body: Mapping[str, Any]) -> Any:
        """Merge patch."""
        return self._call("PATCH", path, body, content_type=_MERGE)

    def delete(self, path: str) -> Any:
        """Delete; what the object owns follows. Gone already is as good."""
        body = {"propagationPolicy": "Background"}
        return self._call("DELETE", path, body, missing=True)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
        accept: str = "application/json",
        missing: bool = False,
    ) -> Any:
        sent = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type, "Accept": accept}
        self._connection.request(method, path, sent, headers)
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status == 404 and missing:
            return None
        if answer.status >= 400:
            raise CallFailed(f"{method} {path}: {answer.status} {text[:500]!r}")
        return json.loads(text)
