"""What a fleet's Kubernetes objects say, for plan() and for people. Pure.

    Children --fleet_seen--> FleetSeen (what plan() looks at)
    Children --find_problems--> Problem, ... --fleet_status--> the fleet's status --events--> Events

Objects come raw, as the API server has them, and nothing in them makes this fail. Time comes in as
RFC 3339 text. What is done about anything is plan()'s business.
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
