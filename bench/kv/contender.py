"""What moves bytes from one process to the other, as `side` sees it.

A receiver is made first; its `address` (JSON) goes to the sender's process. Then `accept` on the
one side and the sender's making on the other meet. Each transfer is one `send` and one `receive`
with the same Case; `send` returns when the receiver is known to have all of it. Names are resolved
late: what one contender needs, another's environment may not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from bench.kv.memory import Arena, Ring
from bench.kv.shape import Case

WAIT_S = 60.0
"""No single wait of a contender is longer."""


class Sender(Protocol):
    def send(self, case: Case) -> list[int]:
        """Move one prompt; the blocks it stood in."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    @property
    def address(self) -> Any:
        """For the sender."""
        ...

    def accept(self) -> None:
        """Wait until the sender is there."""
        ...

    def receive(self, case: Case) -> list[int]:
        """Take one prompt; the blocks it stands in."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """What a contender gets on its side."""

    arena: Arena
    ring: Ring
    """The blocks of this side."""
    far_ring: Ring
    """And of the other: one-sided writes need to know both."""
    folder: Path
    shared: Any = None
    """P's arena as the product's SharedMemory, where the product is here."""


_CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "shm": ("ours", {"transport": "shm"}),
    "uds": ("ours", {"transport": "uds"}),
    "tcp": ("ours", {"transport": "tcp"}),
    "tcp-2": ("ours", {"transport": "tcp", "connections": 2}),
    "tcp-no-key": ("ours", {"transport": "tcp", "protection": "none"}),
    "tls": ("ours", {"transport": "tcp", "protection": "tls"}),
    "control-shm": ("control", {"transport": "shm"}),
    "control-uds": ("control", {"transport": "uds"}),
    "control-tcp": ("control", {"transport": "tcp"}),
    "plain-tcp": ("plain", {"connections": 1}),
    "plain-tcp-2": ("plain", {"connections": 2}),
    "gloo": ("gloo", {}),
    "nixl": ("nixl_peer", {}),
    "mooncake": ("mooncake_peer", {}),
}


def make_receiver(name: str, place: Place) -> Receiver:
    """D's side of the contender."""
    return _maker(name, "make_receiver")(place)


def make_sender(name: str, place: Place, address: Any) -> Sender:
    """P's side of the contender, connected to the receiver at `address`."""
    return _maker(name, "make_sender")(place, address)


def _maker(name: str, function: str) -> Callable[..., Any]:
    module, options = _CONTENDERS[name]
    make = getattr(import_module(f"bench.kv.{module}"), function)
    return lambda *args: make(*args, **options)
