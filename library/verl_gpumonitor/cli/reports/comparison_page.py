# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A comparison as a page of HTML."""

from .charts import stage_class
from .comparison import Comparison
from .gather import Run
from .page import chart_views, environment, facts


def html(comparison: Comparison, before: Run, after: Run) -> str:
    """Return the page of two runs."""
    stages = dict.fromkeys(row.stage for run in (before, after) for row in run.stages)
    context = {
        "kind": "Comparison",
        "title": f"{comparison.before} and {comparison.after}",
        "facts": [f"before: {', '.join(facts(before))}", f"after: {', '.join(facts(after))}"],
        "comparison": comparison,
        "legend": [(stage_class(stage), stage) for stage in stages],
        "sides": [
            {"title": title, "charts": chart_views(run)} for title, run in (("Before", before), ("After", after))
        ],
    }
    return environment().get_template("comparison.html.j2").render(context)
