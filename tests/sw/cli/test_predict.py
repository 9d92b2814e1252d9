"""`plora predict`, `plora rtl exec` and `plora calibrate`: the same files, the same keys, agreeing cycles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from plora.sim.core.constants import load_constants
from plora.sw.cli import main

STREAM = """\
{"device_rows": 16, "device_columns": 300, "gpu_rows": 3, "chain": 1, "keep": "new"}
{"device_rows": 100, "device_columns": 16, "gpu_rows": 3, "source": "kept"}
{"device_rows": 7, "device_columns": 40, "queue": 1}
{"device_rows": 7, "device_columns": 40, "gpu_bytes": 3}
{"device_rows": 33, "device_columns": 8, "queue": 1, "arrival_cycle": 900}
"""


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    path = tmp_path / "stream.jsonl"
    path.write_text(STREAM)
    return path


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_predicted_cycles_are_those_of_the_rtl(capsys: pytest.CaptureFixture[str], stream: Path) -> None:
    arguments = ("--descriptors", stream, "--preset", "tiny", "--read-latency", 30, "--write-latency", 12)
    model, rtl = command(capsys, "predict", *arguments), command(capsys, "rtl", "exec", *arguments)
    assert rtl["match"] is True
    assert model["memory"]["read_latency_cycles"] == rtl["memory"]["read_latency_cycles"] == 30
    for predicted, measured in zip(model["descriptors"], rtl["descriptors"], strict=True):
        shared = ("line", "queue", "status")
        assert [predicted[key] for key in shared] == [measured[key] for key in shared]
        assert predicted["cycles"] == pytest.approx(measured["cycles"], abs=2)
        assert predicted["completed_cycle"] == pytest.approx(measured["completed_cycle"], abs=4)
    assert model["total_cycles"] == pytest.approx(rtl["total_cycles"], abs=4)
    assert [row["status"] for row in rtl["descriptors"]] == ["OK", "OK", "OK", "SIZE_MISMATCH", "OK"]


def test_with_random_stalls_the_prediction_is_the_mean(capsys: pytest.CaptureFixture[str], stream: Path) -> None:
    arguments = ("--descriptors", stream, "--preset", "tiny", "--stall", 0.2)
    model = command(capsys, "predict", *arguments)
    rtl = command(capsys, "rtl", "exec", *arguments, "--seeds", 12)
    assert rtl["seeds"] == 12
    assert model["total_cycles"] == pytest.approx(rtl["total_cycles"], rel=0.03, abs=8)


def test_energy_has_a_range_and_refused_descriptors_have_none(capsys: pytest.CaptureFixture[str], stream: Path) -> None:
    rows = command(capsys, "predict", "--descriptors", stream)["descriptors"]
    for row in rows:
        low, best, high = (row["energy_pj"][key] for key in ("low", "best", "high"))
        assert 0 < low < best < high or (row["status"] != "OK" and (low, best, high) == (0, 0, 0))


def test_a_dram_standard_replaces_latencies(capsys: pytest.CaptureFixture[str], stream: Path) -> None:
    found = command(capsys, "predict", "--descriptors", stream, "--preset", "full", "--dram", "lpddr5x-8533")
    # 64 x16 channels achieve 1000 of the 1024 GB/s that the ports take.
    assert found["memory"]["beat_cycles"] == pytest.approx(1.024, abs=0.002)
    assert 40 < found["memory"]["read_latency_cycles"] < 70


def test_output_for_people_names_every_descriptor(capsys: pytest.CaptureFixture[str], stream: Path) -> None:
    assert main(["predict", "--descriptors", str(stream)]) == 0
    text = capsys.readouterr().out
    assert "SIZE_MISMATCH" in text and "5 descriptors on small" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "unknown device preset"),
        (["--read-latency", "-1"], "--read-latency -1"),
        (["--stall", "0.95"], "stall is 0.95"),
        (["--dram", "ddr3"], "unknown DRAM standard"),
        (["--dram", "lpddr5x-8533", "--stall", "0.1"], "leave out"),
        (["--link", "string"], "unknown link"),
    ],
)
def test_bad_flags_are_one_line(
    capsys: pytest.CaptureFixture[str], stream: Path, arguments: list[str], message: str
) -> None:
    assert main(["predict", "--descriptors", str(stream), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plora: error: ") and message in error and error.count("\n") == 1


def test_a_missing_or_empty_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for verb in (["predict"], ["rtl", "exec"]):
        assert main([*verb, "--descriptors", str(tmp_path / "none")]) == 2
        assert "cannot be read" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.write_text("")
    assert main(["predict", "--descriptors", str(empty)]) == 2
    assert "no descriptors" in capsys.readouterr().err


def test_rtl_exec_refuses_bad_seeds(capsys: pytest.CaptureFixture[str], stream: Path) -> None:
    assert main(["rtl", "exec", "--descriptors", str(stream), "--preset", "tiny", "--seeds", "0"]) == 2
    assert "--seeds 0" in capsys.readouterr().err


def test_rtl_and_model_have_not_drifted_apart(capsys: pytest.CaptureFixture[str]) -> None:
    found = command(capsys, "calibrate", "--check")
    assert found["cases"] == 27 and set(found["by_preset"]) == {"small"}
    assert found["mean_abs_error"] <= 0.01
    assert found["max_abs_error"] >= found["mean_abs_error"]
    assert found["within_limits"] is True and found["stale_predictions"] == 0


def test_drift_fails_the_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    constants = load_constants()
    # A core that takes ten cycles longer to decode than the RTL's.
    slower = structs.replace(constants, decode=constants.decode + 10)
    monkeypatch.setattr("plora.sim.device.kernel.load_constants", lambda: slower)
    assert main(["calibrate", "--check", "--preset", "tiny", "--cases", "9", "--seeds", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["within_limits"] is False and found["stale_predictions"] > 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "0"], "--cases 0"),
        (["--preset", "huge"], "unknown device preset"),
        (["--write", "--preset", "small"], "replaces the whole result"),
    ],
)
def test_calibrate_refuses_what_makes_no_sense(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err
