"""Four ways through the product, each with fakes at its far ends, traced a few times over.

J1: a streamed chat of three tokens through the router's process; its engines are fakes.
J2: one KV block from P to D over TCP, both connectors in this process, over fake memory.
J3: an edit of a fleet from one decode replica to three, until the fake API server has the
Deployment and a status that says so.
J4: one token in the worker, from the model's logits to the chunk of the stream that a client reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from tests.journeys.trace import ROOT, Calls, Trace

ROUNDS = 4
"""After a first one that warms up: connections, caches and lazy imports are there."""
PATIENCE_S = 20.0


def chat() -> list[Calls]:
    """J1."""
    from tests.router.fakes import pair, run

    trace, found = Trace(), list[Calls]()

    async def requests() -> None:
        async with pair() as (fleet, _, _):
            for _ in range(ROUNDS + 1):
                trace.start()
                events = await fleet.events("chat/completions", max_tokens=4)
                found.append(trace.stop())
                assert len(events) == 7, "a chunk for each token, the end, [DONE]"

    with trace.installed():
        run(requests())
    return found[1:]


def kv_block() -> list[Calls]:
    """J2."""
    from tests.kv.pods import admitted, ids_of, key_of, pods, send, settled, until

    trace, found = Trace(), list[Calls]()
    with trace.installed(), pods() as (p, d):
        assert d.kv.consumer is not None
        for seed in range(1, ROUNDS + 2):
            ids, key = ids_of(seed, d.pool.block_size), key_of(seed)
            trace.start()
            d.kv.consumer.expect(key, wait_s=PATIENCE_S, now=time.monotonic())
            send(p, d.address, ids, seed, chunk=len(ids))
            answer = admitted(d, key, ids)
            until(lambda key=key: settled(p, key))
            found.append(trace.stop())
            assert d.memory.holds(answer.block_ids, seed)
            d.pool.release(answer.block_ids)
    return found[1:]


def edit() -> list[Calls]:
    """J3."""
    from tests.operator.kube_fakes import FakeApi, until
    from tests.operator.kube_operating import condition, fleet, fleet_ready, ready, replicas, run
    from xpyd_operator.controller.decision.kinds import FLEET

    trace, found = Trace(), list[Calls]()

    def is_reported(api: FakeApi, decode: int) -> bool:
        is_ready = condition(api, "Ready").get("status") == "True"
        is_applied = replicas(api, "decode") == [decode] and (decode == 1 or not is_ready)
        # Behind the status the turn goes on: it writes Events.
        return is_applied and (
            not trace.is_on or trace.has_left("Reconciler.turn", by="FleetQueue.done")
        )

    async def edits(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            for _ in range(ROUNDS + 1):
                for decode in (3, 1):
                    if decode == 3:
                        trace.start()
                    api.change(FLEET, "ns", "chat", {"spec": fleet(decode=decode)["spec"]})
                    await until(lambda decode=decode: is_reported(api, decode), what="applied")
                    if decode == 3:
                        found.append(trace.stop())
                    await ready(api)

    with trace.installed():
        run(edits)
    return found[1:]


class _Engine:
    """The engine core as the server's tests want an engine. It waits behind each step's outputs
    until the client has them, so that the next step is not part of a token's way."""

    def __init__(self) -> None:
        self.deliver: Any = None
        self.tasks: set[Any] = set()
        self.core: Any = None
        self.seen = threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def delivered(self, outputs: Sequence[Any]) -> None:
        self.deliver(outputs)
        # The client reads meanwhile; this thread does nothing of the product.
        self.seen.acquire(timeout=PATIENCE_S)


def token() -> list[Calls]:
    """J4."""
    from tests.worker.server_fakes import run, serving
    from xpyd_worker.config import WorkerConfig
    from xpyd_worker.load.engine import load

    trace, found = Trace(), list[Calls]()
    engine = _Engine()
    config = WorkerConfig(
        str(ROOT / "examples/demo-model"), dtype="float32", kv_cache_bytes=8 << 20, threads=1
    )
    body = {
        "model": "demo-model",
        "messages": [{"role": "user", "content": "San Francisco is a"}],
        "max_tokens": ROUNDS + 2,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }

    async def tokens() -> None:
        async with serving(engine, model=loaded.model) as server:  # pyright: ignore[reportArgumentType]
            loaded.engine.start()
            async with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if '"content":"' not in line or '"content":""' in line:
                        continue  # the role, the end
                    found.append(trace.stop())
                    trace.start(behind="logits")
                    engine.seen.release()

    loaded = load(config, deliver=engine.delivered, keys=(), incarnation="i", make_store=None)
    engine.core = loaded.engine
    with trace.installed():
        run(tokens())
    loaded.close(engine_s=PATIENCE_S, kv_s=PATIENCE_S)
    assert len(found) == ROUNDS + 2
    return found[2:]


JOURNEYS = {"J1": chat, "J2": kv_block, "J3": edit, "J4": token}
