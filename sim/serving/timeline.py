"""A serving run as a timeline in Chrome's trace format, which Perfetto reads."""

from __future__ import annotations

import json
from typing import Any

from plora.sim.serving.outcome import Outcome
from plora.sim.system.clock import PS_PER_S, PS_PER_US
from plora.sim.workload.requests import Requests


def run_trace(title: str, requests: Requests, outcome: Outcome) -> str:
    """Return counters (batch, queue, KV blocks) and, for every request, spans of waiting, prompt and decoding."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    for time, running, waiting, blocks in outcome.samples:
        at = time / PS_PER_US
        events.append(
            {"ph": "C", "pid": 1, "ts": at, "name": "requests", "args": {"running": running, "waiting": waiting}}
        )
        events.append({"ph": "C", "pid": 1, "ts": at, "name": "KV blocks", "args": {"used": blocks}})
    free: list[float] = []
    arrivals = (requests.arrival_s * PS_PER_S / PS_PER_US).tolist()
    columns = (outcome.admitted_ps, outcome.first_token_ps, outcome.finished_ps)
    for number, (arrived, *stamps) in enumerate(
        zip(arrivals, *((column / PS_PER_US).tolist() for column in columns), strict=True)
    ):
        admitted, first, finished = stamps
        lane = next((n for n, end in enumerate(free) if end <= admitted), len(free))
        if lane == len(free):
            free.append(0.0)
        free[lane] = finished
        about = {"request": number, "adapter": int(requests.adapter[number]), "queued_us": admitted - arrived}
        for name, start, end in (("prompt", admitted, first), ("decode", first, finished)):
            if end > start:
                span = {"ph": "X", "pid": 2, "tid": lane, "name": name, "ts": start, "dur": end - start}
                events.append({**span, "args": about})
    events.append({"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "requests by seat"}})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))
