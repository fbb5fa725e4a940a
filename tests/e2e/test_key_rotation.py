"""The fleet's key is changed under load, as docs/kv-transfer.md says: by its file, while all serve;
and by new engines, where those of neighbouring steps serve side by side.
tests/kv/test_failures_between_processes.py does the latter without the engine."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, Process, empty_fleet, http, wait_for
from tests.e2e.oracle import Case, open_loop
from xpyd_core.keys import key_ids

OLD, NEW = secrets.token_hex(32), secrets.token_hex(32)
STEPS = ((OLD, NEW), (NEW, OLD), (NEW,))


class Asking:
    """Requests one after another until `stop`; what was wrong with them."""

    def __init__(self, running: Fleet, cases: list[Case]) -> None:
        self.right = 0
        self.wrong: list[str] = []
        self._running = running
        self._cases = cases
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(2)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, number: int) -> None:
        while not self._stop.is_set():
            case = self._cases[number % len(self._cases)]
            number += 2
            try:
                ids = self._running.answer(case)
            except (AssertionError, OSError) as error:
                self.wrong.append(repr(error))
                continue
            if ids == case.ids:
                self.right += 1
            else:
                self.wrong.append(f"other tokens for case {number}")


def _start(running: Fleet, keys: Path) -> list[Process]:
    env = {"XPYD_KV_KEY_FILE": str(keys)}
    return [running.start_engine(role, env=env) for role in ("Prefill", "Decode")]


@pytest.mark.slow
@pytest.mark.long
def test_a_key_is_rotated_by_its_file_while_all_serve(tmp_path: Path, cases: list[Case]) -> None:
    with empty_fleet(tmp_path) as running:
        running.key_file.write_text(OLD)
        router = running.start_router()
        engines = [running.start_engine(role) for role in ("Prefill", "Decode", "Decode")]
        running.wait_ready(*engines)
        pids = [process.popen.pid for process in running.processes]

        def have(*keys: str) -> bool:
            said = json.loads(http(f"{router.admin}/instances")[1])
            wanted = list(key_ids([key.encode() for key in keys]))
            return all(each["key_ids"] == wanted for each in (said, *said["instances"]))

        def rotate() -> None:
            for keys in ((OLD, NEW), (NEW, OLD), (NEW,)):
                running.key_file.write_text("\n".join(keys))
                wait_for(f"{len(keys)} keys", lambda keys=keys: have(*keys))
            # Engines that start now have the new key alone, and KV connections with the others.
            running.wait_ready(running.start_engine("Prefill"), running.start_engine("Decode"))

        asked = asyncio.run(open_loop(router.url, cases, rate=6, seconds=20, disturb=rotate))
        assert [one.what for one in asked if one.what is not None] == []
        assert [process.popen.pid for process in running.processes][: len(pids)] == pids
        for engine in running.engines:
            assert engine.metric("xpyd_kv_auth_failed_total") == 0, engine.name
        moved = [e.metric("xpyd_kv_transfers_total{outcome=done}") for e in running.engines]
        assert moved[-1] > 0, "the new D got KV"


@pytest.mark.soak
def test_a_key_is_changed_under_load_without_a_lost_request(
    tmp_path: Path, cases: list[Case]
) -> None:
    with empty_fleet(tmp_path) as running:
        # The router has both all the while: its own steps are a restart each, of which others tell.
        both = tmp_path / "both"
        both.write_text(f"{OLD}\n{NEW}")
        running.start_router(env={"XPYD_KV_KEY_FILE": str(both)})
        running.key_file.write_text(OLD)
        serving = _start(running, running.key_file)
        running.wait_ready(*serving)
        asking = Asking(running, cases)
        try:
            for number, keys in enumerate(STEPS):
                file = tmp_path / f"key{number}"
                file.write_text("\n".join(keys))
                following = _start(running, file)
                running.wait_ready(*following)
                # All four pairs of old and new have to do with each other for a while.
                seen = asking.right
                wait_for("requests to all", lambda seen=seen: asking.right >= seen + 12, 120)
                for engine in (*serving, *following):
                    assert engine.metric("xpyd_kv_auth_failed_total") == 0, engine.name
                    assert http(f"{engine.url}/health")[0] == 200
                for engine in serving:
                    assert engine.stop(60) == 0, engine.log[-2000:]
                serving = following
            seen = asking.right
            wait_for("requests to the last", lambda: asking.right >= seen + 4, 120)
        finally:
            asking.stop()
        assert not asking.wrong
        p, d = serving
        assert d.metric("xpyd_kv_transfers_total{outcome=done}") > 0
        assert p.metric("xpyd_kv_failed_total") == 0
