"""Runs inside a client pod: sends completions through a fleet's Service and compares the token ids.

    python -c "$(cat load_client.py)" URL RATE REQUESTS [KEY_FILE]

The load is open: a request starts each 1/RATE seconds, whatever became of the others, and each has
a connection of its own. A closed loop, or connections that live on, would send nothing just when
new connections are refused. REQUESTS 0: as long as standard input is open. KEY_FILE has the client
key; it is read for each request, so that another key in it is that of the next request.

The first line of standard input is a list of {"prompt": [ids], "ids": [ids]}, of a chat with
"messages" in the prompt's place; every second request is streamed. Prints `begun`, a line of JSON
for each request that is over (when it began and ended, by time.time(), and as what it is counted),
then one JSON object. Needs Python and aiohttp, nothing of xpyd.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
import time
from collections import Counter
from typing import Any

import aiohttp

PER_REQUEST_S = 240.0
MOST = 20_000
"""Requests of a load that nobody ends."""
SHOWN = 10


class Failed(Exception):
    """An answer came and is wrong. `kind`: how it is counted."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def kind_of(error: BaseException) -> str:
    """What a failure is counted as."""
    if isinstance(error, Failed):
        return error.kind
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "refused" if error.errno == errno.ECONNREFUSED else "not connected"
    return "broken"


def key_of(file: str) -> dict[str, str]:
    """The headers of a client with the key in `file`; without a file, of one that has none."""
    if not file:
        return {}
    with open(file) as opened:
        return {"Authorization": f"Bearer {opened.read().strip()}"}


async def ask(
    session: aiohttp.ClientSession, url: str, key_file: str, case: dict[str, Any], stream: bool
) -> None:
    """One request; raises when it fails or its tokens are not the case's."""
    headers = key_of(key_file)
    name, path = (
        ("messages", "chat/completions") if "messages" in case else ("prompt", "completions")
    )
    body = {
        "model": "demo",
        name: case[name],
        "max_tokens": len(case["ids"]),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    async with session.post(f"{url}/v1/{path}", json=body, headers=headers) as answer:
        if answer.status != 200:
            raise Failed(f"status {answer.status}", (await answer.text())[:200])
        if stream:
            ids, done = [], False
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise Failed("error event", str(event["error"]))
                for choice in event["choices"]:
                    ids += choice.get("token_ids") or []
            if not done:
                raise Failed("broken", "the stream ended without [DONE]")
        else:
            ids = (await answer.json())["choices"][0]["token_ids"]
    if ids != case["ids"]:
        raise Failed("wrong tokens", f"{ids[:8]}... in place of {case['ids'][:8]}...")


class Load:
    """Requests at a fixed rate, and what became of them."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, key_file: str, cases: list[Any]
    ) -> None:
        self._session = session
        self._url = url
        self._key_file = key_file
        self._cases = cases
        self._started_s = time.monotonic()
        self.sent = 0
        self.failures: Counter[str] = Counter()
        self.first_failures: list[str] = []
        self.slowest_s = 0.0

    async def run(self, rate: float, most: int, ended: asyncio.Event) -> None:
        """Send until `most` are sent or `ended` is set; returns when all are answered."""
        async with asyncio.TaskGroup() as group:
            while self.sent < most and not ended.is_set():
                group.create_task(self._one(self.sent))
                self.sent += 1
                wait_s = self._started_s + self.sent / rate - time.monotonic()
                try:
                    async with asyncio.timeout(max(0.0, wait_s)):
                        await ended.wait()
                except TimeoutError:
                    pass

    async def _one(self, number: int) -> None:
        begun_s, begun_at = time.monotonic(), time.time()
        case, kind = self._cases[number % len(self._cases)], ""
        try:
            await ask(self._session, self._url, self._key_file, case, number % 2 == 0)
        except (aiohttp.ClientError, OSError, ValueError, Failed) as error:
            kind = kind_of(error)
            self.failures[kind] += 1
            if len(self.first_failures) < SHOWN:
                at_s = begun_s - self._started_s
                self.first_failures.append(f"{at_s:.1f} s, {number}: {kind}: {error!r}"[:400])
        self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)
        each = [round(begun_at, 2), round(time.time(), 2), kind]
        sys.stdout.write(f"{json.dumps(each)}\n")
        sys.stdout.flush()

    def report(self) -> dict[str, Any]:
        """For the test."""
        return {
            "requests": self.sent,
            "failed": self.failures.total(),
            "failures": dict(self.failures),
            "first_failures": self.first_failures,
            "seconds": round(time.monotonic() - self._started_s, 1),
            "slowest_s": round(self.slowest_s, 1),
        }


async def main(url: str, rate: float, requests: int, key_file: str = "") -> None:
    """Run the load and print its report."""
    cases = json.loads(sys.stdin.buffer.readline())
    ended = asyncio.Event()

    def look() -> None:
        if not os.read(0, 4096):
            asyncio.get_running_loop().remove_reader(0)
            ended.set()

    if not requests:
        asyncio.get_running_loop().add_reader(0, look)
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    timeout = aiohttp.ClientTimeout(total=PER_REQUEST_S)
    # No limit: with one, a request would wait for the others.
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        load = Load(session, url, key_file, cases)
        await load.run(rate, requests or MOST, ended)
    sys.stdout.write(json.dumps(load.report()) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))
