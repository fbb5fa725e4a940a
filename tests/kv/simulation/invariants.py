"""What must hold: at each send, read, write and return of memory, at all times, and at the end.

at the moment   DONE only over right bytes; no DATA begun for a landing that was given back;
                no landing given back while DATA for it is on its way; adopted once
                (reads, writes, bytes: memory.py, prefill.py, decode.py)
at all times    no transfer, landing or request stands still for longer than its deadlines add
                up to; the store's metrics are those of the landings that are out
at the end      every request is answered, every block and byte is back, every map is empty
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from tests.kv.simulation.link import Begin
from tests.kv.simulation.memory import WatchedLanding
from tests.kv.simulation.prefill import Prefill, PromptPlan
from xpyd_core.request_id import TransferKey
from xpyd_kv.metrics import KvMetrics
from xpyd_kv.wire import messages as wire

if TYPE_CHECKING:
    from tests.kv.simulation.endpoint import SimEndpoint
    from tests.kv.simulation.process import Process
    from tests.kv.simulation.stream import SimStream
    from tests.kv.simulation.world import World

# For turns of loops and frames on their way.
SLACK_S = 3.0
_Ref = tuple[str, TransferKey, int]


def _ref(incarnation: str, message: Any) -> _Ref:
    return incarnation, TransferKey(message.uuid, message.prompt_index), message.epoch


class Watch:
    """One run's."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tags: dict[_Ref, int] = {}
        self._tokens: dict[_Ref, int] = {}
        self._landings: dict[_Ref, WatchedLanding] = {}
        self._granted_at: dict[tuple[str, TransferKey], float] = {}
        self._landed: set[int] = set()
        self._deferred: set[_Ref] = set()
        self._adopted: set[int] = set()

    @property
    def _pulls(self) -> bool:
        return self._world.plan.settings.mode == "get"

    # --- at the moment

    def on_send(self, endpoint: SimEndpoint, peer: SimStream, message: wire.Message) -> None:
        """The session sends `message`."""
        process = endpoint.process
        if isinstance(message, wire.Offer):
            ref = _ref(process.incarnation, message)
            assert process.prefill is not None
            self._tags[ref] = process.prefill.unsettled[ref[1]].tag
            self._tokens[ref] = message.tokens
        elif isinstance(message, wire.Grant | wire.Pull):
            self._on_grant(process, peer, message)
        elif isinstance(message, wire.Done):
            landing = self._landings[_ref(process.incarnation, message)]
            assert landing.tag is not None
            if landing.tag not in self._landed:
                assert landing.holds(landing.tag), "DONE over wrong bytes"
                self._landed.add(landing.tag)

    def _on_grant(self, process: Process, peer: SimStream, grant: wire.Grant | wire.Pull) -> None:
        assert isinstance(grant, wire.Pull) == self._pulls, "GRANT and PULL are mixed up"
        ref = _ref(process.incarnation, grant)
        if ref in self._landings:
            return
        landing = process.store.youngest(ref[1])
        assert landing is not None, "GRANT without a landing"
        assert landing.tag is None, "a landing is granted twice"
        assert peer.hello is not None
        landing.epoch = grant.epoch
        landing.tag = self._tags[_ref(peer.hello.incarnation, grant)]
        landing.tokens = self._tokens[_ref(peer.hello.incarnation, grant)]
        landing.first_block = grant.skip_tokens // process.pool.block_size
        self._landings[ref] = landing
        self._granted_at[process.incarnation, ref[1]] = self._world.schedule.now

    def on_read(self, process: Process, message: wire.Message) -> None:
        """The session gets `message`."""
        if isinstance(message, wire.Lease):
            self._deferred.add(_ref(process.incarnation, message))

    def on_step_over(self, process: Process, gained: list[Prefill], since: float) -> None:
        """P's engine goes on, after a step that ended at `since` and completed blocks of
        `gained`."""
        limits, engine = self._world.plan.settings.limits, process.prefill
        assert engine is not None
        now = self._world.schedule.now
        if self._world.plan.settings.mode != "put":
            assert now == since, "a step is held"
            return
        if now >= since + limits.hold_s:
            self._world.seen["held out"] += 1
            return
        self._world.seen["held"] += now > since
        for prompt in gained:
            transfer = process.session._departures._open.get(prompt.key)
            state = engine.producer.status(prompt.key).state
            if state == "none":
                continue
            if not prompt.is_computed:
                sending = transfer is not None and state == "granted" and transfer.in_flight
                assert not sending, f"a step ends before the KV of {prompt.key} is sent"
            elif engine.producer.is_settled(prompt.key):
                assert prompt.tag in self._landed, f"a step ends before {prompt.key} has landed"
            else:
                assert transfer is not None
                ref = process.incarnation, prompt.key, transfer.request.epoch
                is_deferred = state == "pending" and ref in self._deferred
                assert is_deferred, f"a step ends before {prompt.key} is with D"

    def on_data(self, stream: SimStream, header: wire.Data) -> None:
        """P begins to send a frame."""
        target = stream.pipe_out.reader
        if stream.pipe_out.is_cut or target is None or target.closing is not None:
            return
        landing = self._landings.get(_ref(target.endpoint.process.incarnation, header))
        assert landing is not None, "DATA that was not granted"
        assert not landing.is_over, "DATA for a landing that D has given back"

    def on_taken(self, process: Process, owner: TransferKey) -> None:
        """D takes memory for KV."""
        assert process.decode is not None
        if self._pulls:
            assert owner in process.decode.waiting, f"{owner} takes room before its request runs"

    def on_spilled(self) -> None:
        """P moves KV out of its blocks."""
        self._world.seen["spilled"] += 1

    def on_given_back(self, process: Process, landing: WatchedLanding) -> None:
        """D frees or adopts a landing."""
        if not self._world.plan.is_ordered:
            return
        for stream in process.endpoint.streams:
            for _, item in stream.pipe_in.items:
                on_its_way = isinstance(item, Begin) and _ref("", item.header) == (
                    "", landing.owner, landing.epoch,
                )  # fmt: skip
                assert not on_its_way, f"{landing.owner} is given back, DATA is on its way"

    def on_settled(self, process: Process, prompt: Prefill, state: str) -> None:
        """P's engine learns that its transfer is over."""
        if state == "granted":
            assert prompt.tag in self._landed, "P believes in KV that D has not"

    def on_adopted(self, process: Process, plan: PromptPlan) -> int:
        """D's request starts; the tag of its KV."""
        landing, process.store.last_adopted = process.store.last_adopted, None
        assert landing is not None, "KV without a landing"
        assert landing.tag is not None, "KV without a GRANT"
        assert landing.owner == plan.key, "KV of another prompt"
        assert landing.tag in self._landed, "KV that is not complete"
        assert landing.tag not in self._adopted, "KV adopted twice"
        self._adopted.add(landing.tag)
        return landing.tag

    # --- at all times

    def look(self) -> None:
        """After a step."""
        for process in self._world.alive():
            if process.is_frozen:
                continue
            if process.prefill is not None:
                self._look_at_p(process)
            else:
                self._look_at_d(process)

    def _look_at_p(self, process: Process) -> None:
        limits = self._world.plan.settings.limits
        assert process.prefill is not None
        engine = process.prefill
        if engine.held is not None:
            held_s = process.idle_s(engine.held_since)
            assert held_s <= limits.hold_s + SLACK_S, f"a step of {process} is held for ever"
        if self._pulls:
            metrics, used = process.store.metrics(), dict.fromkeys(("buffer", "pool"), 0)
            for spill in process.store.spills:
                used[spill.kind] += spill.size_bytes
            assert (metrics.buffer_used_bytes, metrics.pool_used_bytes) == (
                used["buffer"], used["pool"],
            ), "the metrics of P's store"  # fmt: skip
        longest = max(limits.dial_s, limits.offer_s, limits.lease_s, limits.done_s)
        for key in process.prefill.unsettled:
            idle_s = process.idle_s(process.activity[key])
            assert idle_s <= longest + limits.cancel_s + SLACK_S, f"P has forgotten {key}"

    def _look_at_d(self, process: Process) -> None:
        limits, store, engine = self._world.plan.settings.limits, process.store, process.decode
        assert engine is not None
        metrics = store.metrics()
        used = dict.fromkeys(("direct", "buffer", "pool"), 0)
        for landing in store.out:
            used[landing.kind] += landing.size_bytes
            if landing.owner not in engine.waiting:
                idle_s = process.idle_s(process.activity[landing.owner])
                held_s = limits.lease_s + limits.cancel_s + SLACK_S
                assert idle_s <= held_s, f"{landing.owner} is held past its lease"
        assert (metrics.leases, metrics.buffer_used_bytes, metrics.pool_used_bytes) == (
            len(store.out), used["buffer"], used["pool"],
        ), "the store's metrics"  # fmt: skip
        engine.excuse()
        for key, request in engine.waiting.items():
            granted_at = self._granted_at.get((process.incarnation, key), 0.0)
            idle_s = process.idle_s(max(request.since, request.excused_at, granted_at))
            assert idle_s <= request.plan.wait_s + SLACK_S, f"the request of {key} waits too long"

    # --- at the end

    def at_the_end(self, process: Process) -> None:
        """Nothing is to come, all connections are closed, all memories have run out."""
        engine = process.prefill or process.decode
        assert engine is not None
        assert not engine.waiting, "a request was never answered"
        if process.prefill is not None:
            assert not process.prefill.running
            assert not process.prefill.unsettled, "a transfer was never settled"
            assert process.prefill.held is None, "a step was never over"
            if self._pulls:
                assert not process.store.spills, "a spill was never given back"
                assert process.store.metrics().leases == 0
        assert process.pool.num_free == process.pool.num_blocks, f"{process} has lost blocks"
        if process.role == "D":
            assert not process.store.out, "a landing was never given back"
        connector = process.connector
        half = connector.producer or connector.consumer
        assert half is not None
        assert not half.has_work()
        assert process.session.open_transfers == 0
        for part in (half, process.session):
            assert not _what_is_kept(part), f"{process} keeps {_what_is_kept(part)}"


def _what_is_kept(part: object, depth: int = 0) -> list[str]:
    """Names of containers below `part` that are not empty, in classes of sessions and
    connectors."""
    kept: list[str] = []
    for name, value in vars(part).items():
        if isinstance(value, dict | set | list | deque) and value:
            kept.append(f"{type(part).__name__}.{name}")
        elif _is_looked_into(value) and depth < 3:
            kept += _what_is_kept(value, depth + 1)
    return kept


def _is_looked_into(value: object) -> bool:
    module = type(value).__module__
    ours = module.startswith(("xpyd_kv.session", "xpyd_kv.connector"))
    return ours and hasattr(value, "__dict__") and not isinstance(value, KvMetrics)
