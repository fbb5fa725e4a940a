"""The scheduler's half of the connector, as far as P and D have it in common.

In the process of vLLM's scheduler, which has the block pool and no cache: the ranks move the bytes.
vLLM's thread calls the methods of `prefill.PrefillHalf` or `decode.DecodeHalf`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from xpyd_core.compat import compat_key
from xpyd_core.errors import XpydError
from xpyd_core.keys import is_call_mac
from xpyd_core.request_id import Address, PairId, parse_address, parse_pair_id
from xpyd_kv.connector.build import Connector, build
from xpyd_kv.ranks.engine import RankedEngine, RankedMemory, engine_wire_layout
from xpyd_kv.session.probing import ProbeResult
from xpyd_kv.transport.api import Handler
from xpyd_kv.transport.endpoint import TcpEndpoint
from xpyd_kv.transport.host.data_path import UnusedPath
from xpyd_kv.transport.host.shared_memory import host_token
from xpyd_kv.transport.settings import Identity
from xpyd_kv.values import BlockPool
from xpyd_kv.vllm import engine_api
from xpyd_kv.vllm.channel import SchedulerChannel, Turns
from xpyd_kv.vllm.engine_api import GpuBlockPool, Request, VllmConfig
from xpyd_kv.vllm.link import EngineState, LinkServer
from xpyd_kv.vllm.options import Options, engine_name, incarnation_of, role_of
from xpyd_kv.vllm.worker import RankFacts
from xpyd_kv.wire.handshake import LENT

_CLOSE_S = 2.0
PROBE_S = 15.0
"""Over a probe's own deadline: only a process that is stuck needs so long."""
PREFILLED = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
"""How a request ends whose prompt was computed."""


