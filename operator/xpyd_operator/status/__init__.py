"""Reads a fleet's Kubernetes objects: what plan() looks at, problems, statuses and Events.

    Children --fleet_seen--> FleetSeen (what plan() looks at)
    Children --find_problems--> Problem, ... --fleet_status--> the fleet's status --events--> Events

Objects come raw, as the API server returns them, and no content makes this fail. Time is an
argument, as RFC 3339 text. plan() decides what is done. See journey 3 of docs/architecture.md.
"""
