"""The operator: the shell around plan() and the manifests that talks to the Kubernetes API.

    kopf's watches -> Cache -> FleetQueue -> Reconciler: decide() -> server-side apply -> report()
                        ^                                                |
                        +------------- answers of own writes ------------+

Only this package knows kopf and kubernetes. `decision` is its pure half and decides, with
xpyd_operator.plan, .manifests and .status; the modules here move bytes and keep time.
See journey 3 of docs/architecture.md.
"""
