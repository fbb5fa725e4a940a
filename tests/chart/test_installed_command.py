"""The command of `helm test`: what it asks, what it takes for an answer, when it gives up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.tls_kit import write_pair
from xpyd_operator.controller.decision.errors import Unavailable
from xpyd_operator.controller.installed import InstallChecks, NotInstalled, wait_for_all

BOTH = frozenset({"inferencefleets", "inferencefleetpools", "inferencefleetpools/scale"})
MODELS = '{"object": "list", "data": [{"id": "demo"}]}'


@dataclass
class Installed:
    """Answers by path, each a list whose last one stays."""

    ready: list[tuple[int, str]] = field(default_factory=lambda: [(200, "ok")])
    models: list[tuple[int, str]] = field(default_factory=lambda: [(200, MODELS)])
    pairs: list[tuple[int, str]] = field(default_factory=lambda: [(200, "ok")])
    kinds: list[frozenset[str]] = field(default_factory=lambda: [BOTH])
    said: list[str] = field(default_factory=list)
    time_s: float = 0.0

    def check(self, *, with_fleet: bool = True, timeout_s: float = 10.0) -> None:
        asyncio.run(self._check(with_fleet, timeout_s))

    async def _check(self, with_fleet: bool, timeout_s: float) -> None:
        app = web.Application()
        app.router.add_get("/operator/readyz", self._answer_ready)
        app.router.add_get("/fleet/v1/models", self._answer_models)
        app.router.add_get("/fleet/readiness", self._answer_pairs)
        async with TestServer(app, host="127.0.0.1") as server:
            checks = InstallChecks(self.resources)
            fleet = str(server.make_url("/fleet")) if with_fleet else ""
            try:
                await wait_for_all(
                    checks.checks_of(str(server.make_url("/operator")), fleet),
                    timeout_s=timeout_s,
                    say=self.said.append,
                    now=lambda: self.time_s,
                    sleep=self._sleep,
                )
            finally:
                await checks.close()

    async def _answer_ready(self, _: web.Request) -> web.Response:
        return self._answer(self.ready)

    async def _answer_models(self, _: web.Request) -> web.Response:
        return self._answer(self.models)

    async def _answer_pairs(self, request: web.Request) -> web.Response:
        assert request.query["pairs"] == "true"
        return self._answer(self.pairs)

    @staticmethod
    def _answer(answers: list[tuple[int, str]]) -> web.Response:
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        return web.Response(status=status, text=body)

    async def resources(self, api_version: str) -> frozenset[str]:
        assert api_version == "xpyd.dev/v1alpha1"
        if not self.kinds:
            raise Unavailable("no answer from the API server")
        return self.kinds.pop(0) if len(self.kinds) > 1 else self.kinds[0]

    async def _sleep(self, seconds: float) -> None:
        self.time_s += seconds


def test_what_is_well_installed_passes() -> None:
    installed = Installed()
    installed.check()
    assert [line.partition(":")[0] for line in installed.said] == ["ok", "ok", "ok"]
    assert installed.time_s == 0


def test_without_a_fleet_nobody_asks_for_models() -> None:
    installed = Installed(models=[(500, "")])
    installed.check(with_fleet=False)
    assert len(installed.said) == 2


def test_what_comes_up_late_is_waited_for() -> None:
    installed = Installed(
        ready=[(503, "listing"), (200, "ok")],
        kinds=[frozenset(), BOTH],
        models=[(503, ""), (200, '{"data": []}'), (200, MODELS)],
    )
    installed.check()
    assert installed.time_s == 4


def test_a_fleet_that_asks_for_a_key_is_asked_whether_it_can_serve() -> None:
    refused = [(401, "no key")]
    installed = Installed(models=refused, pairs=[(503, "no pair"), (200, "ok")])
    installed.check()
    assert installed.time_s == 1
    with pytest.raises(NotInstalled, match="HTTP 503: no pair"):
        Installed(models=refused, pairs=[(503, "no pair")]).check()


def test_a_fleet_with_a_certificate_of_a_strangers_authority_is_asked(tmp_path: Path) -> None:
    async def problem() -> str:
        async def models(_: web.Request) -> web.Response:
            return web.Response(text=MODELS)

        app = web.Application()
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app)
        await runner.setup()
        context = write_pair(tmp_path).make()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        checks = InstallChecks(Installed().resources)
        try:
            url = f"https://127.0.0.1:{runner.addresses[0][1]}"
            return await checks.checks_of("http://unused", url)[-1].problem()
        finally:
            await checks.close()
            await runner.cleanup()

    assert asyncio.run(problem()) == ""


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        (Installed(ready=[(503, "fleets are not read yet")]), "HTTP 503: fleets are not read yet"),
        (Installed(kinds=[frozenset()]), "not served: are the CRDs installed"),
        (Installed(kinds=[BOTH - {"inferencefleets"}]), "has no inferencefleets"),
        (Installed(kinds=[]), "no answer from the API server"),
        (Installed(models=[(503, "no engine")]), "HTTP 503: no engine"),
        (Installed(models=[(200, '{"data": []}')]), "serves its models"),
        (Installed(models=[(200, "<html>")]), "<html>"),
    ],
)
def test_what_is_wrong_is_named_when_the_time_is_over(installed: Installed, said: str) -> None:
    with pytest.raises(NotInstalled, match=r"^not so: ") as problem:
        installed.check()
    assert said in str(problem.value)
    assert installed.time_s == 10
