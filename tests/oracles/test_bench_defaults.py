"""The vLLM article's number 30: what `latency`, `throughput` and `serve` measure by default.

Poisson as the special case of gamma-distributed gaps, and goodput: tests/tools/test_bench_summary;
the cap of concurrency at work: tests/tools/test_bench_serve.
"""

import argparse
import math

from xpyd_core.cli import build_parser
from xpyd_tools.bench.summary import Sample, summarize


def _parse(words: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", *words.split()])


def test_latency_is_32_tokens_in_128_out_in_batches_of_8() -> None:
    args = _parse("latency --model m")
    assert (args.input_len, args.output_len, args.batch_size) == (32, 128, 8)


def test_throughput_is_1000_prompts_at_once() -> None:
    args = _parse("throughput --model m")
    assert args.num_prompts == 1000


def test_serve_sends_at_once_or_as_poisson_or_gamma_and_has_no_cap_by_default() -> None:
    args = _parse("serve")
    assert (args.request_rate, args.burstiness, args.max_concurrency) == (math.inf, 1.0, None)
    args = _parse("serve --request-rate 8 --burstiness 0.5 --max-concurrency 64")
    assert (args.request_rate, args.burstiness, args.max_concurrency) == (8.0, 0.5, 64)


def test_the_tuners_objective_p99_e2e_below_500_ms_can_be_read_off_a_run() -> None:
    fast = [Sample(0.0, ttft_s=0.1, e2e_s=0.4, output_tokens=8)] * 99
    slow = Sample(0.0, ttft_s=0.1, e2e_s=20.0, output_tokens=8)
    assert summarize(fast).e2e_ms.p99 < 500
    assert summarize([*fast, slow]).e2e_ms.p99 > 500
