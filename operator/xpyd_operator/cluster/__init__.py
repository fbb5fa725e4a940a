"""`kubectl xpyd`: a person's commands to fleets in a cluster, besides `rollout`.

`page`, `why`, `leaving` and `waterfall` are pure: they make texts of objects as the API server
returns them, and of lines of logs. `command` asks kubectl for those, as the user whom kubectl
knows. The operator does not know this package. See docs/adr/0109.
"""
