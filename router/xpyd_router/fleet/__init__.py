"""The instances of the fleet: heartbeats in, snapshots and health out.
See journey 1 of docs/architecture.md."""
