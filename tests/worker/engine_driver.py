"""An engine over the fakes, run by hand in virtual time, and requests for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.worker.engine_fakes import BLOCK, EOS, FakeExecutor, alone, kv_of, next_token
from tests.worker.transfer_fakes import FakeConsumer, FakeProducer
from xpyd_core.errors import XpydError
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.core import EngineCore
from xpyd_worker.engine.inbox import Inbox
from xpyd_worker.engine.open_requests import StopRules
from xpyd_worker.engine.request import (
    EngineOutput,
    EngineRequest,
    Policy,
    ReceiveFrom,
    SamplingParams,
    SchedulerConfig,
    SendTo,
)
from xpyd_worker.engine.speculation import SpeculativeConfig
from xpyd_worker.engine.step_times import LatencyGoal
from xpyd_worker.grammar.matcher import Matcher

# How many steps are under way: one, one more that is drawn ahead for, or those of a pipeline.
Way = dict[str, Any]
ONE_OR_AHEAD: list[Way] = [{"depth": 1}, {"depth": 2}]
PIPELINES: list[Way] = [{"depth": n, "draws_ahead": False} for n in (2, 3, 4)]
# Short n-grams, so that the fake model's texts have many.
DRAFTS = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
MODEL_DRAFTS = SpeculativeConfig(method="draft_model", model="draft", num_speculative_tokens=3)
# What drafts reads hidden states, also of tokens whose KV is at hand.
STATE_DRAFTS = SpeculativeConfig(method="eagle3", model="head", num_speculative_tokens=3)


def seeds(quick: int, whole: int) -> list[Any]:
    """Parameters of a walk: the first few, and as `make soak` all of them."""
    rest = (pytest.param(seed, marks=pytest.mark.soak) for seed in range(quick, whole))
    return [*range(quick), *rest]


def walks(quick: int, whole: int) -> list[Any]:
    """Parameters (seed, way) of a walk in each way to have steps under way; one quick one in each
    pipeline."""
    drawn_ahead = [(seed, way, seed >= quick) for way in ONE_OR_AHEAD for seed in range(whole)]
    pipelined = [(seed, way, seed > 0) for way in PIPELINES for seed in range(whole)]
    return [
        pytest.param(
            *(seed, way),
            marks=[pytest.mark.soak] if is_rest else [],
            id=f"{seed}-{'ahead' if way.get('draws_ahead', True) else 'stages'}{way['depth']}",
        )
        for seed, way, is_rest in drawn_ahead + pipelined
    ]


class EngineDriver:
    """An engine over the fakes, run by hand in virtual time, without its thread."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        seqs: int = 8,
        budget: int = 32,
        model_len: int = 200,
        max_waiting: int = 1000,
        recompute: bool = True,
        caching: bool = True,
        sends: bool = False,
        receives: bool = False,
        linger: int = 2,
        threshold: int = 0,
        policy: Policy = "fcfs",
        depth: int = 1,
        draws_ahead: bool = True,
        ranks_send: bool = False,
        speculative: SpeculativeConfig | None = None,
        goal: LatencyGoal = "ttft",
        make_executor: Callable[[int, SchedulerConfig, int, bool], FakeExecutor] = FakeExecutor,
    ) -> None:
        limits = SchedulerConfig(
            seqs, budget, max_waiting, recompute, threshold, policy, speculative, goal
        )
        self.now = 100.0
        self.drafts = speculative is not None
        self.model_len = model_len
        self.executor = make_executor(blocks, limits, depth, draws_ahead)
        self.pool = BlockManager(blocks, block_size=BLOCK, enable_prefix_caching=caching)
        self.producer = (
            FakeProducer(self.pool, self.executor, linger, ranks_send) if sends else None
        )
        self.consumer = FakeConsumer(self.pool, self.executor) if receives else None
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.requests: dict[str, EngineRequest] = {}
        # By request, as they were when it was submitted.
        self.matchers: dict[str, tuple[Matcher, ...]] = {}
        self.core = EngineCore(
            self.executor,
            pool=self.pool,
            inbox=Inbox(),
            config=limits,
            rules=StopRules((EOS,), model_len),
            deliver=self._deliver,
            producer=self.producer,
            consumer=self.consumer,
            clock=lambda: self.now,
        )

    def submit(self, request: EngineRequest) -> EngineRequest:
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        self.matchers[request.request_id] = tuple(one.copy() for one in request.matchers)
        self.core.submit(request)
        return request

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.core.turn()

    def run(self, limit: int = 3000) -> None:
        """Until nothing can be done, and no sent block is held."""
        for _ in range(limit):
            if not self.core.turn() and not (self.producer and self.producer.has_work()):
                return
        raise AssertionError("the engine does not come to rest")

    def finished(self, request_id: str) -> bool:
        return any(output.finished for output in self.outputs[request_id])

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        return [
            sampled.token_id
            for output in self.outputs[request_id]
            for part in output.choices
            if part.choice == choice
            for sampled in part.tokens
        ]

    def reasons(self, request_id: str) -> dict[int, str]:
        """Why each choice ended; it fails when one ended twice."""
        ends = [
            (part.choice, part.finish_reason)
            for output in self.outputs[request_id]
            for part in output.choices
            if part.finish_reason is not None
        ]
        assert len(dict(ends)) == len(ends), "a choice ended twice"
        return dict(ends)

    def alone(self, request_id: str) -> list[tuple[list[int], str]]:
        """See engine_fakes.alone."""
        request = self.requests[request_id]
        return alone(request, self.model_len, self.matchers[request_id])

    def assert_as_alone(self, request_id: str) -> None:
        for choice, (tokens, reason) in enumerate(self.alone(request_id)):
            assert self.tokens(request_id, choice) == tokens, (request_id, choice)
            assert self.reasons(request_id)[choice] == reason
        assert [o.finished for o in self.outputs[request_id]].count(True) == 1
        assert self.outputs[request_id][-1].finished

    def assert_begins_as_alone(self, request_id: str) -> None:
        """For a request that was cut off: it put out nothing wrong."""
        for choice, (tokens, _reason) in enumerate(self.alone(request_id)):
            got = self.tokens(request_id, choice)
            assert got == tokens[: len(got)], (request_id, choice)

    def assert_all_blocks_free(self) -> None:
        assert self.pool.num_free == self.pool.num_blocks

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            earlier = self.outputs[output.request_id]
            assert not any(o.finished for o in earlier), "an output after the last one"
            earlier.append(output)


