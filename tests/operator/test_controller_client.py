"""The client: verbs, errors by kind, what is tried again and what is not."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.operator.kube_fakes import FakeApi, Fault
from xpyd_core.errors import UserError
from xpyd_operator.controller.client import NEVER_CURRENT, Api, Login, find_login, open_session
from xpyd_operator.controller.decision.errors import (
    Conflict,
    Forbidden,
    Invalid,
    KubeError,
    NotFound,
    Refused,
    Throttled,
    Unavailable,
    error_of,
)
from xpyd_operator.controller.decision.kinds import (
    DEPLOYMENT,
    EVENT,
    FLEET,
    LEADER_WORKER_SET,
    SERVICE,
    Obj,
)


class Rig:
    """An Api against the fake server; sleeps are noted, not slept."""

    def __init__(self, server: FakeApi) -> None:
        self.server = server
        self.slept: list[float] = []
        self.counted: Counter[tuple[str, str, str]] = Counter()
        self.logins = 0
        self.login_error: Exception | None = None
        self.api = Api(self._login, count=self._count, sleep=self._sleep)

    async def _login(self) -> Login:
        self.logins += 1
        if self.login_error is not None:
            raise self.login_error
        return await self.server.login()

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def _count(self, *labels: str) -> None:
        self.counted[labels[0], labels[1], labels[2]] += 1


def service(name: str = "s", **spec: Any) -> Obj:
    metadata = {"name": name, "namespace": "ns"}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def run(test: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        async with FakeApi() as server:
            rig = Rig(server)
            try:
                await test(rig)
            finally:
                await rig.api.close()

    asyncio.run(main())


def test_apply_creates_and_changes_as_our_field_manager() -> None:
    async def test(rig: Rig) -> None:
        made = await rig.api.apply(service(type="ClusterIP"))
        changed = await rig.api.apply(service(type="NodePort"))
        assert changed["metadata"]["uid"] == made["metadata"]["uid"]
        assert changed["spec"] == {"type": "NodePort"}
        call = rig.server.calls[-1]
        assert call.query == {"fieldManager": "xpyd-operator", "force": "true"}
        assert rig.counted["apply", "services", "200"] == 2

    run(test)


def test_an_apply_that_may_only_create_does_not_touch_what_is_there() -> None:
    async def test(rig: Rig) -> None:
        rig.server.add(service(type="ClusterIP"))
        obj = service(type="NodePort")
        obj["metadata"]["resourceVersion"] = NEVER_CURRENT
        with pytest.raises(Conflict):
            await rig.api.apply(obj)
        assert rig.server.all(SERVICE)[0]["spec"] == {"type": "ClusterIP"}
        obj["metadata"]["name"] = "other"
        assert (await rig.api.apply(obj))["spec"] == {"type": "NodePort"}

    run(test)


def test_an_apply_of_an_old_version_is_a_conflict() -> None:
    async def test(rig: Rig) -> None:
        made = await rig.api.apply(service(type="ClusterIP"))
        rig.server.change(SERVICE, "ns", "s", {"spec": {"type": "NodePort"}})
        obj = service(type="ClusterIP")
        obj["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"]
        with pytest.raises(Conflict, match="modified"):
            await rig.api.apply(obj)

    run(test)


def test_delete_hits_only_the_object_that_was_meant_and_says_where_there_is_none() -> None:
    async def test(rig: Rig) -> None:
        made = rig.server.add(service())
        with pytest.raises(Conflict):
            await rig.api.delete(SERVICE, "ns", "s", uid="another")
        uid = made["metadata"]["uid"]
        with pytest.raises(Conflict):
            await rig.api.delete(SERVICE, "ns", "s", uid=uid, resource_version="1")
        await rig.api.delete(SERVICE, "ns", "s", uid=uid)
        with pytest.raises(NotFound):
            await rig.api.delete(SERVICE, "ns", "s", uid=uid)
        assert rig.server.all(SERVICE) == []

    run(test)


def test_a_status_is_patched_apart() -> None:
    async def test(rig: Rig) -> None:
        rig.server.add(service(type="ClusterIP"))
        body = {"status": {"a": 1}, "spec": {"type": "NodePort"}}
        after = await rig.api.patch(SERVICE, "ns", "s", body, sub="status")
        assert after["status"] == {"a": 1}
        assert after["spec"] == {"type": "ClusterIP"}
        assert rig.counted["patch", "services/status", "200"] == 1

    run(test)


def test_a_long_list_comes_in_pages() -> None:
    async def test(rig: Rig) -> None:
        for number in range(600):
            rig.server.add(service(f"s{number:03}"))
        pages = [page async for page in rig.api.pages(SERVICE, None)]
        assert [len(page["items"]) for page in pages] == [250, 250, 100]
        names = [item["metadata"]["name"] for page in pages for item in page["items"]]
        assert names == sorted(f"s{number:03}" for number in range(600))

    run(test)


def test_what_the_server_has_under_a_version_and_what_it_does_not_have() -> None:
    async def test(rig: Rig) -> None:
        assert DEPLOYMENT.plural in await rig.api.resources("apps/v1")
        assert SERVICE.plural in await rig.api.resources("v1")
        assert await rig.api.resources(LEADER_WORKER_SET.api_version) == frozenset()

    run(test)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status: int) -> None:
    async def test(rig: Rig) -> None:
        rig.server.faults.append(Fault("PATCH", "/services/", status, times=3))
        await rig.api.apply(service())
        assert len(rig.server.calls) == 4
        assert rig.slept == [0.2, 0.5, 1.0] if status != 429 else [1.0, 1.0, 1.0]

    run(test)


def test_a_server_that_stays_away_is_left_to_the_callers_back_off() -> None:
    async def test(rig: Rig) -> None:
        rig.server.faults.append(Fault("*", "/", 503, times=99, message="etcd is gone"))
        with pytest.raises(Unavailable, match="etcd is gone"):
            await rig.api.get(SERVICE, "ns", "s")
        assert len(rig.server.calls) == 5
        assert rig.counted["get", "services", "503"] == 5

    run(test)


def test_retry_after_is_waited_for_and_a_long_one_is_the_callers() -> None:
    async def test(rig: Rig) -> None:
        rig.server.faults.append(Fault("GET", "/", 429, retry_after="3"))
        with pytest.raises(NotFound):
            await rig.api.get(SERVICE, "ns", "s")
        assert rig.slept == [3.0]
        rig.server.faults.append(Fault("GET", "/", 429, retry_after="60"))
        with pytest.raises(Throttled) as caught:
            await rig.api.get(SERVICE, "ns", "s")
        assert caught.value.retry_after_s == 60.0
        assert rig.slept == [3.0]

    run(test)


def test_nobody_there_is_unavailable_and_counted() -> None:
    async def test(rig: Rig) -> None:
        await rig.server.go_away()
        with pytest.raises(Unavailable, match="no answer"):
            await rig.api.get(SERVICE, "ns", "s")
        assert rig.counted["get", "services", "error"] == 5
        await rig.server.come_back()

    run(test)


@pytest.mark.parametrize("status", [400, 403, 409, 422])
def test_a_refusal_is_not_tried_again(status: int) -> None:
    async def test(rig: Rig) -> None:
        rig.server.faults.append(Fault("POST", "/", status, times=9, message="no, because"))
        with pytest.raises(KubeError, match="no, because"):
            await rig.api.create(service())
        assert len(rig.server.calls) == 1
        assert rig.slept == []

    run(test)


def test_what_is_worth_one_attempt_is_tried_once() -> None:
    async def test(rig: Rig) -> None:
        rig.server.faults.append(Fault("POST", "/events", 503, times=9))
        metadata = {"name": "e", "namespace": "ns"}
        event = {"apiVersion": "v1", "kind": EVENT.name, "metadata": metadata}
        with pytest.raises(Unavailable):
            await rig.api.create(event, attempts=1)
        assert len(rig.server.calls) == 1

    run(test)


def test_a_refused_identity_is_renewed_once() -> None:
    async def test(rig: Rig) -> None:
        rig.server.faults.append(Fault("GET", "/", 401))
        with pytest.raises(NotFound):
            await rig.api.get(FLEET, "ns", "s")
        assert rig.logins == 2
        rig.server.faults.append(Fault("GET", "/", 401, times=2))
        with pytest.raises(Refused):
            await rig.api.get(FLEET, "ns", "s")
        assert rig.logins == 3

    run(test)


@pytest.mark.parametrize("error", [UserError("no token"), FileNotFoundError("token")])
def test_an_identity_that_cannot_be_had_for_a_moment_is_as_no_answer(error: Exception) -> None:
    async def test(rig: Rig) -> None:
        with pytest.raises(NotFound):
            await rig.api.get(FLEET, "ns", "s")
        rig.login_error = error
        rig.server.faults.append(Fault("GET", "/", 401, times=99))
        with pytest.raises(Unavailable, match=r"cannot sign in: .*token"):
            await rig.api.get(FLEET, "ns", "s")
        rig.login_error = None
        rig.server.faults.clear()
        with pytest.raises(NotFound):
            await rig.api.get(FLEET, "ns", "s")

    run(test)


def test_a_field_that_does_not_exist_is_the_documents_fault() -> None:
    text = (
        "failed to create typed patch object (ns/chat; apps/v1, Kind=Deployment): "
        ".spec.template.spec.nodeSelectr: field not declared in schema"
    )
    error = error_of(500, json.dumps({"kind": "Status", "message": text}).encode(), None)
    assert isinstance(error, Invalid)
    assert "nodeSelectr" in str(error)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Invalid),
        (401, Refused),
        (403, Forbidden),
        (404, NotFound),
        (405, Refused),
        (409, Conflict),
        (410, Conflict),
        (422, Invalid),
        (429, Throttled),
        (500, Unavailable),
        (504, Unavailable),
    ],
)
def test_statuses_become_errors(status: int, kind: type[KubeError]) -> None:
    body = json.dumps({"message": "words of the server", "reason": "Why"}).encode()
    error = error_of(status, body, None)
    assert type(error) is kind
    assert str(error) == "words of the server"
    assert error.status == status


@pytest.mark.parametrize(
    ("body", "text"),
    [(b"", "HTTP 500"), (b"[1]", "HTTP 500"), (b"\xff<html>", "\ufffd<html>"), (b"{}", "HTTP 500")],
)
def test_an_answer_that_is_no_status_has_a_message_too(body: bytes, text: str) -> None:
    assert str(error_of(500, body, None)) == text


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7.0), (None, 1.0), ("-1", 0.0), ("Wed, 21 Oct 2026", 1.0)]
)
def test_retry_after_is_read_as_seconds(header: str | None, seconds: float) -> None:
    error = error_of(429, b"", header)
    assert isinstance(error, Throttled)
    assert error.retry_after_s == seconds


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "%s"}}]
users: [{name: u, user: {token: s3cret}}]
"""


