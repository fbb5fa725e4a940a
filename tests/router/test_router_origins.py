"""Web pages and names: who may use a router from a browser, and what a rebound name gets."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import aiohttp
import pytest

from tests.router.fakes import Fleet, fleet
from xpyd_core.cli import build_parser
from xpyd_core.errors import UserError
from xpyd_router.command import read_config
from xpyd_router.cross_site import CrossSite, Origins, Refused

PAGE = "https://chat.example.com"
ALLOWED = "access-control-allow-origin"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}

HOSTS = {
    "127.0.0.1:10001": (True, True),
    "127.0.3.1": (True, True),
    "[::1]:10001": (True, True),
    "localhost:10001": (True, True),
    "LOCALHOST.": (True, True),
    "router.localhost": (True, True),
    "": (True, True),
    "10.1.2.3:10001": (False, True),
    "[fd00::1]": (False, True),
    "named.example:80": (True, True),
    "a.below.example": (True, True),
    "below.example": (False, False),
    "evil.example:10001": (False, False),
    "127.0.0.1.evil.example": (False, False),
    "localhost.evil.example": (False, False),
    "named.example.evil": (False, False),
    "[::1].evil.example": (True, True),  # no browser sends it
}
"""Host: whether it is right, for a local router and for another one with names."""


@pytest.mark.parametrize("host", HOSTS)
def test_names_of_the_loopback_and_named_ones_are_right(host: str) -> None:
    rules = CrossSite(hosts=("named.example", "*.below.example"))
    assert (passes(rules, host, is_local=True), passes(rules, host, is_local=False)) == HOSTS[host]
    assert passes(CrossSite(), host, is_local=False)


def passes(rules: CrossSite, host: str, *, is_local: bool) -> bool:
    try:
        Origins(rules, is_local=is_local).check_host(host)
    except Refused:
        return False
    return True


ORIGINS = {
    "http://127.0.0.1:10001": True,
    "http://127.0.0.1:3000": True,
    "http://localhost:3000": True,
    PAGE: True,
    PAGE.upper(): True,
    f"{PAGE}:8443": False,
    "http://chat.example.com": False,
    "https://evil.example": False,
    "null": False,
    "": False,
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_local_router_takes_pages_of_its_host_and_allowed_ones(origin: str) -> None:
    origins = Origins(CrossSite(origins=(PAGE,)), is_local=True)
    if ORIGINS[origin]:
        origins.check_origin(origin, "127.0.0.1:10001")
    else:
        with pytest.raises(Refused, match="--allowed-origins"):
            origins.check_origin(origin, "127.0.0.1:10001")


async def post(made: Fleet, **headers: str) -> tuple[int, Any, Any]:
    async with await made.post(headers=headers) as answer:
        return answer.status, answer.headers, await answer.json()


@pytest.mark.usefixtures("both_ways")
async def test_a_rebound_name_gets_nothing() -> None:
    async with fleet() as made:
        engine = await made.engine("A")
        assert (await post(made))[0] == 200
        status, headers, body = await post(made, Host="evil.example")
        assert status == 403
        assert "--allowed-hosts" in body["error"]["message"]
        assert ALLOWED not in headers
        assert len(engine.calls) == 1
        ours, admins = ("/health", "/v1/models", "/nothing"), ("/health", "/metrics", "/nothing")
        for url in (*[made.base + one for one in ours], *[made.admin + one for one in admins]):
            async with made.http.get(url, headers={"Host": "evil.example"}) as answer:
                assert answer.status == 403
        assert (await post(made))[0] == 200


@pytest.mark.usefixtures("both_ways")
async def test_a_page_of_another_site_gets_nothing_from_a_local_router() -> None:
    async with fleet() as made:
        engine = await made.engine("A")
        status, headers, body = await post(made, Origin=PAGE)
        assert status == 403
        assert "--allowed-origins" in body["error"]["message"]
        assert ALLOWED not in headers
        assert not engine.calls
        assert (await post(made, Origin=made.base))[0] == 200


@pytest.mark.usefixtures("both_ways")
async def test_pages_of_an_allowed_site_read_answers_and_streams() -> None:
    async with fleet(cross_site=CrossSite(origins=(PAGE,))) as made:
        await made.engine("A")
        status, headers, _ = await post(made, Origin=PAGE)
        assert (status, headers[ALLOWED], headers["Vary"]) == (200, PAGE, "Origin")
        readable = headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= {*readable}
        assert "access-control-allow-credentials" not in headers
        async with await made.post(stream=True, headers={"Origin": PAGE}) as answer:
            assert answer.headers[ALLOWED] == PAGE
            assert b"[DONE]" in await answer.read()
        async with made.http.get(f"{made.base}/v1/models", headers={"Origin": PAGE}) as answer:
            assert answer.headers[ALLOWED] == PAGE
        async with await made.post(model="none", headers={"Origin": PAGE}) as answer:
            assert (answer.status, answer.headers[ALLOWED]) == (404, PAGE)
        async with made.http.get(f"{made.admin}/instances", headers={"Origin": PAGE}) as answer:
            assert answer.status == 403
            assert ALLOWED not in answer.headers


async def preflight(made: Fleet, **changes: str) -> tuple[int, Any]:
    url = f"{made.base}/v1/chat/completions"
    async with made.http.options(url, headers={**PREFLIGHT, **changes}) as answer:
        return answer.status, answer.headers


async def test_a_browsers_question_is_answered_for_an_allowed_site() -> None:
    rules = CrossSite(
        origins=(PAGE,),
        methods=("POST",),
        headers=("authorization", "content-type"),
        allows_credentials=True,
    )
    async with fleet(cross_site=rules) as made:
        status, headers = await preflight(made)
        assert (status, headers[ALLOWED]) == (200, PAGE)
        assert headers["access-control-allow-methods"] == "POST"
        assert headers["access-control-allow-headers"] == "authorization, content-type"
        assert headers["access-control-allow-credentials"] == "true"
        for changes in (
            {"Origin": "https://evil.example"},
            {"Access-Control-Request-Method": "DELETE"},
            {"Access-Control-Request-Headers": "x-other"},
        ):
            status, headers = await preflight(made, **changes)
            assert status == 403
            assert ALLOWED not in headers


async def test_all_sites_may_read_where_all_are_allowed() -> None:
    async with fleet(cross_site=CrossSite(origins=("*",))) as made:
        await made.engine("A")
        assert (await post(made, Origin=PAGE))[1][ALLOWED] == "*"
        status, headers = await preflight(made)
        assert (status, headers[ALLOWED]) == (200, "*")


async def test_a_router_for_other_machines_leaves_origins_to_the_browser() -> None:
    """A key is asked for there, not a page's name; a page that is not allowed cannot read."""
    async with fleet(host="0.0.0.0", cross_site=CrossSite()) as made:
        await made.engine("A")
        status, headers, _ = await post(made, Origin=PAGE, Host="any.example")
        assert status == 200
        assert ALLOWED not in headers
        assert (await preflight(made))[0] == 403


