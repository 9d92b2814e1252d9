"""The benchmark of the RTL measures what it says, and sees a device that is too slow or wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plora.hw.cosim.device import RtlDevice
from plora.hw.defs.config import PRESETS, NdpConfig, preset
from plora.hw.defs.status import Status
from plora.sim.device.predict import statuses, stream_demands
from plora.sim.device.stream import Stream
from plora.sw.rtl_bench import Check, job_bounds, measure, period
from plora.sw.rtl_cases import BF16_CASES, BenchCase, Criterion, bench_cases
from plora.sw.stream_run import differences

TINY, SMALL, FULL = (preset(name) for name in ("tiny", "small", "full"))


def case_of(name: str) -> BenchCase:
    return next(case for case in bench_cases(SMALL) if case.name == name)


@pytest.mark.parametrize("config", PRESETS.values(), ids=lambda c: c.name)
def test_every_case_has_a_name_of_its_own_and_is_legal(config: NdpConfig) -> None:
    cases = bench_cases(config)
    assert len({case.name for case in cases}) == len(cases) > 20
    for case in cases:
        found = statuses(case.stream(config, case.jobs))
        assert set(found) == {Status.OK}, case.name


def test_the_full_device_is_measured_on_all_that_its_operands_can_be() -> None:
    cases = {case.name: case for case in bench_cases(FULL)}
    for batch in (1, 2):
        for kind in ("a", "b"):
            (row,) = cases[f"gemv-{kind}-1m-batch{batch}"].rows
            # Within one stripe for each row group of 1,048,575 bytes.
            assert 0.99 < int(str(row["device_rows"])) * int(str(row["device_columns"])) * 2 / (1 << 20) < 1
            (row,) = cases[f"gemv-{kind}-64k-batch{batch}"].rows
            assert int(str(row["device_rows"])) * int(str(row["device_columns"])) * 2 == 1 << 16
    assert {case.rows[0]["gpu_rows"] for case in cases.values()} >= {1, 2, 31, 32, 127, 128}
    assert {case.timing.stall for case in cases.values()} == {0, 0.1, 0.3}
    in_bf16 = {case.name for case in cases.values() if case.dtype == "bf16"}
    assert in_bf16 == {f"{name}-bf16" for name in BF16_CASES}
    assert {case.operation for case in cases.values() if case.dtype == "bf16"} >= {"GEMV A", "GEMM A", "attention"}


def test_bounds_of_a_job_are_counted_from_its_shape() -> None:
    rows = (
        {"device_rows": 64, "device_columns": 1000, "gpu_rows": 5},
        {"device_rows": 320, "device_columns": 8, "gpu_rows": 2},
    )
    case = BenchCase("x", "x", rows, Criterion.BOUND, 1.0)
    stream = case.stream(SMALL, 1)
    bounds = job_bounds(SMALL, stream_demands(stream, [Status.OK] * 2))
    # 16 groups of 32 beats, three pairs; 8 stripes for each of five rows; 5 x 2 lines.
    # 20 groups of one beat of four rows a word; a stripe a row; 2 x 10 lines.
    assert bounds == {"memory": 512 + 40 + 20 + 2 + 30 / 4, "array": 1536 + 20, "drain": 80, "result port": 30}


def test_the_period_is_that_between_jobs_in_the_middle() -> None:
    assert period([10, 30]) == 20
    # The last four jobs were read ahead: they come faster than memory delivers.
    assert period([100, 160, 260, 360, 460, 560, 660, 760, 800, 840, 880, 920]) == 100


def test_a_check_is_met_at_its_limit() -> None:
    assert Check("x", 0.97, 0.97).passed and not Check("x", 0.9699, 0.97).passed
    assert Check("x", 4, 4, at_most=True).passed and not Check("x", 4.5, 4, at_most=True).passed


def test_a_memory_slower_than_stated_is_seen() -> None:
    for name, missed in (("gemv-a-1m-batch1", "useful beat fraction"), ("gemv-a-64k-batch1", "gap in cycles")):
        case = replace(case_of(name), jobs=10 if "64k" in name else 1)
        found = measure(case, SMALL, lambda case: RtlDevice(SMALL, read_latency_cycles=400))
        assert not found.passed and not found.faults
        assert missed in [check.what for check in found.checks if not check.passed]


def test_remainders_are_judged_by_the_share_of_the_array_that_they_can_use() -> None:
    case = replace(case_of("gemm-a-tails-batch31"), jobs=1)
    found = measure(case, SMALL, lambda case: RtlDevice(SMALL))
    assert found.passed
    (check,) = found.checks
    assert check.limit == pytest.approx(0.95 * 126 / 128 * 499 / 512 * 31 / 32)


def test_wrong_bits_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(stream: Stream, device: RtlDevice) -> list[str]:
        device.memory[:] ^= np.uint8(1)
        return list(differences(stream, device))

    monkeypatch.setattr("plora.sw.rtl_bench.differences", spoiled)
    found = measure(
        replace(case_of("gemv-b-64k-batch1"), jobs=1), SMALL, lambda case: RtlDevice(SMALL, dram_bytes=1 << 22)
    )
    assert not found.passed and "line 1" in found.faults[0]


def test_a_device_too_small_for_the_latency_is_not_judged_where_memory_is_the_bound() -> None:
    cases = {case.name: replace(case, jobs=1) for case in bench_cases(TINY)}
    memory = measure(cases["gemv-b-64k-batch1"], TINY, lambda case: RtlDevice(TINY))
    assert memory.bound == "memory" and memory.checks == () and memory.passed
    array = measure(cases["gemm-a-batch32"], TINY, lambda case: RtlDevice(TINY))
    assert array.bound == "array" and len(array.checks) == 1 and array.passed


def test_exponentials_are_counted_against_a_beat_a_cycle() -> None:
    case = next(case for case in bench_cases(TINY) if case.name == "attention-g8-d64-64k")
    found = measure(replace(case, jobs=1), TINY, lambda case: RtlDevice(TINY))
    assert not found.faults
    # 256 tokens and 8 rows in 128 groups of two beats, four pairs of rows.
    assert found.alone.exps_needed == 256 * 8 / (128 * 2 * 4)
    assert found.alone.exps_delivered is not None
    assert found.alone.exps_delivered <= found.alone.exps_needed
    assert [check.what for check in found.checks] == ["multiply-add utilisation", "softmax keeps up"]
