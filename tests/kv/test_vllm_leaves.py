"""vLLM's plugin lets a second signal through. The first one: test_vllm_plugin.py."""

from __future__ import annotations

import asyncio
import os
import signal

from tests.kv.test_vllm_plugin import api_server, pair, signed

__all__ = ["signed"]  # a fixture


async def test_a_second_sigterm_ends_the_wait_for_routers(signed):
    heard, loop = asyncio.Event(), asyncio.get_running_loop()
    with pair(signed, {**signed, "wait_s": 0.3, "heartbeat_period_s": 60.0}) as (_, d):
        async with api_server(d) as server:
            loop.add_signal_handler(signal.SIGTERM, heard.set)
            await server.beat("Ready")
            os.kill(os.getpid(), signal.SIGTERM)
            await server.beat("Draining")
            assert not heard.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(5.0):
                await heard.wait()
