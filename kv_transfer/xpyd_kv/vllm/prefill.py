"""P's half in the scheduler's process: which prompts are sent, and from which blocks.

vLLM's thread calls the methods. The producer's own references keep blocks until they are sent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.connector.producer import KvProducer
from xpyd_kv.vllm import engine_api
from xpyd_kv.vllm.engine_api import Request, SchedulerOutput, VllmConfig
from xpyd_kv.vllm.options import Options
from xpyd_kv.vllm.scheduler import PREFILLED, EngineBlocks, SchedulerHalf
from xpyd_kv.vllm.worker import StepMetadata, StepsDone

# So often an answer to a step that waits for D is looked for, where no event wakes it (put).
_HOLD_POLL_S = 0.05


class HeldBlocks(EngineBlocks):
    """A BlockPool over vLLM's, for P: references of its own keep blocks until they are sent."""

    def match_prefix(self, token_ids: Sequence[int], *, salt: bytes, max_tokens: int) -> list[int]:
        """Return no block: a P takes none."""
        return []

    def take(self, count: int) -> list[int] | None:
        """Return None: a P takes no block."""
        return None

    def retain(self, block_ids: Sequence[int]) -> None:
        """Keep blocks that are to be sent."""
        self.hold(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Let go what was sent, or is not to be."""
        self.give_back(block_ids)


@dataclass
class Sending:
    """A prompt that P computes for a D, until its request ends here."""

    key: TransferKey
    peer: Address
    tokens: tuple[int, ...]
    blocks: list[int] = field(default_factory=list[int])
    is_offered: bool = False
    # All of it is in steps that are under way or over.
    is_staged: bool = False
    # An offer was cancelled: the next one waits until nothing of it is in flight.
    is_unsettled: bool = False


class PrefillHalf(SchedulerHalf):
    """P's. Its blocks are held by references of the producer's own, so that vLLM frees a request
    as if nothing were sent."""

    def __init__(self, config: VllmConfig, options: Options) -> None:
        super().__init__(config, options)
        self._sendings: dict[str, Sending] = {}

    @property
    def _producer(self) -> KvProducer:
        assert self.connector is not None
        assert self.connector.producer is not None
        return self.connector.producer

    def new_request(self, request: Request) -> None:
        """See KVConnectorBase_V1.on_new_request."""
        self._producer.poll(time.monotonic())
        pair = self._pair_of(request)
        if pair is not None:
            key = TransferKey(pair.uuid, pair.suffix_index)
            tokens = tuple(request.prompt_token_ids or ())
            self._sendings[request.request_id] = Sending(key, pair.decode, tokens)

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """P loads nothing. A preempted prompt waits until its cancelled offer is settled."""
        if request.status.name == "PREEMPTED":
            # It may run again in the step that would say so.
            self._preempted(request.request_id)
        sending = self._sendings.get(request.request_id)
        if sending is not None and sending.is_unsettled:
            sending.is_unsettled = not self._producer.is_settled(sending.key)
            if sending.is_unsettled:
                return None, False
        return 0, False

    def allocated(self, request: Request, blocks: Sequence[int], external: int) -> None:
        """Do nothing: the step says which blocks a prompt has."""

    def step(self, step: SchedulerOutput) -> StepMetadata:
        """Offer and stage what the step computes."""
        now = time.monotonic()
        self._producer.poll(now)
        for name in step.preempted_req_ids or ():
            self._preempted(name)
        for new in step.scheduled_new_reqs:
            blocks, scheduled = new.block_ids[0], step.num_scheduled_tokens[new.req_id]
            self._begin(new.req_id, blocks, new.num_computed_tokens + scheduled, now)
        cached = step.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            more = cached.new_block_ids[at]
            blocks = more[0] if more else []
            tokens = cached.num_computed_tokens[at] + step.num_scheduled_tokens[name]
            if name in cached.resumed_req_ids:
                self._begin(name, blocks, tokens, now)
            elif (sending := self._sendings.get(name)) is not None:
                sending.blocks.extend(blocks)
                self._stage(sending, tokens)
        chunks = self._producer.step_chunks() if step.total_num_scheduled_tokens else None
        assert self._turns is not None
        is_moving = self._producer.has_work()
        self._turns.give(is_moving=is_moving)
        return StepMetadata(chunks, is_moving)

    def reported(self, meta: object) -> None:
        """Ranks say that steps are over. In mode put this waits until D has what they computed."""
        if isinstance(meta, StepsDone):
            for _ in range(meta.steps):
                self._producer.step_done()
                self._hold()
        self._producer.poll(time.monotonic())

    def finished(self, request: Request, blocks: Sequence[int]) -> dict[str, Any] | None:
        """The request is over here: what D is to know of its KV, for P's answer."""
        sending = self._sendings.pop(request.request_id, None)
        if sending is None:
            return None
        if not sending.is_offered:
            return _transfer("none", "not_sent")
        if request.status.name not in PREFILLED or not sending.is_staged:
            self._producer.cancel(sending.key, "aborted")
        status = self._producer.status(sending.key)
        return _transfer(status.state, status.reason, status.decode_incarnation)

    def has_work(self) -> bool:
        """Whether vLLM's loop must go on, so that blocks come back."""
        return self._producer.has_work()

    def reset(self) -> None:
        """Send nothing more of what is computed by now."""
        self._producer.cancel_all("reset")

    def _begin(self, name: str, blocks: Sequence[int], tokens: int, now: float) -> None:
        """The prompt's first step, after which its first `tokens` tokens are in the blocks."""
        sending = self._sendings.get(name)
        if sending is None or sending.is_offered:
            return
        if not self._producer.is_settled(sending.key):
            engine_api.log().warning("KV of %s is not sent: one of this id is", sending.key)
            return
        sending.blocks = list(blocks)
        sending.is_offered = True
        ids = sending.tokens
        self._producer.offer(
            sending.key, sending.peer, ids, prompt_tokens=len(ids), salt=b"", now=now
        )
        # Of what vLLM calls computed some may be another prompt's in this very step, whose blocks
        # are in the prefix cache before they are written: all of it goes with the step's layers.
        self._stage(sending, tokens)

    def _stage(self, sending: Sending, tokens: int) -> None:
        if sending.is_offered and not sending.is_staged:
            sending.is_staged = tokens >= len(sending.tokens)
            self._producer.stage(sending.key, sending.blocks, min(tokens, len(sending.tokens)))

    def _preempted(self, name: str) -> None:
        """Its blocks are taken away. An offer that is not complete must be made again."""
        sending = self._sendings.get(name)
        if sending is not None and sending.is_offered and not sending.is_staged:
            self._producer.cancel(sending.key, "preempted")
            sending.is_offered = False
            sending.is_unsettled = True

    def _hold(self) -> None:
        while (until := self._producer.held_until(now := time.monotonic())) is not None:
            self._wake.wait(min(max(0.0, until - now), _HOLD_POLL_S))
            self._wake.clear()


def _transfer(state: str, reason: str = "", incarnation: str = "") -> dict[str, Any]:
    """P's `kv_transfer_params`, as our engine gives them."""
    return {"transfer": [state], "reason": [reason], "decode_incarnation": incarnation}
