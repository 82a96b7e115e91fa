# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""One Helm, and one set of renderings, for all tests of the chart."""

import pytest

from tests.unit.chart.rendering import Chart, Rendered, helm_program


@pytest.fixture(scope="session")
def chart() -> Chart:
    """The chart, to be rendered with any values."""
    return Chart(helm_program())


@pytest.fixture(scope="session")
def default(chart: Chart) -> Rendered:
    """The chart with its own values."""
    return chart.render()
