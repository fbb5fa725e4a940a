"""One rank's end of the Channel: what the engine says is done, what comes of it is pairs.

On the rank's I/O thread, but for the step's chunks (`StepSender`), which come on the runner's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.memory.api import KvMemory
from xpyd_kv.memory.device import DeviceError
from xpyd_kv.memory.space import OwnSpace
from xpyd_kv.metrics import EndpointCounts, RankCounts, RankMetricsDelta
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.ranks.chunks import StepChunks
from xpyd_kv.ranks.engine import Channel
from xpyd_kv.ranks.handler import ComputeGate
from xpyd_kv.ranks.receives import RankReceives
from xpyd_kv.ranks.sends import RankSends
from xpyd_kv.session import pairs
from xpyd_kv.session.outgoing import ReadyArea
from xpyd_kv.session.pairs import (
    Opened,
    Opening,
    PairEnded,
    PairFlushed,
    PairLanded,
    PairLost,
    PairQuiet,
    ReceiveReport,
    Sending,
    SendReport,
    Target,
)
from xpyd_kv.session.probing import ProbeResult
from xpyd_kv.wire.messages import Mode

Call = Callable[[Callable[[], None]], None]


class RankReporter:
    """Tells the engine. From any thread."""

    def __init__(self, channel: Channel, figures: RankMetricsDelta) -> None:
        self._channel = channel
        self._figures = figures

    def sent(self, key: TransferKey, epoch: int, report: SendReport) -> None:
        """What becomes of a pair of a P's rank."""
        names = pairs.names_of(key, epoch)
        match report:
            case PairFlushed():
                self._post(
                    pairs.Flushed(**names, destination=report.destination, areas=report.areas)
                )
            case PairEnded():
                self._post(
                    pairs.Ended(
                        **names,
                        destination=report.destination,
                        reason=report.reason,
                        transport=report.transport,
                        figures=self._figures.take(),
                    )
                )

    def received(self, key: TransferKey, epoch: int, report: ReceiveReport) -> None:
        """What becomes of a pair of a D's rank."""
        names = pairs.names_of(key, epoch)
        match report:
            case Opened():
                self._post(pairs.Taking(**names))
            case PairLanded():
                self._post(
                    pairs.Landed(
                        **names,
                        source=report.source,
                        transport=report.transport,
                        figures=self._figures.take(),
                    )
                )
            case PairLost():
                self._post(
                    pairs.Lost(
                        **names,
                        source=report.source,
                        reason=report.reason,
                        figures=self._figures.take(),
                    )
                )
            case PairQuiet():
                self._post(pairs.Quiet(**names, source=report.source))

    def copied(self, number: int) -> None:
        """A copy is through."""
        self._post(pairs.Copied(number=number))

    def probed(self, number: int, destination: int, result: ProbeResult) -> None:
        """A probe of one rank of D is over."""
        self._post(
            pairs.Probed(
                number=number,
                destination=destination,
                ok=result.ok,
                transport=result.transport,
                num_bytes=result.num_bytes,
                seconds=result.seconds,
                digest_matches=result.digest_matches,
                reason=result.reason,
            )
        )

    def counted(self, figures: RankCounts, endpoint: EndpointCounts) -> None:
        """See MetricsReporter."""
        self._post(pairs.Counted(figures=figures, endpoint=endpoint))

    def _post(self, message: pairs.FromRank) -> None:
        self._channel.post(pairs.encode(message))


