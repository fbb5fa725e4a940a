"""`helm uninstall` runs this before the operator is deleted: it deletes all fleets and waits.

    chart's pre-delete hook -> python -m xpyd_operator.controller.uninstall -> DELETE of every fleet
                                       ^                                       |
                                       +-- the operator drains, lets go of it -+
                                       +-- Kubernetes deletes what it owned ---+

Without it fleets would wait for ever: each has a finalizer that only the operator removes. And what
a fleet owned would stay for ever: Kubernetes deletes it only while the owner's CRD exists, and
looks for new CRDs every half minute. This module never touches a finalizer and does not know how a
fleet is taken down.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from xpyd_core.errors import XpydError
from xpyd_operator.controller.client import Api, find_login, run_job, say_line
from xpyd_operator.controller.decision.election import operator_of
from xpyd_operator.controller.decision.errors import Conflict, NotFound, Refused, Unavailable
from xpyd_operator.controller.decision.kinds import FLEET, FLEET_LABEL, SECRET, WATCHED, Kind, Obj
from xpyd_operator.manifests.names import KEY_SLOTS, kv_secret_name
from xpyd_operator.status.children import condition, is_true, text

OWNED = tuple(kind for kind in WATCHED if kind.labelled)
"""The kinds that a fleet owns, except Secrets, which the operator may not read."""

_POLL_S = 1.0
_SAY_EVERY_S = 15.0
_NAMED = 5
"""How many of what is left a message names."""

FleetId = tuple[str, str, str]
"""Namespace, name and uid."""


class Leftovers(XpydError):
    """Objects remain after the timeout; the text names them and says what to do."""


class FleetsElsewhere(XpydError):
    """The CRDs would be deleted, and with them fleets that this release does not serve."""


@dataclass(frozen=True)
class Clock:
    """Time as the loop needs it, so that tests bring their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True)
class _Left:
    """What the last round found. `owned`: by plural, read only when no fleet is left."""

    fleets: tuple[Obj, ...] = ()
    owned: tuple[tuple[str, tuple[Obj, ...]], ...] = ()
    trouble: str = "nothing was answered yet"
    """Why that round failed; empty: it did not."""

    def nothing(self) -> bool:
        return not (self.trouble or self.fleets or self.owned)


class Uninstall:
    """Deletes every fleet in `namespaces` (none: in all), once, but those that another release than
    `release` has marked as its own; "": all."""

    def __init__(
        self,
        api: Api,
        namespaces: Sequence[str],
        *,
        say: Callable[[str], None],
        clock: Clock | None = None,
        release: str = "",
    ) -> None:
        self._release = release
        self._api = api
        self._namespaces = tuple(namespaces)
        self._say = say
        self._clock = clock or Clock()
        self._seen: set[FleetId] = set()

    async def refuse_fleets_elsewhere(self) -> None:
        """FleetsElsewhere if there is a fleet outside the namespaces, or another release's; may
        raise KubeError."""
        fleets = await self._list(FLEET, [None], "")
        served = self._namespaces
        others = [
            fleet
            for fleet in fleets
            if (served and fleet["metadata"]["namespace"] not in served) or not self._is_ours(fleet)
        ]
        if others:
            raise FleetsElsewhere(
                f"{len(others)} fleets ({_names(others)}) are not in the namespaces that this "
                "release serves, or another release's, and would lose their CRD: delete them, or "
                "keep the CRDs (helm rollback to the last revision, then helm upgrade "
                "--reuse-values --set crds.keep=true)"
            )

    async def run(self, timeout_s: float) -> None:
        """Delete the fleets and wait until they and all that they owned are gone.

        Raises Leftovers after `timeout_s`, and errors that no retry can cure (Forbidden) at once.
        """
        started = self._clock.now()
        said_at, left = float("-inf"), _Left()
        while True:
            left = await self._look(left)
            if left.nothing():
                self._say("no fleet is left")
                return
            passed = self._clock.now() - started
            if passed >= timeout_s:
                raise Leftovers(_explain(left, timeout_s))
            if passed - said_at >= _SAY_EVERY_S:
                said_at = passed
                self._say(f"waiting: {_summary(left)}")
            await self._clock.sleep(min(_POLL_S, timeout_s - passed))

    async def _look(self, before: _Left) -> _Left:
        places = self._namespaces or (None,)
        try:
            found = await self._list(FLEET, places, "")
            fleets = tuple(filter(self._is_ours, found))
            others = {_place(fleet) for fleet in found if not self._is_ours(fleet)}
            await self._delete(fleets)
            if fleets:
                return _Left(fleets, (), "")
            listed = [(kind, await self._list(kind, places, FLEET_LABEL)) for kind in OWNED]
            owned = [
                (kind, tuple(obj for obj in objects if _fleet_of(obj) not in others))
                for kind, objects in listed
            ]
            for _, objects in owned:
                self._seen.update(owner for obj in objects for owner in _fleets_of(obj))
            named = [_secret(name, slot) for name in sorted(self._seen) for slot in KEY_SLOTS]
            secrets = [secret for secret in named if await self._exists(secret)]
            left = [*((kind.plural, objects) for kind, objects in owned)]
            left.append((SECRET.plural, tuple(secrets)))
            return _Left((), tuple((plural, objects) for plural, objects in left if objects), "")
        except (Unavailable, Conflict) as error:
            return _Left(before.fleets, before.owned, str(error))

    def _is_ours(self, fleet: Obj) -> bool:
        return not self._release or operator_of(fleet) in ("", self._release)

    async def _delete(self, fleets: Sequence[Obj]) -> None:
        # A fleet that was created after the first round is deleted, too.
        for meta in (fleet["metadata"] for fleet in fleets):
            self._seen.add((meta["namespace"], meta["name"], meta["uid"]))
            if "deletionTimestamp" not in meta:
                self._say(f"deleting fleet {meta['namespace']}/{meta['name']}")
                with contextlib.suppress(NotFound):  # the next look says whether it is gone
                    await self._api.delete(FLEET, meta["namespace"], meta["name"], uid=meta["uid"])

    async def _exists(self, secret: Obj) -> bool:
        """Whether a fleet's own Secret exists, found out without the right to read it."""
        try:
            await self._api.create(secret, dry_run=True)
        except Conflict:
            return True
        except (Refused, NotFound):
            # Nothing can be made there, so none is left: the namespace is being deleted.
            return False
        return False

    async def _list(
        self, kind: Kind, namespaces: Sequence[str | None], selector: str
    ) -> tuple[Obj, ...]:
        found: list[Obj] = []
        for namespace in namespaces:
            try:
                answer = await self._api.list(kind, namespace, selector=selector)
            except NotFound:
                # The kind's API is not installed.
                continue
            found += cast("list[Obj]", answer["items"])
        return tuple(found)


