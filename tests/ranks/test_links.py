"""Links between ranks: what one holds for a peer that does not read."""

from __future__ import annotations

import socket

import pytest

from xpyd_core.errors import ProtocolError
from xpyd_worker.ranks.link import links
from xpyd_worker.ranks.link.frames import Frame, Kind, encode_frame
from xpyd_worker.ranks.link.links import Link


def test_a_link_is_lost_before_it_holds_more_than_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frame = Frame(Kind.CHANNEL, 0, b"x" * 100)
    monkeypatch.setattr(links, "MAX_UNSENT_BYTES", 2 * len(encode_frame(frame)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = Link(ours, lambda: None, lambda _: None, lambda _: None)
        link.post(frame)
        link.post(frame)
        link.send()
        assert len(theirs.recv(1 << 16)) == 2 * len(encode_frame(frame))
        for _ in range(3):
            link.post(frame)
        with pytest.raises(ProtocolError, match="it does not read"):
            link.send()
