"""A small Kubernetes API server in memory, at the HTTP seam: discovery, list, watch, apply, patch,
delete, preconditions, finalizers, owner references, and faults on demand.

It is no validator and merges lists by replacing them. What it must get right is what the operator
relies on: ascending resourceVersions, Conflicts, what an apply leaves out, watches from a version.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.operator.kube_objects import Applied, by_type, merge, pod_of, same, without_type
from xpyd_operator.controller.client import Login
from xpyd_operator.controller.decision.kinds import (
    CLAIM_TEMPLATE,
    DEPLOYMENT,
    EVENT,
    FLEET_LABEL,
    LEADER_WORKER_SET,
    LEASE,
    NODE,
    POD,
    SECRET,
    WATCHED,
    Address,
    Kind,
    Obj,
    address_of,
)

ObjectRef = tuple[str, str]
NOW = "2026-01-01T00:00:00Z"


@dataclass
class Fault:
    """Answer `times` requests that match with `status` instead of doing them."""

    method: str
    path: str
    status: int
    times: int = 1
    retry_after: str | None = None
    message: str = "injected"


@dataclass
class Call:
    """One request as it came in, watches excluded from `writes`."""

    method: str
    path: str
    query: dict[str, str]
    status: int
    body: Any

    @property
    def is_write(self) -> bool:
        return self.method != "GET"


@dataclass
class _Watch:
    kind: Kind
    namespace: str | None
    selector: str
    queue: asyncio.Queue[tuple[str, Obj] | None] = field(default_factory=asyncio.Queue)


class FakeApi:
    """`async with FakeApi() as api`: listens on a free port of loopback."""

    def __init__(self, *, missing: Iterable[Kind] = (LEADER_WORKER_SET, CLAIM_TEMPLATE)) -> None:
        self.kinds = {
            kind for kind in (*WATCHED, SECRET, EVENT, LEASE, NODE) if kind not in set(missing)
        }
        self.objects: dict[Kind, dict[ObjectRef, Obj]] = {}
        self.calls: list[Call] = []
        self.faults: list[Fault] = []
        self.version = 100
        self.oldest_version = 0
        self.hidden_groups: set[str] = set()
        """Left out of the list of groups, as those of a CRD that was installed just now."""
        self._uids = 0
        self._applied = Applied()
        self._watches: list[_Watch] = []
        self._history: list[tuple[int, str, Kind, Obj]] = []
        self._runner: web.AppRunner | None = None
        self._port = 0
        self.url = ""

    async def __aenter__(self) -> FakeApi:
        await self.come_back()
        return self

    async def come_back(self) -> None:
        """Listen, after an absence at the same address."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        host, self._port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{self._port}"

    async def __aexit__(self, *_: object) -> None:
        await self.go_away()

    async def go_away(self) -> None:
        """Close the port and every connection; what is stored stays."""
        self.drop_watches()
        assert self._runner is not None
        await self._runner.cleanup()

    async def login(self) -> Login:
        """What find_login would give."""
        return Login(self.url, None)

    # What a test reads and does

    @property
    def watching(self) -> list[str]:
        """Kinds that have an open watch."""
        return [watch.kind.plural for watch in self._watches]

    @property
    def writes(self) -> list[Call]:
        return [call for call in self.calls if call.is_write]

    def get(self, kind: Kind, namespace: str, name: str) -> Obj | None:
        return self.objects.get(kind, {}).get((namespace, name))

    def all(self, kind: Kind) -> list[Obj]:
        return list(self.objects.get(kind, {}).values())

    def add(self, obj: Obj) -> Obj:
        """Put an object there as another client would."""
        kind = next(k for k in self.kinds if (k.api_version, k.name) == _type(obj))
        return self._store(kind, deepcopy(obj), before=None)

    def change(self, kind: Kind, namespace: str, name: str, patch: dict[str, Any]) -> Obj:
        """Merge `patch` into an object as another client would."""
        before = self.objects[kind][namespace, name]
        return self._store(kind, merge(deepcopy(before), patch), before=before)

    def drop(self, kind: Kind, namespace: str, name: str) -> None:
        """Delete as another client would: finalizers hold."""
        self._delete(kind, (namespace, name))

    def remove_kind(self, kind: Kind) -> None:
        """As when its CRD is deleted: its objects go first, whatever finalizers they have."""
        for obj in self.all(kind):
            obj["metadata"].pop("finalizers", None)
            self._gone(kind, obj)
        self.kinds.discard(kind)
        for watch in self._watches:
            if watch.kind == kind:
                watch.queue.put_nowait(None)

    def drop_watches(self) -> None:
        """Cut every stream."""
        for watch in self._watches:
            watch.queue.put_nowait(None)

    def forget_history(self) -> None:
        """As after a compaction: watches from an older version get 410."""
        self.oldest_version = self.version
        self._history.clear()

    def settle(self, *, ready: bool = True) -> None:
        """What controllers and kubelets would do: pods as Deployments want them."""
        for deployment in self.all(DEPLOYMENT):
            self._settle(deployment, ready=ready)

    def _settle(self, deployment: Obj, *, ready: bool) -> None:
        meta, spec = deployment["metadata"], deployment["spec"]
        wanted = spec.get("replicas", 1)
        mine = [
            pod
            for pod in self.all(POD)
            if pod["metadata"]["ownerReferences"][0]["uid"] == meta["uid"]
        ]
        for pod in mine[wanted:]:
            self._delete(POD, (meta["namespace"], pod["metadata"]["name"]))
        for number in range(len(mine), wanted):
            self.add(pod_of(deployment, f"{meta['name']}-{self.version}{number}"))
        for pod in self.all(POD):
            if pod["metadata"]["ownerReferences"][0]["uid"] == meta["uid"]:
                self._set_ready(pod, ready=ready)
        count = wanted if ready else 0
        status = {
            "observedGeneration": meta["generation"],
            "replicas": wanted,
            "updatedReplicas": wanted,
            "readyReplicas": count,
            "availableReplicas": count,
        }
        if deployment.get("status") != status:
            self.change(DEPLOYMENT, meta["namespace"], meta["name"], {"status": status})

    def _set_ready(self, pod: Obj, *, ready: bool) -> None:
        status = {
            "phase": "Running",
            "conditions": [
                {"type": "Ready", "status": str(ready), "lastTransitionTime": NOW},
                {"type": "ContainersReady", "status": str(ready), "lastTransitionTime": NOW},
            ],
        }
        if pod["status"] != status:
            meta = pod["metadata"]
            self.change(POD, meta["namespace"], meta["name"], {"status": status})

    # HTTP

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        query = dict(request.query)
        fault = self._fault(request)
        if fault is not None:
            self._log(request, query, fault.status, body)
            headers = {"Retry-After": fault.retry_after} if fault.retry_after else None
            return _status(fault.status, fault.message, headers=headers)
        address = address_of(request.path)
        if query.get("watch") == "true" and address is not None and address.kind in self.kinds:
            self._log(request, query, 200, body)
            return await self._stream(request)
        try:
            answer = self._answer(request, query, body)
        except _HttpError as error:
            self._log(request, query, error.status, body)
            return _status(error.status, str(error))
        self._log(request, query, 200, body)
        return web.json_response(answer)

    def _log(self, request: web.Request, query: dict[str, str], status: int, body: Any) -> None:
        self.calls.append(Call(request.method, request.path, query, status, body))

    def _fault(self, request: web.Request) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and fault.method in (request.method, "*"):
                watch = "?watch" if request.query.get("watch") == "true" else ""
                if re.search(fault.path, request.path + watch):
                    fault.times -= 1
                    return fault
        return None

    def _answer(self, request: web.Request, query: dict[str, str], body: Any) -> Any:
        address = address_of(request.path)
        if address is None:
            return self._discover(request.path)
        if address.kind not in self.kinds:
            raise _HttpError(404, "the server could not find the requested resource")
        sub = request.path.rpartition("/")[2]
        sub = sub if sub in ("status", "scale") and request.path.count(sub) else ""
        if request.method == "GET":
            return self._read(address, query)
        if request.method == "POST":
            if self.get(address.kind, body["metadata"]["namespace"], body["metadata"]["name"]):
                raise _HttpError(409, f"{body['metadata']['name']} already exists")
            return self._store(address.kind, body, before=None)
        if request.method == "PATCH":
            return self._patch(address, sub, request.content_type, body)
        return self._delete_checked(address, body or {})

    def _read(self, address: Address, query: dict[str, str]) -> Any:
        if address.name:
            return self._must(address)
        found = [
            obj
            for place, obj in sorted(self.objects.get(address.kind, {}).items())
            if address.namespace in (None, place[0]) and _selected(obj, query)
        ]
        start, limit = int(query.get("continue") or 0), int(query.get("limit") or 0)
        end = start + limit if limit else len(found)
        return {
            "kind": f"{address.kind.name}List",
            "apiVersion": address.kind.api_version,
            "metadata": {
                "resourceVersion": str(self.version),
                "continue": str(end) if end < len(found) else "",
            },
            "items": [without_type(obj) for obj in found[start:end]],
        }

    def _must(self, address: Address) -> Obj:
        found = self.get(address.kind, address.namespace or "", address.name)
        if found is None:
            raise _HttpError(404, f'{address.kind.plural} "{address.name}" not found')
        return found

    def _patch(self, address: Address, sub: str, content_type: str, body: Any) -> Obj:
        place = (address.namespace or "", address.name)
        before = self.objects.get(address.kind, {}).get(place)
        is_apply = "apply" in content_type
        if before is None and (sub or not is_apply):
            raise _HttpError(404, f'{address.kind.plural} "{address.name}" not found')
        wanted = body.get("metadata", {}).pop("resourceVersion", None)
        if before is not None and wanted not in (None, before["metadata"]["resourceVersion"]):
            raise _HttpError(409, "the object has been modified")
        after = self._applied.left(before, body) if is_apply else deepcopy(before or {})
        if sub == "status":
            body = {"status": body.get("status")}
            if "strategic" in content_type and before is not None:
                body["status"]["conditions"] = by_type(before, body)
        elif before is not None:
            body.pop("status", None)
        return self._store(address.kind, merge(after, body), before=before)

    def _delete_checked(self, address: Address, body: dict[str, Any]) -> Any:
        found = self._must(address)["metadata"]
        conditions = body.get("preconditions") or {}
        for name in ("uid", "resourceVersion"):
            if conditions.get(name) not in (None, found[name]):
                raise _HttpError(409, f"precondition failed: {name}")
        self._delete(address.kind, (address.namespace or "", address.name))
        return {"kind": "Status", "status": "Success"}

    def _discover(self, path: str) -> Any:
        shown = [kind for kind in self.kinds if kind.group not in {"", *self.hidden_groups}]
        groups = sorted({(kind.group, kind.version) for kind in shown})
        groups.append(("apiextensions.k8s.io", "v1"))
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {
                "kind": "APIGroupList",
                "groups": [
                    {
                        "name": group,
                        "versions": [{"groupVersion": f"{group}/{version}", "version": version}],
                        "preferredVersion": {"version": version},
                    }
                    for group, version in groups
                ],
            }
        resources = [_resource(kind) for kind in self.kinds if kind.base == path]
        if path == "/apis/apiextensions.k8s.io/v1":
            crds = Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "x")
            resources = [_resource(crds) | {"name": "customresourcedefinitions"}]
        if path == "/api/v1":
            resources.append(_resource(Kind("v1", "Namespace", "namespaces")))
        if not resources:
            raise _HttpError(404, "the server could not find the requested resource")
        return {"kind": "APIResourceList", "resources": resources}

    # The store

    def _store(self, kind: Kind, obj: Obj, *, before: Obj | None) -> Obj:
        meta = obj["metadata"]
        if before is None:
            self._uids += 1
            meta.setdefault("uid", f"uid-{self._uids}")
            meta.setdefault("creationTimestamp", NOW)
            meta["generation"] = 1
        elif same(before, obj):
            return before
        elif before.get("spec") != obj.get("spec"):
            meta["generation"] = before["metadata"]["generation"] + 1
        if before is not None and "deletionTimestamp" in meta and not meta.get("finalizers"):
            self._gone(kind, obj)
            return obj
        self.version += 1
        meta["resourceVersion"] = str(self.version)
        obj.setdefault("apiVersion", kind.api_version)
        obj.setdefault("kind", kind.name)
        self.objects.setdefault(kind, {})[meta["namespace"], meta["name"]] = obj
        self._tell("ADDED" if before is None else "MODIFIED", kind, obj)
        for watch in self._watches:
            # What leaves a watch's selection is gone for who watches.
            was = before is not None and _concerns(watch, kind, before)
            if was and not _concerns(watch, kind, obj):
                watch.queue.put_nowait(("DELETED", deepcopy(obj)))
        return obj

    def _delete(self, kind: Kind, place: ObjectRef) -> None:
        obj = self.objects[kind][place]
        if obj["metadata"].get("finalizers"):
            if "deletionTimestamp" not in obj["metadata"]:
                marked = {"metadata": {"deletionTimestamp": NOW}}
                self._store(kind, merge(deepcopy(obj), marked), before=obj)
            return
        self._gone(kind, obj)

    def _gone(self, kind: Kind, obj: Obj) -> None:
        meta = obj["metadata"]
        self.objects[kind].pop((meta["namespace"], meta["name"]))
        self.version += 1
        last = deepcopy(obj)
        last["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", kind, last)
        for other, objects in self.objects.items():
            for place, child in list(objects.items()):
                owners = child["metadata"].get("ownerReferences") or ()
                if any(owner["uid"] == meta["uid"] for owner in owners):
                    self._delete(other, place)

    def _tell(self, change: str, kind: Kind, obj: Obj) -> None:
        self._history.append((self.version, change, kind, deepcopy(obj)))
        for watch in self._watches:
            if _concerns(watch, kind, obj):
                watch.queue.put_nowait((change, deepcopy(obj)))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        address = address_of(request.path)
        assert address is not None
        watch = _Watch(address.kind, address.namespace, request.query.get("labelSelector", ""))
        since = int(request.query.get("resourceVersion") or self.version)
        response = web.StreamResponse()
        await response.prepare(request)
        if since < self.oldest_version:
            gone = {"code": 410, "message": "too old resource version", "kind": "Status"}
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        for version, change, kind, obj in self._history:
            if version > since and _concerns(watch, kind, obj):
                watch.queue.put_nowait((change, obj))
        self._watches.append(watch)
        try:
            while (item := await watch.queue.get()) is not None:
                line = json.dumps({"type": item[0], "object": item[1]}).encode()
                await response.write(line + b"\n")
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._watches.remove(watch)
        return response


