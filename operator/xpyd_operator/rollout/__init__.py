"""`xpyd rollout`: a person's commands to a fleet in a cluster, through kubectl.

`view` (status, history) and `edit` (plan) are pure: they make tables and verdicts of objects as the
API server returns them. `command` asks kubectl for them and writes the document. The operator does
not know this package.
"""
