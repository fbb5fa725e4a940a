"""Further connections of a peer, for the data path `striped`: who they belong to.

P makes the first connection of a group, which is the peer, then the others. Each goes through the
whole handshake; what one of them is, its HELLO says.
"""

from __future__ import annotations

import os
from dataclasses import replace

import msgspec

from xpyd_kv.transport.stream import ClosedByPeerError, Stream
from xpyd_kv.wire import errors
from xpyd_kv.wire.handshake import Terms

NAME = "striped"
_GROUP_BYTES = 16


def of_group(terms: Terms, main: Stream | None, number: int) -> Terms:
    """P's, with its group: a new one, or that of `main`."""
    if NAME not in terms.hello.transports:
        return terms
    if main is None:
        hello = msgspec.structs.replace(terms.hello, group=os.urandom(_GROUP_BYTES).hex())
    else:
        hello = msgspec.structs.replace(terms.hello, group=main.protocol.ours.group, link=number)
    return replace(terms, hello=hello)


def is_further(stream: Stream) -> bool:
    """Whether this open connection is one for DATA only."""
    if stream.address is not None:
        return stream.main is not None
    return stream.hello.link > 0


def number_of(stream: Stream) -> int:
    """By which number both sides know it."""
    return (stream.hello if stream.main is None else stream.protocol.ours).link


def main_of(stream: Stream, peer: Stream | None) -> Stream:
    """The peer that it belongs to; D: `peer` is that of its HELLO's instance. Raises when there is
    none."""
    if stream.main is not None:
        if stream.main.closing is not None:
            raise ClosedByPeerError("its first connection has ended")
        return stream.main
    theirs = stream.hello
    if (
        peer is None
        or not theirs.group
        or stream.transport != NAME
        or peer.transport != NAME
        or (peer.hello.group, peer.hello.incarnation) != (theirs.group, theirs.incarnation)
    ):
        raise stream.protocol.refuse(errors.GROUP)
    return peer
