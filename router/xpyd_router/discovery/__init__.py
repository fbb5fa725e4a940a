"""How the router learns which engines there are and live: heartbeats and probes."""
