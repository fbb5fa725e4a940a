"""What one rank of D is told to take from one rank of P, until that begins to send. Pure."""

from __future__ import annotations

from xpyd_core.request_id import TransferKey
from xpyd_kv.ranks.api import Opening
from xpyd_kv.session.deadlines import Deadlines
from xpyd_kv.transport.api import Peer


class Awaited:
    """Openings whose P rank has not been heard of. They expire `lease_s` after they came."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._openings: dict[TransferKey, Opening] = {}
        self._deadlines: Deadlines[TransferKey] = Deadlines()

    def __len__(self) -> int:
        return len(self._openings)

    def add(self, opening: Opening, now: float) -> Opening | None:
        """Wait for it; the older one of its key, if there is one."""
        older = self._openings.get(opening.key)
        self._openings[opening.key] = opening
        self._deadlines.set(opening.key, now + self._lease_s)
        return older

    def take(self, key: TransferKey, epoch: int, peer: Peer | None = None) -> Opening | None:
        """The opening, once, if it is of this epoch and (where one is given) for this peer."""
        opening = self._openings.get(key)
        if opening is None or opening.epoch != epoch:
            return None
        who = (opening.engine_id, opening.incarnation)
        if peer is not None and (peer.hello.engine_id, peer.hello.incarnation) != who:
            return None
        self._deadlines.clear(key)
        return self._openings.pop(key)

    def due(self, now: float) -> list[Opening]:
        """Those that were waited for too long: no longer awaited."""
        return [self._openings.pop(key) for key in self._deadlines.due(now)]

    def next(self) -> float | None:
        """When the next one expires."""
        return self._deadlines.next()
