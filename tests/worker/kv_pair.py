"""P and D as engines in one process: the worker's own set-up of the transfer, real sockets between
them. On what they run their steps is the test's choice.

Imports only what a machine with a GPU has.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.memory.api import KvMemory
from xpyd_kv.memory.device import View
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.core import EngineCore
from xpyd_worker.engine.executor import Executor
from xpyd_worker.engine.inbox import Inbox
from xpyd_worker.engine.open_requests import StopRules
from xpyd_worker.engine.request import (
    EngineOutput,
    EngineRequest,
    ReceiveFrom,
    SamplingParams,
    SchedulerConfig,
    SendTo,
)
from xpyd_worker.kv.cache import DeviceCache
from xpyd_worker.kv.engine import HeldKv, Kv, KvParts, make_kv

PATIENCE_S = 30.0
KEY = b"the fleet's key, long enough"
MODEL_LEN = 400
MIB = 2**20


class Instance:
    """One engine with its half of the transfer."""

    def __init__(
        self,
        config: WorkerConfig,
        executor: Executor,
        *,
        memory: KvMemory,
        cache: Sequence[View],
        gpu: DeviceCache | None = None,
        budget: int = 40,
    ) -> None:
        self.executor = executor
        size = memory.layout.block_size
        pool = BlockManager(executor.num_blocks, block_size=size, enable_prefix_caching=True)
        inbox = Inbox()
        parts = KvParts(
            held=HeldKv(memory, cache, gpu=gpu),
            pool=pool,
            wake=inbox.wake,
            factors={"model": "m"},
            keys=(KEY,),
            incarnation=f"incarnation-{config.role}",
            max_model_len=MODEL_LEN,
            buffer_bytes=config.buffer_bytes(0),
        )
        self.kv: Kv = make_kv(config, parts)
        connector = self.kv.connector
        self.engine = EngineCore(
            executor,
            pool=pool,
            inbox=inbox,
            config=SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=16),
            rules=StopRules((), MODEL_LEN),
            deliver=self._deliver,
            producer=connector.producer if connector is not None else None,
            consumer=connector.consumer if connector is not None else None,
        )
        self._outputs: dict[str, list[EngineOutput]] = {}
        self._news = threading.Condition()

    def start(self) -> Instance:
        self.kv.start()
        self.engine.start()
        return self

    @property
    def address(self) -> Address:
        endpoint: Any = self.kv.connector and self.kv.connector.endpoint
        return endpoint.listen_address

    def submit(self, request: EngineRequest) -> None:
        with self._news:
            self._outputs[request.request_id] = []
        self.engine.submit(request)

    def tokens(self, number: int) -> list[int]:
        """All that the request put out, when it is over."""
        name = name_of(number)
        with self._news:
            outputs = self._outputs[name]
            is_over = self._news.wait_for(
                lambda: self.engine.failure or (outputs and outputs[-1].finished), PATIENCE_S
            )
            assert is_over, f"{name} is not over"
            assert self.engine.failure is None
        assert [output.error for output in outputs if output.error] == []
        return [
            token.token_id
            for output in outputs
            for choice in output.choices
            for token in choice.tokens
        ]

    def close(self) -> None:
        self.engine.stop(PATIENCE_S)
        self.kv.close(5.0)

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        with self._news:
            for output in outputs:
                self._outputs[output.request_id].append(output)
            self._news.notify_all()


def settings(role: Any, **fields: Any) -> WorkerConfig:
    """Of one instance: small frames, room beside the cache, any port."""
    chosen = {
        "kv_transports": ("tcp",),
        "kv_group_bytes": 1,
        "kv_host_pool_bytes": 4 * MIB,
        "kv_buffer_bytes": 4 * MIB,
        # Two of one engine id would replace each other.
        "port": 1 if role == "Prefill" else 2,
        "kv_port": 0,
        **fields,
    }
    return WorkerConfig("m", role=role, **chosen)


def answers(p: Instance, d: Instance, prompts: Sequence[Sequence[int]], tokens: int) -> list[Any]:
    """What the two of them make of these prompts, which are under way at once."""
    for number, prompt in enumerate(prompts):
        p.submit(to_p(number, prompt, d.address))
    found: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        first = p.tokens(number)
        assert len(first) == 1
        d.submit(to_d(number, prompt, first[0], tokens))
        found.append(first)
    return [first + d.tokens(number) for number, first in enumerate(found)]


def moved(d: Instance) -> dict[str, int]:
    """Where KV landed on D, and how many tokens of it requests started from."""
    assert d.kv.connector is not None
    landings = {where: n for where, n in d.kv.connector.metrics.landings.items() if n}
    return {**landings, "tokens": d.engine.stats().received_tokens}


def over(d: Instance) -> list[str]:
    """The transports of D's peers."""
    assert d.kv.counters is not None
    return list(d.kv.counters.opened)


def to_p(number: int, prompt: Sequence[int], peer: Address) -> EngineRequest:
    """What the router sends to P."""
    return alone(number, prompt, 1, transfer=SendTo(_key_of(number), peer, len(prompt)))


def to_d(number: int, prompt: Sequence[int], first: int, tokens: int) -> EngineRequest:
    """And to D, which goes on behind P's token up to `tokens` in all."""
    transfer = ReceiveFrom(_key_of(number), PATIENCE_S)
    return alone(number, prompt, tokens, transfer=transfer, continue_from=((first,),))


def alone(number: int, prompt: Sequence[int], tokens: int, **fields: Any) -> EngineRequest:
    """A greedy request that no KV is moved for, if `fields` do not say so."""
    name = name_of(number)
    params = SamplingParams(max_tokens=tokens, seed=0, temperature=0.0)
    return EngineRequest(name, name, tuple(prompt), params, **fields)


def name_of(number: int) -> str:
    return f"request {number}"


def _key_of(number: int) -> TransferKey:
    return TransferKey(f"{number:032x}", 0)
