"""D's half of the connector: where offered KV lands, and when a request may start from it.

It runs on the engine's thread and talks to ReceiveSession on the I/O thread: calls go there through
`Endpoint.call`, results come back through a deque and a wake-up. Blocks and landings are taken and
given back here only; a landing that the session was granted comes back with ReceiveLanded or
ReceiveQuiet, however its request fares.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from xpyd_core.blocks import blocks_for
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.connector.contact import MAX_TOKENS, UNVERIFIED, Contacts
from xpyd_kv.connector.offers import Expectation, Held, OfferState, OpenOffer
from xpyd_kv.memory.api import Landing
from xpyd_kv.memory.store import LandingStore, StagedLanding
from xpyd_kv.ranks.build import Parts
from xpyd_kv.session import pairs
from xpyd_kv.session.deadlines import Remembered
from xpyd_kv.session.events import (
    ReceiveEnded,
    ReceiveEvent,
    ReceiveLanded,
    ReceiveOffered,
    ReceiveQuiet,
)
from xpyd_kv.session.receiving import ReceiveSession
from xpyd_kv.values import Admission, BlockPool, Landed, NoKv, OfferedPrompt, Wait

_log = logging.getLogger(__name__)
_Ref = tuple[TransferKey, int]
_WAIT = Wait()
# So often a landing that is being copied into the cache is looked at.
_COPY_POLL_S = 0.001


class KvConsumer:
    """D's half. A reservation belongs to the transfer's key until a request adopts it, once."""

    def __init__(
        self,
        parts: Parts,
        *,
        ranks: Sequence[pairs.Post],
        wake: Callable[[], None],
        pool: BlockPool,
        store: LandingStore,
    ) -> None:
        context = parts.context
        self.session = ReceiveSession(context, self._on_event, metrics=parts.metrics, ranks=ranks)
        self._wake = wake
        self._call = context.endpoint.call
        # What the I/O thread reported, in order.
        self._events: deque[ReceiveEvent | Address] = deque()
        # Written by the I/O thread as OFFERs come, so that the server finds one at once.
        self._prompts: dict[TransferKey, OfferedPrompt] = {}
        self._store = store
        self._pool = pool
        self._memory = context.memory
        self._gate = parts.gate
        self._metrics = parts.metrics
        self._expected: dict[TransferKey, Expectation] = {}
        self._offers: dict[TransferKey, OpenOffer] = {}
        # What the session may still write into, or what waits to be adopted.
        self._held: dict[_Ref, Held] = {}
        # Pulled, or being pulled, and not adopted.
        self._pulled: set[TransferKey] = set()
        # Why offered KV is gone, for a request that comes later.
        self._lost: Remembered[TransferKey, str] = Remembered(context.settings.limits.tombstone_s)
        self._word_s = context.settings.limits.word_s
        self._contacts = Contacts(context.settings.engine, context.memory.layout.dtype)
        self._polled_s = 0.0

    # --- the engine's calls

    def poll(self, now: float) -> None:
        """Once per engine step and at wake-up: answer OFFERs (reserve: own blocks, device buffer,
        host pool, or defer; where P's mode is get, always defer), take in landed and failed
        transfers, expire orphans' leases."""
        while self._events:
            event = self._events.popleft()
            match event:
                case ReceiveOffered():
                    self._on_offered(event, now)
                case ReceiveLanded():
                    self._on_landed(event)
                case ReceiveEnded():
                    self._on_ended(event, now)
                case ReceiveQuiet():
                    self._free_held(event.key, event.epoch)
                case Address():
                    self._on_gone(event, now)
        self._polled_s = now
        self._contacts.poll(now)
        self._store.poll()
        if now >= self._lost.due_s:
            self._lost.purge(now)

    def offered(self, key: TransferKey) -> OfferedPrompt | None:
        """Return the prompt that P offered under `key`. Callable from any thread."""
        return self._prompts.get(key)

    def expect(
        self, key: TransferKey, *, wait_s: float, now: float, source: Address | None = None
    ) -> None:
        """A request for `key` is in the queue: its KV, of the P at the KV address `source`, does
        not expire while it waits."""
        self._expected[key] = Expectation(wait_s, now, source=source)
        self._call(partial(self.session.expect, key))

    def admit(
        self, key: TransferKey, token_ids: Sequence[int], *, seats: int, now: float
    ) -> Admission:
        """May the expecting request start? `token_ids` are all its known tokens; KV offered for
        other ids is refused. Copies from buffer or pool into blocks taken from the pool now; a
        deferred OFFER is granted now, but KV is pulled only while what was pulled and not given yet
        is of fewer requests than `seats`, those that may start. Landed is given once per key."""
        self.poll(now)
        expectation = self._expected.get(key)
        if expectation is None:
            # Adopted or given up before: a preempted request computes.
            return NoKv("not_expected")
        offer = self._offers.get(key)
        if offer is None:
            reason = self._why_no_offer(key, expectation, now)
            return _WAIT if reason is None else self._no_kv(key, reason)
        if not expectation.is_verified:
            if tuple(token_ids[: len(offer.token_ids)]) != offer.token_ids:
                return self._no_kv(key, "digest")
            expectation.is_verified = True
        if offer.is_contact:
            return self._computes(key)
        match offer.state:
            case OfferState.LANDED:
                return self._adopt(offer)
            case OfferState.DEFERRED:
                # What is pulled can move aside at P no more, and lies here until its turn comes.
                if offer.is_pulled and len(self._pulled) >= seats:
                    return _WAIT
                return self._grant_deferred(offer, now)
            case OfferState.GRANTED:
                since_s = max(expectation.since_s, offer.granted_at_s)
                if now < since_s + expectation.wait_s:
                    return _WAIT
                return self._no_kv(key, "timeout")

    def is_compared(self, key: TransferKey, tokens: int = MAX_TOKENS) -> bool:
        """Whether P's KV of this prompt, of which we have `tokens`, is to be compared with ours."""
        contact = self._contacts.find(key)
        return contact is not None and not contact.own and contact.tokens <= tokens

    def computed(
        self, key: TransferKey, block_ids: Sequence[int], release: Callable[[], None]
    ) -> None:
        """We have computed a prompt whose P is of another engine, into these blocks, which stay as
        they are until `release` is called. Tokens behind the prompt's are not looked at."""
        contact, offer = self._contacts.find(key), self._offers.get(key)
        if contact is None or offer is None or contact.own:
            release()
            return
        contact.own = tuple(block_ids[: blocks_for(contact.tokens, self._pool.block_size)])
        contact.release = release
        self._compare(offer)

    def forget(self, key: TransferKey) -> None:
        """No request expects this KV any more (aborted, refused or failed): free what has landed,
        and what has not as soon as no write can land."""
        self._finish(key, "forgotten")

    def release(self, uuid: str, now: float) -> None:
        """`POST /kv/release`: free all prompts' KV of `uuid`, refuse OFFERs of it for 60 s.
        Called on the engine's thread; idempotent."""
        self._call(partial(self.session.release, uuid))
        for key in [key for key in self._offers if key.uuid == uuid]:
            self._drop_offer(key)
            self._lost.set(key, "released", now)

    def release_all(self, now: float) -> None:
        """Free all KV that no request has adopted; who waits for it computes."""
        for uuid in {key.uuid for key in self._offers}:
            self.release(uuid, now)

    def next_deadline(self) -> float | None:
        """When `poll`/`admit` must run again even if nothing arrives."""
        times: list[float] = []
        for key, expectation in self._expected.items():
            offer = self._offers.get(key)
            if offer is None:
                waits_until_s = expectation.since_s + expectation.wait_s
                times.append(min(waits_until_s, expectation.offer_by_s))
            elif offer.state is OfferState.GRANTED:
                times.append(max(expectation.since_s, offer.granted_at_s) + expectation.wait_s)
        comparing = self._contacts.next_deadline()
        if comparing is not None:
            times.append(comparing)
        if any(held.landing.is_copying for held in self._held.values()):
            times.append(self._polled_s + _COPY_POLL_S)
        return min(times, default=None)

    @property
    def leases(self) -> int:
        """Prompts whose KV is here or on its way, and has no request yet; what the I/O thread has
        only just reported counts, too. Any thread."""
        found = max(len(self._offers), len(self._held)) + len(self._events)
        return found or int(self._contacts.is_comparing)

    def has_work(self) -> bool:
        """Whether KV is still here or on its way (a draining instance waits for it)."""
        return self.leases > 0

    def drain(self) -> None:
        """Refuse OFFERs from now on; what is under way finishes."""
        self._call(self.session.drain)

    def peer_gone(self, address: Address) -> None:
        """The P at this KV address is dead: who waits for what it has not offered computes. Any
        thread."""
        self._events.append(address)
        self._wake()

    # --- what the session reports

    def _on_event(self, event: ReceiveEvent) -> None:
        """Queue an event of the session for the engine's thread. Runs on the I/O thread."""
        if isinstance(event, ReceiveOffered):
            self._prompts[event.key] = event.prompt
        self._events.append(event)
        self._wake()

    def _on_offered(self, event: ReceiveOffered, now: float) -> None:
        key = event.key
        self._drop_offer(key)
        offer = OpenOffer(
            key,
            event.epoch,
            event.prompt,
            event.salt,
            event.alignment_tokens,
            is_pulled=event.mode == "get",
        )
        if self._blocks_of(offer) > self._pool.num_blocks:
            self._finish_at_session(key, "too_long")
            self._forget_prompt(offer)
            self._lost.set(key, "too_long", now)
            return
        met = self._contacts.meet(event, self._blocks_of(offer), self._store)
        if met is not None:
            self._on_foreign(offer, met, now)
            return
        self._offers[key] = offer
        if offer.is_pulled:
            self._call(partial(self.session.defer, key, offer.epoch))
            return
        prefix = self._match(offer, len(offer.token_ids) - 1)
        landing = self._store.take(key, self._blocks_of(offer) - len(prefix))
        if landing is None:
            # The prefix is looked up anew when the request runs: nothing is pinned until then.
            self._pool.release(prefix)
            self._call(partial(self.session.defer, key, offer.epoch))
        else:
            self._grant(offer, landing, prefix, now, where=landing.kind)

    def _on_foreign(self, offer: OpenOffer, met: StagedLanding | str, now: float) -> None:
        """KV of a P of another engine that is not used: see Contacts.meet."""
        key = offer.key
        if isinstance(met, str):
            self._finish_at_session(key, met)
            self._forget_prompt(offer)
            self._lost.set(key, met, now)
            return
        offer.is_contact = True
        self._offers[key] = offer
        self._grant(offer, met, [], now, where=met.kind)

    def _computes(self, key: TransferKey) -> NoKv:
        """The request computes its prompt; P's KV of it is compared with that."""
        self._metrics.not_received[UNVERIFIED] += 1
        self._expected.pop(key, None)
        self._call(partial(self.session.unexpect, key))
        return NoKv(UNVERIFIED)

    def _compare(self, offer: OpenOffer) -> None:
        """Compare, if both are there."""
        contact = self._contacts.find(offer.key)
        if contact is None or not contact.own or offer.state is not OfferState.LANDED:
            return
        landing = self._held.pop((offer.key, offer.epoch)).landing
        assert isinstance(landing, StagedLanding)
        self._contacts.compare(contact, landing, self._polled_s)
        self._finish(offer.key, "compared")
        self._wake()

    def _on_landed(self, event: ReceiveLanded) -> None:
        offer = self._offers.get(event.key)
        if offer is not None and offer.epoch == event.epoch:
            offer.state = OfferState.LANDED
            if offer.is_contact:
                self._compare(offer)
        else:
            # Given up while this was on its way: it is not adopted, and no write follows.
            self._free_held(event.key, event.epoch)

    def _on_ended(self, event: ReceiveEnded, now: float) -> None:
        key = event.key
        offer = self._offers.get(key)
        if offer is None or offer.epoch != event.epoch:
            return
        self._drop_offer(key)
        self._lost.set(key, event.reason, now)
        _log.info("KV of %s is lost: %s", key, event.reason, extra={"request": key.uuid})

    def _why_no_offer(self, key: TransferKey, expectation: Expectation, now: float) -> str | None:
        """Why none comes any more; None: one may."""
        reason = self._lost.get(key, now)
        if reason is not None:
            return reason
        if now >= expectation.offer_by_s:
            return "peer_lost"
        return None if now < expectation.since_s + expectation.wait_s else "no_offer"

    def _on_gone(self, address: Address, now: float) -> None:
        """What it has offered ends with its connection. A request that is younger than such a word
        may be the next P's, which then offers at once."""
        for key, expectation in self._expected.items():
            if expectation.source == address and key not in self._offers:
                is_young = expectation.since_s > now - self._word_s
                by_s = now + self._word_s if is_young else now
                expectation.offer_by_s = min(expectation.offer_by_s, by_s)

    # --- reserve and adopt

    def _blocks_of(self, offer: OpenOffer) -> int:
        return blocks_for(len(offer.token_ids), self._pool.block_size)

    def _match(self, offer: OpenOffer, max_tokens: int) -> list[int]:
        """Blocks of the prefix cache, up to where blocks of both sides begin."""
        step = offer.alignment_tokens
        whole = max_tokens // step * step
        found = self._pool.match_prefix(offer.token_ids, salt=offer.salt, max_tokens=whole)
        surplus = len(found) % (step // self._pool.block_size)
        if surplus:
            self._pool.release(found[-surplus:])
            del found[-surplus:]
        return found

    def _grant(
        self, offer: OpenOffer, landing: Landing, prefix: list[int], now: float, *, where: str
    ) -> None:
        skip = len(prefix) * self._pool.block_size
        self._metrics.landings[where] += 1
        self._metrics.skipped_tokens += skip
        offer.state = OfferState.GRANTED
        offer.granted_at_s = now
        self._held[offer.key, offer.epoch] = Held(landing, prefix, skip)
        grant = partial(self.session.grant, offer.key, offer.epoch, landing, skip)
        # On a GPU the model may still read what these blocks held before.
        event = self._memory.written()
        if event is not None:
            grant = partial(self._gate.add, event, grant, partial(self._refuse, offer.key, grant))
        self._call(grant)

    def _refuse(self, key: TransferKey, grant: Callable[[], None]) -> None:
        """I/O thread: its blocks cannot be had. Granted after its end, the landing comes back."""
        self.session.finish(key, "device_failed")
        grant()

    def _grant_deferred(self, offer: OpenOffer, now: float) -> Admission:
        prefix = self._match(offer, len(offer.token_ids) - 1)
        need = self._blocks_of(offer) - len(prefix)
        landing = self._store.take_direct(offer.key, need)
        while landing is None and self._reclaim_prefix(offer):
            landing = self._store.take_direct(offer.key, need)
        if landing is None:
            self._pool.release(prefix)
            return Wait(for_blocks=offer.is_pulled)
        where = "pulled" if offer.is_pulled else "deferred"
        if offer.is_pulled:
            self._pulled.add(offer.key)
        self._grant(offer, landing, prefix, now, where=where)
        return _WAIT

    def _adopt(self, offer: OpenOffer) -> Admission:
        held, size = self._held[offer.key, offer.epoch], self._pool.block_size
        landing, prefix = held.landing, self._prefix_of(offer, held)
        if prefix is None:
            return self._no_kv(offer.key, "prefix_evicted")
        skip_blocks = len(prefix) - held.skip_tokens // size
        block_ids = landing.adopt(skip_blocks)
        while block_ids is None and not landing.is_copying and self._reclaim_prefix(offer):
            block_ids = landing.adopt(skip_blocks)
        if block_ids is None:
            return _WAIT
        del self._held[offer.key, offer.epoch]
        self._finish(offer.key, "adopted")
        return Landed((*prefix, *block_ids), len(offer.token_ids), len(prefix) * size)

    def _prefix_of(self, offer: OpenOffer, held: Held) -> list[int] | None:
        """What D's cache has of the prompt as its request is to run, at least what comes before the
        landing; None: that was evicted. What came into the cache meanwhile is not copied again."""
        if held.prefix is not None and (held.is_matched or held.landing.kind == "direct"):
            return held.prefix
        ids, salt = offer.token_ids, offer.salt
        found = self._pool.match_prefix(ids, salt=salt, max_tokens=len(ids) - 1)
        if len(found) * self._pool.block_size < held.skip_tokens:
            self._pool.release(found)
            return None
        self._pool.release(held.prefix or ())
        held.prefix, held.is_matched = found, True
        return found

    def _reclaim_prefix(self, needy: OpenOffer) -> bool:
        """Unpin the prefix of the youngest other landing beside the cache; False when there is
        none.

        Such landings need blocks to be adopted: if all of them pinned some, none might ever start.
        One that is being copied has its blocks, and is to start behind this prefix.
        """
        for (key, _), held in reversed(self._held.items()):
            landing = held.landing
            is_pinned = landing.kind != "direct" and not landing.is_copying
            if key != needy.key and held.prefix and is_pinned:
                self._pool.release(held.prefix)
                held.prefix = None
                return True
        return False

    # --- the end

    def _no_kv(self, key: TransferKey, reason: str) -> NoKv:
        self._metrics.not_received[reason] += 1
        self._finish(key, reason)
        return NoKv(reason)

    def _finish(self, key: TransferKey, reason: str) -> None:
        self._expected.pop(key, None)
        self._lost.drop(key)
        self._drop_offer(key)
        self._finish_at_session(key, reason)

    def _finish_at_session(self, key: TransferKey, reason: str) -> None:
        self._call(partial(self.session.finish, key, reason))

    def _drop_offer(self, key: TransferKey) -> None:
        """Forget the offer; free its landing now if no write can follow, else at ReceiveQuiet."""
        offer = self._offers.pop(key, None)
        if offer is None:
            return
        self._pulled.discard(key)
        self._contacts.abandon(key)
        self._forget_prompt(offer)
        if offer.state is OfferState.LANDED:
            self._free_held(key, offer.epoch)

    def _forget_prompt(self, offer: OpenOffer) -> None:
        # The I/O thread may have put the prompt of a later epoch there.
        if self._prompts.get(offer.key) is offer.prompt:
            self._prompts.pop(offer.key, None)

    def _free_held(self, key: TransferKey, epoch: int) -> None:
        held = self._held.pop((key, epoch), None)
        if held is not None:
            held.landing.free()
            if held.prefix:
                self._pool.release(held.prefix)
