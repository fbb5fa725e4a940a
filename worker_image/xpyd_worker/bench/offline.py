"""The engine in this process, without HTTP: how long a batch takes, how much a full queue gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xpyd_worker.bench.figures import Spread, spread
from xpyd_worker.bench.prompts import Ask
from xpyd_worker.offline.sampling import SamplingParams

if TYPE_CHECKING:
    from xpyd_worker.offline.llm import LLM, Prompt


@dataclass(frozen=True)
class Throughput:
    """All prompts at once."""

    requests: int
    seconds: float
    input_tokens: int
    output_tokens: int

    @property
    def requests_per_s(self) -> float:
        """Finished ones."""
        return self.requests / self.seconds

    def as_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "requests": self.requests,
            "seconds": round(self.seconds, 3),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "requests_per_s": round(self.requests_per_s, 3),
            "output_tokens_per_s": round(self.output_tokens / self.seconds, 3),
            "tokens_per_s": round((self.input_tokens + self.output_tokens) / self.seconds, 3),
        }


def batch_latency(
    llm: LLM,
    batches: Sequence[Sequence[Ask]],
    *,
    warmups: int,
    done: Callable[[float], None] = lambda _: None,
) -> Spread:
    """End-to-end milliseconds of a batch, over all batches but the first `warmups`."""
    seconds: list[float] = []
    for batch in batches:
        start_s = time.perf_counter()
        _generate(llm, batch, use_tqdm=False)
        seconds.append(time.perf_counter() - start_s)
        done(seconds[-1])
    return spread(seconds[warmups:])


def throughput(llm: LLM, asks: Sequence[Ask]) -> Throughput:
    """Of all prompts given to the engine at once."""
    start_s = time.perf_counter()
    input_tokens, output_tokens = _generate(llm, asks, use_tqdm=True)
    return Throughput(len(asks), time.perf_counter() - start_s, input_tokens, output_tokens)


def _generate(llm: LLM, asks: Sequence[Ask], *, use_tqdm: bool) -> tuple[int, int]:
    """Tokens that went in and came out. As many as asked come out: EOS does not end a choice."""
    prompts: list[Prompt] = [
        ask.prompt if isinstance(ask.prompt, str) else {"prompt_token_ids": ask.prompt}  # pyright: ignore[reportAssignmentType]  # messages were refused
        for ask in asks
    ]
    params = [
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=ask.output_tokens) for ask in asks
    ]
    outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    return (
        sum(len(one.prompt_token_ids) for one in outputs),
        sum(len(choice.token_ids) for one in outputs for choice in one.outputs),
    )
