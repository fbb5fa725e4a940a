"""Other APIs in front of the chat path: Anthropic's Messages (ADR 0069) and OpenAI's
Responses (ADR 0070).

A translation is pure. It makes a chat of the client's body, and turns the chat's answer into its
own API's bytes. Between the two, the chat is served as every chat: admission, retries,
continuation, metrics and access log are those of `request`. To add an API: one module with an
`Api` (`seam`), its name in ROUTES and its line in `make_apis`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from xpyd_router.request.client_request import ENDPOINTS
from xpyd_router.translations.messages import Messages
from xpyd_router.translations.responses import Responses
from xpyd_router.translations.responses_store import ResponseStore
from xpyd_router.translations.seam import Api

ROUTES: tuple[str, ...] = (*ENDPOINTS, Messages.name, Responses.name)
"""Paths behind /v1/ of the requests that engines generate for."""

TARGETS: Mapping[bytes, str] = {
    **{f"/v1/{route}".encode(): route for route in ROUTES},
    b"/v1/messages?beta=true": Messages.name,
}
"""Routes by what requests ask for, where that is usual: coding agents post with this query, which
is nothing to the router."""


def make_apis(
    wall_clock: Callable[[], float], store: ResponseStore | None = None
) -> Mapping[str, Api]:
    """The APIs that are translated, by their route; each lives as long as the process.
    `wall_clock` gives Unix seconds; `store` is what Responses keeps its responses in."""
    return {Messages.name: Messages(), Responses.name: Responses(store, wall_clock)}


def api_at(path: str, apis: Mapping[str, Api]) -> Api | None:
    """The API that `path` belongs to, so that a refusal there is in its format."""
    first = path.removeprefix("/v1/").partition("/")[0] if path.startswith("/v1/") else ""
    return apis.get(first)
