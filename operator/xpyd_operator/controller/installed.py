"""`helm test` runs this in a pod: it checks that the operator, its API and a fleet answer.

Three checks, each repeated until it succeeds or the time is over: the operator is ready, the API
server has xpyd's kinds, and the router of a given fleet lists its models, or where that needs a
client key, says that it can serve. The pod needs no rights except that of every account to see
which kinds exist, and has no key and no authority: no certificate is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

import aiohttp

from xpyd_core.errors import XpydError
from xpyd_operator.controller.client import Api, find_login, run_job, say_line
from xpyd_operator.controller.decision.errors import KubeError
from xpyd_operator.controller.decision.kinds import FLEET, POOL

_POLL_S = 1.0
_CALL_TIMEOUT_S = 5.0
_BODY_SHOWN = 200

Resources = Callable[[str], Awaitable[frozenset[str]]]
"""Plural names that the API server has under a version; Api.resources. Raises KubeError."""


class NotInstalled(XpydError):
    """A check did not succeed in time; the text names it and the last answer."""


@dataclass(frozen=True)
class InstallCheck:
    """`problem()` runs the check once; empty: it succeeded. It raises nothing."""

    text: str
    problem: Callable[[], Awaitable[str]]


async def wait_for_all(
    questions: Sequence[InstallCheck],
    *,
    timeout_s: float,
    say: Callable[[str], None],
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Return when every check has succeeded; NotInstalled after `timeout_s` for all."""
    deadline = now() + timeout_s
    for question in questions:
        while problem := await question.problem():
            if now() >= deadline:
                raise NotInstalled(f"not so: {question.text}: {problem}")
            await sleep(_POLL_S)
        say(f"ok: {question.text}")


class InstallChecks:
    """The checks, over HTTP. Owns its connections; `close` it in the loop that uses it."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S))

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    def checks_of(self, operator: str, fleet: str) -> list[InstallCheck]:
        """About the operator at that URL, the API, and the fleet whose router has the URL."""
        asked = [
            InstallCheck("the operator is ready", lambda: self._get_problem(f"{operator}/readyz")),
            InstallCheck("the API server has xpyd's kinds", self._kinds_problem),
        ]
        if fleet:
            asked.append(
                InstallCheck(f"{fleet} serves its models", lambda: self._models_problem(fleet))
            )
        return asked

    async def _get_problem(self, url: str) -> str:
        status, body = await self._get(url)
        return "" if status == 200 else _shown(url, status, body)

    async def _kinds_problem(self) -> str:
        try:
            served = await self._resources(FLEET.api_version)
        except KubeError as error:
            return str(error)
        if not served:
            return f"{FLEET.api_version} is not served: are the CRDs installed (crds.install)?"
        missing = {FLEET.plural, POOL.plural, f"{POOL.plural}/scale"} - served
        return f"{FLEET.api_version} has no {', '.join(sorted(missing))}" if missing else ""

    async def _models_problem(self, fleet: str) -> str:
        url = f"{fleet}/v1/models"
        status, body = await self._get(url)
        if status == 401:
            return await self._get_problem(f"{fleet}/readiness?pairs=true")
        return "" if status == 200 and _lists_a_model(body) else _shown(url, status, body)

    async def _get(self, url: str) -> tuple[int, str]:
        """Status and body; status 0: no answer, and the body says why."""
        try:
            async with self._session.get(url, ssl=False) as answer:
                return answer.status, await answer.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            return 0, str(error) or f"no answer within {_CALL_TIMEOUT_S:g} s"


def _shown(url: str, status: int, body: str) -> str:
    shown = " ".join(body[:_BODY_SHOWN].split())
    return f"GET {url}: HTTP {status}: {shown}" if status else f"GET {url}: {shown}"


def _lists_a_model(body: str) -> bool:
    try:
        parsed: object = json.loads(body)
    except ValueError:
        return False
    return isinstance(parsed, dict) and bool(cast("dict[str, object]", parsed).get("data"))


def main(argv: Sequence[str] | None = None) -> int:
    """The command of the chart's test pod. Status 1: a check did not succeed."""
    parser = argparse.ArgumentParser(
        prog="python -m xpyd_operator.controller.installed",
        description="Check that the operator, its API and, if given, a fleet answer.",
    )
    parser.add_argument("--operator", required=True, help="URL of the operator's Service")
    parser.add_argument("--fleet", default="", help="URL of a fleet's router")
    parser.add_argument("--timeout-seconds", type=float, default=60.0)
    args = parser.parse_args(argv)
    return run_job(_run(args.operator, args.fleet, args.timeout_seconds))


async def _run(operator: str, fleet: str, timeout_s: float) -> None:
    api = Api(find_login)
    checks = InstallChecks(api.resources)
    try:
        await wait_for_all(checks.checks_of(operator, fleet), timeout_s=timeout_s, say=say_line)
    finally:
        await checks.close()
        await api.close()


if __name__ == "__main__":
    sys.exit(main())
