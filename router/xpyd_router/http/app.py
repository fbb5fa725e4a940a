"""The HTTP surface in Quart: models, state and the admin API, errors as OpenAI's JSON.

Two applications, one of each port (ADR 0077): `build_app` for clients, whose inference routes come
before Quart, in `inference`; `admin_app` for metrics, instances and the admin API. Both say whether
the router lives and is ready. The admin API (under /admin) shows instances
with their loads and sets cordons. It has keys of its own (`--admin-key-file`): a client that may
send requests may not take instances out. To drain an instance, cordon it and wait until it has no
calls in flight.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from datetime import UTC, datetime
from functools import cache
from typing import cast

import msgspec
import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Blueprint, Quart, Response, request
from werkzeug.exceptions import HTTPException
from werkzeug.routing import BaseConverter

from xpyd_core import __version__
from xpyd_core.errors import ApiError
from xpyd_core.keys import key_ids
from xpyd_router.app_state import AppState
from xpyd_router.errors import unknown_model
from xpyd_router.fleet.instances import Instance
from xpyd_router.fleet.introductions import PairProblem, WithoutKv
from xpyd_router.fleet.view import FleetView
from xpyd_router.http.asgi import AsgiApp, Scope
from xpyd_router.http.inference import Inference
from xpyd_router.http.keyed import OpenBodies, owner_of
from xpyd_router.http.openapi.document import openapi_document
from xpyd_router.http.shapes import (
    AdminInstance,
    AdminState,
    Alive,
    InstanceHealth,
    InstanceKv,
    InstanceLoad,
    InstanceReport,
    Instances,
    Model,
    ModelList,
    NotReady,
    PairReport,
    Ready,
    ResponseDeleted,
    Shape,
    Version,
)
from xpyd_router.http.text_calls import TEXT_ROUTES, TextCalls
from xpyd_router.metrics import only, state_of
from xpyd_router.request.client_request import HeadReader
from xpyd_router.request.flow import Flow
from xpyd_router.translations import ROUTES, api_at, make_apis
from xpyd_router.translations.responses import STORE_FLAG, Responses
from xpyd_router.translations.responses_items import item_page
from xpyd_router.translations.responses_store import ResponseStore
from xpyd_router.translations.seam import Api, error_of
from xpyd_router.upstream.client import UpstreamClient


def json_reply(payload: Shape, status: int = 200) -> Response:
    """`payload` as JSON."""
    return Response(msgspec.json.encode(payload), status, content_type="application/json")


def error_reply(error: ApiError, api: Api | None = None) -> Response:
    """An error in OpenAI's format, or that of `api`."""
    body = error.body()
    if api is not None:
        body = api.refusal(error_of(error.status, body), "")
    response = Response(body, error.status, content_type="application/json")
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


logger = logging.getLogger(__name__)


def is_admin(keys: Iterable[bytes], authorization: str) -> bool:
    """Whether the header is `Bearer` with one of the keys; in constant time for each."""
    scheme, _, token = authorization.partition(" ")
    given = token.strip().encode("utf-8", "replace")
    return scheme.lower() == "bearer" and any(hmac.compare_digest(key, given) for key in keys)


def admin_routes(app_state: AppState) -> Blueprint:
    """The routes. Without keys each of them answers 403."""
    routes, fleet = Blueprint("admin", __name__, url_prefix="/admin"), app_state.fleet

    @routes.before_request
    async def check() -> None:
        if not app_state.admin_keys:
            raise ApiError(403, "the admin API is closed: start the router with --admin-key-file")
        if not is_admin(app_state.admin_keys, request.headers.get("Authorization", "")):
            raise ApiError(401, "Authorization: expected Bearer and a key of --admin-key-file")

    @routes.errorhandler(ApiError)
    async def refuse(error: ApiError) -> Response:
        response = error_reply(error)
        if error.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response

    @routes.get("/state")
    async def state() -> Response:
        rows = [_describe_load(fleet, instance) for instance in fleet.instances]
        return json_reply(AdminState(is_draining=app_state.is_draining, instances=rows))

    @routes.get("/instances/<name>")
    async def show(name: str) -> Response:
        return json_reply(_describe_load(fleet, _find(fleet, name)))

    @routes.post("/instances/<name>/cordon")
    async def cordon(name: str) -> Response:
        return await _cordon(app_state, name, is_cordoned=True)

    @routes.post("/instances/<name>/uncordon")
    async def uncordon(name: str) -> Response:
        return await _cordon(app_state, name, is_cordoned=False)

    # Quart's decorators register them; pyright sees names without a reader.
    _ = check, refuse, state, show, cordon, uncordon
    return routes


