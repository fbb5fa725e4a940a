"""The replay engine: the real server and engine over a token source that plays what it is given.

`replaying` serves it over HTTP, so that what a model family puts out can be played through all that
turns tokens into answers. Scheduler, stop rules, continuation and text are the real ones; a step
draws the next token of the script in place of a forward. KV never moves: in a fleet (`replayed`)
P says so, and D computes the prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tests.router.fakes import Fleet, fleet
from tests.worker.server_fakes import EOS, KEY, VOCAB, ByteTokenizer, Running, serving
from xpyd_core.errors import XpydError
from xpyd_core.messages import Heartbeat
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.core import EngineCore
from xpyd_worker.engine.executor import (
    Finished,
    ScheduledSequence,
    StepCounters,
    StepInput,
    StepOutput,
)
from xpyd_worker.engine.inbox import Inbox
from xpyd_worker.engine.open_requests import StopRules
from xpyd_worker.engine.request import (
    EngineOutput,
    EngineRequest,
    SampledToken,
    SchedulerConfig,
    TokenLogprob,
)

BLOCK = 16
MODEL_LEN = 8192

Play = Callable[[str, int], str | Sequence[int]]
"""From the prompt's text and OpenAI's index of a choice to what it says: a text, which ends in EOS
and has a token for each byte, or ids."""


def always(said: str) -> Play:
    """Every choice of every request says `said`."""
    return lambda _prompt, _choice: said


def by_prompt(*pairs: tuple[str, str]) -> Play:
    """What is said is that of the first pair whose first text is in the prompt."""

    def play(prompt: str, _choice: int) -> str:
        return next(said for asked, said in pairs if asked in prompt)

    return play


@dataclass
class ReplayExecutor:
    """An Executor whose draws are those of `play`, by choice and position alone."""

    play: Play
    num_blocks: int = 2048
    depth: int = 1
    draws_ahead: bool = False
    counters: StepCounters = field(default_factory=StepCounters)
    prompts: dict[str, str] = field(default_factory=dict)
    """The texts of prompts, by the requests' log id."""
    fails_at: set[int] = field(default_factory=set)
    """Positions whose next draw fails, once each, and with it the requests of its step."""

    def await_oldest(self, awake: int) -> bool:
        return True

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> Finished:
        return Finished(StepOutput({s.seq_id: self._draw(s) for s in step.sequences}, {}))

    def _draw(self, sequence: ScheduledSequence) -> tuple[SampledToken, ...]:
        drawn: list[SampledToken] = []
        for sample in sequence.samples:
            if sample.position in self.fails_at:
                self.fails_at.discard(sample.position)
                raise XpydError("a scripted failure")
            ids = self.ids(self.prompts[sequence.log_id], sample.choice_index)
            token = ids[sample.position] if sample.position < len(ids) else EOS
            wanted = sequence.sampling.logprobs
            score = None if wanted is None else TokenLogprob(token, -0.5, ((token, -0.5),)[:wanted])
            drawn.append(SampledToken(token, score))
        return tuple(drawn)

    def ids(self, prompt: str, choice: int) -> Sequence[int]:
        """What a choice says, as tokens."""
        said = self.play(prompt, choice)
        return [*said.encode(), EOS] if isinstance(said, str) else said


class ReplayEngine(EngineCore):
    """An engine over a ReplayExecutor, as `serving` takes one."""

    def __init__(self, play: Play, max_model_len: int = MODEL_LEN) -> None:
        # Room for four of the longest sequences.
        self.executor = ReplayExecutor(play, num_blocks=4 * max_model_len // BLOCK)
        self.deliver: Callable[[Sequence[EngineOutput]], None] = lambda _outputs: None
        self.requests: list[EngineRequest] = []
        self.tasks: set[Any] = set()
        super().__init__(
            self.executor,
            pool=BlockManager(
                self.executor.num_blocks, block_size=BLOCK, enable_prefix_caching=True
            ),
            inbox=Inbox(),
            config=SchedulerConfig(64, 4096),
            rules=StopRules((EOS,), max_model_len),
            deliver=lambda outputs: self.deliver(outputs),
        )

    def submit(self, request: EngineRequest) -> None:
        self.requests.append(request)
        text = bytes(i for i in request.prompt if i < 256).decode(errors="replace")
        self.executor.prompts[request.log_id] = text
        super().submit(request)


@contextlib.asynccontextmanager
async def replaying(play: Play | str, **served: Any) -> AsyncGenerator[Running]:
    """A server whose model says what `play` says. `served`: as `serving` takes it."""
    served.setdefault("max_model_len", MODEL_LEN)
    said = always(play) if isinstance(play, str) else play
    engine = ReplayEngine(said, served["max_model_len"])
    engine.start()
    try:
        async with serving(engine, **served) as running:  # type: ignore[arg-type]
            yield running
    finally:
        engine.stop(5.0)


@contextlib.asynccontextmanager
async def replayed(
    play: Play | str,
    *,
    prefill: int = 1,
    decode: int = 1,
    names: tuple[str, ...] = ("fake", "alias"),
    served: Mapping[str, Any] = MappingProxyType({}),
    **config: Any,
) -> AsyncIterator[tuple[Fleet, dict[str, list[Running]]]]:
    """A real router in front of replay engines, by role: `Prefill` and `Decode`, or, where there
    are none of these, one `Aggregated`. `names`: of the model. `served`: of the engines, `config`:
    of the router."""
    roles = ["Prefill"] * prefill + ["Decode"] * decode or ["Aggregated"]
    engines: dict[str, list[Running]] = {}
    async with contextlib.AsyncExitStack() as stack:
        # They beat once; a test with thousands of requests outlives the usual time to the next.
        made = await stack.enter_async_context(fleet(**{"missed_beats": 1000, **config}))
        for number, role in enumerate(roles):
            # Requests of a router without a key are unsigned; the engine takes them as they are.
            own = {"role": role, "signed_by": None, "keys": (KEY,), "names": names}
            engine = replaying(play, **own, **served)
            running = await stack.enter_async_context(engine)
            engines.setdefault(role, []).append(running)
            length = served.get("max_model_len", MODEL_LEN)
            await _join(made, running, role, number, names, length)
        yield made, engines


async def _join(
    made: Fleet,
    running: Running,
    role: str,
    number: int,
    names: tuple[str, ...],
    max_model_len: int,
) -> None:
    """Have the router know an engine, by a beat of it."""
    beat = Heartbeat(
        type=role[0],
        http_address=running.url.removeprefix("http://"),
        zmq_address=f"127.0.0.1:{21000 + number}",
        version=1,
        instance=f"{role.lower()}-{number}",
        incarnation="my-inc",
        compatibility="replay",
        models=names,
        max_model_len=max_model_len,
        continuation=1,
        block_tokens=BLOCK,
    )
    await made.beat(_Beating(beat))  # type: ignore[arg-type]


@dataclass
class _Beating:
    """What Fleet.beat reads of an engine."""

    beat: Heartbeat


__all__ = ["MODEL_LEN", "VOCAB", "ByteTokenizer", "always", "by_prompt", "replayed", "replaying"]
