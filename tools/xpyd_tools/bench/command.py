"""`xpyd bench latency|throughput|serve`: their flags, and what they print. Imports nothing heavy.

Defaults are those of vLLM's commands of these names, as far as there is a number that fits every
machine: latency 32 tokens in, 128 out, batches of 8; throughput 1,000 prompts at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpyd_core.cli import Command
from xpyd_core.errors import UserError
from xpyd_core.logs import add_logging_arguments, set_up_logging
from xpyd_tools.bench.load import LoadRequest, random_requests, read_requests
from xpyd_worker.flags import add_flags, flags_of

if TYPE_CHECKING:
    from xpyd_worker import LLM

_EPILOG = """examples:
  xpyd bench serve --base-url http://127.0.0.1:20001 --num-prompts 64 --request-rate 4
  xpyd bench serve --max-concurrency 64 --goodput ttft:500 tpot:50 --output json
  xpyd bench latency --model examples/demo-model --batch-size 8
  xpyd bench throughput --model examples/demo-model --num-prompts 1000
"""
# Ids that every vocabulary has, above the usual ids of special tokens and single bytes.
_VOCABULARY = "300:1000"
_ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the three measurements with their flags."""
    kinds = parser.add_subparsers(title="measurements", metavar="KIND", required=True)
    for name, text, add, run in (
        ("latency", "how long one batch takes, engine only", _add_latency, _latency),
        ("throughput", "tokens per second of a full queue, engine only", _add_throughput, _full),
        ("serve", "latencies and rates of a server, over HTTP", _add_serve, _serve),
    ):
        kind = kinds.add_parser(name, help=text, description=text)
        add(kind)
        _add_common(kind)
        kind.set_defaults(measure=run)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("measurement").add_argument
    add(
        "--vocabulary",
        default=_VOCABULARY,
        metavar="FIRST:END",
        help="token ids of random prompts (default: %(default)s)",
    )
    add("--prompt-seed", type=int, metavar="N", help="the same prompts in each run, e.g. 0")
    add("--output", choices=("text", "json"), default="text", help="json: one object on a line")
    add_logging_arguments(parser)


def _add_lengths(
    parser: argparse.ArgumentParser, *, input_len: int, output_len: int, dataset: bool
) -> None:
    add = parser.add_argument_group("prompts").add_argument
    add("--input-len", type=int, default=input_len, metavar="N", help="tokens of a random prompt")
    add("--output-len", type=int, default=output_len, metavar="N", help="tokens of an answer")
    if dataset:
        add("--num-prompts", type=int, default=1000, metavar="N", help="requests")
        add("--dataset", type=Path, metavar="FILE", help="JSON lines in place of random prompts")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "engine, as for `xpyd worker`", flags_of("bench"))


# --- latency


def _add_latency(parser: argparse.ArgumentParser) -> None:
    _add_engine(parser)
    _add_lengths(parser, input_len=32, output_len=128, dataset=False)
    add = parser.add_argument_group("batches").add_argument
    add("--batch-size", type=int, default=8, metavar="N", help="prompts of a batch")
    add("--num-iters-warmup", type=int, default=10, metavar="N", help="batches not counted")
    add("--num-iters", type=int, default=30, metavar="N", help="batches counted")


def _latency(args: argparse.Namespace) -> int:
    from xpyd_tools.bench.engine import batch_latency, run_engine
    from xpyd_tools.bench.summary import times_table

    _check(args, "input_len", "output_len", "batch_size", "num_iters")
    rounds = args.num_iters_warmup + args.num_iters
    requests = _requests(args, rounds * args.batch_size)
    size = args.batch_size
    batches = [requests[at : at + size] for at in range(0, len(requests), size)]

    def done(seconds: float) -> None:
        sys.stderr.write(f"batch of {size}: {seconds:.3f} s\n")

    def measure(llm: LLM) -> None:
        found = batch_latency(llm, batches, warmups=args.num_iters_warmup, done=done)
        members = {"batch_size": size, "input_len": args.input_len, "output_len": args.output_len}
        times = {"mean": found.mean, "p50": found.p50, "p99": found.p99}
        rounded = {name: round(value, 3) for name, value in times.items()}
        _print(
            args,
            {"benchmark": "latency", **members, "batches": args.num_iters, "latency_ms": rounded},
            times_table([(f"batch of {size}, {args.input_len} in, {args.output_len} out", found)]),
        )

    return run_engine(args, measure)


# --- throughput


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    _add_engine(parser)
    _add_lengths(parser, input_len=256, output_len=128, dataset=True)


def _full(args: argparse.Namespace) -> int:
    from xpyd_tools.bench.engine import run_engine, throughput
    from xpyd_tools.bench.summary import table

    _check(args, "input_len", "output_len", "num_prompts")
    requests = _requests(args, args.num_prompts)
    if any(isinstance(request.prompt, list) for request in requests):
        raise UserError("--dataset: messages are for `xpyd bench serve`; give prompts")

    def measure(llm: LLM) -> None:
        found = throughput(llm, requests).as_json()
        names = (name.replace("_per_s", "/s").replace("_", " ") for name in found)
        rows = [(name, f"{value:g}") for name, value in zip(names, found.values(), strict=True)]
        _print(args, {"benchmark": "throughput", **found}, table(rows))

    return run_engine(args, measure)