class EngineBlocks:
    """vLLM's block pool, and references of our own on its blocks. vLLM's thread."""

    def __init__(self, pool: GpuBlockPool, block_size: int) -> None:
        self._pool = pool
        self.block_size = block_size

    @property
    def num_blocks(self) -> int:
        return self._pool.num_gpu_blocks

    @property
    def num_free(self) -> int:
        return self._pool.get_num_free_blocks()

    def hold(self, block_ids: Sequence[int]) -> None:
        """Take a reference on each."""
        self._pool.touch([self._pool.blocks[block] for block in block_ids])

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Drop a reference of each."""
        # The tail is evicted first, as vLLM does.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(block_ids)])


class SchedulerHalf:
    """What P and D have in common: the connection to the ranks, and which requests are a pair's."""

    def __init__(self, config: VllmConfig, options: Options) -> None:
        self._config = config
        self._options = options
        self._keys = options.keys
        self._wake = threading.Event()
        self._channels: list[SchedulerChannel] = []
        self._turns: Turns | None = None
        self._link: LinkServer | None = None
        self._compatibility = ""
        self._blocks: BlockPool | None = None
        self.connector: Connector | None = None
        self.running = 0
        """Requests of the last step."""

    def connect(self, ranks: Sequence[RankFacts], pool: BlockPool) -> Connector:
        """Connect to the ranks, in the order of their numbers, and start the I/O thread."""
        first, config, options = ranks[0], self._config, self._options
        role, transfer = role_of(config), config.kv_transfer_config
        if any(rank.factors != first.factors for rank in ranks):
            raise XpydError("the ranks of this engine have different caches")
        self._channels = [SchedulerChannel(rank.channel) for rank in ranks]
        engine = RankedEngine(
            layout=first.engine,
            channels=self._channels,
            dtype=first.dtype,
            head_dim=first.head_dim,
            on_device=bool(first.gpu),
        )
        # The ranks move KV; where one transport was asked for by name, this side names it, too.
        named = options.transports[0] if len(options.transports) == 1 else ""
        addresses = tuple(parse_address(rank.address) for rank in ranks if rank.address)

        def make_endpoint(handler: Handler) -> TcpEndpoint:
            return TcpEndpoint(
                handler,
                identity=Identity(
                    transfer.engine_id,
                    incarnation_of(config),
                    role,
                    host=host_token() if first.gpu else b"",
                    gpu=first.gpu,
                    engine=engine_name(),
                ),
                layout=engine_wire_layout(
                    engine,
                    factors=first.factors,
                    max_tokens=config.model_config.max_model_len,
                    ranks=addresses,
                ),
                keys=self._keys,
                takes="engines",
                listen=Address(options.host, transfer.kv_port) if role == "D" else None,
                source_host=options.host,
                transports=options.transports,
                socket_dir=Path(options.socket_dir) if options.socket_dir else None,
                encrypted=options.is_encrypted,
                paths=(UnusedPath(named),) if named in LENT else (),
            )

        self.connector = build(
            role,
            make_endpoint=make_endpoint,
            memory=RankedMemory(engine),
            pool=pool,
            wake=self._wake.set,
            settings=options.settings,
            ranks=engine,
        )
        self.connector.endpoint.start()
        self._turns = Turns(self.connector.endpoint)
        self._compatibility, self._blocks = compat_key(first.factors), pool
        self._link = LinkServer(
            incarnation_of(config),
            {
                "state": self._state,
                "release": self._release,
                "probe": self._probe,
                "drain": self._drain,
                "gone": self._gone,
                "outcomes": self._outcomes,
            },
        )
        return self.connector

    def close(self) -> None:
        """End the threads."""
        if self._link is not None:
            self._link.close()
        if self.connector is not None:
            self.connector.endpoint.close(_CLOSE_S)
        for channel in self._channels:
            channel.close()

    # --- calls of the API server's process, each on a thread of its own

    def _state(self, _: str) -> EngineState:
        connector, blocks = self.connector, self._blocks
        assert connector is not None
        assert blocks is not None
        half = connector.consumer if connector.producer is None else connector.producer
        return EngineState(
            compatibility=self._compatibility,
            free_blocks=blocks.num_free,
            total_blocks=blocks.num_blocks,
            running=self.running,
            is_idle=half is None or not half.has_work(),
            kv_leases=0 if half is None else half.leases,
            kv_peers=connector.metrics.peers.latest(),
        )

    def _release(self, uuid: str) -> None:
        """A D's alone: P's KV goes with its lease, or with D's answer."""

    def _outcomes(self, uuids: str) -> dict[str, str]:
        """What became of the KV of each of these requests of a D, where that is known."""
        return {}

    def _probe(self, address: str) -> dict[str, Any]:
        assert self.connector is not None
        results: queue.SimpleQueue[ProbeResult] = queue.SimpleQueue()
        self.connector.probe(parse_address(address), results.put)
        try:
            return results.get(timeout=PROBE_S).document()
        except queue.Empty:
            raise XpydError("the KV thread does not answer") from None

    def _gone(self, address: str) -> None:
        assert self.connector is not None
        self.connector.peer_gone(parse_address(address))

    def _drain(self, _: str) -> None:
        assert self.connector is not None
        self.connector.drain()

    # --- inside

    def _pair_of(self, request: Request) -> PairId | None:
        """The pair that the request's id names, if its router signed it; None: it is served
        alone."""
        pair = parse_pair_id(request.request_id)
        if pair is None or not request.prompt_token_ids:
            return None
        if request.lora_request is not None or request.mm_features:
            return None
        mac = params_of(request).get("pair_mac")
        if self._options.accept_unsigned_pairs or (
            isinstance(mac, str) and is_call_mac(self._keys, "pair", str(pair), mac)
        ):
            return pair
        engine_api.log().warning(
            "a pair id without the router's MAC: request %s is served alone", pair.uuid
        )
        return None


def params_of(request: Request) -> Mapping[str, Any]:
    """What the router says of the request in its body. vLLM passes on what it gets there."""
    given = request.kv_transfer_params
    return cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {}
