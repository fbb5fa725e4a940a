"""The reference tables of docs: every flag, field and metric is there, as the programs have it."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from xpyd_core.cli import build_parser
from xpyd_core.errors import ApiError
from xpyd_core.messages import Heartbeat
from xpyd_core.parallel.ranks import Sizes
from xpyd_kv.memory.api import StoreMetrics
from xpyd_kv.metrics import EndpointCounters, KvMetrics
from xpyd_operator.controller.main import OperatorMetrics
from xpyd_operator.document.mistakes import UNSUPPORTED_FIELDS, UNSUPPORTED_VALUES
from xpyd_operator.up.checks import CLUSTER_ONLY
from xpyd_router.access_log import Trace
from xpyd_router.fleet.instances import Instance, InstanceKey
from xpyd_router.metrics import RouterMetrics
from xpyd_router.request_metrics import Exposition
from xpyd_worker import LLM
from xpyd_worker.engine.executor import LayerExperts, LayerMoves
from xpyd_worker.engine.request import EngineStats
from xpyd_worker.flags import add_flags, flags_of
from xpyd_worker.load.replicas import wave_samples
from xpyd_worker.ranks.start.messages import RankReady
from xpyd_worker.ranks.watch.beats import Beat
from xpyd_worker.ranks.watch.judge import Shown
from xpyd_worker.replicas.lock_step import LockStep
from xpyd_worker.server.openai.not_built import refuse_not_built
from xpyd_worker.server.telemetry.expert_metrics import expert_samples
from xpyd_worker.server.telemetry.metrics import (
    ServerMetrics,
    kv_samples,
    rank_samples,
    replica_samples,
)

CHAT_ONLY = {
    *("functions", "function_call", "chat_template", "audio", "modalities", "prediction"),
    *("verbosity", "web_search_options", "mm_processor_kwargs", "separate_reasoning"),
}
DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the tables below `heading` (until the next of its level), without heads."""
    text = (DOCS / page).read_text()
    level = re.escape(heading.split(" ")[0])
    section = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^{level} |\Z)", text, re.M | re.S)
    assert section is not None, f"{page} has no {heading!r}"
    lines = [line for line in section[1].splitlines() if line.startswith("| `")]
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
    ]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def _actions(command: str) -> list[argparse.Action]:
    parser = build_parser()
    choices: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:  # argparse has no public way to its sub-parsers
        if isinstance(action.choices, dict):
            choices = action.choices
    return [a for a in choices[command]._actions if a.dest != "help" and a.option_strings]


def _flag(action: argparse.Action) -> str:
    return next(name for name in action.option_strings if name.startswith("--"))


@pytest.mark.parametrize(
    ("command", "page"),
    [
        ("worker", "engine.md"),
        ("router", "router.md"),
        ("operator", "operator.md"),
        ("advise", "advise.md"),
    ],
)
def test_the_flags_of_a_program_are_those_of_its_page(command: str, page: str) -> None:
    table = {code(row[0])[0]: row[1] for row in rows(page, "## Flags")}
    actions = {_flag(action): action for action in _actions(command)}
    assert list(table) == list(actions)
    for flag, action in actions.items():
        default = action.default
        if default is None or default is False or default == []:
            assert not re.fullmatch(r"`[\d.]+`", table[flag]), flag
        elif default is True:
            assert table[flag] == "on", flag
        elif isinstance(default, int | float):
            shown = table[flag].removesuffix(": off")
            assert shown in (f"`{default:g}`", f"`{default}`"), flag
        elif str(default).isdigit():
            assert re.fullmatch(r"`\d+\wi`", table[flag]), flag
        else:
            assert table[flag] == f"`{default}`", flag


def test_the_engine_flags_of_the_benchmarks_are_on_their_page() -> None:
    text = (DOCS / "bench.md").read_text()
    found = re.search(r"^Of `latency` and `throughput`, for the engine: (.*?)^$", text, re.M | re.S)
    assert found is not None
    names = {name for name in code(found[1]) if name.startswith("--")}
    assert names == {flag.names[0] for flag in flags_of("bench")}


def test_the_arguments_of_an_llm_are_flags_of_the_worker_and_on_their_page() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, "LLM", flags_of("LLM"))
    defaults = vars(parser.parse_args(["--model", "m"]))
    parameters = dict(inspect.signature(LLM).parameters)
    assert set(parameters) == set(defaults)
    del parameters["model"]
    assert {name: one.default for name, one in parameters.items()} == {
        name: defaults[name] for name in parameters
    }
    text = (DOCS / "offline.md").read_text()
    found = re.search(r"^`LLM\(model, ...\)` takes (.*?)^$", text, re.M | re.S)
    assert found is not None
    assert set(parameters) <= set(code(found[1]))


@pytest.mark.parametrize("command", ["up", "status", "trace", "scale", "logs", "chat", "down"])
def test_the_flags_of_the_local_commands_are_on_their_page(command: str) -> None:
    table = {code(row[0])[0]: code(row[1]) for row in rows("local-fleets.md", "## Commands")}
    flags = [_flag(action) for action in _actions(command)]
    assert [name for name in table[command] if name.startswith("--")] == flags


def test_the_fields_without_effect_in_local_mode_are_those_of_their_page() -> None:
    table = rows("fleet-document.md", "## In local mode")
    assert {path for row in table for path in code(row[0])} == CLUSTER_ONLY