async def _cordon(app_state: AppState, name: str, *, is_cordoned: bool) -> Response:
    fleet = app_state.fleet
    instance = _find(fleet, name)
    await app_state.control.cordon(instance.key, is_cordoned=is_cordoned)
    logger.info("%s %s", "cordoned" if is_cordoned else "uncordoned", instance.name)
    return json_reply(_describe_load(fleet, _find(fleet, instance.key.http)))


def _find(fleet: FleetView, name: str) -> Instance:
    """The instance at this HTTP address, else the one of this name."""
    everyone = fleet.instances
    found = [instance for instance in everyone if instance.key.http == name]
    found = found or [instance for instance in everyone if instance.name == name]
    if not found:
        raise ApiError(404, f"no such instance: {name[:200]}")
    if len(found) > 1:
        raise ApiError(409, f"{len(found)} instances have this name: say the http_address")
    return found[0]


def _describe_load(fleet: FleetView, instance: Instance) -> AdminInstance:
    ours, others = fleet.requests(instance)
    return AdminInstance(
        instance=instance.name,
        type=instance.beat.type,
        state=state_of(instance),
        is_cordoned=instance.is_cordoned,
        http_address=instance.key.http,
        incarnation=instance.beat.incarnation,
        in_flight=ours,
        others_in_flight=others,
    )


_NO_PARTNERS = WithoutKv([], [], [])


def _describe(
    fleet: FleetView, instance: Instance, weight: float, without_kv: WithoutKv, unpaired: str
) -> InstanceReport:
    """The line of /instances for one instance."""
    beat, health = instance.beat, fleet.report(instance.key)
    return InstanceReport(
        instance=instance.name,
        type=beat.type,
        state=state_of(instance),
        http_address=str(instance.http),
        zmq_address=str(instance.kv),
        incarnation=beat.incarnation,
        age_seconds=round(max(0.0, fleet.now_s - instance.last_beat_s), 3),
        health=InstanceHealth(
            ejected_by=health.cause or None,
            ejected_seconds=round(health.ejected_s, 3),
            breaker=health.breaker,
            open_seconds=round(health.open_s, 3),
            weight=round(weight, 3),
        ),
        models=list(beat.models),
        compatibility=beat.compatibility,
        continuation=beat.continuation,
        dialect=instance.dialect,
        fleet=beat.fleet,
        pool=beat.pool,
        revision=beat.revision,
        fleet_revision=beat.fleet_revision,
        max_model_len=beat.max_model_len,
        load=InstanceLoad(
            running=beat.running,
            waiting=beat.waiting,
            free_blocks=beat.free_blocks,
            total_blocks=beat.total_blocks,
            kv_leases=beat.kv_leases,
        ),
        kv=[
            InstanceKv(peer=peer.peer, moved=peer.moved, failed=peer.failed)
            for peer in beat.kv_peers
        ],
        engine=beat.engine,
        unmet=without_kv.unmet,
        refused=without_kv.refused,
        unverified=without_kv.unverified,
        unpaired=unpaired,
        key_ids=list(beat.key_ids),
        in_flight=fleet.requests(instance)[0],
        replicas=sum(1 for one in beat.replicas if one.serving and not one.draining),
        scaling_problem=beat.scaling_problem,
    )


def _report(pair: PairProblem) -> PairReport:
    found = pair.found
    return PairReport(
        prefill=pair.prefill,
        decode=pair.decode,
        cause=found.cause,
        detail=found.detail,
        seconds=round(found.seconds, 6),
    )


_ADMIN_PATHS = frozenset({"metrics", "instances", "admin"})
"""First parts of the paths that only the admin port has."""


def _http_error(error: HTTPException, api: Api | None, elsewhere: str) -> Response:
    """Quart's own refusals (no such path, wrong method, body too long) in OpenAI's format, or that
    of the API that the path belongs to. `elsewhere` ends the 404: where such a path is."""
    status = error.code or 500
    messages = {
        404: f"no such path: {request.method} {request.path[:200]}{elsewhere}",
        405: f"{request.method} is not allowed here",
        413: "the request body is too long",
        408: "the request body did not come in time",
    }
    response = error_reply(ApiError(status, messages.get(status, error.name)), api)
    for name, value in error.get_headers():
        if name.lower() == "allow":
            response.headers["Allow"] = value
    return response


