from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plora.sw.cli import main

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "queueing_ms")


def object_of(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["serve", *flags, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_one_system_gives_every_metric_with_percentiles(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(capsys, "--num-requests", "40", "--request-rate", "20")
    for name in LATENCIES:
        assert {"mean", "p50", "p90", "p95", "p99"} == set(found[name])
    assert found["completed_requests"] == found["requests"] == 40
    assert found["config"]["serving"]["request_rate"] == 20
    assert found["config"]["preset"] == "priced"
    assert "law: uniform" in found["config"]["workload_origin"]["adapters"]
    assert found["throughput_tokens_per_s"] > 0


def test_several_systems_give_a_list_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    flags = ["serve", "--num-requests", "20", "--system", "plora", "s-lora", "--out", str(out), "--json"]
    assert main(flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["system"] for one in found["systems"]] == ["plora", "s-lora"]
    assert json.loads((out / "summary.json").read_text())["systems"] == found["systems"]
    assert (out / "requests-plora.csv").read_text().count("\n") == 21
    assert (out / "samples-s-lora.csv").read_text().startswith("time_s,running,waiting,kv_blocks\n")
    events = json.loads((out / "trace-plora.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(event["name"] == "decode" for event in spans) == 20
    lanes: dict[int, float] = {}
    for event in sorted(spans, key=lambda e: e["ts"]):
        assert event["ts"] >= lanes.get(event["tid"], 0.0) - 1e-6, "two requests in one seat"
        lanes[event["tid"]] = event["ts"] + event["dur"]


def test_a_trace_brings_arrivals_and_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    rows = "".join(f"{n * 0.5},{100 + n},10\n" for n in range(12))
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    found = object_of(capsys, "--workload", str(path), "--num-adapters", "7", "--model", "llama3-8b")
    assert found["requests"] == 12
    assert found["computed_prompt_tokens"] == sum(100 + n for n in range(12))
    assert "uniform over 7 adapters" in found["config"]["workload_origin"]["adapters"]
    assert main(["serve", "--workload", str(path), "--request-rate", "3"]) == 2
    assert "leave --request-rate out" in capsys.readouterr().err


def test_no_adapters_serve_the_base_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(capsys, "--num-requests", "20", "--num-adapters", "0", "--system", "plora")
    assert found["token_steps_by_strategy"] == {}
    assert found["config"]["workload_origin"]["adapters"].startswith("none")


def test_prompts_that_begin_alike_are_found_in_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-requests", "30", "--request-rate", "5", "--shared-prefix-tokens", "130", "--num-adapters", "2")
    found = object_of(capsys, *flags, "--enable-prefix-caching")
    assert found["prefix_cache_hit_tokens"] % 128 == 0, "whole blocks of 16"
    assert found["prefix_cache_hit_tokens"] == 28 * 128, "each adapter's first prompt has to compute it"
    assert found["computed_prompt_tokens"] + found["prefix_cache_hit_tokens"] == 30 * 256
    assert object_of(capsys, *flags)["prefix_cache_hit_tokens"] == 0


def test_a_law_of_popularity_replaces_the_workloads_own(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-requests", "20", "--popularity", "skewed", "--popularity-alpha", "1.5", "--num-adapters", "40")
    assert "skewed alpha=1.5 over 40" in object_of(capsys, *flags)["config"]["workload_origin"]["adapters"]
    lmsys = object_of(capsys, "--num-requests", "20", "--workload", "lmsys", "--popularity", "identical")
    assert "identical over 27" in lmsys["config"]["workload_origin"]["adapters"]


def test_the_same_flags_give_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        assert main(["serve", "--num-requests", "30", "--workload", "lmsys", "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_prompts_may_have_steps_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-requests", "30", "--request-rate", "30")
    mixed = object_of(capsys, *flags)
    apart = object_of(capsys, *flags, "--no-enable-chunked-prefill")
    assert mixed["config"]["serving"]["enable_chunked_prefill"] is True
    assert apart["config"]["serving"]["enable_chunked_prefill"] is False
    assert mixed["ttft_ms"] != apart["ttft_ms"]


def test_without_flags_a_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--num-requests", "25"]) == 0
    out = capsys.readouterr().out
    assert "PLoRA (NSD)" in out
    assert "TTFT ms" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-requests", "0"], "num_requests is 0"),
        (["--request-rate", "-1"], "request_rate is -1"),
        (["--max-num-seqs", "9000"], "leaves no room for prompts"),
        (["--system", "warp"], "unknown system 'warp'"),
        (["--workload", "nowhere.csv"], "nowhere.csv"),
        (["--input-tokens", "9000000", "--num-requests", "2"], "needs"),
        (["--model", "llama3.1-405b"], "the weights take"),
        (["--shared-prefix-tokens", "-1"], "shared_prefix_tokens is -1"),
        (["--data-parallel-size", "0"], "data_parallel_size is 0"),
        (["--enable-expert-parallel"], "give a data_parallel_size above 1"),
        (["--enable-expert-parallel", "--data-parallel-size", "2"], "llama2-7b has 0 routed experts"),
        (["--tensor-parallel-size", "3"], "do not divide over 3 GPUs"),
        (["--popularity-alpha", "2"], "give --popularity"),
        (["--workload", "lmsys", "--popularity", "skewed", "--popularity-alpha", "0"], "alpha is 0"),
        (["--cv", "1e300", "--request-rate", "5"], "cv of the arrivals is 1e+300"),
        (["--system", "pure-cxl", "--link-gb-per-s", "0.001"], "lasts longer than 9e+06 s"),
        (["--system", "ns", "--link-gb-per-s", "0.001", "--output-tokens", "2000"], "lasts longer than 9e+06 s"),
        (["--block-size", "x"], "invalid int value"),
    ],
)
def test_bad_input_is_one_clear_line(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["serve", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("plora: error: ")
    assert message in last


def test_compositions_without_order_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('composition = "overlap"\n')
    assert main(["serve", "--config", str(path)]) == 2
    assert "composition overlap has no order of events" in capsys.readouterr().err
