"""Messages between programs of a fleet. Pure; append-only: a field, once here, keeps its meaning.

Heartbeat: every instance -> every router replica, ZMQ DEALER -> ROUTER, one msgpack map per beat,
and behind it, where the fleet has a key, the map's MAC in a frame of its own (`keys.beat_mac`).
The three fields without default are the base that vLLM <= 0.22 sends and vllm-router reads; the
rest is ours and optional. Unknown fields are ignored, so that either side may be newer.

A router's words go back on the connections of the beats, each one msgpack map and its MAC
(`keys.word_mac`): a DrainAck to each beat that says Draining, of the instance or of a replica
(docs/adr/0098, docs/adr/0133), and a PeerGone to all when one is dead (docs/adr/0099). Older
routers say nothing, older engines do not read it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from xpyd_core.errors import ProtocolError, UserError
from xpyd_core.kv_outcome import MAX_PEERS, KvPeer
from xpyd_core.request_id import Address, TlsAddress, parse_address

MAX_HEARTBEAT_BYTES = 64 * 1024
MAX_MODELS = 64
MAX_REPLICAS = 64
MAX_KEY_IDS = 16
HEARTBEAT_PERIOD_S = 3.0
MISSED_BEATS = 3

InstanceType = Literal["P", "D", "A"]
InstanceState = Literal["Starting", "Ready", "Draining", "Gone"]
SpokenDialect = Literal["", "pair-id", "nixl", "nixl-push"]
_Text = Annotated[str, msgspec.Meta(max_length=512)]
_AddressText = Annotated[str, msgspec.Meta(min_length=3, max_length=300)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ReplicaBeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a beat says of one replica of its instance. `serving` 0: it takes no requests, and its
    KV is gone. `draining` 1: as an instance that says Draining, while the others stay. The other
    fields are as in Heartbeat, of this replica alone."""

    zmq_address: _AddressText
    serving: Literal[0, 1] = 1
    running: _Count = 0
    waiting: _Count = 0
    free_blocks: _Count = 0
    total_blocks: _Count = 0
    kv_leases: _Count = 0
    draining: Literal[0, 1] = 0

    @property
    def kv(self) -> Address:
        """Its KV control address."""
        return parse_address(self.zmq_address.removeprefix("tcp://"))


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One beat of one instance.

    `type`: P (prefill), D (decode) or A (aggregated). `zmq_address` is the KV control address that
    goes into request ids. `incarnation` is random per process start: another one at the same
    address is another instance. `compatibility` is the key of xpyd_core.compat; instances pair only
    when theirs are equal. `state` Gone is the goodbye. `continuation` 1: the engine knows
    `continue_from`.
    `period_ms` is the sender's own beat period. `sent_us` is the Unix time of the beat in
    microseconds and grows with every beat of a process start, so that an old beat is known as one.
    Load numbers are counts at the time of the beat. `kv_peers`: what a P or D counted with the
    peers that it met last (docs/adr/0043).
    `dialect`: how P's KV is named to D where that is not as between xpyd's own engines: by the pair
    id alone, or by the `kv_transfer_params` of a vLLM connector; empty where `continuation` says
    it. `prompt_ids` 1: the engine takes a prompt's ids, also of a chat, as vLLM does from 0.32 on
    (docs/adr/0053). `block_tokens`: tokens of each of `total_blocks`; 0: as many as our engine's
    blocks have by default. `engine`: which program the engine is, as in HELLO: empty for xpyd's
    own, `vllm 0.32.0` for another one (docs/adr/0055). `tls` 1: the HTTP port speaks TLS alone.
    `key_ids`: the fleet's keys that the engine accepts, by `keys.key_ids`; the first signs.
    `kv_leases`: prompts whose KV is held here for, or is on its way to or from, another instance.
    `fleet_revision`: equal for all pools of one document; `revision` is the pool's own (ADR 0097).
    `routers`: to how many this beat goes, of which a router is one; 0: not said (ADR 0121).
    `replicas`: those of an engine with several, by their numbers (docs/adr/0124). Numbers of load
    are then their sums, and `zmq_address` is that of replica 0, for routers that know no replicas.
    `scaling_problem`: why there are not as many as there should be (docs/adr/0134).
    """

    type: InstanceType
    http_address: _AddressText
    zmq_address: _AddressText
    version: _Count = 0
    instance: _Text = ""
    incarnation: _Text = ""
    fleet: _Text = ""
    pool: _Text = ""
    revision: _Text = ""
    compatibility: _Text = ""
    models: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MAX_MODELS)] = ()
    max_model_len: _Count = 0
    state: InstanceState = "Ready"
    continuation: Literal[0, 1] = 0
    period_ms: _Count = 0
    sent_us: _Count = 0
    tensor: Annotated[int, msgspec.Meta(ge=1)] = 1
    pipeline: Annotated[int, msgspec.Meta(ge=1)] = 1
    running: _Count = 0
    waiting: _Count = 0
    free_blocks: _Count = 0
    total_blocks: _Count = 0
    kv_peers: Annotated[tuple[KvPeer, ...], msgspec.Meta(max_length=MAX_PEERS)] = ()
    dialect: SpokenDialect = ""
    prompt_ids: Literal[0, 1] = 0
    block_tokens: _Count = 0
    engine: _Text = ""
    tls: Literal[0, 1] = 0
    key_ids: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MAX_KEY_IDS)] = ()
    kv_leases: _Count = 0
    fleet_revision: _Text = ""
    routers: _Count = 0
    replicas: Annotated[tuple[ReplicaBeat, ...], msgspec.Meta(max_length=MAX_REPLICAS)] = ()
    scaling_problem: _Text = ""

    @property
    def http(self) -> Address:
        """The HTTP address, a TlsAddress where `tls`; a leading `http://` is tolerated, as old
        routers do."""
        found = parse_address(self.http_address.removeprefix("http://"))
        return TlsAddress(*found) if self.tls else found

    @property
    def kv(self) -> Address:
        """The KV control address."""
        return parse_address(self.zmq_address.removeprefix("tcp://"))

    def of_replica(self, number: int) -> Heartbeat:
        """The beat as if that replica were an instance of its own."""
        one = self.replicas[number]
        return msgspec.structs.replace(
            self,
            zmq_address=one.zmq_address,
            running=one.running,
            waiting=one.waiting,
            free_blocks=one.free_blocks,
            total_blocks=one.total_blocks,
            kv_leases=one.kv_leases,
            replicas=(),
        )


class DrainAck(msgspec.Struct, frozen=True, kw_only=True, tag="drain-ack"):
    """A router picks the instance no more, in none of its processes; of one that stays, the
    replicas that its beat says are draining.

    `incarnation` and `sent_us` are those of the beat that it answers. `in_flight`: requests of this
    router that were given what leaves before, and are not over.
    """

    incarnation: _Text
    sent_us: _Count
    in_flight: _Count


class PeerGone(msgspec.Struct, frozen=True, kw_only=True, tag="peer-gone"):
    """An instance died, was replaced at its address, or misses its beats: no KV that it has not
    offered yet will come, and none that it was to get is taken.

    `zmq_address` and `incarnation` are those of its beats, `sent_us` the Unix time of the word.
    """

    zmq_address: _AddressText
    incarnation: _Text
    sent_us: _Count

    @property
    def kv(self) -> Address:
        """Its KV control address."""
        return parse_address(self.zmq_address.removeprefix("tcp://"))


RouterWord = DrainAck | PeerGone
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Heartbeat)
_word_decoder: msgspec.msgpack.Decoder[RouterWord] = msgspec.msgpack.Decoder(RouterWord)
MAX_WORD_BYTES = 1024


def encode_heartbeat(beat: Heartbeat) -> bytes:
    """The beat as one msgpack map."""
    return _encoder.encode(beat)


def decode_heartbeat(frame: bytes) -> Heartbeat:
    """The beat in `frame`; ProtocolError when too long, malformed or without usable address."""
    if len(frame) > MAX_HEARTBEAT_BYTES:
        raise ProtocolError(f"heartbeat of {len(frame)} bytes, more than {MAX_HEARTBEAT_BYTES}")
    try:
        beat = _decoder.decode(frame)
        _ = beat.http, beat.kv, [one.kv for one in beat.replicas]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UserError) as error:
        raise ProtocolError(f"heartbeat: {error}") from error
    return beat


def encode_word(word: RouterWord) -> bytes:
    """The word as one msgpack map."""
    return _encoder.encode(word)


def decode_word(frame: bytes) -> RouterWord:
    """The word in `frame`; ProtocolError when too long, malformed or not known here."""
    if len(frame) > MAX_WORD_BYTES:
        raise ProtocolError(f"a router's word of {len(frame)} bytes, more than {MAX_WORD_BYTES}")
    try:
        word = _word_decoder.decode(frame)
        if isinstance(word, PeerGone):
            _ = word.kv
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UserError) as error:
        raise ProtocolError(f"a router's word: {error}") from error
    return word
