"""A step as a timeline in Chrome's trace format, which Perfetto reads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from plora.sim.system.clock import PS_PER_US
from plora.sim.system.compose import full_graph
from plora.sim.system.decode import DecodeRun
from plora.sim.system.engine import WAIT, simulate


def step_trace(run: DecodeRun, layers: int | None = 4) -> str:
    """Return the first step of `run`, played as events, with `layers` of each kind of layer (None: all).

    The trace shows the `dependency` composition whatever the run used: the others have no order.
    """
    work = run.setting.work
    if layers is not None:
        work = replace(work, kinds=tuple(replace(kind, count=min(kind.count, layers)) for kind in work.kinds))
    graph = full_graph(replace(run.setting, work=work), list(run.loads))
    schedule = simulate(graph)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{run.spec.title}, one decode step"}}
    ]
    for number, name in enumerate(graph.resources):
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}})
    for task in range(len(graph)):
        if graph.resource[task] == WAIT or not graph.duration_ps[task]:
            continue
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": graph.resource[task],
                "name": graph.label[task],
                "cat": graph.kind[task],
                "ts": schedule.start_ps[task] / PS_PER_US,
                "dur": graph.duration_ps[task] / PS_PER_US,
                "args": {"bytes": graph.moved_bytes[task], "limit": graph.limit[task]},
            }
        )
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, separators=(",", ":"))
