"""What a body of 33.5 MB costs a real router and a real P: memory, and who is served meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, Process, fleet, http

pytestmark = pytest.mark.slow
_SIZE = 33_500_000
_SLACK_BYTES = 16 * 1024 * 1024
"""What a process takes besides, for bystanders and for the first time that it does something."""


def filled(head: str, item: str, tail: str) -> bytes:
    """A body of about `_SIZE` bytes: `item` again and again between `head` and `tail`."""
    return (head + ",".join([item] * (_SIZE // (len(item) + 1))) + tail).encode()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("memory"), prefill=1, decode=1) as running:
        for _ in range(3):
            running.complete(prompt="hi", max_tokens=2)
        yield running


def resident(process: Process, field: str) -> int:
    """VmRSS, or VmHWM: the most since `forget_peak`. Bytes."""
    text = Path(f"/proc/{process.popen.pid}/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.M)
    assert found
    return 1024 * int(found[1])


def forget_peak(process: Process) -> int:
    """What it has now, from which its peak counts."""
    Path(f"/proc/{process.popen.pid}/clear_refs").write_text("5")
    return resident(process, "VmRSS")


@pytest.mark.parametrize("at_once", [1, 6])
@pytest.mark.parametrize(
    ("body", "status", "most"),
    [
        pytest.param(
            filled('{"model":"demo","prompt":"a","max_tokens":2,"x":[', "{}", "]}"),
            *(200, 1),
            id="unknown members",
        ),
        pytest.param(
            filled('{"model":"demo","max_tokens":2,"prompt":[', "777", "]}"),
            *(400, 8),
            id="token ids",
        ),
        pytest.param(
            filled('{"model":"demo","max_tokens":2,"prompt":"', "a b c d", '"}'),
            *(400, 5),
            id="text",
        ),
    ],
)
def test_a_body_costs_a_few_times_its_length_and_others_are_served(
    pair: Fleet, body: bytes, status: int, most: int, at_once: int
) -> None:
    url = f"{pair.router.url}/v1/completions"
    watched = [pair.router, pair.engine("Prefill")]
    before = [forget_peak(process) for process in watched]
    served = 0
    with ThreadPoolExecutor(at_once) as clients:
        bombs = [clients.submit(http, url, body) for _ in range(at_once)]
        while not served or not all(bomb.done() for bomb in bombs):
            pair.complete(prompt="hi", max_tokens=2)
            assert set(pair.states().values()) == {"Ready"}
            served += 1
    assert [bomb.result()[0] for bomb in bombs] == [status] * at_once
    for process, was in zip(watched, before, strict=True):
        grown = resident(process, "VmHWM") - was
        assert grown <= (1 + most) * at_once * len(body) + _SLACK_BYTES, process.name
    assert "ejected" not in pair.router.log
