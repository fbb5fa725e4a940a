"""A loaded engine and the thread with the event loop that feeds it: what an LLM owns.

Owns the engine's thread and the processes of its ranks, too. It must not know the LLM: the LLM's
end, by whatever way, closes it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, TypeVar

from xpyd_core.errors import UserError
from xpyd_core.logs import format_in_use, level_in_use
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine.request import EngineOutput
from xpyd_worker.model.generation import SamplingDefaults
from xpyd_worker.ranks.loss import RankLostError
from xpyd_worker.ranks.start.messages import Logs
from xpyd_worker.server.bridge import EngineBridge, RequestMetrics
from xpyd_worker.server.service import InstanceInfo, Service, seeds
from xpyd_worker.system import prepare_for_torch

if TYPE_CHECKING:
    from xpyd_worker.load.engine import LoadedEngine

T = TypeVar("T")
Work = Callable[[Service], Coroutine[Any, Any, T]]
# As for `xpyd worker`: the longest step that the end waits for.
_STOP_S = 10.0


class Session:
    """Made ready to run; ended by `close`. Methods may be called from any thread."""

    def __init__(self, config: WorkerConfig) -> None:
        """Load and start. UserError for a checkpoint or a size that cannot work, RankLostError for
        a rank that ends meanwhile; nothing is left then."""
        # The loop shares its cores with torch's threads. No effect where torch is imported already.
        prepare_for_torch()
        from xpyd_worker.load.engine import load

        incarnation = os.urandom(8).hex()
        bridge = EngineBridge(RequestMetrics())
        self._own_threads: set[int] = set()

        def deliver(outputs: Sequence[EngineOutput]) -> None:
            self._own_threads.add(threading.get_ident())
            bridge.deliver(outputs)

        loaded = load(
            config,
            deliver=deliver,
            keys=(),
            incarnation=incarnation,
            make_store=None,
            logs=Logs(level_in_use(), format_in_use()),
        )
        self._own_threads |= loaded.threads
        # A copy of this process that was forked has neither its threads nor its ranks.
        self._pid = os.getpid()
        self._parts: tuple[LoadedEngine, Service] | None = (
            loaded,
            Service(
                model=loaded.model,
                instance=InstanceInfo("Aggregated", incarnation),
                bridge=bridge,
                has_priorities=config.scheduling_policy == "priority",
                draw_seed=seeds(config.seed),
            ),
        )
        self._closing = threading.Lock()
        self._end = asyncio.Event()
        started = threading.Event()
        self._failed: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, args=(bridge, loaded, started), name="offline", daemon=True
        )
        try:
            self._thread.start()
            started.wait()
            if self._failed is not None:
                raise self._failed
        except BaseException:
            loaded.close(engine_s=_STOP_S, kv_s=_STOP_S)
            raise

    def _run(self, bridge: EngineBridge, loaded: LoadedEngine, started: threading.Event) -> None:
        async def serve() -> None:
            self._own_threads.add(threading.get_ident())
            try:
                bridge.bind(loaded.engine)
                loaded.engine.start()
            except BaseException as error:
                self._failed = error
                return
            finally:
                started.set()
            await self._end.wait()

        # The runner cancels what still runs when `serve` returns.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(serve())

    @property
    def defaults(self) -> SamplingDefaults:
        """Sampling defaults of the model. UserError when the session is closed."""
        parts = self._parts
        if parts is None:
            raise _closed()
        return parts[1].model.defaults

    def run(self, work: Work[T]) -> T:
        """What `work` returns or raises, run on the session's loop. It is cancelled when the
        caller is interrupted. UserError when the session is or gets closed, RankLostError when a
        rank is or gets lost."""
        parts = self._parts
        if parts is None:
            raise _closed()
        if os.getpid() != self._pid:
            raise UserError(f"this LLM runs in process {self._pid}, and {os.getpid()} was forked")
        future = asyncio.run_coroutine_threadsafe(work(parts[1]), self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise _closed() from error
        except UserError as error:
            if self._parts is None:
                raise _closed() from error
            failure = parts[0].engine.failure
            if isinstance(failure, RankLostError):
                raise RankLostError(f"{failure}; this LLM has ended, make a new one") from error
            raise
        finally:
            future.cancel()

    def close(self) -> None:
        """End threads and ranks, and free weights and KV cache. May be called again."""
        if os.getpid() != self._pid:
            return
        if threading.get_ident() in self._own_threads:
            # The garbage collector runs in any thread, and none can wait for its own end.
            threading.Thread(target=self.close, name="offline-close").start()
            return
        with self._closing:
            parts, self._parts = self._parts, None
            if parts is None:
                return
            parts[0].close(engine_s=_STOP_S, kv_s=_STOP_S)
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(_STOP_S)
            parts[1].threads.close()
            parts[1].grammars.close()
        del parts
        # The parts know each other in circles; the memory is large enough not to wait for it.
        gc.collect()
        # With ranks this process did not need it.
        if "torch" in sys.modules:
            from xpyd_worker.runner.device import empty_cache

            empty_cache()


def _closed() -> UserError:
    return UserError("this LLM was closed; make a new one")
