"""Requests and answers of other APIs than OpenAI's older ones: between HTTP and their translations.

Of a stream, what the flow writes is a chat's events, and goes through a ChatReader to the client.
While no event comes, the client gets pings.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import cast

from xpyd_core.errors import ApiError, ProtocolError
from xpyd_router.errors import Answer
from xpyd_router.request.client_request import Endpoint, InferenceRequest, parse_chat, parse_request
from xpyd_router.request.relay import ClientStream, Header, Sink
from xpyd_router.request.state import RequestState
from xpyd_router.translations.seam import Api, ChatReader, Events, Json, Translation, chat_answer

logger = logging.getLogger(__name__)
PING_S = 10.0
"""Proxies and clients give up on connections that are silent for long; 30 s are common."""


def read_request(
    api: Api | None, endpoint: str, owner: str, body: bytes
) -> tuple[InferenceRequest, Translation | None]:
    """The request in `body`, of `api` as a chat; None: of an endpoint that engines have. `owner`:
    the name of its client key."""
    if api is None:
        return parse_request(cast(Endpoint, endpoint), body), None
    translation = api.read(body, owner)
    return parse_chat(translation.chat), translation


def translated(translation: Translation | None, answer: Answer) -> Answer:
    """The client's answer for an engine's; None: the same."""
    if translation is None:
        return answer
    try:
        body = translation.whole(chat_answer(answer.body))
    except ProtocolError as error:
        logger.warning("%s", error)
        raise ApiError(502, "an engine's answer is no chat", code="upstream_failed") from error
    return answer._replace(body=body)


class TranslatedStream(ClientStream):
    """See the module. Its owner calls `close`."""

    def __init__(
        self,
        sink: Sink,
        headers: Sequence[Header],
        state: RequestState,
        clock: Callable[[], float],
        *,
        events: Events,
        ping_s: float = PING_S,
    ) -> None:
        super().__init__(sink, headers, state.trace, clock)
        self.takes_frames = False
        self._state = state
        self._events = events
        self._feed = ChatReader(events, self._known_usage).feed
        self._ping_s = ping_s
        self._timer: asyncio.TimerHandle | None = None
        self._seen_bytes = 0
        """Bytes sent when the timer was set."""

    def write(self, data: bytes) -> None:
        """See ClientStream; `data` is of a chat's stream."""
        if data and (shown := self._feed(data)):
            super().write(shown)
            if self._timer is None:
                self._expect()

    def end(self) -> None:
        """See ClientStream."""
        self.close()
        super().end()

    def close(self) -> None:
        """See ClientStream."""
        if self._timer is not None:
            self._timer.cancel()

    def _known_usage(self) -> Json:
        sent = self._state.sent
        return {} if sent is None else sent.usage

    def _expect(self) -> None:
        self._seen_bytes = self.sent_bytes
        self._timer = asyncio.get_running_loop().call_later(self._ping_s, self._look)

    def _look(self) -> None:
        """Ping where nothing was sent since the last look, to a client that reads."""
        if self.sent_bytes == self._seen_bytes and not self.sink.is_paused:
            super().write(self._events.ping())
        self._expect()