def build_app(state: AppState, flow: Flow, upstream: UpstreamClient, reader: Executor) -> AsgiApp:
    """The application; what it gets lives as long as it."""
    limit_bytes = state.config.responses_store_bytes
    store = ResponseStore(limit_bytes) if limit_bytes else None
    apis = make_apis(time.time, store)
    bodies = OpenBodies(state.config.max_open_body_bytes, state.config.max_body_bytes)
    rest = cast(AsgiApp, quart_app(state, apis, store))
    texts = TextCalls(state, upstream, bodies, rest, reader=reader, apis=apis)
    return Inference(state, flow, bodies, texts, reader=reader, apis=apis)


def quart_app(
    app_state: AppState, apis: Mapping[str, Api], store: ResponseStore | None = None
) -> Quart:
    """All routes of clients; those of inference are here only as names."""

    def elsewhere() -> str:
        if request.path.split("/", 2)[1] not in _ADMIN_PATHS:
            return ""
        return f" on this port: ask the admin port, {app_state.admin_port} (--admin-port)"

    app = _new_app(app_state, apis, elsewhere)
    _add_inference(app)
    _add_models(app, app_state)
    _add_responses(app, store)
    _add_state(app, app_state)
    _add_about(app, _openapi_json(is_admin=False))
    return app


def admin_app(app_state: AppState) -> Quart:
    """The routes of the admin port."""

    def elsewhere() -> str:
        return f" on the admin port: clients ask port {app_state.http_port} (--port)"

    app = _new_app(app_state, {}, elsewhere)
    _add_state(app, app_state)
    _add_figures(app, app_state)
    _add_about(app, _openapi_json(is_admin=True))
    app.register_blueprint(admin_routes(app_state))
    return app


def _new_app(app_state: AppState, apis: Mapping[str, Api], elsewhere: Callable[[], str]) -> Quart:
    app = Quart("xpyd_router", static_folder=None)
    app.url_map.merge_slashes = False  # another path, not a redirect that clients may not follow
    app.config["MAX_CONTENT_LENGTH"] = app_state.config.max_body_bytes
    heads = HeadReader()

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        return _http_error(error, api_at(request.path, apis), elsewhere())

    @app.after_request
    async def echo(response: Response) -> Response:
        if client_id := heads.read(request.scope["headers"]).request_id:
            response.headers["X-Request-Id"] = client_id.decode("ascii")
        return response

    # Quart's decorators register them; pyright sees names without a reader.
    _ = http_error, echo
    return app


def _add_inference(app: Quart) -> None:
    """These routes come before Quart, which knows their paths only to refuse GET."""
    for path in (*(f"/v1/{route}" for route in ROUTES), *TEXT_ROUTES):
        app.add_url_rule(path, path, _unreachable, methods=["POST"])


async def _unreachable() -> Response:
    raise AssertionError("answered by Inference or TextCalls")


def _add_models(app: Quart, app_state: AppState) -> None:
    def describe(name: str) -> Model:
        context = app_state.fleet.snapshot.of_model(name).max_model_len
        created = datetime.fromtimestamp(app_state.created, UTC)
        return Model(
            id=name,
            created=app_state.created,
            max_model_len=context,
            display_name=name,
            created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        )

    def shown(names: Iterable[str]) -> list[str]:
        owner = owner_of(cast(Scope, request.scope))
        return list(names) if owner is None else owner.only(names)

    @app.get("/v1/models")
    async def models() -> Response:
        names = shown(app_state.fleet.snapshot.models)
        first, last = (names[0], names[-1]) if names else (None, None)
        data = [describe(name) for name in names]
        return json_reply(ModelList(data=data, first_id=first, last_id=last))

    @app.get("/v1/models/<path:name>")
    async def model(name: str) -> Response:
        if name in shown(app_state.fleet.snapshot.models):
            return json_reply(describe(name))
        return error_reply(unknown_model(name, shown(app_state.fleet.snapshot.known_models)))

    _ = models, model


class _ResponseId(BaseConverter):
    """An id as this router makes them: other paths are no responses'."""

    regex = "resp_[0-9a-f]{32}"


