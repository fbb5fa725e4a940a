"""kill -9 of a D in the middle of what agents ask for: a client gets one valid whole.

Real processes: a router, P, two Ds and the demo model, whose word " of" reads `</think>` here, so
that it reasons first where the template opens the reasoning. Kinds of answers run at once, each
twice, by turns on the two Ds; a D is killed when the answers that a turn aims at have come to a
drawn place. What a client got must be what it gets when nothing happens. Each run has half of the
kinds, the soak all.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import pytest

from tests.e2e.harness import DEMO_MODEL, Fleet, Process, empty_fleet, wait_for
from tests.e2e.wholes import (
    STREAMS,
    Reader,
    Whole,
    chat,
    chat_stream,
    messages_stream,
    responses_stream,
)

Json = dict[str, Any]
WORD = "Ġof"


def _object(**members: Json) -> Json:
    required = list(members)
    return {"type": "object", "properties": members, "required": required}


PERSON = _object(
    name={"type": "string", "minLength": 20, "maxLength": 60},
    tags={
        "type": "array",
        "items": {"type": "string", "minLength": 3, "maxLength": 12},
        "minItems": 3,
        "maxItems": 8,
    },
    age={"type": "integer", "minimum": 0, "maximum": 150},
)
ARGUMENTS = {
    "weather": _object(city={"type": "string", "minLength": 8, "maxLength": 20}),
    "note": _object(
        text={"type": "string", "minLength": 16, "maxLength": 40},
        stars={"type": "integer", "minimum": 1, "maximum": 5},
    ),
}
ASKED = "Return a list of"
"""The model reasons about it for 50 tokens."""
MOST_TOKENS = 1200
REQUEST_S = 120.0
ENOUGH_EVENTS = 8
"""Of a client that had a part of its answer: more than any head has."""
MOST_TURNS = 12


@dataclass(frozen=True)
class Kind:
    """One kind of request. `schemas`: what a text of the answer must be, if it has a schema."""

    path: str
    body: Json
    read: Reader
    text: Json | None = None

    @property
    def is_stream(self) -> bool:
        return self.read in STREAMS

    def check(self, whole: Whole) -> None:
        """Every text and every call is whole and valid."""
        for parts, finish in whole.choices:
            calls = [part for part in parts if part[0] == "call"]
            assert finish == ("tool_calls" if calls else "stop"), whole
            assert [part[0] for part in parts].count("text") <= 1, whole
            for part in parts:
                schema = ARGUMENTS[part[1]] if part[0] == "call" else self.text
                if schema is not None and part[0] != "reasoning":
                    jsonschema_rs.validate(schema, json.loads(part[-1]))


def _chat(*, stream: bool = True, text: Json | None = None, **more: Any) -> Kind:
    body: Json = {"messages": [{"role": "user", "content": ASKED}], "max_tokens": MOST_TOKENS}
    body |= {"temperature": 0, **more}
    if text is not None:
        form = {"name": "answer", "schema": text}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Kind("chat/completions", body, chat_stream if stream else chat, text)


def _message(*, text: Json | None = None, **more: Any) -> Kind:
    body: Json = {"messages": [{"role": "user", "content": ASKED}], "max_tokens": MOST_TOKENS}
    body |= {"temperature": 0, "stream": True, **more}
    if text is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": text}}
    return Kind("messages", body, messages_stream, text)


def _response(*, text: Json | None = None, **more: Any) -> Kind:
    body: Json = {"input": ASKED, "max_output_tokens": MOST_TOKENS, "temperature": 0}
    body |= {"stream": True, **more}
    if text is not None:
        body["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": text}}
    return Kind("responses", body, responses_stream, text)


def _tools(*names: str) -> list[Json]:
    made = [{"name": name, "parameters": ARGUMENTS[name]} for name in names]
    return [{"type": "function", "function": one} for one in made]


_NAMED = {"type": "function", "function": {"name": "note"}}
_SEEDED: Json = {"temperature": 0.8, "seed": 7}
_THINKS: Json = {"chat_template_kwargs": {"enable_thinking": True}}
_BUDGET: Json = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": MOST_TOKENS}
_USES = [{"name": name, "input_schema": ARGUMENTS[name]} for name in ARGUMENTS]
_FUNCTIONS = [
    {"type": "function", "name": name, "parameters": ARGUMENTS[name]} for name in ARGUMENTS
]
KINDS = {
    "chat, schema": _chat(text=PERSON),
    "chat, schema, drawn": _chat(text=PERSON, **_SEEDED),
    "chat, schema, two choices": _chat(text=PERSON, n=2, **_SEEDED),
    "chat, schema behind reasoning": _chat(text=PERSON, **_THINKS),
    "chat, reasoning and text": _chat(**_THINKS),
    "chat, any calls": _chat(tools=_tools("weather", "note"), tool_choice="required", **_SEEDED),
    "chat, one call": _chat(
        tools=_tools("note"), tool_choice="required", parallel_tool_calls=False
    ),
    "chat, a named call": _chat(tools=_tools("weather", "note"), tool_choice=_NAMED),
    "chat, a call behind reasoning": _chat(tools=_tools("note"), tool_choice=_NAMED, **_THINKS),
    "chat, schema, not streamed": _chat(stream=False, text=PERSON),
    "chat, calls, not streamed": _chat(
        stream=False, tools=_tools("weather", "note"), tool_choice="required"
    ),
    "message": _message(),
    "message, schema": _message(text=PERSON),
    "message, thinking": _message(**_BUDGET),
    "message, uses of tools": _message(tools=_USES, tool_choice={"type": "any"}),
    "response, schema": _response(text=PERSON),
    "response, schema behind reasoning": _response(text=PERSON, reasoning={"effort": "low"}),
    "response, calls": _response(tools=_FUNCTIONS, tool_choice="required"),
}
USUAL = (
    "chat, schema",
    "chat, schema, two choices",
    "chat, any calls",
    "chat, a call behind reasoning",
    "chat, schema, not streamed",
    "message, thinking",
    "message, uses of tools",
    "response, schema behind reasoning",
    "response, calls",
)
"""Each API, and text, reasoning, a schema and calls; drawn and not, streamed and not."""


@dataclass
class Asking:
    """One request on its way. `on_event` is called for each piece that comes."""

    kind: str
    id: str
    on_event: Callable[[], None]
    events: int = 0
    events_at_kill: int = 0
    is_over: bool = False
    data: bytearray = field(default_factory=bytearray)

    async def run(self, http: aiohttp.ClientSession, url: str) -> Whole:
        kind = KINDS[self.kind]
        body = json.dumps({"model": "demo", **kind.body})
        head = {"X-Request-Id": self.id, "Content-Type": "application/json"}
        try:
            async with http.post(f"{url}/v1/{kind.path}", data=body, headers=head) as response:
                async for piece in response.content.iter_any():
                    self.data += piece
                    self.events += piece.count(b"\n\n")
                    self.on_event()
                assert response.status == 200, bytes(self.data)
        finally:
            self.is_over = True
            self.on_event()
        whole = kind.read(bytes(self.data))
        kind.check(whole)
        return whole


@dataclass
class Killing:
    """A fleet of which Ds are killed, what its answers are, and which kinds were hit how often."""

    fleet: Fleet
    rng: random.Random
    kinds: Collection[str]
    right: dict[str, Whole] = field(default_factory=dict[str, Whole])
    events: dict[str, int] = field(default_factory=dict[str, int])
    hits: dict[str, int] = field(init=False)
    turns: int = 0

    def __post_init__(self) -> None:
        self.hits = dict.fromkeys(self.kinds, 0)

    async def learn(self, http: aiohttp.ClientSession) -> None:
        """What each kind is answered while nothing happens."""
        for kind in self.kinds:
            asking = Asking(kind, "undisturbed", lambda: None)
            self.right[kind] = await asking.run(http, self.fleet.router.url)
            self.events[kind] = asking.events
        for kind in ("chat, any calls", "message, uses of tools", "response, calls"):
            (parts, _), *_ = self.right[kind].choices
            assert len(parts) > 1, f"only one call, choose another prompt: {parts}"

    async def turn(self, http: aiohttp.ClientSession, aim: str) -> None:
        """Kill a D in the middle of the answers `aim`, start it again. AssertionError for an answer
        that is not the right one."""
        self.turns += 1
        victim = self.rng.choice([one for one in self.fleet.engines if one.role == "Decode"])
        place = self.rng.uniform(0.1, 0.8)
        was_killed = False

        def look() -> None:
            nonlocal was_killed
            if not was_killed and all(self._has_come_to(place, one) for one in aimed):
                was_killed = True
                victim.popen.kill()
                for one in askings:
                    one.events_at_kill = 0 if one.is_over else one.events

        askings = [
            Asking(kind, f"{self.turns}-{number}-{twin}", look)
            for number, kind in enumerate(self.kinds)
            for twin in range(2)
        ]
        # What is not streamed is hit where a stream that has begun with it is.
        shown = aim if KINDS[aim].is_stream else "chat, schema"
        aimed = [one for one in askings if one.kind == shown]
        url = self.fleet.router.url
        got = await asyncio.gather(*(one.run(http, url) for one in askings), return_exceptions=True)
        told = f"turn {self.turns}: {victim.name} killed at {place:.2f} of {shown}"
        for one, whole in zip(askings, got, strict=True):
            said = f"{told}, {one.kind}, {one.events_at_kill} events before: {whole!r}"
            assert whole == self.right[one.kind], f"{said}, not {self.right[one.kind]!r}"
        assert was_killed, told
        await asyncio.to_thread(victim.restart)
        await asyncio.to_thread(self.fleet.wait_ready, victim)
        self._count(askings)

    def _has_come_to(self, place: float, asking: Asking) -> bool:
        return asking.is_over or asking.events >= max(
            ENOUGH_EVENTS, place * self.events[asking.kind]
        )

    def _count(self, askings: list[Asking]) -> None:
        """The kinds whose answers another D went on with, by the router's access log."""
        lines = wait_for("lines of the access log", lambda: self._lines(askings))
        for one in askings:
            failures = re.search(r" tries=2 .* failures=decode:\S+", lines[one.id])
            had_some = one.events_at_kill >= ENOUGH_EVENTS or not KINDS[one.kind].is_stream
            self.hits[one.kind] += failures is not None and had_some

    def _lines(self, askings: list[Asking]) -> dict[str, str] | None:
        found = re.findall(r"^.* client_id=(\S+).*$", self.fleet.router.log, re.M)
        ids = {one.id for one in askings}
        if not ids <= set(found):
            return None
        lines = self.fleet.router.log.splitlines()
        return {match[1]: line for line in lines if (match := re.search(r" client_id=(\S+)", line))}

    def check_leaks(self) -> None:
        """Nothing is held for what is over, neither by the router nor by an engine."""
        assert "Traceback" not in self.fleet.router.log
        router = self.fleet.router
        wait_for("no request in the router", lambda: not router.metric("xpyd_router_in_flight"))
        for engine in self.fleet.engines:
            wait_for(f"nothing held in {engine.name}", lambda one=engine: _is_empty(one))
            assert "Traceback" not in engine.log


