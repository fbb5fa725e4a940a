"""Which rank of P sends which layers and heads to which rank of D: any TP x PP to any. Pure.

Both sides compute the plan from the two layouts of the handshake and the transfer's id, and get
the same one: a segment is named by its place in the plan, and nothing of the plan travels. So the
rule and the order of the segments are part of the protocol. A transfer is complete on a rank when
exactly its planned segments are.

For each head of a destination rank one source rank that holds it is chosen:

1. Where P has no replicas there is no choice.
2. Where D has as many replicas of a head as P, or a multiple: D's replica j takes P's j mod count.
   No salt: every source rank sends equally much in every transfer, and a pair of ranks that never
   talks needs no connection. (A NCCL communicator holds 50 to 100 MB on both devices.)
3. Where P has more, and a multiple: D's replica j has as many of P's for itself, and the salt
   chooses one of them for each transfer. So they share the load over time, and each rank of P still
   talks to one replica only.
4. Else (3 replicas to 2): the salt rotates through all of P's.

Layers go where the two stages' sets meet; nothing is assumed of how either side cut them.

See docs/adr/0010.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from xpyd_core.request_id import TransferKey
from xpyd_kv.plan.engine_layout import EngineLayout, LayoutError
from xpyd_kv.spans import Span


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`heads` adjacent heads of some layers, for all tokens that are sent.

    `source` and `destination` are ranks, numbered as in EngineLayout; the heads count within the
    cache of the rank; `layers` are absolute indices, ascending, held by both ranks.
    """

    source: int
    destination: int
    layers: tuple[int, ...]
    source_head: int
    destination_head: int
    heads: int


def transfer_salt(key: TransferKey) -> int:
    """Return the number that spreads transfers over replicas. Both sides know it; the prompts of
    one request differ in it."""
    return int(key.uuid, 16) + key.prompt_index


def plan_segments(
    source: EngineLayout, destination: EngineLayout, *, salt: int = 0
) -> tuple[Segment, ...]:
    """Return the segments that one transfer moves from P's ranks to D's, for any tokens. It is the
    same for salts that are equal modulo the source's `replicas`, so a pair of engines needs as many
    plans and no more. Each rank of D gets something; where other replicas send, a rank of P sends
    nothing. LayoutError names the factor by which the two do not fit."""
    check_fit(source, destination)
    return tuple(
        segment
        for source_stage, destination_stage, layers in _common_layers(source, destination)
        for place in range(destination.tp)
        for segment in _segments_of(
            source,
            destination,
            source_base=source_stage * source.tp,
            rank=destination_stage * destination.tp + place,
            layers=layers,
            salt=salt,
        )
    )


@lru_cache(maxsize=256)
def pairs_between(
    source: EngineLayout, destination: EngineLayout, salt: int
) -> frozenset[tuple[int, int]]:
    """The (rank of P, rank of D) between which a transfer of this salt moves anything. Give it the
    salt modulo `source.replicas`: what it finds is kept."""
    segments = plan_segments(source, destination, salt=salt)
    return frozenset((segment.source, segment.destination) for segment in segments)


def segment_between(
    source: EngineLayout, destination: EngineLayout, *, source_rank: int, destination_rank: int
) -> Segment | None:
    """Return the segment that the one rank sends the other in each transfer in which it sends
    anything; None where it never does. The salt only chooses among pairs: what moves between two
    ranks is always the same, since replicas hold one head. LayoutError as in `plan_segments`, or
    for a rank that is none."""
    check_fit(source, destination)
    for name, rank, engine in (("P", source_rank, source), ("D", destination_rank, destination)):
        if not 0 <= rank < engine.num_ranks:
            raise LayoutError("rank", f"{rank} of {name}, which has {engine.num_ranks}")
    held = frozenset(source.layers_of(source_rank))
    layers = tuple(layer for layer in destination.layers_of(destination_rank) if layer in held)
    if not layers:
        return None
    segments = (
        segment
        for salt in range(source.replicas)
        for segment in _segments_of(
            source,
            destination,
            source_base=source_rank // source.tp * source.tp,
            rank=destination_rank,
            layers=layers,
            salt=salt,
        )
    )
    return next((segment for segment in segments if segment.source == source_rank), None)