class _HttpError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def until(condition: Callable[[], object], *, what: str, timeout_s: float = 20.0) -> None:
    """Wait for something that another task or thread makes true."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - what changes it knows no event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from None


def _type(obj: Obj) -> tuple[str, str]:
    return obj["apiVersion"], obj["kind"]


def _resource(kind: Kind) -> dict[str, Any]:
    return {
        "name": kind.plural,
        "singularName": kind.name.lower(),
        "namespaced": True,
        "kind": kind.name,
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    }


def _selected(obj: Obj, query: dict[str, str]) -> bool:
    if query.get("fieldSelector") == "spec.unschedulable=true":
        return obj["spec"].get("unschedulable") is True
    return not query.get("labelSelector") or _has_label(obj, query["labelSelector"])


def _has_label(obj: Obj, selector: str) -> bool:
    key, _, value = selector.partition("=")
    found = (obj["metadata"].get("labels") or {}).get(key)
    return found is not None and value in ("", found)


def _concerns(watch: _Watch, kind: Kind, obj: Obj) -> bool:
    if watch.kind != kind or watch.namespace not in (None, obj["metadata"]["namespace"]):
        return False
    return not watch.selector or _has_label(obj, watch.selector)


def _status(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    reasons = {404: "NotFound", 409: "Conflict", 403: "Forbidden", 422: "Invalid"}
    body = {
        "kind": "Status",
        "status": "Failure",
        "message": message,
        "reason": "AlreadyExists"
        if "already exists" in message
        else reasons.get(status, "Unknown"),
        "code": status,
    }
    return web.json_response(body, status=status, headers=headers)


__all__ = ["FLEET_LABEL", "FakeApi", "Fault", "until"]
