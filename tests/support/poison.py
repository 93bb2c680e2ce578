"""What an earlier replay left must not show."""

from __future__ import annotations

from typing import Any

from models.interfaces.capturable import Plan
from service.graphs.runner import GraphRunner, Run


def poison_replays(runner: GraphRunner) -> None:
    """Before each replay of this runner static buffers hold NaN and indices out of range, and outputs NaN or -1."""

    def poisoned(plan: Plan, **options: Any) -> Run:
        if options.get("eager") is None and (graph := runner.graph_for(plan.required)) is not None:
            graph.static.device.fill_(0xFF)
            for output in graph.capture.outputs.values():
                output.fill_(float("nan") if output.is_floating_point() else -1)
        return GraphRunner.run(runner, plan, **options)

    runner.run = poisoned  # type: ignore[method-assign]
