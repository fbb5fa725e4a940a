"""Two engines of many ranks over a network of lists: one thread, one clock, each step a draw.

Real connectors and ranks over fake endpoints and Channels. Anything may happen between any two
messages: those of engines, of ranks, of an engine to its ranks, and the three steps of a DATA frame
(it is read at P, begins at D, is written there). Every read and write looks whether somebody holds
the block.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from tests.kv.rank_sides import Link, Node, Peer, SimSide
from xpyd_core.blocks import blocks_for
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.session.settings import KvSettings
from xpyd_kv.values import Landed, NoKv
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.fit import pair_on


@dataclass
class Prompt:
    """One request, at P and at D."""

    key: TransferKey
    ids: tuple[int, ...]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    at_d: str = "waits"
    held: tuple[int, ...] = ()


class Sim:
    """P, D and the network. `rng` draws what happens."""

    def __init__(
        self,
        p: EngineLayout,
        d: EngineLayout,
        *,
        seed: int,
        settings: KvSettings,
        blocks: int = 24,
        faults: float = 0.0,
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.faults = faults
        self.by_address: dict[Address, Node] = {}
        self.links: list[Link] = []
        self.to_cut: list[Peer] = []
        self.d = SimSide(self, "D", d, settings, blocks)
        self.p = SimSide(self, "P", p, settings, blocks)
        self.prompts: list[Prompt] = []
        self.steps: deque[list[tuple[Prompt, int, int]]] = deque()
        self.seen: list[str] = []

    def clock(self) -> float:
        return self.now

    @property
    def nodes(self) -> list[Node]:
        return [*self.p.nodes, *self.d.nodes]

    def link_of(self, peer: Peer) -> Link | None:
        return next((link for link in self.links if peer in (link.at_p, link.at_d)), None)

    # --- what may happen

    def moves(self) -> list[Callable[[], None]]:
        """Everything that could be next, but for faults and the passing of time."""
        found: list[Callable[[], None]] = []
        for node in self.nodes:
            if node.calls:
                found.append(lambda n=node: (n.calls.popleft()(), n.tick()))
            found += [lambda n=node, a=a: self._dial(n, a) for a in node.dialling]
        for side in (self.p, self.d):
            for end in (end for ends in side.ends for end in ends if end.come):
                found.append(lambda e=end: e.handle(e.come.popleft()))
        for link in self.links:
            if link.to_p:
                found.append(lambda x=link: self._to_p(x))
            if link.to_d or link.landing is not None:
                found.append(lambda x=link: self._to_d(x))
            if link.queued:
                found.append(lambda x=link: self._put(x))
        found += [lambda q=peer: self.cut(q) for peer in self.to_cut]
        return found

    def _dial(self, node: Node, address: Address) -> None:
        data = node.dialling.pop(address)
        target = self.by_address[address]
        if self.rng.random() < self.faults / 3:
            self.seen.append("dial")
            node.handler.dial_failed(address, "unreachable")
            node.tick()
            return
        hellos = {"dialler": node.hello(data=data), "acceptor": target.hello(data=False)}
        pair = pair_on(node.layout, target.layout, **hellos)
        at_p = Peer(address, hellos["acceptor"], target.layout, pair, data)
        at_d = Peer(None, hellos["dialler"], node.layout, pair, data)
        link = Link(node, target, at_p, at_d)
        self.links.append(link)
        node.links[address] = link
        target.handler.peer_up(at_d)
        node.handler.peer_up(at_p)
        node.tick()
        target.tick()

    def _to_p(self, link: Link) -> None:
        message, body = link.to_p.popleft()
        link.p.handler.message(link.at_p, message, body)
        link.p.tick()

    def _to_d(self, link: Link) -> None:
        handler = link.d.handler
        if link.landing is not None:
            (header, body, checksum, views), link.landing = link.landing, None
            intact = blake2b(body, digest_size=8).digest() == checksum
            if views is not None:
                link.d.side.check_held(views, "a write into")
                at = 0
                for view in views:
                    view[:] = body[at : at + len(view)]
                    at += len(view)
            stored = views is not None
            handler.data_end(link.at_d, header, checksum, stored=stored, intact=stored and intact)
        else:
            first, second, *rest = link.to_d.popleft()
            if isinstance(first, wire.Data):
                views = handler.data_begin(link.at_d, first, len(second))
                assert views is None or sum(map(len, views)) == len(second)
                link.landing = (first, second, rest[0], views)
            else:
                handler.message(link.at_d, first, second)
        link.d.tick()

    def _put(self, link: Link) -> None:
        make_header, views, done = link.queued.popleft()
        header = make_header()
        if header is None:
            done(None)
        else:
            link.p.side.check_held(views, "a read of")
            body = b"".join(map(bytes, views))
            checksum = blake2b(body, digest_size=8).digest()
            if self.rng.random() < self.faults / 4:
                self.seen.append("corrupt")
                body = bytes([body[0] ^ 255]) + body[1:]
            link.to_d.append((header, body, checksum))
            done(checksum)
        link.p.tick()

    def cut(self, peer: Peer) -> None:
        """The connection is closed, whatever is on its way."""
        if peer in self.to_cut:
            self.to_cut.remove(peer)
        link = self.link_of(peer)
        if link is None:
            return
        self.links.remove(link)
        link.p.links = {a: one for a, one in link.p.links.items() if one is not link}
        for _, _, done in link.queued:
            done(None)
        link.p.handler.peer_down(link.at_p, "cut")
        link.d.handler.peer_down(link.at_d, "cut")
        link.p.tick()
        link.d.tick()

    def fault(self) -> None:
        """A connection goes, a request is given up, or time passes with nothing moving."""
        kind = self.rng.choice(["cut", "cancel", "forget", "release", "pause"])
        self.seen.append(kind)
        prompt = self.rng.choice(self.prompts) if self.prompts else None
        if kind == "cut" and self.links:
            self.cut(self.rng.choice(self.links).at_p)
        elif kind == "cancel" and prompt is not None:
            self.p.kv.producer.cancel(prompt.key, "aborted")
        elif kind == "forget" and prompt is not None and prompt.at_d == "waits":
            self.d.kv.consumer.forget(prompt.key)
            prompt.at_d = "forgotten"
        elif kind == "release" and prompt is not None and prompt.at_d == "waits":
            self.d.kv.consumer.release(prompt.key.uuid, self.now)
        elif kind == "pause":
            self.now += self.rng.choice([0.5, 4.0, 6.0, 31.0])

    # --- the engines

    def submit(self, tokens: int) -> None:
        number = len(self.prompts) + 1
        prompt = Prompt(TransferKey(f"{number:032x}", 0), tuple(range(number, number + tokens)))
        blocks = self.p.pool.take(blocks_for(tokens, self.p.engine.block_size))
        if blocks is None:
            return
        prompt.blocks = blocks
        self.prompts.append(prompt)
        self.d.kv.consumer.expect(prompt.key, wait_s=20.0, now=self.now)
        self.p.kv.producer.offer(
            prompt.key, self.d.address, prompt.ids, prompt_tokens=tokens, salt=b"", now=self.now
        )

    def launch(self, chunk: int) -> None:
        """A step at P, all layers at once; its end is another move."""
        prompt = next((p for p in self.prompts if p.computed < len(p.ids)), None)
        if prompt is None or self.steps:
            return
        end = min(prompt.computed + chunk, len(prompt.ids))
        self.p.kv.producer.stage(prompt.key, prompt.blocks, end)
        message = self.p.kv.producer.step_chunks()
        size = self.p.engine.block_size
        indices = range(prompt.computed // size, blocks_for(end, size))
        for rank, memory in enumerate(self.p.memories):
            sender = self.p.parts[rank].sender if self.p.parts else None
            if sender is not None:
                sender.begin_step(message)
            for layer in range(len(memory.layout.layers)):
                for index in indices:
                    view = memory.block_view(layer, prompt.blocks[index])
                    view[:] = self.p.wanted(rank, layer, prompt.ids[0], index)
                (sender or self.p.kv.producer).layer_done(layer)
            if sender is not None:
                sender.step_done(failed=False)
        prompt.computed = end
        self.steps.append([(prompt, end, chunk)])

    def end_step(self) -> None:
        """The engine hears that its step is over."""
        if not self.steps:
            return
        ((prompt, end, _),) = self.steps.popleft()
        self.p.kv.producer.step_done()
        self.p.kv.producer.held_until(self.now)
        if end == len(prompt.ids):
            self.p.pool.release(prompt.blocks)

    def poll(self) -> None:
        """Both engines' turns: requests start at D when they may."""
        self.p.kv.producer.poll(self.now)
        consumer = self.d.kv.consumer
        consumer.poll(self.now)
        for prompt in self.prompts:
            if prompt.at_d != "waits":
                continue
            answer = consumer.admit(prompt.key, prompt.ids, seats=4, now=self.now)
            if isinstance(answer, Landed):
                prompt.at_d, prompt.held = "landed", answer.block_ids
                assert self.d.holds(answer.block_ids, prompt.ids[0], len(prompt.ids))
            elif isinstance(answer, NoKv):
                prompt.at_d = answer.reason

    def finish(self, prompt: Prompt) -> None:
        """The request is over at D: its KV was right until now."""
        if prompt.held:
            assert self.d.holds(prompt.held, prompt.ids[0], len(prompt.ids))
            self.d.pool.release(prompt.held)
            prompt.held = ()

    # --- a run

    def run(self, prompts: int, *, tokens: Sequence[int], chunk: int) -> None:
        """All prompts to their ends, and past all deadlines; then nothing is held by anybody."""
        left = prompts
        for _ in range(6000):
            moves = self.moves()
            own = [self.poll, lambda: self.launch(chunk), self.end_step]
            if left:
                own.append(lambda: self.submit(self.rng.choice(tokens)))
            if self.rng.random() < self.faults / 10:
                self.fault()
            elif moves and self.rng.random() < 0.8:
                self.rng.choice(moves)()
            else:
                chosen = self.rng.choice(own)
                left -= (
                    chosen not in (self.poll, self.end_step)
                    and len(own) == 4
                    and (chosen is own[3])
                )
                chosen()
            held = [p for p in self.prompts if p.held]
            if held and self.rng.random() < 0.05:
                self.finish(self.rng.choice(held))
            self.now += self.rng.choice([0.0, 0.0005, 0.002])
            if not left and not moves and self._is_through():
                break
            if not moves and not self.steps and self._is_stuck(left):
                self.now += 0.5
                for node in self.nodes:
                    node.tick()
        self._end()

    def _is_through(self) -> bool:
        return not self.steps and all(
            p.at_d != "waits" and p.computed == len(p.ids) for p in self.prompts
        )

    def _is_stuck(self, left: int) -> bool:
        return not left and all(p.computed == len(p.ids) for p in self.prompts)

    def _end(self) -> None:
        for _ in range(400):
            while moves := self.moves():
                self.rng.choice(moves)()
            self.launch(100)
            self.end_step()
            self.poll()
            self.now += 1.0
            for node in self.nodes:
                node.tick()
        for prompt in self.prompts:
            assert prompt.at_d != "waits", f"{prompt.key} waits for ever"
            self.finish(prompt)
        for side in (self.p, self.d):
            lost = side.pool.num_blocks - side.pool.num_free
            assert not lost, f"{lost} blocks of {side.role} are never given back"
            if side.kv.store is not None:
                assert not side.kv.store.metrics().leases
            for part in side.parts:
                assert not part.metrics.open_transfers
        assert not self.p.kv.metrics.open_transfers
        assert not self.d.kv.metrics.open_transfers
        assert not self.p.kv.producer.has_work()
        assert not self.d.kv.consumer.has_work()
