"""The other pods of an instance, as its first has them: it waits for all, and has a link to each.

A pod has ranks of one replica or of several (RemoteRanks, ADR 0130); they come and go as the leader
says, their pod stays. A pod that is gone does not come back: LeaderWorkerSet creates the whole
group again.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence

from xpyd_core.errors import ProtocolError
from xpyd_core.keys import fleet_keys
from xpyd_core.parallel.checks import RPC_PORT
from xpyd_worker.config import WorkerConfig
from xpyd_worker.ranks.link.frames import Frame, Kind
from xpyd_worker.ranks.link.links import Links
from xpyd_worker.ranks.loss import EXIT_POD_LOST, RankLostError
from xpyd_worker.ranks.pods.handshake import JOIN_S, greet_pod, listen
from xpyd_worker.ranks.pods.messages import (
    Beats,
    Load,
    Numbers,
    PodEnd,
    Unloaded,
    decode_pod,
    encode_pod,
)
from xpyd_worker.ranks.pods.remote import RemoteRanks
from xpyd_worker.ranks.watch.judge import LOOK_S

_log = logging.getLogger(__name__)
_POLL_S = 0.5
_GONE_S = 30.0
"""The time for a pod to end a replica's ranks, before they are started again: it waits for them,
and kills them then (pod.py)."""
_CLOSE_S = 2.0


class RemotePod:
    """Pod `number`, over `sock`. Each replica has `ranks` ranks."""

    def __init__(self, number: int, sock: socket.socket, links: Links, ranks: int) -> None:
        self.number = number
        self._each = ranks
        self._there: dict[int, RemoteRanks] = {}
        """By replica, until the pod says that they are gone."""
        self._lost = ""
        self._changed = threading.Condition()
        self._link = links.add(sock, self._take, self._lose)

    def load(self, message: Load, ranks: RemoteRanks) -> None:
        """Have it start `ranks`, once those before them are gone. RankLostError where the pod is,
        or does not end them."""
        replica = message.config.replica
        with self._changed:
            self._changed.wait_for(lambda: self._lost or replica not in self._there, _GONE_S)
            if self._lost:
                raise RankLostError(self._gone, status=EXIT_POD_LOST)
            if replica in self._there:
                text = f"pod {self.number} has not ended replica {replica} within {_GONE_S:g} s"
                raise RankLostError(text, status=EXIT_POD_LOST)
            self._there[replica] = ranks
        ranks.load(self._link.post, message)

    def beat(self) -> None:
        """The leader lives."""
        self._link.post(Frame(Kind.POD, 0, encode_pod(Beats())))

    def end(self, *, in_order: bool, reason: str) -> None:
        """Have it end all its processes, and itself."""
        self._link.post(Frame(Kind.POD, 0, encode_pod(PodEnd(in_order, reason))))

    @property
    def _gone(self) -> str:
        return f"pod {self.number} of the instance is gone: {self._lost}"

    # --- the links' thread

    def _take(self, frame: Frame) -> None:
        replica = frame.rank // self._each
        ranks = self._there.get(replica)
        if ranks is None:
            raise ProtocolError(f"pod {self.number} speaks for rank {frame.rank}")
        ranks.take(frame)
        if frame.kind == Kind.POD and isinstance(decode_pod(frame.body), Unloaded):
            with self._changed:
                del self._there[replica]
                self._changed.notify_all()

    def _lose(self, reason: str) -> None:
        with self._changed:
            self._lost = reason
            there = list(self._there.values())
            self._changed.notify_all()
        for ranks in there:
            ranks.lose(self._gone)


class Pods:
    """All of them. `gather` once; `close` in any case."""

    def __init__(self, config: WorkerConfig) -> None:
        """`config`: the leader's, of the whole instance."""
        self._config = config
        self._links = Links("pods-links")
        self._closing = threading.Event()
        self._found: dict[int, RemotePod] = {}
        self._beating = threading.Thread(target=self._beat, name="pods-beats", daemon=True)

    def __getitem__(self, number: int) -> RemotePod:
        """Pod `number`, from 1 on, once gathered."""
        return self._found[number]

    def gather(self) -> None:
        """Wait for all. UserError when the port is taken, RankLostError when a pod does not come,
        or none is waited for any more."""
        config = self._config
        keys = fleet_keys(config.kv_key_file, insecure=config.kv_insecure)
        self._beating.start()
        end_s = time.monotonic() + JOIN_S
        flag = "--kv-port" if config.rpc_port is None else RPC_PORT
        with listen(config.host, config.rendezvous_port, flag) as listener:
            listener.settimeout(_POLL_S)
            while missing := sorted(set(range(1, config.pods)) - set(self._found)):
                if self._closing.is_set() or time.monotonic() >= end_s:
                    text = f"pods {missing} did not come within {JOIN_S:g} s"
                    raise RankLostError(text, status=EXIT_POD_LOST)
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    continue
                self._greet(sock, keys)

    def end(self, *, in_order: bool, reason: str) -> None:
        """Have all end: `in_order` when their ranks have ended so, or do."""
        for pod in list(self._found.values()):
            pod.end(in_order=in_order, reason=reason)

    def close(self, *, in_order: bool, reason: str) -> None:
        """The same, and give the links back."""
        self._closing.set()
        self.end(in_order=in_order, reason=reason)
        self._links.close(_CLOSE_S)

    def _greet(self, sock: socket.socket, keys: Sequence[bytes]) -> None:
        config = self._config
        try:
            number = greet_pod(sock, Numbers.of(config), keys)
            if not 0 < number < config.pods or number in self._found:
                raise ProtocolError(f"it calls itself pod {number} of {config.pods}")
        except (OSError, ProtocolError) as error:
            sock.close()
            _log.warning("a connection that is no pod of this instance: %s", error)
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._found[number] = RemotePod(number, sock, self._links, config.sizes.replica)
        _log.info("pod %d has come, %d of %d", number, len(self._found), config.pods - 1)

    def _beat(self) -> None:
        """Also while others are waited for: a pod ends when its leader gives no sign of life."""
        while not self._closing.wait(LOOK_S):
            for pod in list(self._found.values()):
                pod.beat()


def gather(config: WorkerConfig) -> Pods | None:
    """The other pods of the instance, all there; None where it has no others. Raises what `gather`
    of Pods raises."""
    if config.pods == 1:
        return None
    pods = Pods(config)
    try:
        pods.gather()
    except BaseException:
        pods.close(in_order=False, reason="not all pods came")
        raise
    return pods
