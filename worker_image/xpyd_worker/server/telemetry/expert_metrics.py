"""What /metrics shows of a model's experts: how many tokens chose each, and, where experts move,
how often, and how even the ranks' load is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from xpyd_worker.engine.executor import LayerExperts, LayerMoves
from xpyd_worker.server.telemetry.metrics import Sample

_EXPERT_PREFIX = "xpyd_engine_expert_"


def expert_samples(layers: Sequence[LayerExperts]) -> Iterable[Sample]:
    """All `xpyd_engine_expert_*`: as many series as there are experts of a layer, and two for each
    layer. Those of each expert in each layer would be thousands."""
    sums = [sum(tokens) for tokens in zip_longest(*(one.tokens for one in layers), fillvalue=0)]
    for expert, tokens in enumerate(sums):
        labels = (("expert", str(expert)),)
        text = "Tokens that chose the expert, in all layers"
        yield Sample(f"{_EXPERT_PREFIX}tokens", "counter", text, float(tokens), labels)
    for one in layers:
        labels = (("layer", str(one.layer)),)
        for name, text, value in (
            ("layer_tokens", "Tokens of all experts of the layer", sum(one.tokens)),
            ("layer_busiest_tokens", "Tokens of its most chosen expert", max(one.tokens)),
        ):
            yield Sample(_EXPERT_PREFIX + name, "counter", text, float(value), labels)
        if one.moves is not None:
            yield from _move_samples(one.moves, labels)


def _move_samples(moves: LayerMoves, labels: tuple[tuple[str, str], ...]) -> Iterable[Sample]:
    """Of one layer whose experts move."""
    for name, text, value in (
        (
            "layer_rebalancings",
            "Times that experts of the layer were placed anew",
            moves.placements,
        ),
        ("layer_moves", "Experts of the layer that were given to another rank", moves.moved),
    ):
        yield Sample(_EXPERT_PREFIX + name, "counter", text, float(value), labels)
    text = "Tokens of the busiest rank over the mean, in the last window"
    for when, value in (("before", moves.before), ("after", moves.after)):
        when_labels = (*labels, ("placement", when))
        yield Sample(_EXPERT_PREFIX + "layer_imbalance", "gauge", text, value, when_labels)
