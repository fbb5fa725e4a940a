"""When a pod's readiness gate opens and shuts, by what routers say; as pure functions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xpyd_operator.manifests.names import ROUTABLE
from xpyd_operator.status.routable import SILENT_S, Gate, GateWatch, InstanceState, read_states

TTL_S = 9.0
Said = dict[str, tuple[InstanceState, ...] | None]


def pod(*, containers: bool = True, gate: bool = False, ip: str = "10.0.0.1") -> dict[str, Any]:
    conditions = [("ContainersReady", containers), (ROUTABLE, gate)]
    return {
        "metadata": {"name": "d-0", "uid": "u"},
        "status": {
            "podIP": ip,
            "conditions": [{"type": kind, "status": str(holds)} for kind, holds in conditions],
        },
    }


def has(state: str, *, name: str = "d-0", host: str = "10.0.0.1") -> tuple[InstanceState, ...]:
    return (InstanceState(name, host, state),)


class Watched:
    """One pod's gate over time."""

    def __init__(self, **made: Any) -> None:
        self.watch, self.now_s, self.pod = GateWatch(), 0.0, pod(**made)

    def look(self, said: Said, *, after_s: float = 1.0) -> Gate | None:
        self.now_s += after_s
        found = self.watch.look({"d-0": self.pod}, said, self.now_s, ttl_s=TTL_S)
        return found.get("d-0")


def test_it_opens_when_every_ready_router_sends_the_instance_requests() -> None:
    watched = Watched()
    assert watched.look({"r-0": has("Ready"), "r-1": ()}) is None
    found = watched.look({"r-0": has("Ready"), "r-1": has("HalfOpen")})
    assert found is not None
    assert (found.is_open, found.reason) == (True, "Admitted")


@pytest.mark.parametrize(
    "rows",
    [
        (),
        has("Starting"),
        has("Ejected"),
        has("CircuitOpen"),
        has("Ready", name="d-1"),
        has("Ready", host="10.0.0.9"),
    ],
)
def test_it_stays_shut_while_a_router_does_not_and_says_why_after_a_while(
    rows: tuple[InstanceState, ...],
) -> None:
    watched = Watched()
    assert watched.look({"r-0": rows}) is None
    found = watched.look({"r-0": rows}, after_s=TTL_S)
    assert found is not None
    assert (found.is_open, found.reason) == (False, "NotAdmitted")
    assert "r-0" in found.message


def test_an_open_gate_shuts_when_a_router_has_lost_the_instance_for_a_ttl() -> None:
    watched = Watched(gate=True)
    assert watched.look({"r-0": has("Ready")}) == Gate(
        True, "Admitted", "every ready router sends it requests"
    )
    assert watched.look({"r-0": ()}) is None, "a beat may be late"
    assert watched.watch.is_moving
    assert watched.look({"r-0": ()}, after_s=TTL_S / 2) is None
    lost = watched.look({"r-0": ()}, after_s=TTL_S / 2)
    assert lost is not None
    assert not lost.is_open
    back = watched.look({"r-0": has("Ready")})
    assert back is not None
    assert back.is_open
    assert not watched.watch.is_moving
    assert watched.look({"r-0": ()}, after_s=TTL_S) is None, "another loss has its own time"


@pytest.mark.parametrize("state", ["Draining", "Cordoned"])
def test_an_open_gate_shuts_at_once_when_a_router_drains_the_instance(state: str) -> None:
    found = Watched(gate=True).look({"r-0": has("Ready"), "r-1": has(state)})
    assert found is not None
    assert (found.is_open, found.reason) == (False, state)


def test_an_open_gate_shuts_with_its_containers_and_needs_a_new_admission() -> None:
    watched = Watched(gate=True, containers=False)
    found = watched.look({"r-0": has("Ready")})
    assert found is not None
    assert not found.is_open
    watched.pod = pod(gate=False, containers=False)
    assert watched.look({"r-0": has("Ready")}) is None
    watched.pod = pod(gate=False)
    assert watched.look({"r-0": has("Starting")}) is None


def test_a_router_that_does_not_answer_is_waited_for_and_not_for_ever() -> None:
    watched = Watched()
    said: Said = {"r-0": has("Ready"), "r-1": None}
    assert watched.look(said) is None
    assert watched.look(said, after_s=SILENT_S - 1) is None
    found = watched.look(said)
    assert found is not None
    assert (found.is_open, found.reason) == (True, "Admitted")


@pytest.mark.parametrize("said", [{}, {"r-0": None}])
def test_without_any_router_the_gate_opens_after_a_minute_so_that_nothing_is_stuck(
    said: Said,
) -> None:
    watched = Watched()
    assert watched.look(said) is None
    assert watched.look(said, after_s=SILENT_S - 1) is None
    found = watched.look(said)
    assert found is not None
    assert (found.is_open, found.reason) == (True, "NoRouter")


@pytest.mark.parametrize("said", [{}, {"r-0": None}])
def test_an_open_gate_stays_open_while_no_router_says_anything(said: Said) -> None:
    watched = Watched(gate=True)
    for _ in range(5):
        assert watched.look(said, after_s=SILENT_S) is None


def test_what_routers_answer_is_read_and_what_is_none_says_nothing() -> None:
    row = {"instance": "d-0", "state": "Ready", "http_address": "10.0.0.1:20001"}
    body = json.dumps({"instances": [row, {**row, "http_address": "?"}]}).encode()
    assert read_states(body) == (*has("Ready"), *has("Ready", host=""))
    for wrong in (b"", b"[]", b'{"instances": [{}]}', b"\xff"):
        assert read_states(wrong) is None
