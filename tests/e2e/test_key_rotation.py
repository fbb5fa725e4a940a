"""The fleet's key is changed under load, as docs/kv-transfer.md says: engines of neighbouring steps
serve side by side. tests/kv/test_failures_between_processes.py does the same without the engine."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, Process, empty_fleet, http, wait_for
from tests.e2e.oracle import Case

pytestmark = pytest.mark.soak
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
