"""helm for the tests of the chart, without a cluster."""

from pathlib import Path

import pytest

from tests.chart.render import Helm
from tests.cluster.harness.tools import ToolMissing, helm_binary


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """helm with an empty home. Fetched once; where that cannot be, the test says so and skips."""
    try:
        binary: Path = helm_binary()
    except ToolMissing as missing:
        pytest.skip(str(missing))
    return Helm(binary, tmp_path_factory.mktemp("helm"))
