"""A pod of an instance that does not lead it: it starts its ranks, and relays. No HTTP, no torch.

    leader --steps, start-up, channels--> here --ring, links--> ranks
           <--answers, beats, ends------

Steps have a thread of their own: where ranks that compute have not read those before, they wait,
and channels and the leader's signs of life must not.

Signals are the leader's to hear, which drains and then ends this pod; before there is a leader, and
at a second signal, this one ends by itself.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

from xpyd_core.errors import ProtocolError, UserError
from xpyd_core.keys import fleet_keys
from xpyd_core.pod_env import rendezvous_port
from xpyd_worker.config import WorkerConfig
from xpyd_worker.ranks.link.frames import Frame, Kind
from xpyd_worker.ranks.link.links import Links
from xpyd_worker.ranks.link.ring import NotReadError, RingError, RingReader
from xpyd_worker.ranks.loss import EXIT_POD_LOST
from xpyd_worker.ranks.pods.handshake import JOIN_S, join_leader
from xpyd_worker.ranks.pods.messages import Beats, Ended, Join, PodEnd, decode_pod, encode_pod
from xpyd_worker.ranks.pods.pod import Pod
from xpyd_worker.ranks.start.processes import COMMAND
from xpyd_worker.ranks.watch.judge import LOOK_S, SILENT_LOOKS

_log = logging.getLogger(__name__)
_CONNECT_S = 2.0
_AGAIN_S = 0.5
_PUBLISH_S = 30.0
"""The time to write a step into the ring, as for the leader's own ranks."""
_END_S = 5.0


class Agent:
    """This pod's life after it has joined."""

    def __init__(
        self, config: WorkerConfig, join: Join, sock: socket.socket, command: Sequence[str]
    ) -> None:
        self._join = join
        self._config = config
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._end: PodEnd | None = None
        self._has_heard = True
        # The leader has no more of them under way than it has stages.
        self._steps: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._publisher = threading.Thread(target=self._publish, name="pod-steps", daemon=True)
        self._links = Links("pod-links")
        ranks = join.config.pod_ranks(config.pod)
        self._pod = Pod(ranks, self._links, lambda frame: self._post(frame), command)
        self._answers = {fds.come[0]: n for n, fds in enumerate(self._pod.responses)}
        self._rings = [RingReader(fds) for fds in self._pod.responses]
        self._leader = self._links.add(sock, self._take, self._lose)

    def run(self) -> int:
        """Run until the leader ends the pod, or is gone; the exit status. The main thread: the
        ranks end with the thread that started them."""
        end = PodEnd(False, "this pod failed")
        try:
            # The address is this pod's own, and nothing else.
            host = self._config.host
            config = replace(self._join.config, host=host)
            self._pod.spawn(self._join, config=config, address=host)
            self._pod.be_watched()
            self._publisher.start()
            end = self._relay()
        finally:
            self.end(end.reason)
            self._stop_publisher()
            if end.in_order:
                self._pod.end(_END_S)
            else:
                self._pod.kill()
            self._links.close(_END_S)
        if end.in_order:
            return 0
        _log.critical("the instance ended: %s", end.reason)
        return EXIT_POD_LOST

    def end(self, reason: str) -> None:
        """End the pod at once. Called on any thread, and in a signal's handler."""
        self._end = self._end or PodEnd(False, reason)
        os.eventfd_write(self._waker, 1)

    def _relay(self) -> PodEnd:
        poll = self._pod.ends
        for descriptor in (self._waker, *self._answers):
            poll.register(descriptor, select.POLLIN)
        next_look_s, looks_silent = time.monotonic(), 0
        while self._end is None:
            found = poll.poll(max(0.0, next_look_s - time.monotonic()) * 1000)
            for descriptor, _ in found:
                self._answer(descriptor)
            for rank, returncode in self._pod.take_ended():
                self._say(Ended(rank, returncode))
            if time.monotonic() < next_look_s:
                continue
            next_look_s = time.monotonic() + LOOK_S
            self._say(Beats(tuple(self._pod.look())))
            heard, self._has_heard = self._has_heard, False
            looks_silent = 0 if heard else looks_silent + 1
            if looks_silent >= SILENT_LOOKS:
                return PodEnd(False, f"the leader says nothing for {SILENT_LOOKS * LOOK_S:g} s")
        return self._end

    def _answer(self, descriptor: int) -> None:
        place = self._answers.get(descriptor)
        if place is None:
            return
        while (message := self._rings[place].read(0)) is not None:
            self._post(Frame(Kind.RESPONSE, self._pod.ranks[place], message))

    def _post(self, frame: Frame) -> None:
        self._leader.post(frame)

    def _say(self, message: Beats | Ended) -> None:
        self._post(Frame(Kind.POD, 0, encode_pod(message)))

    def _stop_publisher(self) -> None:
        """Steps that have come are in the ring then, or of no use."""
        self._steps.put(None)
        if self._publisher.is_alive():
            self._publisher.join(_END_S)

    # --- the steps' thread

    def _publish(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._pod.publish(step, within_s=_PUBLISH_S, unless=self._waker)
            except NotReadError as error:
                rank = self._pod.ranks[error.reader]
                self.end(f"rank {rank} has not read its steps for {_PUBLISH_S:g} s")
                return
            except RingError as error:
                self.end(str(error))
                return

    # --- the links' thread

    def _take(self, frame: Frame) -> None:
        self._has_heard = True
        if frame.kind == Kind.STEP:
            self._steps.put(frame.body)
        elif frame.kind in (Kind.CONTROL, Kind.CHANNEL):
            self._pod.post(frame)
        else:
            message = decode_pod(frame.body)
            if isinstance(message, PodEnd):
                self._end = message
                os.eventfd_write(self._waker, 1)

    def _lose(self, reason: str) -> None:
        self.end(f"the leader is gone: {reason}")


def serve_pod(config: WorkerConfig, command: Sequence[str] = COMMAND) -> int:
    """Run this pod's ranks for its leader; the exit status. UserError for what the user can
    mend."""
    keys = fleet_keys(config.kv_key_file, insecure=config.kv_insecure)
    signals = 0
    agent: Agent | None = None

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if agent is None:
            os._exit(128 + number)
        if signals > 1:
            agent.end(f"a second {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    sock, join = _reach(config, keys)
    agent = Agent(config, join, sock, command)
    _log.info("pod %d has joined", config.pod, extra={"leader": config.leader_address})
    return agent.run()


def _reach(config: WorkerConfig, keys: Sequence[bytes]) -> tuple[socket.socket, Join]:
    """A connection to the leader, as soon as there is one."""
    host, port = config.leader_address, rendezvous_port(config.kv_port)
    end_s = time.monotonic() + JOIN_S
    said = ""
    while True:
        try:
            sock = socket.create_connection((host, port), _CONNECT_S, (config.host, 0))
            try:
                return sock, join_leader(sock, config.pod, keys)
            except BaseException:
                sock.close()
                raise
        except (OSError, ProtocolError) as error:
            why = f"the leader at {host}:{port} does not answer: {error}"
        if time.monotonic() >= end_s:
            raise UserError(f"LWS_LEADER_ADDRESS: {why}")
        if why != said:
            _log.info("%s", why)
            said = why
        time.sleep(_AGAIN_S)
