"""`plora rtl bench` and `plora rtl wave`: what they print, what they write, what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import pywellen

from plora.hw.defs.config import preset
from plora.sw.cli import main
from plora.sw.rtl_cases import bench_cases

TINY = preset("tiny")


def test_bench_gives_a_row_a_case_with_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rtl", "bench", "--preset", "tiny", "--cases", "gemv-b-rank8-64k-*, gemm-a-*", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["case"]: row for row in document["cases"]}
    assert set(rows) == {
        *("gemv-b-rank8-64k-batch1", "gemv-b-rank8-64k-batch2"),
        *("gemm-a-batch32", "gemm-a-batch32-bf16", "gemm-a-tails-batch31"),
    }
    for row in rows.values():
        assert {"operation", "shape", "dtype", "cycles", "useful_beat_fraction", "multiply_add_utilisation"} <= set(row)
        assert row["pass"] is True and row["checks"]
    for dtype, name in (("fp16", "gemm-a-batch32"), ("bf16", "gemm-a-batch32-bf16")):
        assert (rows[name]["dtype"], rows[name]["multiply_add_utilisation"]) == (dtype, 1)
    assert rows["gemv-b-rank8-64k-batch1"]["bound"] == "drain"
    assert document["pass"] is True and document["missed"] == []


def test_bench_fails_and_says_where_a_limit_is_missed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plora.sw.rtl_bench.GAP_LIMIT_CYCLES", -1)
    assert main(["rtl", "bench", "--preset", "tiny", "--cases", "gemm-a-batch32"]) == 1
    assert "MISSED gemm-a-batch32: gap in cycles is" in capsys.readouterr().out


def test_bench_lists_its_cases_without_running_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rtl", "bench", "--preset", "full", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["cases"]
    assert [row["case"] for row in listed] == [case.name for case in bench_cases(preset("full"))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "unknown device preset"),
        (["--cases", "gemv-z"], "'gemv-z' is no case of tiny"),
        (["--cases", "gemv-*,"], "'' is no case of tiny"),
        (["--seed", "-1"], "--seed -1"),
    ],
)
def test_bench_refuses_what_makes_no_sense(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["rtl", "bench", "--preset", "tiny", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plora: error: ") and message in error and error.count("\n") == 1


def test_a_wave_file_shows_every_beat_of_the_descriptor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "waves.fst"
    arguments = ["--case", "gemm-a-batch32", "--preset", "tiny", "--out", str(path)]
    assert main(["rtl", "wave", *arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert path.stat().st_size == said["size_bytes"] > 10_000
    assert list(tmp_path.iterdir()) == [path]
    waves = {var.full_name: var for var in pywellen.Waveform(str(path)).all_vars()}
    beats = list(waves["ndp.ndp_device.counters.beats"].tv)
    # 64 x 64 on two channels, 16 pairs of rows: 32 groups of two beats, 16 times.
    assert [value for _, value in beats] == list(range(32 * 2 * 16 + 1))
    first, last = (step / said["steps_per_cycle"] for step, _ in (beats[1], beats[-1]))
    assert said["start_cycle"] < first < last < said["end_cycle"]
    # Words of memory are there whole.
    assert waves["ndp.m_axi_0__rdata"].size == 512 and len(list(waves["ndp.m_axi_0__rdata"].tv)) > 64
    assert len(list(waves["ndp.clk"].tv)) > 2 * (said["end_cycle"] - 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "gemm-a-batch32", "--out", "x.txt"], "ends in .fst or .vcd"),
        (["--case", "gemm-a-batch32", "--out", "none/x.fst"], "there is no folder"),
        (["--case", "gemm-a-*", "--out", "x.fst"], "names 3 cases"),
        (["--case", "none", "--out", "x.fst"], "is no case of tiny"),
        (["--descriptors", "none.jsonl", "--out", "x.fst"], "cannot be read"),
        (["--case", "gemm-a-batch32"], "--out"),
        (["--out", "x.fst"], "--descriptors --case"),
        (["--case", "gemm-a-batch32", "--out", "x.fst", "--stall", "2"], "stall is 2"),
        (["--case", "gemm-a-batch32", "--out", "x.fst", "--seed", "-1"], "--seed -1"),
    ],
)
def test_wave_refuses_what_makes_no_sense_and_leaves_no_file(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["rtl", "wave", "--preset", "tiny", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plora: error: ") and message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_no_wave_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("plora.sw.stream_run.run_stream", fail)
    path = tmp_path / "waves.fst"
    assert main(["rtl", "wave", "--case", "gemm-a-batch32", "--preset", "tiny", "--out", str(path)]) == 130
    assert list(tmp_path.iterdir()) == []
