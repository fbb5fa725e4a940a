"""A rank in a process of its own: what its engine says is done, what its runner says is sent.

On the rank's I/O thread, but for the step's chunks (`StepSender`), which come on the runner's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from xpyd_core.errors import UserError
from xpyd_core.request_id import TransferKey
from xpyd_kv.memory.api import KvMemory
from xpyd_kv.memory.device import DeviceError
from xpyd_kv.memory.space import OwnSpace
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.ranks.chunks import StepChunks
from xpyd_kv.ranks.handler import ComputeGate
from xpyd_kv.ranks.receives import RankReceives
from xpyd_kv.ranks.sends import RankSends
from xpyd_kv.session import pairs
from xpyd_kv.session.outgoing import ReadyArea
from xpyd_kv.wire.messages import Mode

_log = logging.getLogger(__name__)
Call = Callable[[Callable[[], None]], None]
"""Endpoint.call."""


class RankAgent:
    """Does what the engine says: copies within this process' memory itself, all else by `half`.
    `give_up`: see build_rank."""

    def __init__(
        self,
        half: RankSends | RankReceives,
        *,
        space: OwnSpace,
        gate: ComputeGate,
        post: pairs.Report,
        give_up: Callable[[str], None],
    ) -> None:
        self._half = half
        self._space = space
        self._gate = gate
        self._post = post
        self._give_up = give_up

    def do(self, message: pairs.ToRank) -> None:
        """Handle a message of the engine."""
        if isinstance(message, pairs.Copy):
            self._copy(message)
        elif isinstance(message, pairs.Compare):
            self._compare(message)
        else:
            self._half.do(message)

    def _compare(self, compare: pairs.Compare) -> None:
        try:
            worst = self._space.compare(compare.place, compare.block_ids, compare.tokens)
        except DeviceError as error:
            self._give_up(f"the GPU has failed: {error}")
        except UserError as error:
            # The engine hears nothing, and tries the next prompt after its deadline.
            _log.warning("KV of another engine cannot be compared: %s", error)
        else:
            self._post(pairs.Compared(number=compare.number, worst=worst))

    def _copy(self, copy: pairs.Copy) -> None:
        try:
            event = self._space.copy(
                copy.place,
                copy.block_ids,
                into_cache=copy.into_cache,
                first_block=copy.first_block,
            )
        except DeviceError as error:
            self._give_up(f"the GPU has failed: {error}")
            return
        done = partial(self._post, pairs.Copied(number=copy.number))
        if event is None:
            done()
        else:
            # It is not known any more what the GPU writes to, nor when.
            fail = partial(self._give_up, "the GPU does not copy KV within the cache's memory")
            self._gate.add(event, done, fail)


class StepSender:
    """The runner's side of a sending rank. Runs on the runner's thread."""

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
        """Stage the chunks of a step, before its forward: what the engine's producer said of this
        step (StepInput.kv)."""
        for chunk in pairs.decode_chunks(chunks):
            name = (chunk.key, chunk.epoch)
            if chunk.is_cached:
                self._chunks.cached(name, chunk.first_block, chunk.block_ids)
            else:
                self._chunks.add(name, chunk.first_block, chunk.block_ids)
            if chunk.is_last:
                self._ends.append(name)

    def layer_done(self, layer: int) -> None:
        """Layer `layer` (index among the rank's) of all chunks is in the cache. Hot path."""
        self._chunks.layer_done(layer)

    def step_done(self, *, failed: bool) -> None:
        """End the oldest step, after its forward."""
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
