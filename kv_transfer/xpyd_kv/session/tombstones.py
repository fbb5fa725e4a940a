"""What D remembers of transfers that are over, for as long as something of them may still arrive.
Pure."""

from __future__ import annotations

from dataclasses import dataclass

from xpyd_core.request_id import TransferKey
from xpyd_kv.session.deadlines import Remembered


@dataclass(frozen=True)
class _Stone:
    last_epoch: int
    # The request of this key has gone on: no later epoch is of use either.
    closed: bool


class Tombstones:
    """Ended keys and released uuids, each remembered for `ttl_s`."""

    def __init__(self, ttl_s: float) -> None:
        self._keys: Remembered[TransferKey, _Stone] = Remembered(ttl_s)
        self._uuids: Remembered[str, bool] = Remembered(ttl_s)

    def __len__(self) -> int:
        return len(self._keys) + len(self._uuids)

    def end(self, key: TransferKey, epoch: int, now: float) -> None:
        """This epoch is over; a later one may be offered."""
        stone = self._keys.get(key, now)
        if stone is not None:
            epoch = max(epoch, stone.last_epoch)
        self._keys.set(key, _Stone(epoch, stone is not None and stone.closed), now)

    def close(self, key: TransferKey, now: float) -> None:
        """No OFFER of this key is of use any more."""
        stone = self._keys.get(key, now)
        self._keys.set(key, _Stone(stone.last_epoch if stone else 0, True), now)

    def release(self, uuid: str, now: float) -> None:
        """No OFFER of this uuid is of use any more."""
        self._uuids.set(uuid, True, now)

    def refusal(self, key: TransferKey, epoch: int, now: float) -> str | None:
        """Why an OFFER is refused: `released`, `finished` or `stale`; None when it is not."""
        if self._uuids.get(key.uuid, now):
            return "released"
        stone = self._keys.get(key, now)
        if stone is None:
            return None
        if stone.closed:
            return "finished"
        return "stale" if epoch <= stone.last_epoch else None

    def purge(self, now: float) -> None:
        """Forget what has expired."""
        self._keys.purge(now)
        self._uuids.purge(now)
