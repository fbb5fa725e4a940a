"""What passes between P and D is what was planned, byte for byte, whatever moves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import pytest

from tests.e2e.harness import Fleet, Process, fleet, listens, wait_for
from tests.e2e.relay import Relay
from tests.e2e.tap import Tap, planned_cells
from xpyd_kv.wire.messages import Commit, Grant, Message, Offer

pytestmark = pytest.mark.slow

_M = TypeVar("_M", bound=Message)
BLOCK = 16
HALF = 16 * BLOCK
SENT = "xpyd_kv_sent_bytes_total"


class Tapped(NamedTuple):
    """A D behind a tap, waiting for a P."""

    fleet: Fleet
    decode: Process
    tap: Tap
    flags_of_p: tuple[str, ...]


@pytest.fixture(scope="module")
def tapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tapped]:
    folder, tap = tmp_path_factory.mktemp("tapped"), Tap()
    ps, ds = folder / "of-p", folder / "of-d"
    with fleet(folder) as running:
        d_ip, relay_ip = f"{running.subnet}.20", f"{running.subnet}.120"
        through = ("--kv-advertise", f"{relay_ip}:21001", "--kv-socket-dir", str(ds))
        decode = running.start_engine("Decode", *through, ip=d_ip)
        wait_for("D's KV port", lambda: listens(d_ip, 21001), 90)
        relay = Relay(relay_ip, 21001, (d_ip, 21001), sockets=(ps, ds), watch=tap)
        try:
            running.wait_ready(decode)
            yield Tapped(running, decode, tap, ("--kv-socket-dir", str(ps)))
        finally:
            relay.close()


@pytest.mark.parametrize(
    ("number", "transport", "kind"), [(0, "tcp", "Data"), (1, "uds", "Data"), (2, "shm", "Shared")]
)
def test_the_bytes_sent_are_the_planned_segments_and_half_where_d_has_half(
    tapped: Tapped, number: int, transport: str, kind: str
) -> None:
    flags = ("--kv-transport", transport, *tapped.flags_of_p)
    prefill = tapped.fleet.start_engine("Prefill", *flags)
    skipped = tapped.decode.metric("xpyd_kv_skipped_tokens_total")
    try:
        tapped.fleet.wait_ready(prefill)
        # Ids of no other prompt: D has cached what it is meant to have.
        mine = range(100 + 900 * number, 1000 + 900 * number)
        whole = _check(tapped, prefill, tuple(mine[: 2 * HALF]), skip=0)
        half = _check(tapped, prefill, (*mine[:HALF], *mine[-HALF:]), skip=HALF)
        assert 2 * half == whole
        # A prompt that ends in a block: blocks travel whole.
        _check(tapped, prefill, tuple(mine[300 : 300 + 5 * BLOCK + 3]), skip=0)
        assert tapped.decode.metric("xpyd_kv_skipped_tokens_total") - skipped == HALF
        assert tapped.decode.metric("xpyd_kv_recomputed_requests_total") == 0
        assert {type(header).__name__ for header in tapped.tap.kv()} == {kind}
    finally:
        prefill.stop()
        wait_for("the router forgot it", lambda: prefill.name not in tapped.fleet.states())


def _check(tapped: Tapped, prefill: Process, prompt: tuple[int, ...], *, skip: int) -> int:
    """One request. All that was sent for it is the plan, no more and no less: its KV bytes."""
    tap, before = tapped.tap, prefill.metric(SENT)
    tap.forget()
    tapped.fleet.complete(prompt=list(prompt), max_tokens=4, ignore_eos=True)
    wait_for("DONE", lambda: tap.names()["Done"] == 1)
    plan = tap.plan()
    unit_bytes = plan.unit_bytes
    planned = len(plan.units(len(prompt), skip_tokens=skip)) * unit_bytes
    assert tap.kv_bytes() == planned
    assert tap.cells() == planned_cells(plan, len(prompt), skip)
    # What the two say of it themselves.
    offer, commit = _only(tap, Offer), _only(tap, Commit)
    assert offer.tokens == len(prompt)
    assert offer.total_bytes == len(plan.units(len(prompt))) * unit_bytes
    assert _only(tap, Grant).skip_tokens == skip
    assert (commit.frames, commit.total_bytes) == (len(tap.kv()), planned)
    assert prefill.metric(SENT) - before == planned
    return planned


def _only(tap: Tap, kind: type[_M]) -> _M:
    (found,) = [seen.message for seen in tap.seen if isinstance(seen.message, kind)]
    return found