def _is_empty(engine: Process) -> bool:
    held = ("kv_leases", "kv_open_transfers", "kv_buffer_used_bytes", "kv_pool_used_bytes")
    names = ("engine_requests_running", "engine_requests_waiting", *held)
    samples = engine.metrics()
    free, total = (samples[f"xpyd_engine_kv_blocks_{name}"] for name in ("free", "total"))
    return free == total and not any(samples[f"xpyd_{name}"] for name in names)


def make_model(folder: Path) -> Path:
    """The demo model as one that reasons where a chat asks for it."""
    shutil.copytree(DEMO_MODEL, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    model = tokenizer["model"]
    model["vocab"]["</think>"] = model["vocab"].pop(WORD)
    model["merges"] = [pair for pair in model["merges"] if WORD not in (*pair, "".join(pair))]
    file.write_text(json.dumps(tokenizer))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    closed, opened = "<think>\\n\\n</think>\\n\\n", "<think>\\n"
    config["chat_template"] += f"{{{{- '{opened}' if enable_thinking else '{closed}' -}}}}"
    file.write_text(json.dumps(config))
    return folder


@pytest.fixture
def killing(tmp_path: Path) -> Iterator[Callable[[int, Collection[str]], Killing]]:
    """A fleet of one P and two Ds."""
    model = make_model(tmp_path / "model")
    with empty_fleet(tmp_path) as running:
        running.start_router()
        roles = ("Prefill", "Decode", "Decode")
        running.wait_ready(*(running.start_engine(role, model=model) for role in roles))
        yield lambda seed, kinds: Killing(running, random.Random(seed), kinds)


async def _play(killing: Killing, *, least_hits: int, most_turns: int) -> None:
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        await killing.learn(http)
        while missing := [kind for kind, hits in killing.hits.items() if hits < least_hits]:
            assert killing.turns < most_turns, f"not hit: {missing}"
            # Others are longer than the shortest, so most are hit with it.
            some = (killing.rng.choice(missing), min(missing, key=killing.events.__getitem__))
            await killing.turn(http, killing.rng.choice(some))


@pytest.mark.slow
@pytest.mark.long
def test_whatever_an_agent_asked_for_is_whole_when_its_d_is_killed(
    killing: Callable[[int, Collection[str]], Killing],
) -> None:
    """Each of these kinds of answers is hit by a kill once or more."""
    made = killing(1, USUAL)
    asyncio.run(_play(made, least_hits=1, most_turns=MOST_TURNS))
    made.check_leaks()


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3])
def test_each_kind_of_answer_is_whole_behind_twenty_kills(
    killing: Callable[[int, Collection[str]], Killing], seed: int
) -> None:
    made = killing(seed, KINDS)
    asyncio.run(_play(made, least_hits=20, most_turns=200))
    made.check_leaks()
