"""A recorded vLLM 0.19 run, two data-parallel replicas that share their experts, against this simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from plora.hw.defs.errors import UserError
from plora.sim.serving.validation import compare, main, table


def test_a_recorded_run_is_met_within_five_percent_in_tpot_and_ten_in_ttft(shared_data: Path) -> None:
    path = shared_data / "reference/vllm_runs/RTXPRO6000_Qwen3-30B-A3B-Instruct-2507.vllm_requests.jsonl"
    if not path.is_file():
        pytest.skip(f"no recorded run at {path}")
    rows = {row.metric: row for row in compare(path)}
    assert abs(rows["TPOT mean (ms)"].difference) < 0.05, table(list(rows.values()))
    for metric in rows:
        if metric.startswith("TTFT mean"):
            assert abs(rows[metric].difference) < 0.10, table(list(rows.values()))
    assert abs(rows["duration (s)"].difference) < 0.05


def test_scheduling_ahead_as_the_recorded_engine_does_meets_the_time_of_prompts(shared_data: Path) -> None:
    path = shared_data / "reference/vllm_runs/RTXPRO6000_Qwen3-30B-A3B-Instruct-2507.vllm_requests.jsonl"
    if not path.is_file():
        pytest.skip(f"no recorded run at {path}")
    rows = {row.metric: row for row in compare(path, async_scheduling=True)}
    assert abs(rows["prompt, mean (ms)"].difference) < 0.10, table(list(rows.values()))
    assert abs(rows["TPOT mean (ms)"].difference) < 0.05, table(list(rows.values()))


def test_a_file_that_is_no_recorded_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text('{"arrival_time": 1}\n')
    with pytest.raises(UserError, match="no recorded run"):
        compare(file)
    assert main([str(file)]) == 2
    assert main([]) == 2
    assert "no recorded run" in capsys.readouterr().err