def check_fit(source: EngineLayout, destination: EngineLayout) -> None:
    """LayoutError, with the factor, where no KV can move from P's layout to D's."""
    if source.is_mla != destination.is_mla:
        raise LayoutError("is_mla", f"{source.is_mla} on P, {destination.is_mla} on D")
    if source.heads != destination.heads:
        raise LayoutError("kv_heads", f"P has {source.heads}, D has {destination.heads}")
    if source.row_bytes != destination.row_bytes:
        raise LayoutError(
            "block_bytes",
            f"P has {source.row_bytes} per token of a head, D has {destination.row_bytes}",
        )
    sizes = sorted((source.block_size, destination.block_size))
    if sizes[1] % sizes[0]:
        raise LayoutError(
            "block_size",
            f"P has {source.block_size} tokens, D has {destination.block_size}; "
            "one must be a multiple of the other",
        )
    ours, theirs = ({layer for s in side.stages for layer in s} for side in (source, destination))
    if ours != theirs:
        raise LayoutError(
            "layers", f"P has {len(ours)}, D has {len(theirs)}; {min(ours ^ theirs)} is on one side"
        )


def _common_layers(
    source: EngineLayout, destination: EngineLayout
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(source stage, destination stage, layers of both) where there are any."""
    stage_of = {layer: number for number, stage in enumerate(source.stages) for layer in stage}
    for number, stage in enumerate(destination.stages):
        groups: dict[int, list[int]] = {}
        for layer in stage:
            groups.setdefault(stage_of[layer], []).append(layer)
        for source_stage, layers in groups.items():
            yield source_stage, number, tuple(layers)


def _segments_of(
    source: EngineLayout,
    destination: EngineLayout,
    *,
    source_base: int,
    rank: int,
    layers: tuple[int, ...],
    salt: int,
) -> Iterator[Segment]:
    """Yield the segments that one destination rank gets of these layers from the source stage whose
    first rank is `source_base`: its heads in ascending order, adjacent ones of one source rank
    together."""
    wanted = destination.heads_of(rank)
    replica = _source_replica(
        rank % destination.replicas, ours=source.replicas, theirs=destination.replicas, salt=salt
    )
    head = wanted.start
    while head < wanted.stop:
        from_rank = source_base + head * source.tp // source.heads + replica
        held = source.heads_of(from_rank)
        end = min(wanted.stop, held.stop)
        yield Segment(
            source=from_rank,
            destination=rank,
            layers=layers,
            source_head=head - held.start,
            destination_head=head - wanted.start,
            heads=end - head,
        )
        head = end


def _source_replica(wanted_by: int, *, ours: int, theirs: int, salt: int) -> int:
    """Return which of P's `ours` replicas of a head sends it to replica `wanted_by` of D's
    `theirs`. The module's docstring has the rule and its reasons."""
    if theirs % ours == 0:
        return wanted_by % ours
    if ours % theirs == 0:
        share = ours // theirs
        return wanted_by * share + salt % share
    base = wanted_by * ours // theirs if ours > theirs else wanted_by
    return (base + salt) % ours


class Unit(NamedTuple):
    """`tokens` tokens of a prompt. Blocks count from the prompt's first, tokens from the start of
    the block."""

    tokens: int
    source_block: int
    source_token: int
    destination_block: int
    destination_token: int


def units(
    tokens: int, *, skip_tokens: int, source_block_size: int, destination_block_size: int
) -> list[Unit]:
    """The units that hold the tokens [skip_tokens, tokens) of a prompt, in their order.

    The last is whole even where the prompt ends in it, as blocks travel whole. A chunk's end within
    a unit therefore has to wait for the next chunk. ValueError when `skip_tokens` is no multiple of
    the smaller block size or leaves nothing to send.
    """
    size = min(source_block_size, destination_block_size)
    if skip_tokens % size:
        raise ValueError(f"skip_tokens {skip_tokens}: must be a multiple of {size}")
    if not 0 <= skip_tokens < tokens:
        raise ValueError(f"skip_tokens {skip_tokens}: must be 0 or more and below {tokens}")
    return [
        Unit(
            size,
            token // source_block_size,
            token % source_block_size,
            token // destination_block_size,
            token % destination_block_size,
        )
        for token in range(skip_tokens, tokens, size)
    ]


def runs(
    layout: EngineLayout, *, first_head: int, heads: int, first_token: int, tokens: int
) -> list[Span]:
    """The bytes of heads [first_head, first_head + heads) (counted within the rank) and tokens
    [first_token, first_token + tokens) of a block: one run where the block is taken whole or by one
    head, else one for each head."""
    head_bytes = layout.block_size * layout.row_bytes
    if tokens == layout.block_size:
        return [Span(first_head * head_bytes, heads * head_bytes)]
    return [
        Span(head * head_bytes + first_token * layout.row_bytes, tokens * layout.row_bytes)
        for head in range(first_head, first_head + heads)
    ]
