"""Measure an engine in this process, without HTTP: latency of a batch, throughput of a queue.

The engine is used as any Python program uses it: by the public names of xpyd_worker. The only
module of xpyd_tools that leads to torch, so that `command` imports it at call time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xpyd_tools.bench.load import LoadRequest
from xpyd_tools.bench.summary import Spread, spread
from xpyd_worker import LLM, RankLostError, SamplingParams
from xpyd_worker.flags import flags_of


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
        """The result as a JSON object."""
        return {
            "requests": self.requests,
            "seconds": round(self.seconds, 3),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "requests_per_s": round(self.requests_per_s, 3),
            "output_tokens_per_s": round(self.output_tokens / self.seconds, 3),
            "tokens_per_s": round((self.input_tokens + self.output_tokens) / self.seconds, 3),
        }


def run_engine(args: argparse.Namespace, measure: Callable[[LLM], None]) -> int:
    """Start the engine that the flags describe, `measure` it and end it. The exit status is 1 when
    one of its ranks is lost."""
    try:
        with _make_llm(args) as llm:
            measure(llm)
    except RankLostError as error:
        sys.stderr.write(f"xpyd: {error}\n")
        return 1
    return 0


def _make_llm(args: argparse.Namespace) -> LLM:
    given = {flag.argument: getattr(args, flag.argument) for flag in flags_of("bench")}
    # Warm-ups and repetitions must compute what the first run computed.
    return LLM(**given, enable_prefix_caching=False)


def batch_latency(
    llm: LLM,
    batches: Sequence[Sequence[LoadRequest]],
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


def throughput(llm: LLM, requests: Sequence[LoadRequest]) -> Throughput:
    """The throughput of all prompts given to the engine at once."""
    start_s = time.perf_counter()
    input_tokens, output_tokens = _generate(llm, requests, use_tqdm=True)
    return Throughput(len(requests), time.perf_counter() - start_s, input_tokens, output_tokens)


def _generate(llm: LLM, requests: Sequence[LoadRequest], *, use_tqdm: bool) -> tuple[int, int]:
    """Tokens that went in and came out. As many as asked come out: EOS does not end a choice."""
    prompts: list[Any] = [
        request.prompt if isinstance(request.prompt, str) else {"prompt_token_ids": request.prompt}
        for request in requests
    ]
    params = [
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.output_tokens)
        for request in requests
    ]
    outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    return (
        sum(len(one.prompt_token_ids) for one in outputs),
        sum(len(choice.token_ids) for one in outputs for choice in one.outputs),
    )
