"""What a step of a layout sends between its ranks, and what moving KV takes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from xpyd_kv.transport.nccl.limits import NcclLimits, communicator_bytes
from xpyd_worker.advise.arithmetic import (
    LINKS,
    Link,
    all_reduce_bytes,
    all_reduces,
    all_to_all_bytes,
    boundary_bytes,
    bubble,
    launches_s,
    ring_factor,
    transfer_s,
)
from xpyd_worker.advise.facts import ModelFacts
from xpyd_worker.advise.fit import Hardware, nodes_of
from xpyd_worker.advise.trees import Layout

CHANNELS = (16, NcclLimits().channels)
"""Of a communicator: NCCL's usual number, and what engines ask for."""


@dataclass(frozen=True)
class Messages:
    """Of one kind in one step: how many, the bytes that a rank gives to each, the bytes that leave
    a rank in the step, how long these take at full speed, and what launching takes."""

    count: int
    each_bytes: int
    sent_bytes: int
    seconds: float
    link: Link
    launches_s: tuple[float, float] | None = None


@dataclass(frozen=True)
class Step:
    """One step of `tokens`. None: there are no such messages in this layout. `all_to_alls` stand in
    place of one all-reduce of each layer with experts, and count as if all of a token's experts
    were elsewhere."""

    tokens: int
    all_reduces: Messages | None
    boundaries: Messages | None
    all_to_alls: Messages | None


def step_of(facts: ModelFacts, layout: Layout, hardware: Hardware, tokens: int) -> Step:
    """What `layout` sends for `tokens` tokens, of all requests together."""
    size = facts.element_bytes
    within = LINKS[hardware.within]
    reduces = boundaries = to_all = None
    if layout.tensor > 1:
        count = all_reduces(len(facts.layers))
        each = all_reduce_bytes(tokens, facts.hidden, size)
        sent = int(count * each * ring_factor(layout.tensor))
        launching = launches_s(within, count)
        reduces = Messages(count, each, sent, _s(sent, within), within, launching)
    if layout.pipeline > 1:
        is_between = nodes_of(hardware, layout.tensor, layout.pipeline) > 1
        link = LINKS[hardware.between if is_between else hardware.within]
        each = boundary_bytes(tokens, facts.hidden, size, tensor=layout.tensor)
        count = layout.pipeline - 1
        boundaries = Messages(count, each, each, count * _s(each, link), link)
    if layout.expert > 1 and facts.experts is not None:
        per_token, count = facts.experts.per_token, 2 * facts.experts.layers
        each = all_to_all_bytes(tokens, facts.hidden, facts.expert_element_bytes, per_token)
        to_all = Messages(count, each, count * each, _s(count * each, within), within)
    return Step(tokens, reduces, boundaries, to_all)


def _s(size_bytes: int, link: Link) -> float:
    return transfer_s(size_bytes, link.bytes_per_s)


def bubbles(stages: int) -> tuple[tuple[int, Fraction], ...]:
    """The share of time that stages wait, by batches under way; none without stages."""
    if stages == 1:
        return ()
    return tuple((count, bubble(stages, count)) for count in (1, stages, 2 * stages, 4 * stages))


@dataclass(frozen=True)
class Moves:
    """KV of one prompt from P to D, and NCCL's memory on each device for `peers` instances of the
    other role, by channels of a communicator."""

    prompt_bytes: int
    seconds: float
    link: Link
    peers: int
    nccl_bytes: tuple[tuple[int, int], ...]


def moves_of(prompt_bytes: int, hardware: Hardware, peers: int) -> Moves:
    """A device has a communicator with the rank at its own place in each of `peers` instances, if
    both sides are divided alike."""
    link = LINKS[hardware.between]
    memory = tuple((channels, peers * communicator_bytes(channels)) for channels in CHANNELS)
    return Moves(prompt_bytes, _s(prompt_bytes, link), link, peers, memory)
