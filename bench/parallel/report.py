"""From rounds to the figures that are kept. Pure but for versions and the machine.

A ratio is of one round; the figure is the median of the rounds.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import Any, NamedTuple

from bench.engine.shape import Case
from bench.operator.report import machine
from bench.parallel.all_reduce import Rounds
from bench.parallel.engines import BATCHES, DECODE_1, DECODE_8, Layout, Turn
from bench.parallel.experts import LayerRounds
from bench.parallel.gpu_all_reduce import GpuRounds
from bench.parallel.replicas import INSTANCES, Contender, ReplicasTurn
from xpyd_tools.bench.summary import Summary, summarize

_ALONE = Layout()


class Collectives(NamedTuple):
    """What was measured of ranks without engines."""

    reduces: Sequence[Rounds] = ()
    on_gpus: Sequence[GpuRounds] = ()
    exchanges: Sequence[Rounds] = ()
    layers: Sequence[LayerRounds] = ()


def report(
    collectives: Collectives,
    turns: dict[str, list[Turn]],
    replicas: dict[str, list[ReplicasTurn]] | None = None,
    *,
    cores: int,
    rounds: int,
) -> dict[str, Any]:
    """The JSON that a run ends with. `turns`, `replicas`: of each model."""
    of_replicas = replicas or {}
    return {
        "benchmark": "parallel",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "ratios": [*_ratios(collectives, turns), *_replica_ratios(of_replicas)],
        "allReduce": [_reduce(one) for one in collectives.reduces],
        "gpuAllReduce": [_gpu_reduce(one) for one in collectives.on_gpus],
        "allToAll": [_reduce(one) for one in collectives.exchanges],
        "expertLayers": [_layer(one) for one in collectives.layers],
        "engines": {model: _engines(found) for model, found in turns.items()},
        "bubble": {model: _bubbles(found) for model, found in turns.items()},
        "replicas": {model: _replicas(found) for model, found in of_replicas.items()},
        "cores": cores,
        "rounds": rounds,
        "absent": {},
        "ownArgs": [],
        "versions": {
            **{name: version(name) for name in ("xpyd", "torch")},
            "python": platform.python_version(),
        },
        "machine": machine(),
    }


def ideal_bubble(stages: int, batches: int) -> float:
    """The share of its time that a stage has nothing to do (article fact 46)."""
    return (stages - 1) / (stages - 1 + batches)


def measured_bubble(stages: int, batches: int, *, one_s: float, all_s: float) -> float:
    """The same of a pipeline that needs `one_s` for one batch and `all_s` for all of them: a stage
    works `one_s / stages` on each."""
    return 1 - batches * one_s / stages / all_s


def _ratios(collectives: Collectives, turns: dict[str, list[Turn]]) -> list[dict[str, Any]]:
    """By name, each to a peer of the same run."""
    both = {"all-reduce": collectives.reduces, "all-to-all": collectives.exchanges}
    found = [
        _named(f"{what}, {one.ranks} ranks, {one.size_kib} KiB", "Gloo", one.ours_us, one.gloo_us)
        for what, rounds in both.items()
        for one in rounds
    ]
    found += [
        _named(
            f"layer of whole experts, {layer.ranks} ranks, {layer.rows} rows",
            "TP",
            layer.whole_us,
            layer.slices_us,
        )
        for layer in collectives.layers
    ]
    for model, of_model in turns.items():
        layouts = _layouts(of_model)
        for layout in layouts:
            rates = _rates(of_model, layout)
            if layout != _ALONE:
                name = f"{model}, {layout.name}, tokens/s"
                found.append(_named(name, _ALONE.name, rates, _rates(of_model, _ALONE)))
            if layout.has_whole_experts:
                sliced = _rates(of_model, replace(layout, has_whole_experts=False))
                found.append(_named(f"{model}, {layout.name}, tokens/s", "TP", rates, sliced))
            unqueued = replace(layout, is_queued=False)
            if layout.is_queued and unqueued in layouts:
                name = f"{model}, {layout.name}, tokens/s"
                found.append(_named(name, "one step at a time", rates, _rates(of_model, unqueued)))
    return found


def _replica_ratios(turns: dict[str, list[ReplicasTurn]]) -> list[dict[str, Any]]:
    """Each contender of a model to two instances behind a router."""
    return [
        _named(f"{model}, {one.name}, {what}", INSTANCES.name, ours, others)
        for model, of_model in turns.items()
        for one in _contenders(of_model)
        if one != INSTANCES
        for (what, ours), (_, others) in zip(
            _figures(of_model, one).items(), _figures(of_model, INSTANCES).items(), strict=True
        )
    ]


def _contenders(turns: Sequence[ReplicasTurn]) -> list[Contender]:
    return list(dict.fromkeys(turn.contender for turn in turns))


def _figures(turns: Sequence[ReplicasTurn], contender: Contender) -> dict[str, list[float]]:
    """Of each round."""
    own = [turn for turn in turns if turn.contender == contender]
    at_once = [summarize(turn.at_once) for turn in own]
    poisson = [summarize(turn.poisson) for turn in own]
    return {
        "tokens/s": [one.output_tokens_per_s for one in at_once],
        "TTFT p50": [one.ttft_ms.p50 for one in poisson],
        "TTFT p99": [one.ttft_ms.p99 for one in poisson],
        "ITL p99": [one.itl_ms.p99 for one in poisson],
    }


def _replicas(turns: Sequence[ReplicasTurn]) -> list[dict[str, Any]]:
    peers = _figures(turns, INSTANCES)
    rows: list[dict[str, Any]] = []
    for contender in _contenders(turns):
        found = _figures(turns, contender)
        rate, p50, p99, itl = (round(median(one), 2) for one in found.values())
        rows.append(
            {
                "contender": contender.name,
                "tokensPerS": rate,
                "ttftP50Ms": p50,
                "ttftP99Ms": p99,
                "itlP99Ms": itl,
                "tokensPerSToInstances": _ratio(found["tokens/s"], peers["tokens/s"]),
                "ttftP99ToInstances": _ratio(found["TTFT p99"], peers["TTFT p99"]),
            }
        )
    return rows


def _rates(turns: Sequence[Turn], layout: Layout) -> list[float]:
    return [summary.output_tokens_per_s for summary in _of(turns, layout, DECODE_8)]


def _named(name: str, peer: str, ours: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    measured = [round(a / b, 4) for a, b in zip(ours, others, strict=True)]
    return {"name": name, "peer": peer, "reached": round(median(measured), 4), "measured": measured}


def _reduce(one: Rounds) -> dict[str, Any]:
    return {
        "ranks": one.ranks,
        "kib": one.size_kib,
        "oursUs": round(median(one.ours_us), 1),
        "glooUs": round(median(one.gloo_us), 1),
        "ratio": round(median(a / b for a, b in zip(one.ours_us, one.gloo_us, strict=True)), 4),
    }


def _gpu_reduce(one: GpuRounds) -> dict[str, Any]:
    return {
        "ranks": one.ranks,
        "kib": one.size_kib,
        "oursUs": round(median(one.ours_us), 2),
        "ncclUs": round(median(one.nccl_us), 2),
        "ratio": round(median(a / b for a, b in zip(one.ours_us, one.nccl_us, strict=True)), 4),
    }


def _layer(one: LayerRounds) -> dict[str, Any]:
    return {
        "ranks": one.ranks,
        "rows": one.rows,
        "slicesUs": round(median(one.slices_us), 1),
        "wholeUs": round(median(one.whole_us), 1),
        "sentUs": round(median(one.sent_us), 1),
        "ratio": round(median(a / b for a, b in zip(one.whole_us, one.slices_us, strict=True)), 4),
    }


def _engines(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    alone = {case: _of(turns, _ALONE, case) for case in (DECODE_1, DECODE_8)}
    rows: list[dict[str, Any]] = []
    for layout in _layouts(turns):
        one, eight = (_of(turns, layout, case) for case in (DECODE_1, DECODE_8))
        cpu_us = [
            turn.main_cpu_s / sum(sample.output_tokens for sample in turn.samples) * 1e6
            for turn in turns
            if (turn.layout, turn.case) == (layout, DECODE_1)
        ]
        rows.append(
            {
                "layout": layout.name,
                "tensor": layout.tensor,
                "pipeline": layout.pipeline,
                "queued": layout.is_queued,
                "wholeExperts": layout.has_whole_experts,
                "itlP50Ms": round(median(s.itl_ms.p50 for s in one), 3),
                "tokensPerS": round(median(s.output_tokens_per_s for s in eight), 1),
                "itlToOne": _ratio(
                    [s.itl_ms.p50 for s in one], [s.itl_ms.p50 for s in alone[DECODE_1]]
                ),
                "tokensPerSToOne": _ratio(
                    [s.output_tokens_per_s for s in eight],
                    [s.output_tokens_per_s for s in alone[DECODE_8]],
                ),
                # A step gives one token here.
                "mainCpuUsPerStep": round(median(cpu_us), 1),
            }
        )
    return rows


def _bubbles(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for layout in _layouts(turns):
        if layout.pipeline == 1 or layout.tensor > 1:
            continue
        one = [summary.seconds for summary in _of(turns, layout, BATCHES[0])]
        for case in BATCHES:
            seconds = [summary.seconds for summary in _of(turns, layout, case)]
            measured = [
                measured_bubble(layout.pipeline, case.requests, one_s=first, all_s=all_s)
                for first, all_s in zip(one, seconds, strict=True)
            ]
            rows.append(
                {
                    "layout": layout.name,
                    "batches": case.requests,
                    "seconds": round(median(seconds), 4),
                    "measured": round(median(measured), 3),
                    "formula": round(ideal_bubble(layout.pipeline, case.requests), 3),
                }
            )
    return rows


def _layouts(turns: Sequence[Turn]) -> list[Layout]:
    return list(dict.fromkeys(turn.layout for turn in turns))


def _of(turns: Sequence[Turn], layout: Layout, case: Case) -> list[Summary]:
    """Of each round."""
    return [summarize(t.samples) for t in turns if (t.layout, t.case) == (layout, case)]


def _ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    return round(median(a / b for a, b in zip(ours, others, strict=True)), 3)
