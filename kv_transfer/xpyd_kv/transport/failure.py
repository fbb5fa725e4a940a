"""What an error on a connection is called, and which counter it belongs to."""

from __future__ import annotations

from xpyd_core.errors import ProtocolError
from xpyd_kv.transport.counters import Counters
from xpyd_kv.transport.outlet import SlowReaderError
from xpyd_kv.transport.stream import ClosedByPeerError, Stream
from xpyd_kv.wire import errors
from xpyd_kv.wire.errors import RefusedError, SilentPeerError
from xpyd_kv.wire.handshake import LENT


def is_lasting(error: Exception) -> bool:
    """Whether dialling again would soon be refused alike."""
    return isinstance(error, RefusedError) and error.reason in (errors.AUTH, errors.QUARANTINE)


def failed_path(error: Exception) -> str:
    """What the peer could not open of what we lend; '' for any other error."""
    if not isinstance(error, RefusedError) or not error.by_peer:
        return ""
    return error.factor if error.reason == errors.TRANSPORT and error.factor in LENT else ""


def reason_of(error: Exception, *, was_open: bool) -> str:
    """The word for `dial_failed` and `peer_down`: nothing of what the peer sent but a factor."""
    if isinstance(error, RefusedError):
        if error.reason == errors.AUTH:
            return "auth"
        if error.reason == errors.INCOMPATIBLE:
            return f"incompatible:{error.factor}"
        return f"refused:{error.reason}"
    if isinstance(error, SilentPeerError | TimeoutError):
        return "timeout"
    if isinstance(error, ProtocolError):
        return "protocol"
    if isinstance(error, SlowReaderError):
        return "slow_reader"
    if isinstance(error, ClosedByPeerError) and was_open:
        return "closed_by_peer"
    if isinstance(error, OSError):
        return "lost" if was_open else "unreachable"
    return "internal"


def count(counters: Counters, stream: Stream, error: Exception) -> None:
    """Enter the end of `stream` by `error` where it belongs."""
    if isinstance(error, RefusedError):
        counters.auth_failed += error.reason == errors.AUTH
        counters.refused.add(error.factor or error.reason)
    elif isinstance(error, SlowReaderError):
        counters.silent_peers += 1
    elif isinstance(error, ProtocolError):
        if not stream.is_up:
            counters.junk_connections += stream.address is None
        elif isinstance(error, SilentPeerError):
            counters.silent_peers += 1
        else:
            counters.protocol_errors += 1
