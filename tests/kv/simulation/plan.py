"""What a run consists of: processes, limits, prompts, and the strikes of fate. Values."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from tests.kv.kvfakes import LAYOUT, with_block_size
from tests.kv.simulation.faults import FAULTS, TRICKS
from tests.kv.simulation.prefill import PromptPlan
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvLimits, KvSettings
from xpyd_kv.values import KvLayout
from xpyd_kv.wire.messages import MODES, Mode

UNIT = LAYOUT.bytes_per_block
STORES = (
    StoreLimits(),
    StoreLimits(1.0, 100 * UNIT, 0),
    StoreLimits(1.0, 0, 100 * UNIT),
    StoreLimits(1.0, 0, 0),
    StoreLimits(0.6, 4 * UNIT, 6 * UNIT),
)


@dataclass(frozen=True)
class Strike:
    """A fault (its name in faults.FAULTS), at a time or at the n-th delivery of anything by any
    connection: before it (which a cut loses) or after it."""

    fault: str
    at_s: float | None = None
    boundary: int = 0
    when: str = "before"


@dataclass(frozen=True)
class Plan:
    """Times in seconds.

    `turn_items`, `turn_parts`: what one turn of an I/O loop reads from and writes to one
    connection. `frame_parts`: pieces in which a DATA body travels; `part_s`: how long each takes.
    `d_block_size`: tokens of a D block; P's is LAYOUT's. The blocks are D's own.
    `is_ample`: nothing befalls anybody and there is room for all, so every request gets its KV.
    `is_ordered`: no frame overtakes another, so that none is on its way once its landing is given
    back. `vouches`: a transport that calls every frame intact, to see the run fail.
    """

    seed: int
    prompts: tuple[PromptPlan, ...]
    strikes: tuple[Strike, ...] = ()
    settings: KvSettings = field(default_factory=KvSettings)
    num_p: int = 1
    num_d: int = 1
    p_blocks: int = 40
    d_blocks: int = 40
    d_block_size: int = LAYOUT.block_size
    latency_s: float = 0.0005
    jitter_s: float = 0.001
    layer_s: float = 0.002
    part_s: float = 0.0
    turn_items: int = 16
    turn_parts: int = 8
    frame_parts: int = 2
    step_fails: float = 0.0
    restart_s: float = 0.5
    caches: bool = True
    is_ample: bool = False
    is_ordered: bool = True
    vouches: bool = False

    def layout_of(self, role: str) -> KvLayout:
        """The cache of a P or a D."""
        return with_block_size(LAYOUT.block_size if role == "P" else self.d_block_size)


def address_of(name: str) -> Address:
    """The KV address of an instance: P0, D0, D1, ..."""
    return Address(f"127.0.{1 if name[0] == 'P' else 2}.{int(name[1:]) + 1}", 21001)


def prompt(
    index: int, ids: tuple[int, ...], *, p: str = "P0", d: str = "D0", at_s: float = 0.0,
    d_after_s: float | None = 0.01, wait_s: float = 10.0, chunk_tokens: int = 6,
    cached_tokens: int = 0, runs_s: float = 0.05, aborted_after_s: float | None = None,
) -> PromptPlan:  # fmt: skip
    """The `index`-th prompt of a run."""
    key = TransferKey(f"{index:032x}", 0)
    return PromptPlan(
        key,
        ids,
        p,
        d,
        address_of(d),
        at_s,
        d_after_s,
        wait_s,
        chunk_tokens,
        cached_tokens,
        runs_s,
        aborted_after_s,
    )


def plan_of(seed: int, mode: Mode | None = None) -> Plan:
    """Everything from one number; the mode too, where none is given."""
    rng = random.Random(seed)
    num_p, num_d = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)])
    spread_s = rng.choice([0.02, 0.3, 3.0])
    prompts: list[PromptPlan] = []
    for index in range(rng.choice([1, 2, 3, 5])):
        prompts.append(_prompt(rng, index, prompts, num_p=num_p, num_d=num_d, spread_s=spread_s))
    is_ordered = rng.random() < 0.75
    names = sorted(FAULTS) if is_ordered else sorted(TRICKS) + sorted(FAULTS)[::4]
    strikes = tuple(
        _strike(rng, rng.choice(names), spread_s) for _ in range(rng.choice([0, 1, 1, 2, 3, 5]))
    )
    limits = KvLimits(
        lease_s=rng.choice([3.0, 8.0, 30.0]),
        # In proportion to the frames, which are tiny here.
        ahead_bytes=rng.choice([1, 400]),
        max_transfers=rng.choice([2, 4096, 4096]),
        max_held_share=rng.choice([0.2, 0.5, 1.0, 1.0]),
        hold_s=rng.choice([0.3, 10.0]),
    )
    frames = FrameLimits(rng.choice([1, 200, 10**6]), rng.choice([64, 200, 10**6]))
    plan = Plan(
        seed=seed,
        prompts=tuple(prompts),
        strikes=strikes,
        settings=KvSettings(limits, frames, rng.choice(STORES), rng.choice(MODES)),
        num_p=num_p,
        num_d=num_d,
        p_blocks=rng.choice([12, 40, 40]),
        d_blocks=rng.choice([10, 16, 40]),
        latency_s=rng.choice([0.0001, 0.001, 0.02]),
        jitter_s=rng.choice([0.0002, 0.002, 0.02]),
        layer_s=rng.choice([0.0005, 0.005, 0.05]),
        part_s=rng.choice([0.0, 0.0, 0.003, 0.003, 0.3]),
        turn_items=rng.choice([1, 3, 16]),
        turn_parts=rng.choice([1, 2, 8]),
        frame_parts=rng.choice([1, 2, 3]),
        step_fails=rng.choice([0.0, 0.0, 0.03]),
        restart_s=rng.choice([0.01, 0.5, 4.0]),
        caches=rng.random() < 0.7,
        is_ordered=is_ordered,
    )
    if mode is not None:
        plan = replace(plan, settings=replace(plan.settings, mode=mode))
    plan = _ample(plan) if rng.random() < 0.15 else plan
    # In one run of three D's blocks are half or twice as large as P's; as many tokens in all.
    size = random.Random(~seed).choice([4, 4, 4, 4, 2, 8])
    return replace(plan, d_block_size=size, d_blocks=plan.d_blocks * LAYOUT.block_size // size)


def _ample(plan: Plan) -> Plan:
    """The same fleet without faults, haste and want."""
    limits = replace(
        plan.settings.limits, lease_s=30.0, max_transfers=4096, max_held_share=1.0, hold_s=10.0
    )
    return replace(
        plan,
        prompts=tuple(replace(p, wait_s=10.0, aborted_after_s=None) for p in plan.prompts),
        strikes=(),
        settings=replace(plan.settings, limits=limits),
        p_blocks=64,
        d_blocks=64,
        jitter_s=min(plan.jitter_s, 0.002),
        part_s=min(plan.part_s, 0.003),
        step_fails=0.0,
        is_ample=True,
        is_ordered=True,
    )


def _prompt(
    rng: random.Random,
    index: int,
    earlier: list[PromptPlan],
    *,
    num_p: int,
    num_d: int,
    spread_s: float,
) -> PromptPlan:
    tokens = rng.randint(1, 30)
    ids = tuple(range(1000 * index, 1000 * index + tokens))
    if earlier and rng.random() < 0.4:
        shared = rng.choice(earlier).ids[:12]
        ids = (*shared, *ids[len(shared) :])[:tokens]
    asks = rng.random()
    return prompt(
        index,
        ids,
        p=f"P{rng.randrange(num_p)}",
        d=f"D{rng.randrange(num_d)}",
        at_s=rng.random() * spread_s,
        d_after_s=None if asks < 0.15 else rng.random() * (6.0 if asks < 0.3 else 0.1),
        wait_s=rng.choice([0.5, 3.0, 10.0]),
        chunk_tokens=rng.choice([3, 8, 64]),
        cached_tokens=rng.choice([0, 0, (tokens - 1) // 4 * 4]),
        runs_s=rng.choice([0.01, 1.0]),
        aborted_after_s=rng.choice([0.0, 0.05, 1.0]) if rng.random() < 0.12 else None,
    )


def _strike(rng: random.Random, fault: str, spread_s: float) -> Strike:
    if rng.random() < 0.35:
        return Strike(fault, at_s=rng.random() * (spread_s + 0.5))
    boundary = 1 + int(rng.random() ** 2 * 60)
    return Strike(fault, boundary=boundary, when=rng.choice(["before", "after"]))
