"""Fleets of the same engines on the same cores, in turns under the same open-loop load.

All fleets are up from the first turn to the last; those that are not asked only send heartbeats.
Each engine computes with one thread on a core of its own; the router and the client run where there
is room. The rates are shares of what one core prefills, measured first, so that the ladder fits any
machine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from bench.engine.contender import ContenderFailed
from bench.engine.models import Model
from bench.engine.shape import MAX_MODEL_LEN, VOCABULARY
from tests.e2e.harness import Fleet, Process, empty_fleet
from xpyd_tools.bench.client import Target, run_load
from xpyd_tools.bench.load import LoadRequest, arrival_times, random_requests
from xpyd_tools.bench.summary import Sample

_REQUEST_S = 300.0
_CALIBRATING = 5


@dataclass(frozen=True)
class Layout:
    """A fleet: the role of each engine, and the flags of all of them."""

    name: str
    roles: tuple[str, ...]
    flags: tuple[str, ...] = ()


APART = Layout("1P1D", ("Prefill", "Decode"))
AGGREGATED = Layout("aggregated", ("Aggregated", "Aggregated"))
CHUNKED = Layout(
    "aggregated, chunks of 128",
    ("Aggregated", "Aggregated"),
    ("--max-num-batched-tokens", "128", "--max-num-seqs", "64"),
)
LAYOUTS = (APART, AGGREGATED, CHUNKED)


@dataclass(frozen=True)
class Load:
    """The ladder: each share of one core's prefill rate, for each prompt length."""

    prompt_tokens: tuple[int, ...] = (128, 512, 1024)
    output_tokens: int = 64
    shares: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 0.95)
    seconds: float = 30.0
    rounds: int = 1


@dataclass(frozen=True)
class Turn:
    """What one fleet answered at one rung of the ladder."""

    layout: Layout
    prompt_tokens: int
    share: float
    rate_per_s: float
    samples: list[Sample]


def measure(
    model: Model,
    layouts: Sequence[Layout],
    load: Load,
    *,
    cores: int,
    folder: Path,
    say: Callable[[str], None],
) -> list[Turn]:
    """Each fleet at each rung in each round. The prefill rate of the first layout makes the ladder.

    ContenderFailed names the fleet that did not answer as asked.
    """
    turns: list[Turn] = []
    with ExitStack() as stack:
        fleets: dict[Layout, Fleet] = {}
        for number, layout in enumerate(layouts):
            say(f"{layout.name}: {len(layout.roles)} engines start")
            place = folder / str(number)
            place.mkdir()
            fleets[layout] = stack.enter_context(_started(place, layout, model, cores))
        for tokens in load.prompt_tokens:
            for layout in layouts:  # the first prompts of a length pay for compiled operators
                _alone(fleets[layout], layout, tokens, load, seed=1)
            whole = _alone(fleets[layouts[0]], layouts[0], tokens, load, seed=2)
            most_per_s = 1 / median(sample.ttft_s for sample in whole)
            for round_ in range(load.rounds):
                for at, share in enumerate(load.shares):
                    seed = 1_000_000 * (round_ + 1) + 1_000 * at + tokens
                    for layout in _rotated(layouts, round_ + at):
                        rate = share * most_per_s
                        say(f"{tokens} tokens in, {rate:.2f} requests/s: {layout.name}")
                        samples = _ask(fleets[layout], layout, tokens, load, rate, seed)
                        turns.append(Turn(layout, tokens, share, rate, samples))
    return turns


def _rotated(layouts: Sequence[Layout], by: int) -> list[Layout]:
    by %= len(layouts)
    return [*layouts[by:], *layouts[:by]]


def _alone(fleet: Fleet, layout: Layout, tokens: int, load: Load, seed: int) -> list[Sample]:
    """Some requests, one after the other."""
    return _run(fleet, layout, tokens, load, [0.0] * _CALIBRATING, seed, at_once=1)


def _ask(
    fleet: Fleet, layout: Layout, tokens: int, load: Load, rate: float, seed: int
) -> list[Sample]:
    """An open loop: requests come whether or not the ones before are answered, each on a
    connection of its own. All layouts get the same prompts at the same times."""
    count = max(2, round(rate * load.seconds))
    times = arrival_times(count, rate_per_s=rate, burstiness=1.0, seed=seed)
    return _run(fleet, layout, tokens, load, times, seed)


def asked(
    fleet: Fleet,
    requests: Sequence[LoadRequest],
    times_s: Sequence[float],
    *,
    at_once: int | None,
) -> list[Sample]:
    """What the fleet's router answers to greedy requests of exactly so many tokens, sent at these
    times, at most `at_once` (None: any number) under way."""
    url = urlsplit(fleet.router.url)
    members = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    target = Target(
        url.hostname or "", url.port or 0, False, "/v1/completions", "demo", members, _REQUEST_S
    )
    return asyncio.run(run_load(target, requests, times_s, max_concurrency=at_once))


def _run(
    fleet: Fleet,
    layout: Layout,
    tokens: int,
    load: Load,
    times_s: Sequence[float],
    seed: int,
    *,
    at_once: int | None = None,
) -> list[Sample]:
    requests = random_requests(
        len(times_s),
        input_tokens=tokens,
        output_tokens=load.output_tokens,
        vocabulary=VOCABULARY,
        seed=seed,
    )
    samples = asked(fleet, requests, times_s, at_once=at_once)
    for sample in samples:
        got = (sample.input_tokens, sample.output_tokens)
        if sample.error or got != (tokens, load.output_tokens):
            raise ContenderFailed(f"{layout.name}: {sample.error or f'{got} tokens in and out'}")
    return samples


@contextmanager
def _started(folder: Path, layout: Layout, model: Model, cores: int) -> Generator[Fleet]:
    """The layout's fleet, ready, each engine on its core; ended on leaving."""
    with empty_fleet(folder) as running:
        running.heartbeat_ms = 1000
        running.start_router("--policy", "LeastLoaded")
        flags = (
            *("--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)),
            *("--kv-cache-memory", "512Mi", "--kv-buffer-size", "64Mi"),
            *("--kv-host-pool-size", "256Mi", "--no-enable-prefix-caching", *layout.flags),
        )
        engines = [running.start_engine(role, *flags, model=model.folder) for role in layout.roles]
        running.wait_ready(*engines)
        for number, engine in enumerate(engines):
            _bind(engine, number % cores)
        yield running


def _bind(process: Process, core: int) -> None:
    """All threads that the process has; those that they start inherit it."""
    for thread in os.listdir(f"/proc/{process.popen.pid}/task"):
        os.sched_setaffinity(int(thread), {core})
