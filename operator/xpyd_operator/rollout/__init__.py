"""`xpyd rollout`: a person's commands to a fleet in a cluster, through kubectl.

`view` is pure: it makes tables and verdicts of objects as the API server returns them. `command`
asks kubectl for them and writes the document. The operator does not know this package.
"""
