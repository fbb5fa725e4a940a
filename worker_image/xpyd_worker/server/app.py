"""Which path is which handler's. Quart on uvicorn (asgi.py)."""

from __future__ import annotations

from typing import Any, cast

from quart import Quart

from xpyd_core import tokenizer_files
from xpyd_worker.server.admin import Admin
from xpyd_worker.server.api import Api
from xpyd_worker.server.asgi import AsgiApp
from xpyd_worker.server.bodies import MAX_BODY_BYTES, ChargedBodies
from xpyd_worker.server.request_ids import register_request_ids
from xpyd_worker.server.responses import register_errors


def create_app(api: Api, admin: Admin) -> Quart:
    """The Quart app over both."""
    app = Quart("xpyd_worker", static_folder=None)
    # Quart's own place for middleware, whose two types of an ASGI app do not fit each other.
    charged: Any = ChargedBodies(cast("AsgiApp", app.asgi_app), api.admission.bodies)
    app.asgi_app = charged
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    # A stream may take longer than any fixed time; what is bounded is each write (asgi.py).
    app.config["RESPONSE_TIMEOUT"] = None
    register_request_ids(app)
    register_errors(app)
    get, post = ["GET"], ["POST"]
    for path, handler, methods in (
        ("/v1/completions", api.completions, post),
        ("/v1/chat/completions", api.chat, post),
        ("/v1/models", api.models, get),
        ("/v1/models/<path:name>", api.model, get),
        (tokenizer_files.PATH, admin.tokenizer_files, get),
        ("/tokenize", admin.tokenize, post),
        ("/detokenize", admin.detokenize, post),
        ("/health", admin.health, get),
        ("/ping", admin.health, [*get, *post]),
        ("/live", admin.live, get),
        ("/load", admin.load, get),
        ("/version", admin.version, get),
        ("/metrics", admin.show_metrics, get),
        ("/reset_prefix_cache", admin.reset_prefix_cache, post),
        ("/drain", admin.drain, post),
        ("/kv/release", admin.release, post),
        ("/kv/probe", admin.probe, post),
    ):
        app.add_url_rule(path, path, view_func=handler, methods=methods)
    return app