def _kept_reply(body: bytes) -> Response:
    """A kept response, whole."""
    if request.args.get("stream", "false").lower() != "false":
        reason = "stream: a kept response is not streamed again; leave it out"
        return error_reply(ApiError(400, reason, param="stream"))
    return Response(body, content_type="application/json")


def _add_responses(app: Quart, store: ResponseStore | None) -> None:
    """Responses that are kept."""
    app.url_map.converters["response"] = _ResponseId

    def owner() -> str:
        found = owner_of(cast(Scope, request.scope))
        return "" if found is None else found.name

    def missing(response_id: str) -> Response:
        if store is None:
            reason = f"this router keeps no responses (start it with {STORE_FLAG})"
        else:
            reason = f"no response {response_id[:80]!r} is kept in this router's process"
        return error_reply(ApiError(404, reason, param="response_id"))

    @app.get("/v1/responses/<response:response_id>")
    async def show(response_id: str) -> Response:
        kept = None if store is None else store.get(response_id, owner())
        return missing(response_id) if kept is None else _kept_reply(kept.body)

    @app.get("/v1/responses/<response:response_id>/input_items")
    async def show_input(response_id: str) -> Response:
        kept = None if store is None else store.get(response_id, owner())
        if kept is None:
            return missing(response_id)
        digits = response_id.removeprefix(Responses.id_prefix)
        try:
            page = item_page(kept.items, digits, request.args)
        except ApiError as error:
            return error_reply(error)
        return Response(page, content_type="application/json")

    @app.delete("/v1/responses/<response:response_id>")
    async def delete(response_id: str) -> Response:
        if store is None or not store.remove(response_id, owner()):
            return missing(response_id)
        return json_reply(ResponseDeleted(id=response_id))

    @app.post("/v1/responses/<response:response_id>/cancel")
    async def cancel(response_id: str) -> Response:
        if store is None or store.get(response_id, owner()) is None:
            return missing(response_id)
        text = "the response has ended: end a request's connection to cancel its response"
        return error_reply(ApiError(400, text, param="response_id"))

    _ = show, show_input, delete, cancel


def _add_state(app: Quart, app_state: AppState) -> None:
    @app.get("/health")
    async def health() -> Response:
        return json_reply(Alive())

    @app.get("/readiness")
    async def readiness() -> Response:
        asked = request.args.get("pairs", "false")
        if asked not in ("true", "false"):
            return error_reply(ApiError(400, "pairs: expected true or false", param="pairs"))
        reason = app_state.unready
        if reason in (None, "starting") and asked == "true":
            reason = None if app_state.fleet.has_pair else "no instances"
        return json_reply(Ready()) if reason is None else json_reply(NotReady(status=reason), 503)

    _ = health, readiness


def _add_figures(app: Quart, app_state: AppState) -> None:
    @app.get("/metrics")
    async def metrics() -> Response:
        try:
            text = await app_state.control.metrics()
        except ApiError as error:
            return error_reply(error)
        if names := request.args.getlist("name[]"):
            text = only(text, frozenset(names))
        return Response(text, content_type=CONTENT_TYPE_LATEST)

    @app.get("/instances")
    async def instances() -> Response:
        fleet = app_state.fleet
        weights = fleet.weights()
        without_kv, unpaired = fleet.partners_without_kv(), fleet.unpaired()
        found = [
            _describe(
                fleet,
                i,
                weights.get(i.key, 1.0),
                without_kv.get(i.key, _NO_PARTNERS),
                unpaired.get(i.key, ""),
            )
            for i in fleet.instances
        ]
        slowest = fleet.slowest_probe()
        return json_reply(
            Instances(
                instances=found,
                key_ids=list(key_ids(app_state.keys)),
                kv_verify="strict" if fleet.only_verified else "report",
                kv_problems=[_report(one) for one in fleet.pair_problems()],
                kv_slowest=None if slowest is None else _report(slowest),
            )
        )

    _ = metrics, instances


@cache
def _openapi_json(*, is_admin: bool) -> bytes:
    """The OpenAPI document of a port: one for every app of a process."""
    return orjson.dumps(openapi_document(__version__, is_admin=is_admin))


def _add_about(app: Quart, document: bytes) -> None:
    @app.get("/version")
    async def version() -> Response:
        return json_reply(Version(version=__version__))

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(document, content_type="application/json")

    _ = version, openapi
