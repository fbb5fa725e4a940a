"""What a beat may claim: addresses that can be used, names that can be read, what no other has, and
nothing of who has left. Pure; `registry` decides with it.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from xpyd_core.errors import ProtocolError
from xpyd_core.messages import Heartbeat
from xpyd_core.request_id import Address, is_dialable

if TYPE_CHECKING:
    from xpyd_router.fleet.registry import Instance, InstanceKey

MAX_MODELS = 1024
"""Names that all instances together may give: the snapshot has an entry for each."""
FOR_EVER = 2**63 - 1
_MAX_PAST = 4096
# Addresses go into headers and URLs; an underscore would end the address in a request id early.
_HOST = re.compile(r"[A-Za-z0-9.:-]{1,255}")


def usable_http(beat: Heartbeat) -> Address:
    """The HTTP address in one spelling. ProtocolError for one that cannot be called."""
    return _usable(beat.http, "http_address")


def usable_kv(beat: Heartbeat) -> Address:
    """The KV address in one spelling. ProtocolError for one that cannot be dialled: engines of ours
    take only literal ips from a request id, others are asked by names, too."""
    found = _usable(beat.kv, "zmq_address")
    is_dialled = beat.continuation == 1 and beat.type != "A"
    if is_dialled and not is_dialable(found):
        raise ProtocolError(
            f"heartbeat: zmq_address {found}: engines dial only a literal ip and ports from 1024 "
            "on; start this one with --kv-advertise IP:PORT"
        )
    return found


def _usable(address: Address, field_name: str) -> Address:
    if _HOST.fullmatch(address.host) is None:
        raise ProtocolError(f"heartbeat: {field_name} has characters that no host has")
    try:
        ip = ipaddress.ip_address(address.host)
    except ValueError:
        if ":" in address.host:
            raise ProtocolError(f"heartbeat: {field_name} is no IPv6 address") from None
        return address._replace(host=address.host.lower())
    if ip.is_unspecified or ip.is_multicast:
        raise ProtocolError(
            f"heartbeat: {field_name} {address} is no address of an instance; give the engine its "
            "own with --host"
        )
    return address._replace(host=str(ip))


def is_readable(beat: Heartbeat) -> bool:
    """Whether its texts can stand in a log line."""
    texts = (beat.instance, beat.incarnation, beat.fleet, beat.pool, beat.revision)
    return all(text.isprintable() for text in (*texts, beat.compatibility, *beat.models))


class Past:
    """Who left, and up to when what it says is old. Bounded: the oldest are forgotten."""

    def __init__(self) -> None:
        self._until: OrderedDict[InstanceKey, int] = OrderedDict()

    def put(self, key: InstanceKey, sent_us: int) -> None:
        """Beats of `key` sent up to `sent_us` are of the past."""
        # Without an incarnation a late beat cannot be told from a restart: let it in again. And one
        # that says no time comes back by the beat that it always sends.
        if not key.incarnation or not sent_us:
            return
        self._until[key] = sent_us
        self._until.move_to_end(key)
        if len(self._until) > _MAX_PAST:
            self._until.popitem(last=False)

    def has(self, key: InstanceKey, sent_us: int) -> bool:
        """Whether a beat of `key` sent at `sent_us` is of the past."""
        until = self._until.get(key)
        return until is not None and sent_us <= until


class Belongings:
    """What the present instances have: KV addresses, each once, and names of models.

    The KV address of an aggregated instance is never dialled, so it counts for nothing.
    """

    def __init__(self) -> None:
        self._holders: dict[Address, str] = {}
        """KV address -> HTTP address of the P or D that has it."""
        self._models: Counter[str] = Counter()

    def has_other_holder(self, instance: Instance) -> bool:
        """Whether another instance has its KV address."""
        if instance.beat.type == "A":
            return False
        return self._holders.get(instance.kv, instance.key.http) != instance.key.http

    def has_place_for(self, instance: Instance) -> bool:
        """Whether its models are known, or not too many."""
        added = set(instance.beat.models) - self._models.keys()
        return not added or len(self._models) + len(added) <= MAX_MODELS

    def add(self, instance: Instance) -> None:
        """It is there now."""
        self._models.update(instance.beat.models)
        if instance.beat.type != "A":
            self._holders[instance.kv] = instance.key.http

    def remove(self, instance: Instance) -> None:
        """It is not any more; exactly what `add` got."""
        for name in instance.beat.models:
            self._models[name] -= 1
            if not self._models[name]:
                del self._models[name]
        if instance.beat.type != "A":
            del self._holders[instance.kv]