def _place(fleet: Obj) -> tuple[str, str]:
    return fleet["metadata"]["namespace"], fleet["metadata"]["name"]


def _fleet_of(obj: Obj) -> tuple[str, str]:
    """The fleet that the object's label names."""
    return obj["metadata"]["namespace"], text(obj, "metadata", "labels", FLEET_LABEL)


def _fleets_of(owned: Obj) -> Iterator[FleetId]:
    """The fleet that owns the object itself: a pod has another owner."""
    for owner in owned["metadata"].get("ownerReferences") or ():
        if owner["kind"] == FLEET.name and owner["apiVersion"] == FLEET.api_version:
            yield owned["metadata"]["namespace"], owner["name"], owner["uid"]


def _secret(fleet: FleetId, slot: str) -> Obj:
    meta = {"namespace": fleet[0], "name": kv_secret_name(*fleet[1:], slot)}
    return {"apiVersion": SECRET.api_version, "kind": SECRET.name, "metadata": meta}


def _name(obj: Obj) -> str:
    return f"{obj['metadata']['namespace']}/{obj['metadata']['name']}"


def _names(objects: Sequence[Obj]) -> str:
    named = ", ".join(_name(obj) for obj in objects[:_NAMED])
    return f"{named} and {len(objects) - _NAMED} more" if len(objects) > _NAMED else named


def _summary(left: _Left) -> str:
    parts: list[str] = []
    if left.fleets:
        parts.append(f"{len(left.fleets)} fleets ({_names(left.fleets)})")
    parts += [f"{len(objects)} {plural} ({_names(objects)})" for plural, objects in left.owned]
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
    """What the fleet's status says about its deletion."""
    shown = (kind for kind in ("Progressing", "Degraded") if is_true(fleet, kind))
    return "; ".join(filter(None, (text(condition(fleet, kind), "message") for kind in shown)))


def main(argv: Sequence[str] | None = None) -> int:
    """The command of the hook's Job. Status 1: fleets are left, or the API refused."""
    parser = argparse.ArgumentParser(
        prog="python -m xpyd_operator.controller.uninstall",
        description="Delete all fleets and wait until they and what they own are gone.",
    )
    parser.add_argument(
        "--namespace", action="append", default=[], help="only fleets of this one; repeatable"
    )
    parser.add_argument(
        "--crds-go",
        action="store_true",
        help="the CRDs are deleted next: delete nothing while there are fleets elsewhere",
    )
    parser.add_argument(
        "--release", default="", help="NAMESPACE/NAME: leave fleets that others have marked"
    )
    parser.add_argument("--timeout-seconds", type=float, default=270.0)
    args = parser.parse_args(argv)
    return run_job(_run(args))


async def _run(args: argparse.Namespace) -> None:
    api = Api(find_login)
    try:
        uninstall = Uninstall(api, args.namespace, say=say_line, release=args.release)
        if args.crds_go:
            await uninstall.refuse_fleets_elsewhere()
        await uninstall.run(args.timeout_seconds)
    finally:
        await api.close()


if __name__ == "__main__":
    sys.exit(main())