def test_a_kubeconfig_gives_server_and_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    file.write_text(KUBECONFIG % "http://127.0.0.1:1/")
    monkeypatch.setenv("KUBECONFIG", str(file))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    login = asyncio.run(find_login())
    assert login.server == "http://127.0.0.1:1"
    assert login.header == "Bearer s3cret"
    assert "s3cret" not in repr(login)


def test_without_any_way_in_the_user_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UserError, match="no access to Kubernetes"):
        asyncio.run(find_login())


def test_a_token_file_is_read_again_when_it_is_a_minute_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    time = [100.0]
    monkeypatch.setattr("xpyd_operator.controller.client.time.monotonic", lambda: time[0])

    async def main() -> list[str]:
        seen: list[str] = []
        async with FakeApi() as server:
            login = Login(server.url, None, token_file=token)

            async def note(request: Any, handler: Any) -> Any:
                answer = await handler(request)
                seen.append(request.headers["Authorization"])
                return answer

            async with open_session(login, [note], connections=1) as session:
                for moment, text in ((100.0, "second"), (159.0, "third"), (161.0, "fourth")):
                    time[0] = moment
                    await (await session.get(server.url + "/api")).read()
                    token.write_text(text)
        return seen

    assert asyncio.run(main()) == ["Bearer first", "Bearer first", "Bearer third"]
