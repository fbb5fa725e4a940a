"""The instances of the fleet: heartbeats in, snapshots and health out."""
