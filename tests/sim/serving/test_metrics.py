from __future__ import annotations

import numpy as np
import pytest

from plora.sim.serving.metrics import requests_csv, samples_csv, spread, summary
from plora.sim.serving.options import ServeOptions
from plora.sim.serving.outcome import Outcome
from plora.sim.workload.requests import Requests

SECOND = 10**12


def outcome() -> tuple[Requests, Outcome]:
    """Two requests: one of three tokens at 0 s, one of a single token at 1 s."""
    requests = Requests(
        arrival_s=np.array([0.0, 1.0]),
        input_tokens=np.array([5, 6], dtype=np.int32),
        output_tokens=np.array([3, 1], dtype=np.int32),
        adapter=np.array([4, -1], dtype=np.int32),
        adapters=5,
    )
    when = Outcome(
        admitted_ps=np.array([0, 2 * SECOND]),
        first_token_ps=np.array([1 * SECOND, 3 * SECOND]),
        finished_ps=np.array([4 * SECOND, 3 * SECOND]),
        preemptions=np.array([0, 1]),
        step_ps=[1 * SECOND, 2 * SECOND, 1 * SECOND],
        step_tokens=[0, 1, 1],
        samples=[(1 * SECOND, 1, 0, 7)],
        duration_ps=4 * SECOND,
    )
    return requests, when


def test_latencies_follow_their_definitions() -> None:
    found = summary(*outcome(), ServeOptions(slo_ttft_ms=1500, slo_tpot_ms=2000))
    assert found["ttft_ms"]["mean"] == 1500
    assert found["queueing_ms"]["mean"] == 500
    assert found["e2e_ms"]["mean"] == 3000
    assert found["tpot_ms"] == {"mean": 1500, "p50": 1500, "p90": 1500, "p95": 1500, "p99": 1500}
    assert found["itl_ms"]["mean"] == 1500
    assert found["throughput_tokens_per_s"] == 1
    assert found["total_throughput_tokens_per_s"] == pytest.approx(15 / 4)
    assert (found["good_requests"], found["goodput_requests_per_s"]) == (1, 0.25)
    assert found["preemptions"] == 1


def test_percentiles_are_values_that_occurred_and_respect_weights() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0]) == {"mean": 2.5, "p50": 2.0, "p90": 4.0, "p95": 4.0, "p99": 4.0}
    weighted = spread([10.0, 1.0], [1, 99])
    assert weighted["mean"] == pytest.approx(1.09)
    assert (weighted["p50"], weighted["p99"]) == (1.0, 1.0)
    assert spread([])["mean"] == 0.0


def test_tables_have_units_in_their_headers_and_a_line_each() -> None:
    requests, when = outcome()
    lines = requests_csv(requests, when).splitlines()
    assert lines[0].startswith("request,arrived_at,num_prefill_tokens,num_decode_tokens,lora_id,queueing_ms,ttft_ms")
    assert lines[2].split(",")[7] == "", "a single token has no TPOT"
    assert samples_csv(when).splitlines()[1] == "1.000000000,1,0,7"