@dataclass(frozen=True)
class RankAgent:
    """Does what the engine says: `sends` of a P's rank, `receives` of a D's. `give_up`: see
    build_rank."""

    call: Call
    memory: KvMemory
    space: OwnSpace
    gate: ComputeGate
    mouth: RankReporter
    give_up: Callable[[str], None]
    sends: RankSends | None = None
    receives: RankReceives | None = None

    def heard(self, message: bytes) -> None:
        """On the Channel's thread."""
        self.call(partial(self._do, pairs.decode_to_rank(message)))

    def _do(self, message: pairs.ToRank) -> None:
        match message:
            case pairs.Copy():
                self._copy(message)
            case pairs.Send() | pairs.Cancel() | pairs.Forget() if self.sends is not None:
                self._send(self.sends, message)
            case pairs.Probe() if self.sends is not None:
                self.sends.probe(message.number, _targets_of(message))
            case pairs.Open() | pairs.Stop() if self.receives is not None:
                self._receive(self.receives, message)
            case _:
                return

    def _send(self, sends: RankSends, message: pairs.Send | pairs.Cancel | pairs.Forget) -> None:
        key, epoch = TransferKey(message.uuid, message.prompt_index), message.epoch
        match message:
            case pairs.Send():
                stash = None if message.stash is None else self.space.room(message.stash)
                sends.send(
                    Sending(
                        key=key,
                        epoch=epoch,
                        tokens=message.tokens,
                        skip_tokens=message.skip_tokens,
                        mode=message.mode,
                        incarnation=message.incarnation,
                        targets=_targets_of(message),
                        stash=stash,
                    )
                )
            case pairs.Cancel():
                sends.cancel(key, epoch, message.reason)
            case pairs.Forget():
                sends.forget(key, epoch)

    def _receive(self, receives: RankReceives, message: pairs.Open | pairs.Stop) -> None:
        key, epoch = TransferKey(message.uuid, message.prompt_index), message.epoch
        if isinstance(message, pairs.Stop):
            receives.stop(key, epoch, message.reason)
            return
        receives.open(
            Opening(
                key=key,
                epoch=epoch,
                engine_id=message.engine_id,
                incarnation=message.incarnation,
                tokens=message.tokens,
                skip_tokens=message.skip_tokens,
                sources=message.sources,
                room=self.space.room(message.place),
            )
        )
        opened = partial(self.mouth.received, key, epoch, Opened())
        # On a GPU the model may still read what these blocks held before.
        event = self.memory.written()
        if event is None:
            opened()
        else:
            self.gate.add(event, opened, partial(receives.stop, key, epoch, "device_failed"))

    def _copy(self, copy: pairs.Copy) -> None:
        try:
            event = self.space.copy(copy.place, copy.block_ids, into_cache=copy.into_cache)
        except DeviceError as error:
            self.give_up(f"the GPU has failed: {error}")
            return
        done = partial(self.mouth.copied, copy.number)
        if event is None:
            done()
        else:
            # Nobody knows any more what it writes to, nor when.
            fail = partial(self.give_up, "the GPU does not copy KV within the cache's memory")
            self.gate.add(event, done, fail)


def _targets_of(message: pairs.Send | pairs.Probe) -> tuple[Target, ...]:
    return tuple(Target(rank, Address(host, port)) for rank, host, port in message.targets)


class StepSender:
    """See RankSender. On the runner's thread."""

    def __init__(
        self,
        sends: RankSends,
        *,
        call: Call,
        memory: KvMemory,
        gate: ComputeGate,
        mode: Mode,
        limits: FrameLimits,
    ) -> None:
        self._sends = sends
        self._call = call
        self._memory = memory
        self._gate = gate
        self._chunks = StepChunks[_Name](memory.layout, mode=mode, limits=limits, ready=self._ready)
        self._ends: list[_Name] = []

    def begin_step(self, chunks: bytes) -> None:
        """See RankSender."""
        for chunk in pairs.decode_chunks(chunks):
            name = (TransferKey(chunk.uuid, chunk.prompt_index), chunk.epoch)
            if chunk.is_cached:
                self._chunks.cached(name, chunk.first_block, chunk.block_ids)
            else:
                self._chunks.add(name, chunk.first_block, chunk.block_ids)
            if chunk.is_last:
                self._ends.append(name)

    def layer_done(self, layer: int) -> None:
        """See RankSender. Hot path."""
        self._chunks.layer_done(layer)

    def step_done(self, *, failed: bool) -> None:
        """See RankSender."""
        self._chunks.end(failed=failed)
        ends, self._ends = self._ends, []
        for name in () if failed else ends:
            self._when_written(name, partial(self._sends.complete, *name))

    def _ready(self, name: _Name, areas: Sequence[ReadyArea]) -> None:
        self._when_written(name, partial(self._sends.ready, *name, areas))

    def _when_written(self, name: _Name, call: Callable[[], None]) -> None:
        event = self._memory.written()
        if event is not None:
            fail = partial(self._sends.cancel, *name, "device_failed")
            call = partial(self._gate.add, event, call, fail)
        self._call(call)


_Name = tuple[TransferKey, int]
