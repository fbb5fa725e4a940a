"""The admin API: who is in the fleet with what to do, and cordons. Routes in Quart, under /admin.

It has a key of its own (`--admin-key-file`): who may send requests may not take instances out. An
instance is drained by a cordon and the wait until its calls are none.
"""

from __future__ import annotations

import hmac
import logging

from quart import Blueprint, Response, request

from xpyd_core.errors import ApiError
from xpyd_router.fleet.registry import Instance
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import state_of
from xpyd_router.serving.replies import error_reply, json_reply
from xpyd_router.serving.shapes import AdminInstance, AdminState
from xpyd_router.serving.surface import Surface

logger = logging.getLogger(__name__)


def is_admin(keys: tuple[bytes, ...], authorization: str) -> bool:
    """Whether the header is `Bearer` with one of the keys; in constant time for each."""
    scheme, _, token = authorization.partition(" ")
    given = token.strip().encode("utf-8", "replace")
    return scheme.lower() == "bearer" and any(hmac.compare_digest(key, given) for key in keys)


def admin_routes(surface: Surface) -> Blueprint:
    """The routes. Without keys each of them answers 403."""
    routes, fleet = Blueprint("admin", __name__, url_prefix="/admin"), surface.fleet

    @routes.before_request
    async def check() -> None:
        if not surface.admin_keys:
            raise ApiError(403, "the admin API is closed: start the router with --admin-key-file")
        if not is_admin(surface.admin_keys, request.headers.get("Authorization", "")):
            raise ApiError(401, "Authorization: expected Bearer and a key of --admin-key-file")

    @routes.errorhandler(ApiError)
    async def refuse(error: ApiError) -> Response:
        response = error_reply(error)
        if error.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response

    @routes.get("/state")
    async def state() -> Response:
        rows = [_describe(fleet, instance) for instance in fleet.instances]
        return json_reply(AdminState(is_draining=surface.is_draining, instances=rows))

    @routes.get("/instances/<name>")
    async def show(name: str) -> Response:
        return json_reply(_describe(fleet, _find(fleet, name)))

    @routes.post("/instances/<name>/cordon")
    async def cordon(name: str) -> Response:
        return await _cordon(surface, name, is_cordoned=True)

    @routes.post("/instances/<name>/uncordon")
    async def uncordon(name: str) -> Response:
        return await _cordon(surface, name, is_cordoned=False)

    # Quart's decorators register them; pyright sees names that nobody reads.
    _ = check, refuse, state, show, cordon, uncordon
    return routes


async def _cordon(surface: Surface, name: str, *, is_cordoned: bool) -> Response:
    fleet = surface.fleet
    instance = _find(fleet, name)
    await surface.whole.cordon(instance.key, is_cordoned=is_cordoned)
    logger.info("%s %s", "cordoned" if is_cordoned else "uncordoned", instance.name)
    return json_reply(_describe(fleet, _find(fleet, instance.key.http)))


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


def _describe(fleet: FleetView, instance: Instance) -> AdminInstance:
    load = fleet.load(instance.key)
    return AdminInstance(
        instance=instance.name,
        type=instance.beat.type,
        state=state_of(instance),
        is_cordoned=instance.is_cordoned,
        http_address=instance.key.http,
        incarnation=instance.beat.incarnation,
        in_flight=load.ours,
        others_in_flight=load.foreign_requests,
    )
