"""The articles' models as facts, and advice on them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

from xpyd_tools.advise.facts import ModelFacts, Overrides, read_facts
from xpyd_tools.advise.fit import Hardware
from xpyd_tools.advise.layout import Advice, Wishes, advise

MODELS = Path(__file__).parents[1] / "testdata/models"
GB = 10**9


@cache
def facts(name: str, **overrides: object) -> ModelFacts:
    """Of a model of tests/testdata/models."""
    config = json.loads((MODELS / name / "config.json").read_text())
    return read_facts(config, files_bytes=None, overrides=replace(Overrides(), **overrides))


def devices(nodes: int, gpus_per_node: int, **fields: object) -> Hardware:
    """Of 80 GB."""
    base = Hardware(nodes=nodes, gpus_per_node=gpus_per_node, memory_bytes=80 * GB)
    return replace(base, **fields)


def wishes(**fields: object) -> Wishes:
    """Those of the command's defaults, with changes."""
    base = Wishes(
        role="Aggregated",
        context=4096,
        concurrency=16,
        utilization=0.92,
        reserve_bytes=2 * GB,
        prefill_tokens=2048,
        peers=1,
    )
    return replace(base, **fields)


def advice(model: ModelFacts, hardware: Hardware, **fields: object) -> Advice:
    """What is advised for these wishes."""
    return advise(model, hardware, wishes(**fields))
