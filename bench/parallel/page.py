"""The measured part of docs/benchmarks/parallel.md, as tables. Pure."""

from __future__ import annotations

from typing import Any

from bench.report import put_measured, where_measured

BEGIN = "<!-- measured: `make bench-parallel` writes it -->\n"


def with_measured(page: str, made: dict[str, Any]) -> str:
    """The page with the tables of this report in place of those that it has."""
    return put_measured(page, BEGIN, _measured(made))


def _measured(made: dict[str, Any]) -> str:
    where = f"{where_measured(made)}Engines on {made['cores']} cores; rounds: {made['rounds']}."
    parts = [[where], _by_gloo("all-reduce", made["allReduce"])]
    if made.get("gpuAllReduce"):
        parts.append(_gpu_reduces(made))
    if made.get("allToAll"):
        parts += [_by_gloo("all-to-all", made["allToAll"]), _layers(made)]
    for model in made["engines"]:
        parts.append(_engines(model, made["engines"][model]))
        if made["bubble"][model]:
            parts.append(_bubbles(model, made["bubble"][model]))
    for model, rows in made.get("replicas", {}).items():
        parts.append(_replicas(model, rows))
    return "\n" + "".join("\n".join(part) + "\n\n" for part in parts)


def _by_gloo(what: str, rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"| {what} | shared memory, us | Gloo, us | ratio |",
        "|---|---|---|---|",
        *(
            f"| {row['ranks']} ranks, {row['kib']:,} KiB | {row['oursUs']:,.0f} "
            f"| {row['glooUs']:,.0f} | {row['ratio']:.3f} |"
            for row in rows
        ),
    ]


def _layers(made: dict[str, Any]) -> list[str]:
    return [
        "| layer of 32 experts | in slices (TP), us | whole (EP), us | ratio | rows sent, us |",
        "|---|---|---|---|---|",
        *(
            f"| {row['ranks']} ranks, {row['rows']} rows | {row['slicesUs']:,.0f} "
            f"| {row['wholeUs']:,.0f} | {row['ratio']:.3f} | {row['sentUs']:,.0f} |"
            for row in made["expertLayers"]
        ),
    ]


def _gpu_reduces(made: dict[str, Any]) -> list[str]:
    return [
        "| all-reduce on GPUs | over peers' memory, us | NCCL, us | ratio |",
        "|---|---|---|---|",
        *(
            f"| {row['ranks']} ranks, {row['kib']:,} KiB | {row['oursUs']:,.1f} "
            f"| {row['ncclUs']:,.1f} | {row['ratio']:.3f} |"
            for row in made["gpuAllReduce"]
        ),
    ]


def _engines(model: str, rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"| `{model}` | ITL p50 ms, 1 at once | to one rank's | tokens/s, 8 at once "
        "| to one rank's | main process, CPU us a step |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['layout']} | {row['itlP50Ms']:.2f} | {row['itlToOne']:.2f} "
            f"| {row['tokensPerS']:,.0f} | {row['tokensPerSToOne']:.2f} "
            f"| {row['mainCpuUsPerStep']:,.0f} |"
            for row in rows
        ),
    ]


def _replicas(model: str, rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"| `{model}`, behind a router | tokens/s, 8 at once | to two instances "
        "| TTFT p50 ms, Poisson | TTFT p99 ms | to two instances | ITL p99 ms |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row['contender']} | {row['tokensPerS']:,.0f} | {row['tokensPerSToInstances']:.2f} "
            f"| {row['ttftP50Ms']:,.0f} | {row['ttftP99Ms']:,.0f} "
            f"| {row['ttftP99ToInstances']:.2f} | {row['itlP99Ms']:.1f} |"
            for row in rows
        ),
    ]


def _bubbles(model: str, rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"| `{model}`, batches | ms for all | bubble | (PP-1)/(PP-1+M) |",
        "|---|---|---|---|",
        *(
            f"| {row['layout']}, {row['batches']} | {row['seconds'] * 1e3:,.0f} "
            f"| {row['measured']:.2f} | {row['formula']:.2f} |"
            for row in rows
        ),
    ]