def test_the_fields_refused_for_now_are_those_of_their_page() -> None:
    table = rows("fleet-document.md", "## Refused for now")
    paths = {path for row in table for path in code(row[0])}
    assert paths == {*UNSUPPORTED_FIELDS, *UNSUPPORTED_VALUES}
    for row in table:
        if (path := code(row[0])[0]) in UNSUPPORTED_VALUES:
            assert tuple(code(row[1])) == UNSUPPORTED_VALUES[path]


def test_the_api_fields_shown_as_refused_are_refused() -> None:
    text = (DOCS / "engine.md").read_text()
    found = re.search(r"^These are refused with 400(.*?)^Prompt and output", text, re.M | re.S)
    assert found is not None
    names = set(code(found[1])) - {"null"}
    assert len(names) > 8
    for name in names:
        is_chat = name in CHAT_ONLY
        with pytest.raises(ApiError, match=name):
            refuse_not_built(json.dumps({name: "anything"}).encode(), chat=is_chat)


Metric = tuple[str, str, str]


def _documented(heading: str) -> set[Metric]:
    return {
        (code(row[0])[0], row[1], ", ".join(code(row[2]))) for row in rows("metrics.md", heading)
    }


def _of_the_library(metrics: object) -> set[Metric]:
    found: set[Metric] = set()
    for metric in vars(metrics).values():
        if isinstance(metric, Counter | Gauge | Histogram):
            family = metric.describe()[0]
            name = f"{family.name}_total" if family.type == "counter" else family.name
            # The names of the labels are nowhere public before a value was counted.
            found.add((name, family.type, ", ".join(metric._labelnames)))
    return found


def _written(text: str) -> set[Metric]:
    found: set[Metric] = set()
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):  # the client library's own, not ours
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = sorted({key for sample in family.samples for key in sample.labels} - {"le"})
        found.add((name, family.type, ", ".join(labels)))
    return found


def test_the_metrics_of_the_operator_are_those_of_the_page() -> None:
    assert _documented("## Operator") == _of_the_library(OperatorMetrics())


def test_the_metrics_of_the_router_are_those_of_the_page() -> None:
    metrics, trace = RouterMetrics(), Trace("completions", 0.0, first_s=0.5)
    metrics.requests.began()
    metrics.requests.ended(trace, 200, 1.0)
    beat = Heartbeat(type="P", http_address="h:1", zmq_address="h:2")
    instance = Instance(InstanceKey("h:1", ""), beat, beat.http, beat.kv, 0.0, 9.0, 3.0)
    metrics.failed(instance, "reset")
    metrics.instances.paired(instance, instance)
    metrics.kv.count((instance,), "alone", "one_token")
    metrics.kv_probes.count((instance,), "moved", "")
    call = metrics.instances.call(instance, 1)
    for _ in range(2):
        call.streamed(1, 1)
    call.end()
    metrics.objectives.count("ttft", predicted="met", result="met")
    metrics.keys.ended(Trace("completions", 0.0, key="a"), 200)
    metrics.keys.loads["ok"] = metrics.keys.refusals["no key"] = 1
    metrics.canary.begin("0a1b2c3d-0")
    out = Exposition()
    tables = (metrics.requests, metrics.instances, metrics.kv, metrics.kv_probes, metrics.canary)
    for table in (*tables, metrics.objectives, metrics.keys):
        table.write(out)
    counted = _written(out.text().decode())
    assert _documented("## Router") == _of_the_library(metrics) | counted


def test_the_fields_of_the_access_log_are_those_of_the_page() -> None:
    known = Trace("completions", 0.0, client_id="c", trace_id="t", model="m", response_id="r")
    known.key = "k"
    known.prefill_s = known.decode_s = known.first_s = 0.1
    known.prompt_tokens = known.output_tokens = known.priority = 1
    known.failures.append("prefill:reset")
    known.kv, known.kv_cause = "recomputed", "unreachable"
    documented = [name for row in rows("router.md", "## Access log") for name in code(row[0])]
    assert sorted(documented) == sorted(known.extra(1.0))


def test_the_metrics_of_the_engine_are_those_of_the_page() -> None:
    metrics, stats = ServerMetrics(), EngineStats()
    shown, ready = Shown(True, Beat()), RankReady(1, 1, 1, None, "float32", 1, False)
    metrics.watch(
        lambda: stats,
        lambda now: [
            *kv_samples(KvMetrics(), EndpointCounters(), StoreMetrics(), now),
            *rank_samples(Sizes(), shown=[shown], ready=[ready], fits=[1]),
            *expert_samples([LayerExperts(0, (1, 2), LayerMoves())]),
            *replica_samples([(None, 0)], 0),
            *wave_samples(LockStep(1, clock=float, fell=lambda _: None).members),
        ],
        model="m",
        block_size=16,
        load_s=1.0,
    )
    found = _written(metrics.render()[0].decode())
    assert _documented("## Engine") | _documented("## KV transfer") == found


def test_the_rules_that_rename_metrics_to_vllms_name_metrics_there_are() -> None:
    text = (DOCS / "metrics.md").read_text()
    found = re.search(r"^metric_relabel_configs:\n(.*?)^```", text, re.M | re.S)
    assert found is not None
    rules = re.findall(r"regex: '(\w+)(\(_\.\*\))?', .*replacement: 'vllm:(\w+)(\$1)?'", found[1])
    assert len(rules) == len(found[1].splitlines())
    kinds = {name: kind for name, kind, _ in _documented("## Engine")}
    for name, rest, _, kept in rules:
        is_histogram = kinds[name] == "histogram"
        assert (bool(rest), bool(kept)) == (is_histogram, is_histogram), name
