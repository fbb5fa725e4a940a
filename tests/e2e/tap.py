"""A tap on the wire between P and D: what passes a relay, frame by frame.

It reads what the peers read, with the wire's own decoder, and takes the sizes of the caches from
the LAYOUTs that pass. DATA is counted by its body, SHARED by the bytes that it stands for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.kv.plan_oracle import TransferPlan, plan_transfers
from xpyd_kv.wire.fit import engines_of, pair_on
from xpyd_kv.wire.frames import DataBegin, Decoder, Frame, Limits
from xpyd_kv.wire.messages import Data, Hello, Layout, Message, Shared


class Seen(NamedTuple):
    """A frame that passed. `kv_bytes`: of DATA and SHARED."""

    from_dialler: bool
    message: Message
    kv_bytes: int = 0


class Cell(NamedTuple):
    """A block of a layer."""

    layer: int
    block: int


@dataclass
class _Ears:
    """One connection: what each side takes is known once its LAYOUT has passed."""

    of_dialler: Decoder
    of_acceptor: Decoder
    hellos: dict[str, Hello] = field(default_factory=dict[str, Hello])

    @classmethod
    def new(cls) -> _Ears:
        return cls(Decoder(Limits()), Decoder(Limits()))


class Tap:
    """Give it to a Relay as `watch`. `seen` grows on the relay's thread, only at its end."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.layouts: dict[bool, Layout] = {}
        """By whether the dialler said it: P's under True, D's under False."""
        self._links: dict[int, _Ears] = {}

    def __call__(self, link: int, from_dialler: bool, chunk: bytes) -> None:
        ears = self._links.setdefault(link, _Ears.new())
        decoder = ears.of_dialler if from_dialler else ears.of_acceptor
        for event in decoder.feed(chunk):
            if isinstance(event, DataBegin):
                self.seen.append(Seen(from_dialler, event.header, event.length))
            elif isinstance(event, Frame):
                self._frame(ears, from_dialler, event.message)

    def _frame(self, ears: _Ears, from_dialler: bool, message: Message) -> None:
        if isinstance(message, Hello):
            ears.hellos["dialler" if from_dialler else "acceptor"] = message
        if isinstance(message, Layout):
            self.layouts[from_dialler] = message
            if from_dialler:
                # The last of the handshake: what each side takes bounds what the other sends.
                pair = pair_on(
                    message,
                    self.layouts[False],
                    dialler=ears.hellos["dialler"],
                    acceptor=ears.hellos["acceptor"],
                )
                ears.of_acceptor.limits = Limits.of(message, pair)
                ears.of_dialler.limits = Limits.of(self.layouts[False], pair)
        length = 0
        if isinstance(message, Shared):
            length = ears.of_dialler.limits.data_bytes(message)
        self.seen.append(Seen(from_dialler, message, length))

    # --- what it says

    def names(self) -> Counter[str]:
        """Frames by the name of their type."""
        return Counter(type(seen.message).__name__ for seen in self.seen)

    def kv(self) -> list[Data | Shared]:
        """Headers of all frames with KV."""
        return [s.message for s in self.seen if isinstance(s.message, Data | Shared)]

    def kv_bytes(self) -> int:
        return sum(seen.kv_bytes for seen in self.seen)

    def cells(self) -> Counter[Cell]:
        """Each block of a layer that was sent, and how often."""
        layers = self.layouts[True].layers
        return Counter(
            Cell(layers[layer], block)
            for header in self.kv()
            for layer in range(header.first_layer, header.end_layer)
            for block in range(header.first_block, header.end_block)
        )

    def plan(self) -> TransferPlan:
        """What the planner says of these two."""
        return plan_transfers(*engines_of(self.layouts[True], self.layouts[False]))

    def forget(self) -> None:
        """Begin to count anew; connections and layouts stay known. Only while nothing passes."""
        self.seen = []


def planned_cells(plan: TransferPlan, tokens: int, skip_tokens: int = 0) -> Counter[Cell]:
    """What the plan's segments bring of a prompt, each once, in blocks of P."""
    units = plan.units(tokens, skip_tokens=skip_tokens)
    return Counter(
        Cell(layer, unit.source_block)
        for segment in plan.segments
        for layer in segment.layers
        for unit in units
    )
