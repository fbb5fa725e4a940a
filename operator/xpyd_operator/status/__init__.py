"""Reads a fleet's Kubernetes objects: what plan() looks at, problems, statuses and Events.

    Children --fleet_seen--> FleetSeen (what plan() looks at)
    Children --find_problems--> Problem, ... --fleet_status--> the fleet's status --events--> Events

Objects come raw, as the API server returns them, and no content makes this fail. Time is an
argument, as RFC 3339 text. plan() decides what is done.
"""

from xpyd_operator.status.children import Children, fleet_seen
from xpyd_operator.status.conditions import INVALID, INVALID_TEMPLATE
from xpyd_operator.status.fleet import (
    EventText,
    events,
    fleet_status,
    invalid_pool_statuses,
    invalid_status,
    leaving_status,
    pool_statuses,
)
from xpyd_operator.status.problems import Problem, find_problems

__all__ = [
    "INVALID",
    "INVALID_TEMPLATE",
    "Children",
    "EventText",
    "Problem",
    "events",
    "find_problems",
    "fleet_seen",
    "fleet_status",
    "invalid_pool_statuses",
    "invalid_status",
    "leaving_status",
    "pool_statuses",
]
