"""Whether routers send requests to an instance: the readiness gate of engines' pods. Pure.

A pod of an engine is Ready when its containers are and this gate is open. The gate opens when every
ready router has admitted the instance, so that `kubectl wait`, budgets and rollouts mean what
clients see. Routers learn of engines by heartbeats alone, never by the readiness of pods: else the
gate would wait for itself. A P or D that is in no pair although the other side of its revision is
there has no requests either: its gate does not open, so that a rollout to engines that refuse each
other's KV stops at its first step. Where the other side is not there the gate opens: one of the two
is first. A gate that is open stays so, see the ADR.

A router that does not answer says nothing: a gate that is open stays so, and one that is shut opens
without that router after SILENT_S. So a fleet whose routers are broken, or that the operator cannot
ask, is not stuck: its pods are then ready by their own word, as without the gate.
See docs/adr/0106.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from xpyd_core.errors import UserError
from xpyd_core.request_id import parse_address
from xpyd_operator.manifests.names import ROUTABLE
from xpyd_operator.status.children import (
    Children,
    Raw,
    condition,
    is_leaving,
    is_of_workload,
    is_true,
    key_of,
    name_of,
    pod_specs,
    rows,
    short,
    spec_of,
    text,
)
from xpyd_operator.status.instances import read_rows

SILENT_S = 60.0
"""A router that is ready and has not answered for so long is not waited for."""
_ADMITTED = ("Ready", "HalfOpen")
_LEAVING = ("Draining", "Cordoned")
"""States in which no router means to send it anything: the gate shuts at once."""
NO_PAIR = "NoPair"
"""The reason of a gate that is shut because its instance is in no pair."""


class Gate(NamedTuple):
    """What a pod's condition should say."""

    is_open: bool
    reason: str
    message: str


_DOWN = Gate(False, "ContainersNotReady", "its containers are not ready")


class InstanceState(NamedTuple):
    """An instance as one router has it; `host` of its HTTP address. `unpaired`: why it is in no
    pair, where the other side is there."""

    name: str
    host: str
    state: str
    unpaired: str = ""


def read_states(body: bytes) -> tuple[InstanceState, ...] | None:
    """What a router answers to GET /instances; None: that is no answer."""
    rows = read_rows(body)
    if rows is None or not all(row.instance for row in rows):
        return None
    return tuple(
        InstanceState(row.instance, _host(row.http_address), row.state, row.unpaired)
        for row in rows
    )


def _host(address: str) -> str:
    try:
        return parse_address(address).host
    except UserError:
        return ""


def gated_pods(children: Children) -> Iterator[Raw]:
    """The pods with the gate that were not asked to leave. Those that are older have none."""
    specs = pod_specs(children)
    gated = {key for key, spec in specs.items() if any(map(_has_gate, spec))}
    for pod in children.pods:
        key = key_of(pod)
        if key not in gated or is_leaving(pod) or not is_of_workload(pod, key):
            continue
        if _has_gate(spec_of(pod, specs)):
            yield pod


def _has_gate(spec: Raw) -> bool:
    return any(text(gate, "conditionType") == ROUTABLE for gate in rows(spec, "readinessGates"))


def is_open(pod: Raw) -> bool:
    """Whether the pod's gate is open as it is."""
    return is_true(pod, ROUTABLE)


def is_due(pod: Raw, gate: Gate) -> bool:
    """Whether the pod does not say yet what its gate should: open or shut, and where one that is
    shut is in no pair, why: a gate that was never open has no condition until somebody writes it.
    Other words change with each look at an instance that starts, and are not worth a write."""
    if gate.is_open != is_open(pod):
        return True
    said, meant = gate_of(pod), (gate.reason, short(gate.message))
    return NO_PAIR in (said[0], meant[0]) and said != meant


def waits_at_gate(pod: Raw) -> bool:
    """Whether nothing but the gate keeps a pod with one from being ready."""
    return is_true(pod, "ContainersReady") and not is_open(pod)


def meant(pod: Raw, gates: Mapping[str, Gate]) -> Gate | None:
    """What the pod's gate should be: shut where its containers are not ready, whatever routers have
    said, else as in `gates`, by uid. None: it stays as it is."""
    if not is_true(pod, "ContainersReady"):
        return _DOWN if is_open(pod) else None
    return gates.get(text(pod, "metadata", "uid"))


