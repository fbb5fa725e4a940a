"""A whole operator against the API server in memory: what its tests share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.operator.fleets import document, prefill_and_decode
from tests.operator.kube_fakes import FakeApi, until
from xpyd_operator.controller.decision.kinds import (
    DEPLOYMENT,
    EVENT,
    FLEET,
    Kind,
    Obj,
)
from xpyd_operator.controller.main import Operator, OperatorConfig
from xpyd_operator.manifests.names import Settings

SETTINGS = Settings("xpyd-worker:1", "xpyd-router:1")
ALL = 16
"""Writes that a new 1P1D fleet's objects and its finalizer take."""


def fleet(name: str = "chat", *, namespace: str = "ns", decode: int = 1, **spec: Any) -> Obj:
    model, pools = {"uri": "file://./demo-model"}, prefill_and_decode(decode=decode)
    made = document(name, **{"model": model, "pools": pools} | spec)
    return {**made, "metadata": {"name": name, "namespace": namespace}}


@asynccontextmanager
async def operating(
    api: FakeApi,
    *,
    namespaces: tuple[str, ...] = (),
    resync_s: float = 600.0,
    settings: Settings = SETTINGS,
    **more: Any,
) -> AsyncIterator[Operator]:
    """An operator at work, synced; it ends within seconds. `more`: of OperatorConfig."""
    config = OperatorConfig(
        settings, namespaces, http_host="127.0.0.1", http_port=0, resync_s=resync_s, **more
    )
    operator, stop = Operator(config, find_login=api.login), asyncio.Event()
    running = asyncio.create_task(operator.run(stop))
    try:
        await until(lambda: operator.port and not operator.complaints(), what="synced")
        yield operator
    finally:
        stop.set()
        async with asyncio.timeout(10):
            await running


@asynccontextmanager
async def fleet_ready(api: FakeApi, name: str = "chat") -> AsyncIterator[Operator]:
    """An operator that has brought up the fleet."""
    async with operating(api) as operator:
        await ready(api, name)
        yield operator


async def ready(api: FakeApi, name: str = "chat", *, namespace: str = "ns") -> None:
    """Play the controllers until the fleet is ready, and all that follows is written."""

    def is_ready() -> bool:
        api.settle()
        return condition(api, "Ready", name, namespace=namespace).get("status") == "True"

    await until(is_ready, what=f"{name} is ready")
    await still(api)


async def still(api: FakeApi) -> None:
    """Wait until nothing was written for a moment."""
    seen = (-1, 0.0)

    def is_still() -> bool:
        nonlocal seen
        if len(api.writes) != seen[0]:
            seen = (len(api.writes), time.monotonic())
        return time.monotonic() - seen[1] > 0.25

    await until(is_still, what="no more writes")


def condition(api: FakeApi, kind: str, name: str = "chat", *, namespace: str = "ns") -> Obj:
    found = api.get(FLEET, namespace, name) or {}
    conditions = found.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {})


def replicas(api: FakeApi, pool: str) -> list[int]:
    return [
        d["spec"]["replicas"]
        for d in api.all(DEPLOYMENT)
        if d["metadata"]["labels"]["xpyd.dev/pool"] == pool
    ]


def of_pool(api: FakeApi, kind: Kind, pool: str) -> list[Obj]:
    labels = [obj for obj in api.all(kind) if "xpyd.dev/pool" in obj["metadata"]["labels"]]
    return [obj for obj in labels if obj["metadata"]["labels"]["xpyd.dev/pool"] == pool]


def left(api: FakeApi) -> dict[str, int]:
    return {k.name: len(v) for k, v in api.objects.items() if v and k not in (EVENT,)}


def run(test: Callable[[FakeApi], Awaitable[None]], **options: Any) -> None:
    async def go() -> None:
        async with FakeApi(**options) as api:
            await test(api)

    asyncio.run(go())
