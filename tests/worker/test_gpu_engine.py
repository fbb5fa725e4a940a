"""The whole engine two steps deep over the runner: the tokens of the engine on the CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from tests.gpu.fake_gpu import FakeGpu
from tests.gpu.models import cpu_runner, model_config
from tests.worker.engine_driver import DRAFTS
from tests.worker.runner_driver import BLOCK_SIZE, with_params
from tests.worker.test_gpu_runner import make
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.core import EngineCore
from xpyd_worker.engine.inbox import Inbox
from xpyd_worker.engine.open_requests import StopRules
from xpyd_worker.engine.request import EngineOutput, EngineRequest, SamplingParams, SchedulerConfig
from xpyd_worker.engine.speculation import SpeculativeConfig
from xpyd_worker.model.decoder_draft import DecoderDraft
from xpyd_worker.runner.kv_cache import KvCache
from xpyd_worker.runner.model_drafter import ModelDrafter
from xpyd_worker.runner.runner import ModelRunner

# Ends of some texts of these models, at different places.
STOPS = tuple(range(0, 211, 12))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_p": 0.95, "seed": 3},
    {"temperature": 1.2, "top_k": 40, "seed": 8, "logprobs": 2},
    {"stop_token_ids": STOPS, "temperature": 1.5, "seed": 5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 2, "min_tokens": 6, "stop_token_ids": STOPS},
    {"prompt_logprobs": 1},
    {"max_tokens": 1},
]


def requests() -> list[EngineRequest]:
    """One of each kind, one of them with three choices; the longest has several chunks."""
    made: list[EngineRequest] = []
    for number, options in enumerate(OPTIONS):
        prompt = tuple((7 * number + 3 * i) % 200 for i in range(3 + 9 * number))
        params = with_params(**({"max_tokens": 10 + number} | options))
        name = f"r{number}"
        made.append(EngineRequest(name, name, prompt, params, n=3 if number == 1 else 1))
    return made


Tokens = dict[tuple[str, int], list[int]]


class Run:
    """An engine that is turned by hand until all its requests have ended."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        seqs: int = 6,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        self.tokens: Tokens = defaultdict(list)
        self.ends: dict[tuple[str, int], str] = {}
        self.open: set[str] = set()
        self.sampling: dict[tuple[str, int], SamplingParams] = {}
        pool = BlockManager(runner.num_blocks, block_size=BLOCK_SIZE)
        self.engine = EngineCore(
            runner,
            pool=pool,
            inbox=Inbox(),
            config=SchedulerConfig(
                max_num_seqs=seqs, max_num_batched_tokens=24, speculative=speculative
            ),
            rules=StopRules((210,), 250),
            deliver=self._deliver,
        )
        for request in requests():
            self.open.add(request.request_id)
            for choice in range(request.n):
                self.sampling[request.request_id, choice] = request.sampling
            self.engine.submit(request)
        for _ in range(1000):
            self.engine.turn()
            if not self.open:
                break
        assert not self.open
        self.engine.turn()
        assert pool.num_free == pool.num_blocks

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            assert not output.error
            for choice in output.choices:
                key = (output.request_id, choice.choice)
                self.tokens[key] += [token.token_id for token in choice.tokens]
                if choice.finish_reason:
                    self.ends[key] = choice.finish_reason
            if output.finished:
                self.open.remove(output.request_id)


@pytest.fixture(scope="module")
def wanted() -> Run:
    return Run(cpu_runner(model_config("llama")))


@pytest.mark.parametrize(("largest_graph", "blocks"), [(0, 64), (4, 64), (8, 64), (4, 7)])
def test_an_engine_over_a_device_gives_the_tokens_of_the_cpu(
    wanted: Run, largest_graph: int, blocks: int
) -> None:
    """Seven blocks are fewer than the running sequences need: some are preempted."""
    runner = make(FakeGpu(), largest_graph=largest_graph, blocks=blocks)
    found = Run(runner)
    assert found.tokens == wanted.tokens
    assert found.ends == wanted.ends
    assert (found.engine.stats().preemptions > 0) == (blocks == 7)
    assert (runner.counters.graph_replays > 0) == (largest_graph > 0)


@pytest.mark.parametrize(("largest_graph", "blocks"), [(0, 64), (8, 64), (8, 7)])
def test_so_it_does_with_drafts(wanted: Run, largest_graph: int, blocks: int) -> None:
    """A step of decodes with drafts is replayed where a graph has room for its rows."""
    runner = make(FakeGpu(), largest_graph=largest_graph, blocks=blocks)
    found = Run(runner, speculative=DRAFTS)
    assert found.tokens == wanted.tokens
    assert found.ends == wanted.ends
    assert found.engine.stats().spec_draft_tokens > 0
    assert (runner.counters.graph_replays > 0) == (largest_graph > 0)


@pytest.mark.parametrize("largest_graph", [0, 8])
def test_so_it_does_where_a_model_drafts(wanted: Run, largest_graph: int) -> None:
    """The model itself, over a cache of its own: a step with its drafts is waited for."""
    runner = make(FakeGpu(), largest_graph=largest_graph, blocks=64)
    cache, vocab = runner.kv_cache, runner._vocab_size
    runner._drafter = ModelDrafter(
        DecoderDraft(runner._model, vocab, of=vocab),
        runner._kernels,
        KvCache(cache.shape, num_layers=len(cache.layers), num_blocks=64),
        weight_bytes=0,
        most_sequences=12,
    )
    given = SpeculativeConfig(method="draft_model", model="itself", num_speculative_tokens=3)
    found = Run(runner, speculative=given)
    assert found.tokens == wanted.tokens
    assert found.ends == wanted.ends
    assert found.engine.stats().spec_draft_tokens > 0


def test_the_requests_end_in_different_ways(wanted: Run) -> None:
    """What the equality is worth."""
    assert set(wanted.ends.values()) == {"stop", "length"}
    assert len({tuple(tokens) for tokens in wanted.tokens.values()}) == len(wanted.tokens) == 10
