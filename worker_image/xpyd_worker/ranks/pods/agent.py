"""A pod of an instance that does not lead it: it starts ranks, and relays. No HTTP, no torch.

    leader --steps, start-up, channels--> Agent --> Part of a replica --ring, links--> ranks
           <--answers, beats, ends-----------------------'

A Part is the ranks of one replica, as long as the leader wants them: the leader may end them and
start them again, of replicas that share nothing. It has a thread of its own. Steps have one more:
where ranks that compute have not read those before, they wait, and channels and the leader's signs
of life must not.

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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import FrameType

from xpyd_core.errors import ProtocolError, UserError
from xpyd_core.keys import fleet_keys
from xpyd_worker.config import WorkerConfig
from xpyd_worker.ranks.link.frames import Frame, Kind
from xpyd_worker.ranks.link.links import Links, TakeFrame
from xpyd_worker.ranks.link.ring import NotReadError, RingError, RingReader
from xpyd_worker.ranks.loss import EXIT_POD_LOST
from xpyd_worker.ranks.pods.handshake import JOIN_S, LOOPBACK, join_leader, listen
from xpyd_worker.ranks.pods.messages import (
    Beats,
    Ended,
    Load,
    Numbers,
    PodEnd,
    PodMessage,
    Unload,
    Unloaded,
    decode_pod,
    encode_pod,
)
from xpyd_worker.ranks.pods.pod import Pod
from xpyd_worker.ranks.start.processes import COMMAND
from xpyd_worker.ranks.watch.judge import LOOK_S, SILENT_LOOKS

_log = logging.getLogger(__name__)
_CONNECT_S = 2.0
_AGAIN_S = 0.5
_PUBLISH_S = 30.0
"""The time to write a step into the ring, as for the leader's own ranks."""
_END_S = 5.0


