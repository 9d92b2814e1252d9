"""A recorded vLLM 0.19 run, two GPUs as data-parallel replicas, against this simulator.

The replicas shared their experts (expert parallelism), which is not modelled: here each GPU reads
all of them and exchanges nothing. Requests alternate between the replicas. The GPU is its data sheet
and the kernel corrections fitted on another GPU; nothing is fitted to this run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plora.sim.serving.metrics import summary
from plora.sim.serving.options import ServeOptions
from plora.sim.serving.simulate import Simulation
from plora.sim.system.config import RunOptions, resolve
from plora.sim.workload.requests import NO_ADAPTER
from plora.sim.workload.traces import read_trace

REPLICAS = 2


def test_a_recorded_run_is_met_within_five_percent_in_tpot_and_twenty_in_ttft(shared_data: Path) -> None:
    path = shared_data / "reference/vllm_runs/RTXPRO6000_Qwen3-30B-A3B-Instruct-2507.vllm_requests.jsonl"
    if not path.is_file():
        pytest.skip(f"no recorded run at {path}")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    real_ttft = np.mean([row["first_token_ts"] - row["queued_ts"] for row in rows]) * 1e3
    real_tpot = np.mean([(r["last_token_ts"] - r["first_token_ts"]) / (r["output_toks"] - 1) for r in rows]) * 1e3
    trace = read_trace(path)
    choices = RunOptions(
        systems=("all-hbm",), model="qwen3-30b-a3b", gpu="rtx-pro-6000", workload=str(path), num_adapters=0
    )
    resolved = resolve(choices)
    options = ServeOptions(max_num_seqs=128, max_num_batched_tokens=2048)
    found = []
    for replica in range(REPLICAS):
        mine = slice(replica, None, REPLICAS)
        share = replace(
            trace,
            arrival_s=trace.arrival_s[mine],
            input_tokens=trace.input_tokens[mine],
            output_tokens=trace.output_tokens[mine],
            adapter=np.full(len(trace.arrival_s[mine]), NO_ADAPTER, dtype=np.int32),
        )
        outcome = Simulation(resolved, resolved.systems[0], options, share).run()
        found.append(summary(share, outcome, options))
    tpot, ttft = (np.mean([one[name]["mean"] for one in found]) for name in ("tpot_ms", "ttft_ms"))
    assert tpot == pytest.approx(real_tpot, rel=0.05), f"TPOT {tpot:.2f} ms, recorded {real_tpot:.2f} ms"
    assert ttft == pytest.approx(real_ttft, rel=0.20), f"TTFT {ttft:.1f} ms, recorded {real_ttft:.1f} ms"
