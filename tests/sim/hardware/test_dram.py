"""DRAM: closed form against public cycle-level figures and against the cycle-level model here."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.errors import UserError
from plora.sim.calibration import dram as comparison
from plora.sim.hardware.device import load_device
from plora.sim.hardware.dram import (
    Controller,
    achieved_gb_per_s,
    device_gb_per_s,
    idle_latency_ns,
    load_standard,
    load_standards,
    refresh_share,
)
from plora.sim.hardware.dram_cycles import simulate, stream

NAMES = sorted(load_standards())
LPDDR5 = load_standard("lpddr5-6400")
PER_BURST = Controller(access_bytes=32)


@pytest.mark.parametrize(
    ("case", "public"),
    [
        ({"refresh": False}, 12.80),
        ({}, 11.95),
        ({"read_fraction": 0.5}, 9.01),
    ],
)
def test_lpddr5_streams_are_within_two_percent_of_ramulator(case: dict[str, Any], public: float) -> None:
    assert achieved_gb_per_s(LPDDR5, controller=PER_BURST, **case) == pytest.approx(public, rel=0.02)


def test_hbm3_reads_are_within_two_percent_of_ramulator() -> None:
    hbm3 = load_standard("hbm3-6400")
    assert achieved_gb_per_s(hbm3) == pytest.approx(23.36, rel=0.02)


@pytest.mark.parametrize(("write_every", "refresh", "public"), [(0, False, 12.80), (0, True, 11.95), (2, True, 9.01)])
def test_the_cycle_level_model_agrees_with_ramulator_too(write_every: int, refresh: bool, public: float) -> None:
    rate = simulate(LPDDR5, stream(LPDDR5, 32, write_every), 6000, controller=PER_BURST, refresh=refresh)
    assert rate == pytest.approx(public, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("run", "reads"), [(64, 1.0), (64, 0.5), (256, 1.0), (1024, 0.9)])
def test_random_visits_agree_with_the_cycle_level_model(name: str, run: int, reads: float) -> None:
    standard = load_standard(name)
    visits = comparison.random_visits(standard, run, reads)
    cycles = simulate(standard, visits, 3000, controller=Controller())
    assert achieved_gb_per_s(standard, run, reads) == pytest.approx(cycles, rel=0.06)


def test_the_committed_comparison_is_of_this_closed_form() -> None:
    committed = json.loads(comparison.RESULT.read_text(encoding="utf-8"))
    assert committed["random_mean_abs_percent"] < 2.5
    for case in committed["cases"]:
        if case["case"] == "random runs of 256 B, 50% reads":
            now = achieved_gb_per_s(load_standard(case["standard"]), 256, 0.5)
            assert now == pytest.approx(case["closed_form"], rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_random_lines_are_slower_than_a_stream(name: str) -> None:
    standard = load_standard(name)
    assert achieved_gb_per_s(standard, 64) < achieved_gb_per_s(standard) < standard.peak_gb_per_s


@pytest.mark.parametrize(("name", "peak"), [("lpddr5-6400", 12.8), ("lpddr5x-8533", 17.066), ("hbm3-6400", 25.6)])
def test_peak_rate_follows_from_bus_and_transfer_rate(name: str, peak: float) -> None:
    standard = load_standard(name)
    assert standard.peak_gb_per_s == pytest.approx(peak)
    # the column spacing of the standard is what keeps its bus full
    assert standard.burst_cycles == pytest.approx(standard.ccd_s, rel=0.01)


def test_refresh_costs_its_time_and_the_closing_and_opening_of_rows() -> None:
    expected = (210 + (8 + 17 + 15) * 1.25) / 3906.25
    assert refresh_share(LPDDR5) == pytest.approx(expected)


def test_latency_of_a_closed_row() -> None:
    assert idle_latency_ns(LPDDR5) == pytest.approx((15 + 17 + 2) * 1.25)


@given(
    name=st.sampled_from(NAMES),
    run=st.sampled_from([64, 128, 256, 512, 1024, 2048, 65536, math.inf]),
    reads=st.floats(0, 1),
)
def test_nothing_exceeds_the_peak(name: str, run: float, reads: float) -> None:
    standard = load_standard(name)
    assert 0 < achieved_gb_per_s(standard, run, reads) <= standard.peak_gb_per_s


@pytest.mark.parametrize("name", NAMES)
def test_longer_runs_never_read_slower(name: str) -> None:
    standard = load_standard(name)
    rates = [achieved_gb_per_s(standard, run) for run in (64, 128, 256, 512, 1024, 2048, math.inf)]
    # a full row at a time leaves the queue one bank to look ahead at: a little slower, in the cycle-level model too
    assert all(a <= b * 1.01 for a, b in itertools.pairwise(rates))


def test_a_few_appends_among_long_reads_cost_a_few_percent() -> None:
    standard = load_standard("lpddr5x-8533")
    alone = achieved_gb_per_s(standard)
    mixed = achieved_gb_per_s(standard, math.inf, 0.99, write_run_bytes=256)
    assert 0.97 * alone < mixed < alone


def test_the_device_states_1_1_and_achieves_1_0_terabytes_a_second() -> None:
    device = load_device("plora")
    standard = load_standard(device.dram)
    assert device.channels * standard.peak_gb_per_s == pytest.approx(1092.2, abs=0.1)
    assert device.dram_gb_per_s == 1100
    assert device.capacity_bytes == 512e9
    assert device_gb_per_s(device) == pytest.approx(999.8, abs=0.5)


def test_a_device_never_exceeds_what_it_states(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_text("[slow]\ndram_gb_per_s = 100\ncapacity_bytes = 1e9\nndp_tflops = 1\n")
    assert device_gb_per_s(load_device("slow", path)) == 100


@pytest.mark.parametrize("reads", [-0.1, 1.1, float("nan")])
def test_a_share_of_reads_outside_0_to_1_is_refused(reads: float) -> None:
    with pytest.raises(UserError, match="share of reads"):
        achieved_gb_per_s(LPDDR5, 64, reads)


@pytest.mark.parametrize("run", [0, -64, float("nan")])
def test_a_run_that_is_not_positive_is_refused(run: float) -> None:
    with pytest.raises(UserError, match="run is"):
        achieved_gb_per_s(LPDDR5, run)


@pytest.mark.parametrize(
    ("key", "value"), [("rcd", -1), ("rcd", 0), ("tck_ns", float("nan")), ("rfc_ns", 5000), ("cl", "17"), ("tCL", 17)]
)
def test_bad_timings_name_the_key(tmp_path: Path, key: str, value: object) -> None:
    entry = {f: getattr(LPDDR5, f) for f in LPDDR5.__struct_fields__} | {key: value}
    path = tmp_path / "dram.toml"
    path.write_text(
        "[mine]\n" + "\n".join(f"{k} = {json.dumps(v) if isinstance(v, str) else v}" for k, v in entry.items())
    )
    with pytest.raises(UserError, match=rf"\[mine\].*{key}"):
        load_standards(path)