class Part:
    """The ranks of one replica in this pod. `post` leads to the leader; `over` is called when they
    are gone, with why, where they were not asked to go. Its thread starts, relays and ends them."""

    def __init__(
        self,
        config: WorkerConfig,
        load: Load,
        post: TakeFrame,
        over: Callable[[Part, str], None],
        command: Sequence[str],
    ) -> None:
        """`config`: this pod's own."""
        self._load = load
        self._host = config.host
        self._to_leader = post
        self._over = over
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._end: Unload | None = None
        self._failure = ""
        self._is_over = False
        self._lock = threading.Lock()
        """Between what wakes its thread, and the thread's end."""
        self._first = load.config.first_rank
        # The leader has no more of them under way than it has stages.
        self._steps: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._publisher = threading.Thread(target=self._publish, name="pod-steps", daemon=True)
        self._links = Links("pod-ranks")
        ranks = load.config.pod_ranks(config.pod)
        self._pod = Pod(ranks, self._links, lambda frame: self._post(frame), command)
        self._answers = {fds.come[0]: n for n, fds in enumerate(self._pod.responses)}
        self._rings = [RingReader(fds) for fds in self._pod.responses]
        self._thread = threading.Thread(target=self._run, name="pod-part", daemon=True)
        self._thread.start()

    @property
    def replica(self) -> int:
        """Whose ranks they are."""
        return self._load.config.replica

    def take(self, frame: Frame) -> None:
        """What the leader sends to them. The thread of the leader's link."""
        if frame.kind == Kind.STEP:
            self._steps.put(frame.body)
        else:
            self._pod.post(frame._replace(rank=frame.rank - self._first))

    def end(self, unload: Unload) -> None:
        """End them. The first word holds. Any thread."""
        self._end = self._end or unload
        self._wake()

    def join(self) -> None:
        """Wait until they are gone."""
        self._thread.join(4 * _END_S)

    # --- its thread

    def _run(self) -> None:
        unasked = ""
        try:
            unasked = self._live()
        except OSError as error:
            unasked = f"a rank cannot be started: {error}"
        except Exception as error:  # the thread's edge: the leader hears of it
            _log.exception("the ranks of replica %d cannot be relayed", self.replica)
            unasked = repr(error)
        try:
            self._stop(in_order=not unasked and self._end is not None and self._end.in_order)
        finally:
            self._over(self, unasked)

    def _live(self) -> str:
        """Until they are asked to end; else why they must."""
        load, at = self._load, self._load.rendezvous
        # The address is this pod's own, and nothing else.
        config = replace(load.config, host=self._host)
        with ExitStack() as stack:
            if at is None:
                # They meet nobody else, as ranks of an instance that is one pod.
                listener = stack.enter_context(listen(LOOPBACK, 0, "--host"))
                host, port = listener.getsockname()[:2]
                store = listener.fileno()
                self._pod.spawn(load, (host, port), config=config, address=host, listener=store)
            else:
                self._pod.spawn(load, at, config=config, address=self._host)
        self._pod.be_watched()
        self._publisher.start()
        return self._relay()

    def _relay(self) -> str:
        poll = self._pod.ends
        for descriptor in (self._waker, *self._answers):
            poll.register(descriptor, select.POLLIN)
        next_look_s = time.monotonic()
        while self._end is None and not self._failure:
            found = poll.poll(max(0.0, next_look_s - time.monotonic()) * 1000)
            for descriptor, _ in found:
                self._answer(descriptor)
            for rank, returncode in self._pod.take_ended():
                self._say(Ended(rank, returncode))
            if time.monotonic() < next_look_s:
                continue
            next_look_s = time.monotonic() + LOOK_S
            self._say(Beats(tuple(self._pod.look())))
        return self._failure

    def _stop(self, *, in_order: bool) -> None:
        # Steps that have come are in the ring then, or of no use.
        self._steps.put(None)
        if self._publisher.is_alive():
            self._publisher.join(_END_S)
        if in_order:
            self._pod.end(_END_S)
        else:
            self._pod.kill()
        self._links.close(_END_S)
        for ring in self._rings:
            ring.close()
        if self._publisher.is_alive():
            return  # it waits in the memory, which goes with the process then
        self._pod.close()
        with self._lock:
            self._is_over = True
            os.close(self._waker)

    def _answer(self, descriptor: int) -> None:
        place = self._answers.get(descriptor)
        if place is None:
            return
        while (message := self._rings[place].read(0)) is not None:
            self._post(Frame(Kind.RESPONSE, self._pod.ranks[place], message))

    def _post(self, frame: Frame) -> None:
        self._to_leader(frame._replace(rank=self._first + frame.rank))

    def _say(self, message: PodMessage) -> None:
        self._post(Frame(Kind.POD, 0, encode_pod(message)))

    # --- the steps' thread

    def _publish(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._pod.publish(step, within_s=_PUBLISH_S, unless=self._waker)
            except NotReadError as error:
                rank = self._first + self._pod.ranks[error.reader]
                self._fail(f"rank {rank} has not read its steps for {_PUBLISH_S:g} s")
                return
            except RingError as error:
                self._fail(str(error))
                return

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if not self._is_over:
                os.eventfd_write(self._waker, 1)


class Agent:
    """This pod's life after it has joined."""

    def __init__(self, config: WorkerConfig, sock: socket.socket, command: Sequence[str]) -> None:
        self._config = config
        self._command = command
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._end: PodEnd | None = None
        self._has_heard = True
        self._parts: dict[int, Part] = {}
        """By replica. The link's thread adds one, the part's own takes it out."""
        self._links = Links("pod-links")
        self._leader = self._links.make(sock, self._take, self._lose)
        self._links.serve(self._leader)

    def run(self) -> int:
        """Run until the leader ends the pod, or is gone; the exit status."""
        end = PodEnd(False, "this pod failed")
        try:
            end = self._watch()
        finally:
            parts = list(self._parts.values())
            for part in parts:
                part.end(Unload(end.in_order, end.reason))
            for part in parts:
                part.join()
            self._links.close(_END_S)
        if end.in_order:
            return 0
        _log.critical("the instance ended: %s", end.reason)
        return EXIT_POD_LOST

    def end(self, reason: str) -> None:
        """End the pod at once. Called on any thread, and in a signal's handler."""
        self._end = self._end or PodEnd(False, reason)
        os.eventfd_write(self._waker, 1)

    def _watch(self) -> PodEnd:
        """The leader shows itself at each look of its own."""
        poll = select.poll()
        poll.register(self._waker, select.POLLIN)
        looks_silent = 0
        while self._end is None:
            if poll.poll(LOOK_S * 1000):
                continue
            heard, self._has_heard = self._has_heard, False
            looks_silent = 0 if heard else looks_silent + 1
            if looks_silent >= SILENT_LOOKS:
                return PodEnd(False, f"the leader says nothing for {SILENT_LOOKS * LOOK_S:g} s")
        return self._end

    # --- a part's thread

    def _over(self, part: Part, unasked: str) -> None:
        del self._parts[part.replica]
        at = part.replica * self._config.sizes.replica
        self._leader.post(Frame(Kind.POD, at, encode_pod(Unloaded(unasked))))

    # --- the link's thread

    def _take(self, frame: Frame) -> None:
        self._has_heard = True
        if frame.kind == Kind.POD:
            self._take_own(frame.rank // self._config.sizes.replica, decode_pod(frame.body))
            return
        part = self._parts.get(frame.rank // self._config.sizes.replica)
        # What was sent before the leader has heard that they are gone.
        if part is not None:
            part.take(frame)

    def _take_own(self, replica: int, message: PodMessage) -> None:
        part = self._parts.get(replica)
        if isinstance(message, PodEnd):
            self._end = message
            os.eventfd_write(self._waker, 1)
        elif isinstance(message, Unload):
            if part is not None:
                part.end(message)
        elif isinstance(message, Load):
            if part is not None:
                raise ProtocolError(f"replica {replica} is there already")
            self._parts[replica] = Part(
                self._config, message, self._leader.post, self._over, self._command
            )
        elif not isinstance(message, Beats):
            raise ProtocolError(f"the leader said {message!r}")

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
    agent = Agent(config, _reach(config, keys), command)
    _log.info("pod %d has joined", config.pod, extra={"leader": config.leader_address})
    return agent.run()


def _reach(config: WorkerConfig, keys: Sequence[bytes]) -> socket.socket:
    """A connection to the leader, as soon as there is one."""
    host, port = config.leader_address, config.rendezvous_port
    end_s = time.monotonic() + JOIN_S
    said = ""
    while True:
        try:
            sock = socket.create_connection((host, port), _CONNECT_S, (config.host, 0))
            try:
                join_leader(sock, config.pod, Numbers.of(config), keys)
                return sock
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