FLAGS: dict[tuple[str, ...], CrossSite | str] = {
    (): CrossSite(),
    ("--allowed-origins", '["https://A.example", "http://b:1"]'): CrossSite(
        origins=("https://a.example", "http://b:1")
    ),
    ("--allowed-origins", "https://a", "--allowed-origins", "https://b"): CrossSite(
        origins=("https://a", "https://b")
    ),
    ("--allowed-methods", "get", "--allowed-headers", "X-A", "--allowed-hosts", "R"): CrossSite(
        methods=("GET",), headers=("x-a",), hosts=("r",)
    ),
    ("--allowed-origins", "https://a/path"): "--allowed-origins 'https://a/path': expected",
    ("--allowed-origins", "a.example"): "--allowed-origins 'a.example': expected",
    ("--allowed-origins", "[1]"): "--allowed-origins: expected a JSON list",
    ("--allowed-origins", "["): "--allowed-origins: expected a JSON list",
    ("--allowed-methods", "G E"): "--allowed-methods 'G E': expected",
    ("--allowed-hosts", "https://a"): "--allowed-hosts 'https://a': expected",
    ("--allowed-hosts", "a.example:443"): "--allowed-hosts 'a.example:443': expected",
    ("--allowed-hosts", "*"): "--allowed-hosts '*': expected",
    ("--allowed-hosts", "*.a.example", "--allowed-hosts", "::1"): CrossSite(
        hosts=("*.a.example", "::1")
    ),
    ("--allowed-origins", '["https://a:443", "http://b:80", "http://c:443"]'): CrossSite(
        origins=("https://a", "http://b", "http://c:443")
    ),
    ("--forwarded-allow-ips", "10.0.0.0/8"): "--forwarded-allow-ips: needs client keys",
    ("--forwarded-allow-ips", "10.0.0.1/8"): "--forwarded-allow-ips '10.0.0.1/8': expected",
    ("--allow-credentials",): "--allow-credentials: needs --allowed-origins",
    ("--allow-credentials", "--allowed-origins", "*"): "--allow-credentials: with",
}


@pytest.mark.parametrize("argv", FLAGS)
def test_flags_are_read_or_refused_by_name(argv: tuple[str, ...]) -> None:
    args: argparse.Namespace = build_parser().parse_args(["router", "--kv-insecure", *argv])
    want = FLAGS[argv]
    if isinstance(want, CrossSite):
        assert read_config(args).cross_site == want
        return
    with pytest.raises(UserError) as caught:
        read_config(args)
    assert str(caught.value).startswith(want)


async def test_each_request_of_a_connection_is_looked_at() -> None:
    async with fleet() as made:
        await made.engine("A")
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as http:
            for host, status in (("x", 200), ("evil", 403), ("x:1", 200), ("evil", 403)):
                url, body = f"{made.base}/v1/completions", {"model": "m", "prompt": "x"}
                async with http.post(url, json=body, headers={"Host": host}) as answer:
                    assert answer.status == status
                    await answer.read()
        await asyncio.sleep(0)
