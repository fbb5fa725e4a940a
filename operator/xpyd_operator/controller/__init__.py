"""The operator: the shell around plan() and objects that talks to the Kubernetes API.

    kopf's watches -> inbox -> Cache -> FleetQueue -> decide() -> Api (server-side apply) -> status
                                             ^                            |
                                             +---- answers of own writes -+

Only this package knows kopf and kubernetes. What is decided is decided in pure modules (`decide`,
`pacing`, xpyd_operator.plan, .objects, .observe); the rest moves bytes and keeps time.
"""
