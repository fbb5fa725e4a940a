"""Replicas inside an instance beside instances behind a router: the same engines on the same cores.

All are behind a router of their own, so that HTTP costs the same. Two instances are chosen by the
router (LeastLoaded), two replicas by the instance (4 x waiting + running). All are up from the
first turn to the last; those that are not asked only send heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

from bench.engine.contender import ContenderFailed
from bench.engine.models import Model
from bench.engine.shape import MAX_MODEL_LEN, VOCABULARY
from bench.fleet.rounds import asked
from tests.e2e.harness import Fleet, empty_fleet
from xpyd_tools.bench.load import LoadRequest, arrival_times
from xpyd_tools.bench.summary import Sample, summarize

AT_ONCE = 8
SHORT_TOKENS, LONG_TOKENS = 32, 512
"""Prompts: one of eight is long, so that choice matters: who gets a second long one waits."""
_LENGTHS = (*[SHORT_TOKENS] * 7, LONG_TOKENS)
_OUTPUT_TOKENS = (16, 64)
_SHARE = 0.7
"""Of the rate that the two instances answer, 8 at once."""


@dataclass(frozen=True)
class Contender:
    """`engines` of Aggregated, each with `flags`; ranks in all: `ranks`."""

    name: str
    engines: int
    ranks: int
    flags: tuple[str, ...] = ()


INSTANCES = Contender("two instances", 2, 2)
REPLICAS = Contender("one instance, two replicas", 1, 2, ("--data-parallel-size", "2"))
CONTENDERS = (
    INSTANCES,
    REPLICAS,
    Contender("one instance, TP 2", 1, 2, ("--tensor-parallel-size", "2")),
    Contender("one instance", 1, 1),
)
_EXPERTS = "--enable-expert-parallel"
OF_EXPERTS = (
    *CONTENDERS,
    Contender("one instance, two replicas, EP", 1, 2, (*REPLICAS.flags, _EXPERTS)),
    Contender("one instance, TP 2, EP", 1, 2, ("--tensor-parallel-size", "2", _EXPERTS)),
)
"""For a model with experts: also replicas that share them, in lock step."""


@dataclass(frozen=True)
class ReplicasTurn:
    """One contender in one round: with 8 requests at once, and as requests came by themselves."""

    contender: Contender
    at_once: list[Sample]
    poisson: list[Sample]


def measure(
    model: Model,
    *,
    requests: int,
    cores: int,
    rounds: int,
    folder: Path,
    say: Callable[[str], None],
    contenders: Sequence[Contender] = CONTENDERS,
) -> list[ReplicasTurn]:
    """Each contender in each round. ContenderFailed."""
    turns: list[ReplicasTurn] = []
    with ExitStack() as stack:
        fleets: dict[Contender, Fleet] = {}
        for number, contender in enumerate(contenders):
            say(f"{model.name}: {contender.name} starts")
            place = folder / f"replicas-{number}"
            place.mkdir()
            running = stack.enter_context(empty_fleet(place))
            fleets[contender] = running
            _start(running, contender, model, cores)
            _run(running, contender, _requests(2 * AT_ONCE, seed=1), [0.0] * 2 * AT_ONCE)
        calibrating = _requests(requests, seed=2)
        first = _run(fleets[INSTANCES], INSTANCES, calibrating, [0.0] * requests)
        rate_per_s = _SHARE * summarize(first).requests_per_s
        for number in range(rounds):
            of_round, seed = _requests(requests, seed=10 + number), 100 + number
            times_s = arrival_times(requests, rate_per_s=rate_per_s, burstiness=1.0, seed=seed)
            for contender, running in fleets.items():
                say(f"{model.name}: round {number + 1}, {contender.name}")
                at_once = _run(running, contender, of_round, [0.0] * requests)
                poisson = _run(running, contender, of_round, times_s, at_once=None)
                turns.append(ReplicasTurn(contender, at_once, poisson))
    return turns


def _start(running: Fleet, contender: Contender, model: Model, cores: int) -> None:
    running.heartbeat_ms = 1000
    running.start_router("--policy", "LeastLoaded")
    flags = (
        *("--dtype", "auto", "--device", "cpu", "--max-model-len", str(MAX_MODEL_LEN)),
        *("--kv-cache-memory", "256Mi", "--no-enable-prefix-caching"),
        *("--threads", str(max(1, cores // contender.ranks)), *contender.flags),
    )
    engines = [
        running.start_engine("Aggregated", *flags, model=model.folder)
        for _ in range(contender.engines)
    ]
    running.wait_ready(*engines)


def _requests(count: int, *, seed: int) -> list[LoadRequest]:
    rng = Random(seed)
    return [
        LoadRequest(
            tuple(rng.choices(VOCABULARY, k=rng.choice(_LENGTHS))), rng.randint(*_OUTPUT_TOKENS)
        )
        for _ in range(count)
    ]


def _run(
    running: Fleet,
    contender: Contender,
    requests: Sequence[LoadRequest],
    times_s: Sequence[float],
    *,
    at_once: int | None = AT_ONCE,
) -> list[Sample]:
    samples = asked(running, requests, times_s, at_once=at_once)
    # Not by request: samples come in the order in which they ended.
    got = sorted((sample.input_tokens, sample.output_tokens) for sample in samples)
    errors = [sample.error for sample in samples if sample.error]
    if errors or got != sorted((len(one.prompt), one.output_tokens) for one in requests):
        raise ContenderFailed(f"{contender.name}: {errors or f'{got} tokens in and out'}")
    return samples
