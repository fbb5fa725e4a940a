"""The source address of connections to engines. Pure.

In a local fleet the router is a pod with a loopback address of its own, by which engines see who
calls. Only other loopback addresses can be called from it.
"""

from __future__ import annotations

import ipaddress

from xpyd_core.request_id import Address


def source_for(to: Address, local_host: str | None) -> tuple[str, int] | None:
    """asyncio's `local_addr` for a connection to `to`: `local_host`, a loopback address of IPv4,
    where `to` is one, too; else None, and the system chooses.
    """
    if local_host is None:
        return None
    try:
        address = ipaddress.IPv4Address(to.host)
    except ValueError:
        return None
    return (local_host, 0) if address.is_loopback else None
