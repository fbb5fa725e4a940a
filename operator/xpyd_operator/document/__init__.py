"""The InferenceFleet document as typed values, the same for the cluster and for local mode.

`load_fleet`, `parse_fleet`, `parse_object` and `read_object` are the only entry points and report
all mistakes at once. Nothing here knows how a fleet is run. See journey 3 of docs/architecture.md.
"""
