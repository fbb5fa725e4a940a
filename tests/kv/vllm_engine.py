"""A fake of vLLM's engine around the real connector: both of its objects, without a model.

The scheduler does what vLLM's does with a connector, in its order: prefix lookup, ask, allocate,
load, recompute; chunks, preemption, aborts. The "model" writes KV that says which tokens come
before, and its answer is made from all KV of a prompt, so that a wrong byte is a wrong answer.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from tests.kv import vllm_standin
from tests.kv.vllm_fakes import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    CacheMemory,
    FakePool,
    FakeRequest,
    HostMemory,
    Status,
    answer_of,
    config_of,
    groups_of,
    kv_of,
)
from xpyd_core.blocks import blocks_for

vllm_standin.install()

from xpyd_kv.vllm.connector import XpydConnector  # noqa: E402
from xpyd_kv.vllm.engine_api import KVConnectorRole  # noqa: E402

_PORTS = count(24100, 20)


class FakeVllm:
    """One instance: an engine with `tp` x `pp` ranks."""

    def __init__(
        self,
        role: str,
        *,
        tp: int = 1,
        pp: int = 1,
        blocks: int = 64,
        block_size: int = 8,
        chunk: int = 1000,
        caches: bool = True,
        dtype: torch.dtype = torch.float32,
        port: int | None = None,
        policy: str = "recompute",
        transposed: bool = False,
        memory: Callable[[], CacheMemory] = HostMemory,
        defers_loads: bool = False,
        **extra: Any,
    ) -> None:
        """`transposed`: the model has K transposed in its blocks, as vLLM on a CPU. `memory`: makes
        a rank's. `defers_loads`: as 0.33 may, say which blocks a load has when `start_loads` is
        called, which never happens for a request that is aborted before."""
        self.defers_loads = defers_loads
        self.deferred: dict[str, tuple[FakeRequest, int]] = {}
        self._make_memory = memory
        self.memories: list[CacheMemory] = []
        self.transposed = transposed
        self.port = next(_PORTS) if port is None else port
        self.block_size, self.chunk = block_size, chunk
        self.config = config_of(
            f"kv_{role}",
            port=self.port,
            tp=tp,
            pp=pp,
            block_size=block_size,
            policy=policy,
            **extra,
        )
        self.groups = groups_of()
        self.pool = FakePool(blocks, block_size, caches)
        self.ranks: list[tuple[tuple[int, int], Any]] = []
        self.caches: list[dict[str, torch.Tensor]] = []
        self.scheduler: Any = None
        self.waiting: deque[FakeRequest] = deque()
        self.running: list[FakeRequest] = []
        self.requests: dict[str, FakeRequest] = {}
        self.preempted: dict[str, FakeRequest] = {}
        self.arrived: set[str] = set()
        self.failed: set[str] = set()
        self.recomputed: list[str] = []
        self.stats: Any = None
        self.before_forward: Callable[[], None] = lambda: None
        try:
            for stage in range(pp):
                for place in range(tp):
                    self._start_rank(stage, place, tp, pp, blocks, dtype)
            self.scheduler = XpydConnector(self.config, KVConnectorRole.SCHEDULER, self.groups)
            self.scheduler.bind_gpu_block_pool(self.pool)
            facts = {
                at: pickle.loads(pickle.dumps(r.get_handshake_metadata())) for at, r in self.ranks
            }
            self.scheduler.set_xfer_handshake_metadata_pp_aware(facts)
        except BaseException:
            self.close()
            raise

    def _start_rank(
        self, stage: int, place: int, tp: int, pp: int, blocks: int, dtype: torch.dtype
    ) -> None:
        shape = (blocks, HEADS // tp, self.block_size, 2 * HEAD_DIM)
        layers = range(LAYERS * stage // pp, LAYERS * (stage + 1) // pp)
        memory = self._make_memory()
        self.memories.append(memory)
        # As vLLM: all layers are cut from one tensor.
        size = torch.Size(shape).numel() * dtype.itemsize
        flat = memory.allocate(len(layers) * size)
        parts = flat.view(len(layers), size).unbind()
        caches = {
            f"model.layers.{layer}.self_attn.attn": part.view(dtype).view(shape)
            for layer, part in zip(layers, parts, strict=True)
        }

        class Connector(XpydConnector):
            _open_gpu = staticmethod(memory.open_gpu)

        token = vllm_standin.RANK.set((stage, place))
        try:
            with memory.model():
                rank: Any = Connector(self.config, KVConnectorRole.WORKER, self.groups)
                self.ranks.append(((stage, place), rank))
                rank.register_kv_caches(caches)
        finally:
            vllm_standin.RANK.reset(token)
        self.caches.append(caches)

    def close(self) -> None:
        if self.scheduler is not None:
            self.scheduler.shutdown()
        for _, rank in self.ranks:
            rank.shutdown()
        memories, self.memories = self.memories, []
        for memory in memories:
            memory.close()

    # --- the scheduler

    def add(self, request: FakeRequest) -> FakeRequest:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.scheduler.on_new_request(request)
        return request

    def abort(self, request: FakeRequest) -> None:
        """As when the client has gone."""
        remote = request.status is Status.WAITING_FOR_REMOTE_KVS
        never = self.deferred.pop(request.request_id, None) is not None
        delays = remote and request.request_id not in self.arrived and not never
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        self._finish(request, Status.FINISHED_ABORTED, delays=delays)

    def preempt(self, request: FakeRequest) -> None:
        """As when other requests need its blocks."""
        self.running.remove(request)
        self._give_back(request)
        request.status, request.computed = Status.PREEMPTED, 0
        self.preempted[request.request_id] = request

    def has_requests(self) -> bool:
        return bool(self.requests) or self.scheduler.has_pending_push_work()

    def step(self) -> None:
        """One step of vLLM's loop."""
        if not self.has_requests():
            return
        output, chunks = self._schedule()
        metadata = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        if output.total_num_scheduled_tokens:
            self.before_forward()
        results, meta = self._execute(metadata, chunks)
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=meta))
        self._update(chunks, results)
        more = self.scheduler.get_kv_connector_stats()
        if more is not None:
            kept = XpydConnector.build_kv_connector_stats(more.data)
            self.stats = kept if self.stats is None else self.stats.aggregate(kept)

    def run(self, *others: FakeVllm, until: Callable[[], bool], within_s: float = 20.0) -> None:
        """Step all of them; between steps this thread spins as vLLM's workers do."""
        deadline = time.monotonic() + within_s
        while not until():
            assert time.monotonic() < deadline, "it did not happen in time"
            for engine in (self, *others):
                engine.step()
            spin_until = time.monotonic() + 0.0005
            while time.monotonic() < spin_until:
                os.sched_yield()

    def _schedule(self) -> tuple[Any, list[tuple[FakeRequest, int]]]:
        step = SimpleNamespace(new=[], names=[], tables=[], done=[], resumed=set(), chunks=[])
        for request in list(self.running):
            self._go_on(request, step)
        for request in () if self.preempted else list(self.waiting):
            self._start(request, step)
        preempted, self.preempted = self.preempted, {}
        self.waiting.extendleft(preempted.values())
        scheduled = {request.request_id: number for request, number in step.chunks}
        output = SimpleNamespace(
            scheduled_new_reqs=step.new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=step.names,
                resumed_req_ids=step.resumed,
                new_block_ids=step.tables,
                num_computed_tokens=step.done,
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=set(preempted),
        )
        return output, step.chunks

    def _go_on(self, request: FakeRequest, step: Any) -> None:
        number = self._chunk(request)
        more = blocks_for(request.computed + number, self.block_size) - len(request.blocks)
        while request in self.running and more > len(self.pool.free):
            self.preempt(self.running[-1])
        if request in self.running:
            blocks = self.pool.take(more)
            request.blocks += blocks
            self._remember(request, number)
            step.names.append(request.request_id)
            step.tables.append((blocks,) if blocks else None)
            step.done.append(request.computed)
            step.chunks.append((request, number))

    def _start(self, request: FakeRequest, step: Any) -> None:
        if not self._admit(request):
            return
        number = self._chunk(request)
        needed = blocks_for(request.computed + number, self.block_size) - len(request.blocks)
        if needed > len(self.pool.free):
            return
        request.blocks += self.pool.take(needed)
        self._remember(request, number)
        self.waiting.remove(request)
        self.running.append(request)
        name, table = request.request_id, (list(request.blocks),)
        if request.status is Status.PREEMPTED:
            step.resumed.add(name)
            step.names.append(name)
            step.tables.append(table)
            step.done.append(request.computed)
        else:
            step.new.append(
                SimpleNamespace(req_id=name, block_ids=table, num_computed_tokens=request.computed)
            )
        request.status = Status.RUNNING
        step.chunks.append((request, number))

    def _remember(self, request: FakeRequest, number: int) -> None:
        """As vLLM does: before the step has computed them."""
        tokens = request.prompt_token_ids[: request.computed + number]
        self.pool.remember(tokens, request.blocks)

    def _chunk(self, request: FakeRequest) -> int:
        return min(self.chunk, len(request.prompt_token_ids) - request.computed)

    def _admit(self, request: FakeRequest) -> bool:
        """Whether the request has what it needs but the blocks of its first chunk."""
        tokens = request.prompt_token_ids
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            return self._promote(request)
        if request.computed:
            return True
        found = self.pool.lookup(tokens)
        local = len(found) * self.block_size
        external, is_async = self.scheduler.get_num_new_matched_tokens(request, local)
        if external is None:
            return False
        assert is_async == bool(external)
        end = local + external if external else local + min(self.chunk, len(tokens) - local)
        more = blocks_for(end, self.block_size) - len(found)
        if more > len(self.pool.free) - sum(not self.pool.blocks[b].refs for b in found):
            return False
        self.pool.touch([self.pool.blocks[block] for block in found])
        request.blocks = found + self.pool.take(more)
        if external and self.defers_loads:
            self.deferred[request.request_id] = (request, external)
        else:
            self._allocated(request, external)
        request.computed = local + external
        if external:
            request.status = Status.WAITING_FOR_REMOTE_KVS
            request.external = external
            return False
        return True

    def _promote(self, request: FakeRequest) -> bool:
        if request.request_id not in self.arrived:
            return False
        self.arrived.discard(request.request_id)
        request.status = Status.WAITING
        if request.request_id in self.failed:
            self.failed.discard(request.request_id)
            self.recomputed.append(request.request_id)
            self._give_back(request)
            request.computed = request.external = 0
            return self._admit(request)
        self.pool.remember(request.prompt_token_ids[: request.computed], request.blocks)
        request.computed = min(request.computed, len(request.prompt_token_ids) - 1)
        return request.computed > 0 or self._admit_again(request)

    def _admit_again(self, request: FakeRequest) -> bool:
        """A prompt of one token is asked for again after its load."""
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        self._allocated(request, 0)
        return True

    def start_loads(self) -> None:
        """As when the steps that were under way are over."""
        deferred, self.deferred = self.deferred, {}
        for request, external in deferred.values():
            self._allocated(request, external)

    def _allocated(self, request: FakeRequest, external: int) -> None:
        blocks = SimpleNamespace(get_block_ids=lambda: (list(request.blocks),))
        self.scheduler.update_state_after_alloc(request, blocks, external)

    def _give_back(self, request: FakeRequest) -> None:
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(request.blocks)])
        request.blocks = []

    def _finish(self, request: FakeRequest, status: Status, *, delays: bool = False) -> None:
        request.status = status
        more, request.said = self.scheduler.request_finished_all_groups(
            request, (list(request.blocks),)
        )
        assert not more
        if not delays:
            self._give_back(request)
            del self.requests[request.request_id]

    # --- the ranks

    def _execute(self, metadata: Any, chunks: list[tuple[FakeRequest, int]]) -> tuple[Any, Any]:
        reports: list[tuple[Any, Any]] = []
        for (_, place), rank in self.ranks:
            number = len(reports)
            with self.memories[number].model():
                rank.bind_connector_metadata(metadata)
                if chunks:
                    for name, cache in self.caches[number].items():
                        for request, tokens in chunks:
                            self._write(number, name, place, request, tokens)
                        rank.save_kv_layer(name, cache, None)
                rank.start_load_kv(None)
                rank.wait_for_save()
                results = pickle.loads(pickle.dumps(rank.get_transfer_results(set())))
                meta = pickle.loads(pickle.dumps(rank.build_connector_worker_meta()))
            reports.append((results, meta))
        first, meta = reports[0]
        for results, other in reports[1:]:
            assert results == first
            meta = meta if other is None else meta.aggregate(other)
        return first, meta

    def _write(self, rank: int, name: str, place: int, request: FakeRequest, number: int) -> None:
        cache = self.caches[rank][name]
        layer, heads = int(name.split(".")[2]), cache.shape[1]
        kv = kv_of(request.prompt_token_ids)[layer, place * heads : (place + 1) * heads]
        kv = kv.to(cache.dtype).to(cache.device)
        slots = [
            (at, request.blocks[at // self.block_size], at % self.block_size)
            for at in range(request.computed, request.computed + number)
        ]

        def write() -> None:
            for at, block, slot in slots:
                if self.transposed:
                    k, v = self._parts(cache)
                    k[block, :, :, slot], v[block, :, slot] = kv[:, at].split(HEAD_DIM, dim=1)
                else:
                    cache[block, :, slot] = kv[:, at]

        blocks = [cache[block] for block in sorted({block for _, block, _ in slots})]
        self.memories[rank].run(write, writes=blocks)

    def _parts(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K as [block, head, dim, token] and V as [block, head, token, dim]."""
        blocks, heads, size, _ = cache.shape
        k, v = cache.view(blocks, heads, -1).split(size * HEAD_DIM, dim=2)
        return k.view(blocks, heads, HEAD_DIM, size), v.view(blocks, heads, size, HEAD_DIM)

    def read(self, request: FakeRequest) -> torch.Tensor:
        """The KV of a prompt in all caches: [layer, head, token, 2 * head_dim]."""
        by_layer: dict[int, list[torch.Tensor]] = {}
        for memory, caches in zip(self.memories, self.caches, strict=True):
            blocks = [cache[block] for cache in caches.values() for block in request.blocks]
            memory.run(lambda: None, reads=blocks)
            memory.finish()
            for name, cache in caches.items():
                rows = cache[request.blocks].transpose(0, 1)
                if self.transposed:
                    k, v = (part[request.blocks] for part in self._parts(cache))
                    rows = torch.cat((k.transpose(2, 3), v), dim=3).transpose(0, 1)
                flat = rows.reshape(cache.shape[1], -1, 2 * HEAD_DIM).cpu()
                by_layer.setdefault(int(name.split(".")[2]), []).append(flat)
        whole = torch.stack([torch.cat(by_layer[layer]) for layer in range(LAYERS)])
        return whole[:, :, : len(request.prompt_token_ids)]

    def _update(self, chunks: list[tuple[FakeRequest, int]], results: Any) -> None:
        assert results.failed_recving <= results.finished_recving
        for name in results.finished_recving:
            request = self.requests[name]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self.arrived.add(name)
                if name in results.failed_recving:
                    self.failed.add(name)
            else:
                assert request.status is Status.FINISHED_ABORTED
                self._give_back(request)
                del self.requests[name]
        for request, number in chunks:
            if request.status is not Status.RUNNING:
                continue
            request.computed += number
            if request.computed == len(request.prompt_token_ids):
                request.answer = answer_of(self.read(request))
                self.running.remove(request)
                self._finish(request, Status.FINISHED_LENGTH_CAPPED)


@contextmanager
def pair(p: dict[str, Any] | None = None, d: dict[str, Any] | None = None) -> Iterator[Any]:
    """A P and a D, closed at the end."""
    at_d = FakeVllm("consumer", **(d or {}))
    try:
        at_p = FakeVllm("producer", **(p or {}))
        try:
            yield at_p, at_d
        finally:
            at_p.close()
    finally:
        at_d.close()
