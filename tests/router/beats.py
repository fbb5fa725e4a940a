"""Heartbeats for tests of the pure parts."""

from __future__ import annotations

from typing import Any

from xpyd_core.messages import Heartbeat


def beat(kind: Any, host: int = 1, **fields: Any) -> Heartbeat:
    """A beat of 10.0.0.`host` (10.0.1.0 for 256); only the base fields unless more are given."""
    ip = f"10.0.{host // 256}.{host % 256}"
    base = {"http_address": f"{ip}:20001", "zmq_address": f"{ip}:21001"}
    return Heartbeat(type=kind, **{**base, **fields})
