"""A real Kubernetes cluster for tests: the product's own words are in docs/test-cluster.md.

`up` and `attach` give a `Cluster`. Tests take the fixtures of tests/cluster/conftest.py.
"""

from tests.cluster.harness.cluster import Cluster, attach, up
from tests.cluster.harness.components import ClusterError
from tests.cluster.harness.waiting import NotInTime, wait_for

__all__ = ["Cluster", "ClusterError", "NotInTime", "attach", "up", "wait_for"]