# --- serve


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--base-url", default="http://127.0.0.1:20001", metavar="URL", help="any OpenAI server")
    add("--endpoint", choices=_ENDPOINTS, default=_ENDPOINTS[0], help="chat needs --dataset")
    add("--model", metavar="NAME", help="default: the server's first")
    add("--extra-body", default="{}", metavar="JSON", help="more members of each body")
    add("--timeout", type=float, default=600, metavar="SECONDS", help="of one request")
    _add_lengths(parser, input_len=512, output_len=128, dataset=True)
    add = parser.add_argument_group("load").add_argument
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="PER_SECOND",
        help="mean of the requests' coming (default: inf, all at once)",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="SHAPE",
        help="of gamma-distributed gaps; 1: Poisson, less: bursts (default: %(default)s)",
    )
    add("--max-concurrency", type=int, metavar="N", help="at most so many at once, e.g. 64")
    add("--num-warmups", type=int, default=1, metavar="N", help="requests before, not counted")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    add("--stop-at-eos", action="store_true", help="answers may be shorter than --output-len")
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="objectives that a good request meets: ttft, tpot, e2e, e.g. ttft:500 tpot:50",
    )


def _serve(args: argparse.Namespace) -> int:
    import asyncio

    from xpyd_tools.bench.summary import parse_objectives, serve_table, summarize

    _check(args, "input_len", "output_len", "num_prompts", "max_concurrency")
    if not args.request_rate > 0 or not args.burstiness > 0:
        raise UserError("--request-rate, --burstiness: expected a number above 0")
    objectives = parse_objectives(args.goodput)
    requests = _requests(args, args.num_prompts + args.num_warmups)
    if args.endpoint == _ENDPOINTS[1] and args.dataset is None:
        raise UserError(f"--endpoint {args.endpoint}: needs --dataset with messages")
    samples = asyncio.run(_load(args, requests))
    found = summarize(samples, objectives)
    _print(args, {"benchmark": "serve", **found.as_json()}, serve_table(found))
    errors = {one.error for one in samples if one.error}
    for error in sorted(errors)[:3]:
        sys.stderr.write(f"failed: {error}\n")
    return 1 if errors else 0


async def _load(args: argparse.Namespace, requests: Sequence[LoadRequest]) -> list[Any]:
    from dataclasses import replace

    from xpyd_tools.bench.client import Target, first_model, run_load, split_url
    from xpyd_tools.bench.load import arrival_times

    base = split_url(args.base_url)
    members: dict[str, Any] = {"temperature": args.temperature, **_extra_body(args.extra_body)}
    if not args.stop_at_eos:
        members["ignore_eos"] = True
    target = Target(
        base.host,
        base.port,
        base.tls,
        args.endpoint,
        model=args.model or "",
        members=members,
        timeout_s=args.timeout,
        api_key=os.environ.get("OPENAI_API_KEY", ""),
        prefix=base.prefix,
    )
    if not target.model:
        target = replace(target, model=await first_model(target))
    warmups, rest = requests[: args.num_warmups], requests[args.num_warmups :]
    await run_load(target, warmups, [0.0] * len(warmups), max_concurrency=1)
    times_s = arrival_times(
        len(rest),
        rate_per_s=args.request_rate,
        burstiness=args.burstiness,
        seed=_seed(args),
    )
    sys.stderr.write(f"{len(rest)} requests, the last one comes after {times_s[-1]:.1f} s\n")
    start_s = time.perf_counter()
    samples = await run_load(target, rest, times_s, max_concurrency=args.max_concurrency)
    sys.stderr.write(f"done in {time.perf_counter() - start_s:.1f} s\n")
    return samples


# --- all


def _check(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')}: expected at least 1")


def _seed(args: argparse.Namespace) -> int:
    return random.SystemRandom().getrandbits(32) if args.prompt_seed is None else args.prompt_seed


def _requests(args: argparse.Namespace, count: int) -> list[LoadRequest]:
    if getattr(args, "dataset", None) is not None:
        return read_requests(args.dataset, count, output_tokens=args.output_len)
    first, _, end = args.vocabulary.partition(":")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise UserError(f"--vocabulary {args.vocabulary}: expected FIRST:END, e.g. {_VOCABULARY}")
    return random_requests(
        count,
        input_tokens=args.input_len,
        output_tokens=args.output_len,
        vocabulary=range(int(first), int(end)),
        seed=_seed(args),
    )


def _extra_body(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"--extra-body: no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError("--extra-body: expected a JSON object")
    return found  # pyright: ignore[reportUnknownVariableType]


def _print(args: argparse.Namespace, found: dict[str, Any], text: str) -> None:
    sys.stdout.write(json.dumps(found) + "\n" if args.output == "json" else text)


def _run(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level, args.log_format)
    return args.measure(args)


command = Command("measure an engine or a server", configure, _run, _EPILOG)
