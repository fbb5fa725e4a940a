"""Heartbeats for tests of the pure parts."""

from __future__ import annotations

from typing import Any

from xpyd_core.messages import Heartbeat


def beat(kind: Any, host: int = 1, **fields: Any) -> Heartbeat:
    """A beat of 10.0.0.`host`; only the base fields unless more are given."""
    base = {"http_address": f"10.0.0.{host}:20001", "zmq_address": f"10.0.0.{host}:21001"}
    return Heartbeat(type=kind, **{**base, **fields})
