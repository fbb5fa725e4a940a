"""What the HTTP side works with: one value, made by `main`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from xpyd_router.admission.admission import Admission
from xpyd_router.config import RouterConfig
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics
from xpyd_router.requests.flow import Flow
from xpyd_router.serving.access_log import AccessLog
from xpyd_router.serving.whole import Whole


@dataclass
class Surface:
    """See the module. `is_draining` is set by `main` at SIGTERM."""

    config: RouterConfig
    fleet: FleetView
    admission: Admission
    flow: Flow
    metrics: RouterMetrics
    """Of this process."""
    whole: Whole
    access_log: AccessLog
    clock: Callable[[], float]
    created: int
    """Unix time of the start: `created` of the models."""
    admin_keys: tuple[bytes, ...] = field(default=(), repr=False)
    """What opens /admin; none: it is closed."""
    is_draining: bool = False
