"""make bench-agents: the measurements, a line of JSON, and the same in a file and a page.

Exit status: 0 measured, 1 our engine or router failed, or an answer of ours that ended was no value
of its schema. How fast anything was is no failure.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from bench.agents import bystanders, translated
from bench.agents.report import OURS, VLLM, Found, report, with_measured
from bench.agents.schemas import Shape, shapes
from bench.agents.structured import ask, ask_at_once, ask_schema, valid
from bench.engine.contender import ROOT, ContenderFailed, Recipe, Server, own_recipe, served
from bench.engine.peer import peer_environment, peer_recipe
from bench.environments import NotHere
from bench.process import end_at_sigterm
from bench.report import say, write_report

PARTS = ("structured", "bystanders", "router")
MODEL = ROOT / "examples/demo-model"
_THREADS = 2
_CORES = "0-1"
_WARM_UP = 3
_ROUTER_ROUNDS, _ROUTER_REQUESTS = 5, 64
_EXAMPLES = """\
examples:
  all, and docs/benchmarks/agents.json and .md anew:
    make bench-agents
  a minute, ours alone, a few schemas, written nowhere:
    python -m bench.agents --quick
  what a grammar costs with a step of ten milliseconds (random_checkpoint makes such a model):
    python -m bench.agents --quick --parts structured --model FOLDER
  the router's processor time alone:
    python -m bench.agents --parts router
"""


def main(argv: list[str]) -> int:
    """Run it."""
    options = _parser().parse_args(argv)
    all_parts = options.parts == list(PARTS) and options.model == MODEL
    whole = all_parts and not (options.quick or options.no_peer)
    if options.output is None and whole:
        options.output = ROOT / "docs/benchmarks/agents.json"
    some = shapes()[:: 8 if options.quick else 1]
    rounds = 1 if options.quick else options.rounds
    found = Found()
    try:
        with tempfile.TemporaryDirectory() as folder:
            _measure(found, options, some, rounds, Path(folder))
        found.valid = valid(
            [(_schema(some, one.shape), answer.text) for one, answer in found.whole()]
        )
    except (ContenderFailed, NotHere) as error:
        say(f"failed: {error}")
        return 1
    name = f"examples/{MODEL.name}" if options.model == MODEL else options.model.name
    made = report(found, some, name, rounds)
    if options.output is not None:
        write_report(made, options.output, with_measured)
    sys.stdout.write(json.dumps(made) + "\n")
    ours: dict[str, Any] | None = made["answers"].get(OURS)
    return 0 if ours is None or (ours["valid"] == ours["ended"] and not ours["failed"]) else 1


def _schema(some: Sequence[Shape], name: str) -> dict[str, Any]:
    return next(shape.schema for shape in some if shape.name == name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.agents",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        help="where the JSON goes, and tables into the page beside it (default: "
        "docs/benchmarks/agents.json for a whole run, nowhere for a part of it)",
    )
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--rounds", type=int, default=2, help="of answers and bystanders (default: %(default)s)")
    add("--model", type=Path, default=MODEL, help="a checkpoint's folder (default: the demo model)")
    add("--no-peer", action="store_true", help="without vLLM")
    add("--quick", action="store_true", help="a minute: every eighth schema, one round, no vLLM")
    return parser


def _measure(
    found: Found, options: argparse.Namespace, some: Sequence[Shape], rounds: int, folder: Path
) -> None:
    if "router" in options.parts:
        count = (1, 16) if options.quick else (_ROUTER_ROUNDS, _ROUTER_REQUESTS)
        found.costs, found.python = translated.measure(*count, folder, say)
    if set(options.parts) == {"router"}:
        return
    with ExitStack() as stack:
        up = {OURS: stack.enter_context(_served(own_recipe(options.model, _THREADS, ()), folder))}
        if not (options.quick or options.no_peer):
            up[OURS].stop()
            try:
                recipe = peer_recipe(peer_environment(), options.model, _THREADS)
                say(f"{VLLM}: starting")
                up[VLLM] = stack.enter_context(_served(recipe, folder))
                up[VLLM].stop()
            except (NotHere, ContenderFailed) as error:
                say(f"{VLLM} is left out: {error}")
                found.absent[VLLM] = str(error)[:300]
            up[OURS].go_on()
        for number in range(rounds):
            for name in list(up)[:: 1 if number % 2 == 0 else -1]:
                up[name].go_on()
                try:
                    _round(found, options.parts, name, up[name], some, number)
                except ContenderFailed as error:
                    if name == OURS:
                        raise
                    say(f"{name} failed, and is asked no more: {error}")
                    found.absent[f"{name} from round {number + 1} on"] = str(error)[:300]
                    up.pop(name).end()
                    continue
                up[name].stop()


def _served(recipe: Recipe, folder: Path) -> AbstractContextManager[Server]:
    return served(recipe, folder / f"{recipe.name}.log", _CORES)


def _round(
    found: Found,
    parts: Sequence[str],
    name: str,
    server: Server,
    some: Sequence[Shape],
    number: int,
) -> None:
    """One contender's turn. ContenderFailed where it does not answer."""
    for seed in range(_WARM_UP):
        ask(server.port, {"max_tokens": 64, "ignore_eos": True, "seed": seed})
    if "structured" in parts:
        for seed, shape in enumerate(some):
            found.asked.append(ask_schema(server, name, shape, number, seed))
        flat = [shape for shape in some if shape.group == "snowplow"]
        found.at_once.setdefault(name, []).append(ask_at_once(server, flat, number))
        say(f"round {number + 1}, {name}: {len(some)} schemas")
    if "bystanders" in parts:
        found.beside.setdefault(name, []).extend(bystanders.measure(server, number, say))


if __name__ == "__main__":
    end_at_sigterm()
    sys.exit(main(sys.argv[1:]))
