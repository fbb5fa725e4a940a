"""`helm uninstall` runs this before the operator goes: fleets are deleted, their pods waited for.

    chart's pre-delete hook -> python -m xpyd_operator.kube.uninstall -> DELETE of every fleet
                                       ^                                       |
                                       +-- the operator drains, lets go of it -+

Without it fleets would wait for ever: each has a finalizer that only the operator takes away, and
the CRDs cannot go before their fleets. This knows nothing of how a fleet is taken down; it never
touches a finalizer.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from xpyd_core.cli import EXIT_USAGE
from xpyd_core.errors import UserError, XpydError
from xpyd_operator.kube.client import Api
from xpyd_operator.kube.errors import Conflict, NotFound, Unavailable
from xpyd_operator.kube.kinds import FLEET, FLEET_LABEL, POD, Kind, Obj
from xpyd_operator.kube.login import find_login

_POLL_S = 1.0
_SAY_EVERY_S = 15.0
_NAMED = 5
"""How many of what is left a message names."""


class Leftovers(XpydError):
    """The time is over and something is still there; the text says what and what to do."""


class FleetsElsewhere(XpydError):
    """The CRDs would go, and with them fleets that this release does not serve."""


class Caller(Protocol):
    """What is needed of kube.client.Api. Both may raise KubeError."""

    async def list(self, kind: Kind, namespace: str | None, *, selector: str = "") -> Obj:
        """The whole list."""
        ...

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Begin to delete that object; one that is gone is no error."""
        ...


@dataclass(frozen=True)
class Clock:
    """Time as the loop needs it, so that tests bring their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True)
class _Left:
    """What the last look found."""

    fleets: Sequence[Obj] = ()
    pods: Sequence[Obj] = ()
    trouble: str = "nothing was answered yet"
    """Why that look failed; empty: it did not."""

    def nothing(self) -> bool:
        return not (self.trouble or self.fleets or self.pods)


async def delete_fleets(
    api: Caller,
    namespaces: Sequence[str],
    *,
    timeout_s: float,
    say: Callable[[str], None],
    clock: Clock,
) -> None:
    """Delete every fleet in `namespaces` (none: in all) and wait for them and their pods.

    Raises Leftovers after `timeout_s`, and at once what no retry mends (Forbidden).
    """
    started = clock.now()
    said_at, left = float("-inf"), _Left()
    while True:
        left = await _look_and_delete(api, namespaces or [None], left, say)
        if left.nothing():
            say("no fleet is left")
            return
        passed = clock.now() - started
        if passed >= timeout_s:
            raise Leftovers(_explain(left, timeout_s))
        if passed - said_at >= _SAY_EVERY_S:
            said_at = passed
            say(f"waiting: {_summary(left)}")
        await clock.sleep(min(_POLL_S, timeout_s - passed))


async def refuse_fleets_elsewhere(api: Caller, namespaces: Sequence[str]) -> None:
    """FleetsElsewhere if there is a fleet outside `namespaces`; may raise KubeError."""
    fleets = await _list(api, FLEET, [None], "")
    others = [fleet for fleet in fleets if fleet["metadata"]["namespace"] not in namespaces]
    if others:
        raise FleetsElsewhere(
            f"{len(others)} fleets ({_names(others)}) are not in the namespaces that this release "
            "serves, and would lose their CRD: delete them, or keep the CRDs "
            "(helm upgrade --reuse-values --set crds.keep=true)"
        )


async def _look_and_delete(
    api: Caller, namespaces: Sequence[str | None], before: _Left, say: Callable[[str], None]
) -> _Left:
    try:
        fleets = await _list(api, FLEET, namespaces, "")
        # One that was made after the first look goes as well.
        for meta in (fleet["metadata"] for fleet in fleets):
            if "deletionTimestamp" not in meta:
                say(f"deleting fleet {meta['namespace']}/{meta['name']}")
                await api.delete(FLEET, meta["namespace"], meta["name"], uid=meta["uid"])
        return _Left(fleets, await _list(api, POD, namespaces, FLEET_LABEL), "")
    except (Unavailable, Conflict) as error:
        return _Left(before.fleets, before.pods, str(error))


async def _list(
    api: Caller, kind: Kind, namespaces: Sequence[str | None], selector: str
) -> list[Obj]:
    found: list[Obj] = []
    for namespace in namespaces:
        try:
            answer = await api.list(kind, namespace, selector=selector)
        except NotFound:
            # The CRD is not there, so no fleet is.
            continue
        found += cast("list[Obj]", answer["items"])
    return found


def _name(obj: Obj) -> str:
    return f"{obj['metadata']['namespace']}/{obj['metadata']['name']}"


def _names(objects: Sequence[Obj]) -> str:
    named = ", ".join(_name(obj) for obj in objects[:_NAMED])
    return f"{named} and {len(objects) - _NAMED} more" if len(objects) > _NAMED else named


def _summary(left: _Left) -> str:
    parts: list[str] = []
    if left.fleets:
        parts.append(f"{len(left.fleets)} fleets ({_names(left.fleets)})")
    if left.pods:
        parts.append(f"{len(left.pods)} pods ({_names(left.pods)})")
    if left.trouble:
        parts.append(left.trouble)
    return "; ".join(parts)


def _explain(left: _Left, timeout_s: float) -> str:
    lines = [f"after {timeout_s:g} s there are still {_summary(left)}"]
    for fleet in left.fleets[:_NAMED]:
        why = _progress(fleet)
        lines += [f"fleet {_name(fleet)}: {why}"] if why else []
    if left.fleets:
        lines.append("the operator takes a fleet down; is its pod running, and what does it log?")
    lines.append(
        "pods finish their requests first, for spec.drain.timeoutSeconds at most; run `helm "
        "uninstall` again to go on waiting"
    )
    return "\n".join(lines)


def _progress(fleet: Obj) -> str:
    """What the fleet's status says about its going."""
    status = cast("dict[str, Any]", fleet.get("status") or {})
    conditions = cast("list[dict[str, Any]]", status.get("conditions") or [])
    said = [
        str(condition.get("message") or "")
        for condition in conditions
        if condition.get("type") in ("Progressing", "Degraded") and condition["status"] == "True"
    ]
    return "; ".join(filter(None, said))


def main(argv: Sequence[str] | None = None) -> int:
    """The command of the hook's Job. Status 1: fleets are left, or the API refused."""
    parser = argparse.ArgumentParser(
        prog="python -m xpyd_operator.kube.uninstall",
        description="Delete all fleets and wait until their pods are gone.",
    )
    parser.add_argument(
        "--namespace", action="append", default=[], help="only fleets of this one; repeatable"
    )
    parser.add_argument(
        "--crds-go",
        action="store_true",
        help="the CRDs are deleted next: delete nothing while there are fleets elsewhere",
    )
    parser.add_argument("--timeout-seconds", type=float, default=270.0)
    args = parser.parse_args(argv)
    try:
        asyncio.run(_run(args.namespace, args.crds_go, args.timeout_seconds))
    except UserError as error:
        sys.stderr.write(f"xpyd: {error}\n")
        return EXIT_USAGE
    except XpydError as error:
        sys.stderr.write(f"xpyd: {error}\n")
        return 1
    return 0


async def _run(namespaces: Sequence[str], crds_go: bool, timeout_s: float) -> None:
    api = Api(find_login)
    try:
        if crds_go and namespaces:
            await refuse_fleets_elsewhere(api, namespaces)
        await delete_fleets(api, namespaces, timeout_s=timeout_s, say=_say, clock=Clock())
    finally:
        await api.close()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
