"""`xpyd worker` with another store on D: what lands is thrown away, the blocks hold zeros.

If answers stay right with it, D does not use the KV that came. Run as
`python -m tests.e2e.zero_store_worker FLAGS`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from xpyd_core.logs import set_up_logging
from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.build import default_store
from xpyd_kv.memory.api import KvMemory, Landing, StoreMetrics
from xpyd_kv.memory.device import View
from xpyd_kv.memory.store import LandingStore, StoreLimits
from xpyd_kv.values import BlockPool
from xpyd_worker.command import configure, read_config
from xpyd_worker.main import run


class ZeroLanding:
    """A landing whose bytes go to scratch memory and whose blocks are zeroed when adopted."""

    def __init__(self, inner: Landing, memory: KvMemory) -> None:
        self._inner = inner
        self._memory = memory
        self.kind = inner.kind
        self.num_blocks = inner.num_blocks
        self.size_bytes = inner.size_bytes
        self.is_copying = False

    def views(
        self, first_layer: int, end_layer: int, first_block: int, end_block: int
    ) -> list[memoryview]:
        views = self._inner.views(first_layer, end_layer, first_block, end_block)
        return [memoryview(bytearray(len(view))) for view in views]

    def adopt(self, skip_blocks: int = 0) -> list[int] | None:
        block_ids = self._inner.adopt(skip_blocks)
        for block_id in block_ids or ():
            for layer in range(len(self._memory.layout.layers)):
                view = self._memory.block_view(layer, block_id)
                view[:] = bytes(len(view))
        return block_ids

    def free(self) -> None:
        self._inner.free()


class ZeroStore:
    """The default store with every landing replaced."""

    def __init__(self, limits: StoreLimits, memory: KvMemory, pool: BlockPool) -> None:
        self._inner = default_store(limits, memory, pool)
        self._memory = memory

    def take(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        return self._wrap(self._inner.take(owner, num_blocks))

    def take_direct(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        return self._wrap(self._inner.take_direct(owner, num_blocks))

    def poll(self) -> None:
        self._inner.poll()

    def close(self, deadline_s: float) -> None:
        self._inner.close(deadline_s)

    @property
    def regions(self) -> Sequence[View]:
        return self._inner.regions

    def metrics(self) -> StoreMetrics:
        return self._inner.metrics()

    def _wrap(self, landing: Landing | None) -> Landing | None:
        return None if landing is None else ZeroLanding(landing, self._memory)


def make_store(limits: StoreLimits, memory: KvMemory, pool: BlockPool) -> LandingStore:
    """What the worker's main is handed."""
    return ZeroStore(limits, memory, pool)


def main() -> int:
    parser = argparse.ArgumentParser()
    configure(parser)
    args = parser.parse_args()
    set_up_logging(args.log_level, args.log_format)
    return run(read_config(args), store_factory=make_store)


if __name__ == "__main__":
    sys.exit(main())
