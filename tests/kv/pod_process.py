"""A P or a D in a process of its own, with a line of JSON each way: `with pod_process("D") as d`.

Run as `python -m tests.kv.pod_process ROLE SETTINGS` it is the child, whose engine is a loop over
commands: `expect` a prompt, `answers` so far, `send` one, `state`, `close`. It imports xpyd_kv
only, so it starts at once and what its memory holds is the transfer's.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kv.pods import PATIENCE_S, Pod, ids_of, key_of, send
from xpyd_core.request_id import Address
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvLimits, KvSettings
from xpyd_kv.transport.host.shared_memory import SharedMemory
from xpyd_kv.transport.settings import Timeouts
from xpyd_kv.values import Landed, Wait

_POLL_S = 0.01


class PodProcess:
    """The parent's end. Every answer has a deadline."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.popen = popen
        self.pid = popen.pid
        host, port = self._read()["address"] or ("", 0)
        self.address = Address(host, port)
        self._answers: dict[str, str] = {}

    def ask(self, command: str, **more: Any) -> Any:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"do": command, **more}).encode() + b"\n")
        self.popen.stdin.flush()
        return self._read()

    def expect(self, seed: int, tokens: int, wait_s: float = PATIENCE_S) -> None:
        """A request for the prompt `seed` of so many tokens is in D's queue."""
        self.ask("expect", seed=seed, tokens=tokens, wait_s=wait_s)

    def answer(self, seed: int) -> str:
        """What came of it: `right` or `wrong` bytes landed, or why no KV came."""
        deadline = time.monotonic() + 2 * PATIENCE_S
        while str(seed) not in self._answers:
            assert time.monotonic() < deadline, f"prompt {seed} has no answer"
            self._answers |= self.ask("answers")
            time.sleep(_POLL_S)
        return self._answers.pop(str(seed))

    def state(self) -> dict[str, Any]:
        """`threads` by name, what is held, `objects` of the interpreter, and `peers`."""
        return self.ask("state")

    def peers(self) -> dict[str, Any]:
        """Open `connections`, `strangers`, and since the start `lost` peers, `junk` connections and
        `faults` of peers;
        `broken` frames, `quarantines`, peers `opened` and `paths_failed` by transport."""
        return self.ask("peers")

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def memory(self, field: str) -> int:
        """Bytes of one field of /proc/PID/status."""
        with open(f"/proc/{self.pid}/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines[field].split()[0]) * 1024

    def borrowed_maps(self) -> int:
        """Memories of peers that are mapped."""
        with open(f"/proc/{self.pid}/maps") as file:
            return sum("memfd:" in line and " r--s " in line for line in file)

    def mapped_pool_bytes(self) -> int:
        """Bytes of shared anonymous memory, which only a host pool is."""
        with open(f"/proc/{self.pid}/maps") as file:
            runs = [line.split()[0].split("-") for line in file if "/dev/zero" in line]
        return sum(int(end, 16) - int(start, 16) for start, end in runs)

    def _read(self) -> Any:
        assert self.popen.stdout is not None
        ready, _, _ = select.select([self.popen.stdout], [], [], 3 * PATIENCE_S)
        assert ready, "the process does not answer"
        line = self.popen.stdout.readline()
        assert line, f"the process has ended: {self.popen.poll()}"
        return json.loads(line)


@contextmanager
def pod_process(role: str, **settings: Any) -> Iterator[PodProcess]:
    """`settings`: `mode`; `blocks`; `store`, `limits`, `frames`, `timeouts` as dicts of their
    fields; `sockets`, a folder for Unix sockets; `shared_bytes`, a P's memory that others may read;
    `name`, the engine_id; `keys`, the fleet's; `spare_address_bytes`, how much more it may map."""
    popen = subprocess.Popen(
        [sys.executable, "-m", "tests.kv.pod_process", role, json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield PodProcess(popen)
    finally:
        popen.kill()
        popen.communicate()


class _Child:
    def __init__(self, role: str, settings: dict[str, Any]) -> None:
        kv = KvSettings(
            limits=KvLimits(**settings.get("limits", {})),
            frames=FrameLimits(**settings.get("frames", {})),
            store=StoreLimits(**settings.get("store", {})),
            mode=settings.get("mode", "put_async"),
        )
        sockets = settings.get("sockets")
        options: dict[str, Any] = {} if sockets is None else {"socket_dir": Path(sockets)}
        options["timeouts"] = Timeouts(**settings.get("timeouts", {}))
        if "shared_bytes" in settings:
            options["shared"] = SharedMemory(settings["shared_bytes"])
        if "keys" in settings:
            options["keys"] = tuple(key.encode() for key in settings["keys"])
        self.pod = Pod(role, kv, settings.get("blocks", 64), settings.get("name", ""), **options)
        if "spare_address_bytes" in settings:
            _limit_address_space(settings["spare_address_bytes"])
        self.waiting: dict[int, int] = {}
        self.answers: dict[int, str] = {}
        self.commands: dict[str, Callable[..., Any]] = {
            "expect": self.expect,
            "answers": self.take_answers,
            "peers": self.peers,
            "send": self.send,
            "state": self.state,
            "close": self.close,
        }

    def run(self) -> None:
        self.say({"address": self.pod.endpoint.listen_address})
        while True:
            ready, _, _ = select.select([sys.stdin], [], [], _POLL_S)
            self.step()
            if ready:
                # Unbuffered, or select() would not see a second line that was read with the first.
                line = sys.stdin.buffer.raw.readline()  # type: ignore[attr-defined]
                if not line:
                    return
                command = json.loads(line)
                self.say(self.commands[command.pop("do")](**command))

    def say(self, answer: Any) -> None:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    def step(self) -> None:
        now = time.monotonic()
        for half in (self.pod.kv.producer, self.pod.kv.consumer):
            if half is not None:
                half.poll(now)
        for seed, tokens in list(self.waiting.items()):
            self.admit(seed, tokens, now)

    def admit(self, seed: int, tokens: int, now: float) -> None:
        assert self.pod.kv.consumer is not None
        answer = self.pod.kv.consumer.admit(key_of(seed), ids_of(seed, tokens), seats=100, now=now)
        if isinstance(answer, Wait):
            return
        del self.waiting[seed]
        if isinstance(answer, Landed):
            is_right = self.pod.memory.holds(answer.block_ids, seed)
            self.answers[seed] = "right" if is_right else "wrong"
            self.pod.pool.release(answer.block_ids)
        else:
            self.answers[seed] = answer.reason

    # --- commands

    def expect(self, seed: int, tokens: int, wait_s: float) -> None:
        assert self.pod.kv.consumer is not None
        self.pod.kv.consumer.expect(key_of(seed), wait_s=wait_s, now=time.monotonic())
        self.waiting[seed] = tokens

    def send(self, seed: int, tokens: int, address: list[Any]) -> None:
        send(self.pod, Address(*address), ids_of(seed, tokens), seed, chunk=tokens)

    def take_answers(self) -> dict[int, str]:
        answers, self.answers = self.answers, {}
        return answers

    def peers(self) -> dict[str, Any]:
        counters = self.pod.endpoint.counters
        return {
            "connections": counters.connections,
            "strangers": counters.strangers,
            "lost": len(self.pod.lost),
            "junk": counters.junk_connections + counters.auth_failed,
            "faults": counters.protocol_errors,
            "broken": counters.corrupt_frames,
            "quarantines": counters.quarantines,
            "opened": dict(counters.opened),
            "paths_failed": dict(counters.paths_failed),
        }

    def state(self) -> dict[str, Any]:
        gc.collect()
        metrics = None if self.pod.kv.store is None else self.pod.kv.store.metrics()
        return {
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "free_blocks": self.pod.pool.num_free,
            "leases": 0 if metrics is None else metrics.leases,
            "buffer": 0 if metrics is None else metrics.buffer_used_bytes,
            "pool": 0 if metrics is None else metrics.pool_used_bytes,
            "objects": sys.getallocatedblocks(),
            **self.peers(),
        }

    def close(self, deadline_s: float) -> list[str]:
        self.pod.kv.endpoint.close(deadline_s)
        return sorted(thread.name for thread in threading.enumerate())


def _limit_address_space(spare_bytes: int) -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + spare_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    _Child(sys.argv[1], json.loads(sys.argv[2])).run()
