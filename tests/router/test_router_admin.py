"""The admin API: its key, cordons from the registry up to the picks, and drains by poll."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.router.beats import beat
from tests.router.fakes import Fleet, HttpEngine, fleet, pair, until
from tests.router.several import when
from xpyd_core.errors import UserError
from xpyd_router.fleet.registry import Registry, key_of
from xpyd_router.http.app import is_admin

KEY = "an-admin-key-of-a-test"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "admin.key"
    path.write_text(f"{KEY}\nanother-admin-key-of-it\n")
    return path


async def call(made: Fleet, method: str, path: str, **headers: str) -> tuple[int, Any]:
    url = f"{made.admin}/admin/{path}"
    async with made.http.request(method, url, headers=headers or AUTHORIZED) as response:
        return response.status, await response.json()


async def states(made: Fleet) -> dict[str, str]:
    async with made.http.get(f"{made.admin}/instances") as response:
        rows = (await response.json())["instances"]
    return {row["http_address"]: row["state"] for row in rows}


def registry_of(*beats: Any) -> Registry:
    registry = Registry(period_s=3.0, missed_beats=3)
    for each in beats:
        assert registry.apply(each, 0.0)[0] == "new"
    return registry


def test_a_cordon_takes_an_instance_out_until_its_incarnation_leaves() -> None:
    first = beat("A", incarnation="one", models=("m",))
    registry = registry_of(first)
    key, before = key_of(first), registry.version
    assert registry.cordon(key, is_cordoned=True)
    assert registry.version != before
    assert not registry.snapshot.is_ready
    assert registry.snapshot.knows("m")
    assert not registry.cordon(key, is_cordoned=True)
    registry.apply(first, 1.0)
    assert not registry.snapshot.is_ready, "a beat lifted the cordon"
    registry.apply(beat("A", incarnation="two", models=("m",)), 2.0)
    assert registry.snapshot.is_ready
    assert not registry.cordon(key, is_cordoned=True), "the incarnation is gone"


@pytest.mark.parametrize("standing", ["Good", "HalfOpen", "Open", "Trial"])
def test_a_cordoned_instance_is_not_asked_however_it_stands(standing: Any) -> None:
    only = beat("A", incarnation="one", models=("m",))
    registry = registry_of(only)
    registry.set_standing(key_of(only), standing)
    assert registry.snapshot.is_ready
    registry.cordon(key_of(only), is_cordoned=True)
    assert not registry.snapshot.is_ready
    registry.cordon(key_of(only), is_cordoned=False)
    assert registry.snapshot.is_ready


def test_only_a_bearer_with_a_whole_key_is_an_admin() -> None:
    keys = (b"first-key", b"second-key")
    assert is_admin(keys, "Bearer first-key")
    assert is_admin(keys, "bearer  second-key")
    for wrong in (
        "",
        "first-key",
        "Basic first-key",
        "Bearer",
        "Bearer first",
        "Bearer first-keyé",
    ):
        assert not is_admin(keys, wrong)
    assert not is_admin((), "Bearer ")


PATHS = [
    ("GET", "state"),
    ("GET", "instances/x"),
    ("POST", "instances/x/cordon"),
    ("POST", "instances/x/uncordon"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_every_route_is_closed_without_the_key(
    key_file: Path, method: str, path: str
) -> None:
    async with fleet() as made:
        status, body = await call(made, method, path)
        assert status == 403
        assert "--admin-key-file" in body["error"]["message"]
    async with fleet(admin_key_file=key_file) as made:
        status, body = await call(made, method, path, Authorization="Bearer wrong")
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        async with made.http.request(method, f"{made.admin}/admin/{path}") as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
        status, body = await call(made, method, path)
        assert status == (200 if path == "state" else 404)
        assert KEY not in repr(made.router.state)


def write(key_file: Path, key: str) -> None:
    key_file.write_text(f"{key}\n")


async def test_a_changed_file_opens_and_closes_the_api_without_a_restart(
    key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    new = {"Authorization": "Bearer the-next-admin-key-of-it"}
    async with fleet(admin_key_file=key_file) as made:

        async def status(headers: dict[str, str]) -> int:
            return (await call(made, "GET", "state", **headers))[0]

        async def is_closed() -> bool:
            return await status(AUTHORIZED) == 401

        async def is_said() -> bool:
            assert await status(new) == 200
            return "the keys stay as they were" in caplog.text

        assert (await status(AUTHORIZED), await status(new)) == (200, 401)
        write(key_file, "the-next-admin-key-of-it")
        await when(is_closed)
        assert await status(new) == 200
        write(key_file, "short")
        await when(is_said)
        assert f"--admin-key-file {key_file}: a key must have" in caplog.text
    assert "admin-key-of" not in caplog.text


async def test_cordoned_instances_get_no_requests_until_uncordoned(key_file: Path) -> None:
    async with pair(admin_key_file=key_file) as (made, _, first):
        second = await made.engine("D")
        name = first.beat.instance
        status, row = await call(made, "POST", f"instances/{name}/cordon")
        assert (status, row["state"], row["is_cordoned"]) == (200, "Cordoned", True)
        assert (await states(made))[first.beat.http_address] == "Cordoned"
        text = made.router.state.metrics.render(made.router.state.fleet.instances)
        assert b'xpyd_router_instances{state="Cordoned",type="D"} 1.0' in text
        for _ in range(4):
            await made.json()
        await made.beat(first)
        await made.json()
        assert (first.served, second.served) == (0, 5)
        address = first.beat.http_address
        status, row = await call(made, "POST", f"instances/{address}/uncordon")
        assert (status, row["state"], row["is_cordoned"]) == (200, "Ready", False)
        for _ in range(4):
            await made.json()
        assert first.served == 2


async def test_a_cordon_leaves_what_runs_and_its_end_can_be_polled(key_file: Path) -> None:
    async with fleet(admin_key_file=key_file) as made:
        engine = await made.engine("A")
        end = asyncio.Event()
        serve = engine.script

        async def held(engine: HttpEngine, call: Any, request: Any) -> Any:
            await end.wait()
            return await serve(engine, call, request)

        engine.script = held
        asked = asyncio.create_task(made.json())
        await until(lambda: engine.served == 1)
        path = f"instances/{engine.beat.http_address}"
        status, row = await call(made, "POST", f"{path}/cordon")
        assert (status, row["in_flight"], row["others_in_flight"]) == (200, 1, 0)
        async with await made.post() as refused:
            assert refused.status == 503
        await made.beat(engine, running=3)
        status, row = await call(made, "GET", path)
        assert (row["in_flight"], row["others_in_flight"]) == (1, 2)
        end.set()
        assert (await asked)["usage"]["completion_tokens"] == 4
        await made.beat(engine, running=0)
        status, row = await call(made, "GET", path)
        assert (row["in_flight"], row["others_in_flight"]) == (0, 0)
        status, state = await call(made, "GET", "state")
        assert state == {"is_draining": False, "instances": [row]}


async def test_a_name_that_two_have_is_refused(key_file: Path) -> None:
    async with fleet(admin_key_file=key_file) as made:
        await made.engine("A", instance="same")
        other = await made.engine("A", instance="same")
        status, body = await call(made, "POST", "instances/same/cordon")
        assert status == 409
        assert "http_address" in body["error"]["message"]
        status, _ = await call(made, "POST", f"instances/{other.beat.http_address}/cordon")
        assert status == 200
        assert sorted((await states(made)).values()) == ["Cordoned", "Ready"]


async def test_an_unusable_key_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("short\n")
    with pytest.raises(UserError, match=r"--admin-key-file .*16 bytes"):
        async with fleet(admin_key_file=tmp_path / "short"):
            pass
