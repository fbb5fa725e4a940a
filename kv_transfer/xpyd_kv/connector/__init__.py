"""The engine-facing side. `api` is the seam; `producer` is P's half, `consumer` D's."""
