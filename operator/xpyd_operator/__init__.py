"""Turns a fleet document into running pods, and keeps them so.

    document    the document: typed, bounded, every mistake named
    plan        what should run, and what to do next: pure
    manifests   Kubernetes objects as YAML values: pure
    status      what the cluster shows, as conditions, problems and events: pure
    controller  the operator: watches, decides, writes; the only folder that knows Kubernetes
    up          `xpyd up` and its sister commands: pods as processes on this machine

docs/architecture.md shows the way of one edit through them.
"""