class StepFailed(XpydError):
    """What the fake executor raises for a step that failed."""


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    n: int = 1,
    continue_from: tuple[tuple[int, ...], ...] = (),
    transfer: SendTo | ReceiveFrom | None = None,
    first_choice: int = 0,
    max_tokens: int = 8,
    cache_salt: bytes = b"",
    priority: int = 0,
    matchers: tuple[Matcher, ...] = (),
    **sampling: Any,
) -> EngineRequest:
    """A request with the fields that a test cares about."""
    return EngineRequest(
        request_id,
        log_id=request_id,
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, seed=7, **sampling),
        n=n,
        first_choice=first_choice,
        continue_from=continue_from,
        transfer=transfer,
        cache_salt=cache_salt,
        priority=priority,
        matchers=matchers,
    )


def prompt_of(length: int, first: int = 1) -> list[int]:
    """Some prompt; another for another `first`."""
    return [(first + 3 * i) % 37 + 1 for i in range(length)]


def prompt_that_draws(token: int, length: int = 6) -> list[int]:
    """A prompt behind which the fake model draws `token` first, for choice 0."""
    params = SamplingParams(max_tokens=8, seed=7)
    for first in range(10_000):
        prompt = [first // 37 + 1, *prompt_of(length - 1, first)]
        if next_token(kv_of(prompt)[-1], 0, 0, params) == token:
            return prompt
    raise AssertionError("no such prompt")