class _Refusal(NamedTuple):
    """Why a router does not send requests to a pod: the state in which it has the pod, or NoPair,
    and that router's own words."""

    word: str
    why: str = ""


class GateWatch:
    """What the routers of one fleet said of its instances. Times are of one steady clock.

    A router that does not send requests to an instance any more shuts the gate when it is so at
    two looks, `ttl_s` apart: a beat that is late is no loss.
    """

    def __init__(self) -> None:
        self._lost: dict[tuple[str, str], float] = {}
        """Pod (its uid) and router: since when this router does not send it requests."""
        self._silent: dict[str, float] = {}
        """Ready routers that do not answer, since when."""
        self._alone_since: float | None = None
        """Since when no router is ready."""

    @property
    def is_moving(self) -> bool:
        """Whether a router has lost an instance whose gate may have to be shut."""
        return bool(self._lost)

    def look(
        self,
        pods: Mapping[str, Raw],
        routers: Mapping[str, tuple[InstanceState, ...] | None],
        now_s: float,
        *,
        ttl_s: float,
    ) -> dict[str, Gate]:
        """What the gates of `pods`, by name, should be; a pod that is left out stays as it is.

        `routers`: what each ready router answered, None: nothing.
        """
        self._note_silence(routers, now_s)
        speaking = {name: states for name, states in routers.items() if states is not None}
        is_awaited = any(now_s - since < SILENT_S for since in self._silent.values())
        if self._alone_since is not None:
            is_awaited = now_s - self._alone_since < SILENT_S
        found: dict[str, Gate] = {}
        lost: dict[tuple[str, str], float] = {}
        for name, pod in pods.items():
            if not is_true(pod, "ContainersReady"):
                if is_open(pod):
                    found[name] = _DOWN
                continue
            refusals = dict(_refusals(pod, speaking))
            for router in refusals:
                key = text(pod, "metadata", "uid"), router
                lost[key] = self._lost.get(key, now_s)
            gate = self._gate(pod, refusals, lost, now_s, ttl_s)
            if gate is None and not refusals and not (is_awaited and not is_open(pod)):
                gate = _opened(len(speaking)) if speaking or not is_open(pod) else None
            if gate is not None:
                found[name] = gate
        self._lost = lost
        return found

    def _note_silence(
        self, routers: Mapping[str, tuple[InstanceState, ...] | None], now_s: float
    ) -> None:
        silent = (name for name, states in routers.items() if states is None)
        self._silent = {name: self._silent.get(name, now_s) for name in silent}
        if routers:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now_s

    def _gate(
        self,
        pod: Raw,
        refusals: Mapping[str, _Refusal],
        lost: Mapping[tuple[str, str], float],
        now_s: float,
        ttl_s: float,
    ) -> Gate | None:
        """Why it is shut; None: it is not, or not yet."""
        uid = text(pod, "metadata", "uid")
        for router, (word, why) in sorted(refusals.items()):
            what = f"router {short(router, 80)} sends it no requests: {why or word}"
            if word in _LEAVING:
                return Gate(False, word, what)
            if now_s - lost[uid, router] >= ttl_s:
                return Gate(False, word if word == NO_PAIR else "NotAdmitted", what)
        return None


def _opened(routers: int) -> Gate:
    if routers:
        return Gate(True, "Admitted", "every ready router sends it requests")
    what = f"no router has answered for {SILENT_S:.0f} s: it is ready by its own word"
    return Gate(True, "NoRouter", what)


def _refusals(
    pod: Raw, speaking: Mapping[str, tuple[InstanceState, ...]]
) -> Iterator[tuple[str, _Refusal]]:
    """The routers that do not send requests to the pod, and why."""
    name, host = name_of(pod), text(pod, "status", "podIP")
    for router, states in speaking.items():
        mine = [
            one
            for one in states
            if one.name == name and (not host or not one.host or one.host == host)
        ]
        admitted = [one for one in mine if one.state in _ADMITTED]
        if not admitted:
            yield router, _Refusal(short(mine[0].state, 40) if mine else "unknown to it")
        elif not is_open(pod) and all(one.unpaired for one in admitted):
            yield router, _Refusal(NO_PAIR, short(admitted[0].unpaired))


def gate_of(pod: Raw) -> tuple[str, str]:
    """The reason why the pod's gate is shut, and its words, as its condition says."""
    found = condition(pod, ROUTABLE)
    return text(found, "reason"), short(text(found, "message"))
