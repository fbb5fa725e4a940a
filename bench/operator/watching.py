"""Waits on the API server's state by few and small calls, and says when each thing was so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.operator.client import Client
from bench.operator.documents import DEPLOYMENTS, FLEETS, NAMESPACES, PODS

POLL_S = 0.2
DEADLINE_S = 300.0


class TooSlow(RuntimeError):
    """A state did not come in time; the text says which, and what was there."""


def wait_for_all(
    checks: dict[str, Callable[[], Any]], deadline_s: float = DEADLINE_S
) -> dict[str, float]:
    """Ask until each check has been true once; seconds from now until it was, by its name.

    A check may answer anything; the last answers are in the error's text.
    """
    begun = time.monotonic()
    reached: dict[str, float] = {}
    last: dict[str, Any] = {}
    while True:
        for name, check in checks.items():
            if name in reached:
                continue
            last[name] = check()
            if last[name] is True:
                reached[name] = time.monotonic() - begun
        if len(reached) == len(checks):
            return reached
        if time.monotonic() - begun > deadline_s:
            missing = {name: last[name] for name in checks if name not in reached}
            raise TooSlow(f"not within {deadline_s:g} s: {missing}")
        time.sleep(POLL_S)


def exactly(count: Callable[[], int], wanted: int) -> Callable[[], Any]:
    """A check that `count` is `wanted`; otherwise it answers the count."""
    return lambda: (found := count()) == wanted or found


class Namespace:
    """What one namespace has, by its counts."""

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.name = name

    def create(self) -> None:
        """Make it, and wait for the ServiceAccount that pods need."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.name}}
        self.client.post(NAMESPACES, body)
        account = f"{NAMESPACES}/{self.name}/serviceaccounts/default"
        wait_for_all({"account": lambda: self.client.find(account) is not None}, 30)

    def delete(self) -> None:
        """Begin its end."""
        self.client.delete(f"{NAMESPACES}/{self.name}")

    def pods(self) -> int:
        """Pods that are there, those that end included. One of them is sent, not all."""
        page = self.client.get(f"{PODS.format(self.name)}?limit=1")
        return len(page["items"]) + int(page["metadata"].get("remainingItemCount") or 0)

    def pods_ready(self) -> int:
        """Pods that are Ready, as the Deployments count them."""
        rows = self.client.rows(DEPLOYMENTS.format(self.name))
        return sum(int(row["Ready"].partition("/")[0]) for row in rows)

    def fleets(self) -> int:
        """Fleets that are there."""
        return len(self.client.rows(FLEETS.format(self.name)))

    def fleets_ready(self) -> int:
        """Fleets whose condition Ready is True."""
        return sum(row["Ready"] == "True" for row in self.client.rows(FLEETS.format(self.name)))
