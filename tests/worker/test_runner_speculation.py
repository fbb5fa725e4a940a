"""Drafts in a real model's steps: every option draws what it draws without them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.kit.threads import Ranks
from tests.worker.engine_driver import DRAFTS
from tests.worker.grammar_kit import GRAMMARS, start_of
from tests.worker.runner_driver import (
    BLOCK_SIZE,
    make_runner,
    oracle_logits,
    oracle_tokens,
    tiny_checkpoint,
    with_params,
)
from tests.worker.test_rejection import chi_square_is_small
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.core import EngineCore
from xpyd_worker.engine.executor import StepCounters, StepInput
from xpyd_worker.engine.inbox import Inbox
from xpyd_worker.engine.open_requests import StopRules
from xpyd_worker.engine.request import (
    EngineOutput,
    EngineRequest,
    EngineStats,
    SampledToken,
    SamplingParams,
    SchedulerConfig,
)
from xpyd_worker.engine.speculation import SpeculativeConfig
from xpyd_worker.runner.sampler import distribution

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")
EOS = 0
PATTERN = [5, 9, 14, 5, 9, 14, 22]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": 3},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 3, "logprobs": 2},
    # The sharper the surer a draft comes true.
    "sharp": {"temperature": 0.2, "top_k": 20, "seed": 4},
    "min_p": {"temperature": 1.1, "min_p": 0.1, "seed": 5},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "sampled penalties": {"temperature": 0.6, "frequency_penalty": 0.2, "seed": 6},
    "bad words": {"bad_words": ((5, 9), (14,), (9, 14, 5)), "temperature": 0.7, "seed": 7},
    "bias": {"logit_bias": ((5, 4.0), (9, 4.0), (14, 4.0)), "temperature": 0.9, "seed": 8},
    "few ids": {"allowed_token_ids": (3, 4, 5), "temperature": 1.0, "seed": 9},
    # Four tokens come true often, and each is penalised by how often it came.
    "few penalised": {
        "allowed_token_ids": (5, 9, 14, 22),
        "frequency_penalty": 2.0,
        "presence_penalty": -1.0,
        "temperature": 2.0,
        "seed": 10,
    },
    "few forbidden": {
        "allowed_token_ids": (5, 9, 14, 22),
        "bad_words": ((5, 9), (9, 14, 22), (14, 14)),
        "temperature": 2.0,
        "seed": 11,
    },
    "stops": {"allowed_token_ids": (3, 4, 5), "stop_token_ids": (4,), "min_tokens": 9, "seed": 2},
}


@dataclass
class Found:
    """What requests put out, by request and choice."""

    tokens: dict[tuple[str, int], list[SampledToken]]
    ends: dict[tuple[str, int], str]
    stats: EngineStats

    @property
    def ids(self) -> dict[tuple[str, int], list[int]]:
        return {key: [token.token_id for token in some] for key, some in self.tokens.items()}


class Steps:
    """Ranks as an Executor of the engine: one step at a time."""

    depth = 1
    draws_ahead = False

    def __init__(self, ranks: Ranks) -> None:
        self.counters = StepCounters()
        self.num_blocks = ranks.num_blocks
        self._ranks = ranks

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> Any:
        return self._ranks.launch(step, layer_done)

    def await_oldest(self, awake: int) -> bool:
        return True


def run(
    executor: Any,
    requests: Sequence[EngineRequest],
    speculative: SpeculativeConfig | None,
    *,
    budget: int = 256,
) -> Found:
    """An engine turned by hand until all its requests have ended. Its clock stands, so that it does
    not stop to draft."""
    tokens: dict[tuple[str, int], list[SampledToken]] = defaultdict(list)
    ends: dict[tuple[str, int], str] = {}
    waiting = {request.request_id for request in requests}

    def deliver(outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            assert not output.error
            for choice in output.choices:
                tokens[output.request_id, choice.choice] += choice.tokens
                if choice.finish_reason is not None:
                    ends[output.request_id, choice.choice] = choice.finish_reason
            if output.finished:
                waiting.remove(output.request_id)

    pool = BlockManager(executor.num_blocks, block_size=BLOCK_SIZE)
    engine = EngineCore(
        executor,
        pool=pool,
        inbox=Inbox(),
        config=SchedulerConfig(16, budget, speculative=speculative),
        rules=StopRules((EOS,), 256),
        deliver=deliver,
        clock=lambda: 0.0,
    )
    for request in requests:
        engine.submit(request)
    for _ in range(3000):
        engine.turn()
        if not waiting:
            break
    assert not waiting
    engine.turn()
    assert pool.num_free == pool.num_blocks
    return Found(tokens, ends, engine.stats())


def requests(matchers: bool = True) -> list[EngineRequest]:
    """One for each option, one with three choices, and some that follow a grammar."""
    made: list[EngineRequest] = []
    for number, (name, options) in enumerate(OPTIONS.items()):
        prompt = (*(PATTERN * 3), 30 + number, *PATTERN[:3])
        params = with_params(max_tokens=24, ignore_eos=True, **options)
        n = 3 if name == "sharp" else 1
        made.append(EngineRequest(name, name, prompt, params, n=n))
    for number, grammar in enumerate(GRAMMARS if matchers else ()):
        name = f"grammar {number}"
        params = with_params(max_tokens=24, temperature=1.0, seed=number)
        start = (start_of(grammar).copy(),)
        made.append(EngineRequest(name, name, tuple(PATTERN), params, matchers=start))
    return made


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Folder and oracle of a family's model, made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def model(family: str) -> tuple[Path, Any]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = folder, tiny_checkpoint(folder, family)
        return made[family]

    return model


def assert_alike(found: Found, wanted: Found) -> None:
    assert found.ids == wanted.ids
    assert found.ends == wanted.ends
    for key, tokens in wanted.tokens.items():
        for one, other in zip(found.tokens[key], tokens, strict=True):
            assert (one.logprob is None) == (other.logprob is None)
            if one.logprob is None or other.logprob is None:
                continue
            assert one.logprob.rank == other.logprob.rank
            assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-3)
            assert [i for i, _ in one.logprob.top] == [i for i, _ in other.logprob.top]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_option_draws_what_it_draws_without_drafts(
    family: str, models: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, oracle = models(family)
    wanted = run(make_runner(folder), requests(), None)
    found = run(make_runner(folder), requests(), DRAFTS)
    assert_alike(found, wanted)
    assert found.ids["greedy", 0] == oracle_tokens(oracle, requests()[0].prompt, 24)
    assert found.stats.spec_accepted_tokens > 20
    assert found.stats.spec_draft_tokens > found.stats.spec_accepted_tokens
    assert wanted.stats.spec_drafts == 0
    assert {"stop", "length"} == set(wanted.ends.values())


@pytest.mark.parametrize("sizes", [Sizes(tensor=2), Sizes(pipeline=2)], ids=["TP2", "PP2"])
def test_so_it_does_over_ranks(sizes: Sizes, models: Callable[[str], tuple[Path, Any]]) -> None:
    """Steps come to each rank as they are made; tests/ranks has the messages."""
    folder, _ = models("llama")
    wanted = run(make_runner(folder), requests(matchers=False), None)
    ranks = Ranks(folder, sizes)
    try:
        found = run(Steps(ranks), requests(matchers=False), DRAFTS)
    finally:
        ranks.close()
    assert found.ids == wanted.ids
    assert found.stats.spec_accepted_tokens > 10


def assert_distributed(
    oracle: Any, runner: Any, some: tuple[int, ...], speculative: SpeculativeConfig
) -> Found:
    """Of many seeds, at temperature 0.7 with top_p: the token at the place of a draft, and the one
    behind a draft that was accepted, against transformers. Answers have `some` tokens."""
    # Each token has one that came behind it.
    prompt = some * 3
    sampling: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "allowed_token_ids": some}

    def expected(*tokens: int) -> torch.Tensor:
        """What follows the prompt and these."""
        logits = oracle_logits(oracle, [*prompt, *tokens])[-1:]
        forbidden = torch.full_like(logits, -math.inf).index_fill(1, torch.tensor(some), 0)
        logits = logits + forbidden
        params = SamplingParams(max_tokens=1, seed=0, temperature=0.7, top_p=0.95)
        found = distribution(logits, logits.amax(-1, keepdim=True), [params])[0]
        return found / found.sum()

    asked = [
        EngineRequest(f"r{i}", f"r{i}", prompt, with_params(max_tokens=3, seed=i, **sampling))
        for i in range(700)
    ]
    found = run(runner, asked, speculative)
    texts = Counter(tuple(ids) for ids in found.ids.values())
    assert found.stats.spec_drafts > 350

    def followers(*tokens: int) -> torch.Tensor:
        """How often each token came behind these."""
        counts = torch.zeros(307)
        for text, count in texts.items():
            if text[: len(tokens)] == tokens:
                counts[text[len(tokens)]] += count
        return counts

    for first in sorted(some, key=lambda token: -float(expected()[token]))[:2]:
        assert chi_square_is_small(followers(first), expected(first))
        second = int(followers(first).argmax())
        assert followers(first)[second] > 20
        assert chi_square_is_small(followers(first, second), expected(first, second))
    return found


def test_sampled_tokens_are_distributed_as_the_model_s(
    models: Callable[[str], tuple[Path, Any]],
) -> None:
    folder, oracle = models("llama")
    found = assert_distributed(oracle, make_runner(folder), tuple(range(3, 9)), DRAFTS)
    assert found.stats.spec_accepted_tokens > 50
