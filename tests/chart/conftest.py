"""helm for the tests of the chart, without a cluster."""

from pathlib import Path

import pytest

from tests.chart.render import Helm
from tests.cluster.harness.tools import ToolMissing, helm_binary
from tests.cluster.needs import skip_for


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """helm with an empty home. Fetched once; where that cannot be, the test says so and skips."""
    try:
        binary: Path = helm_binary()
    except ToolMissing as missing:
        skip_for(str(missing))
        raise
    return Helm(binary, tmp_path_factory.mktemp("helm"))
