"""Who is in the fleet: heartbeats in, snapshots and health out."""
