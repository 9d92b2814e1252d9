"""The speed of the core by its own counters: the cases and limits of `plora rtl bench`, on `small` and on `full`.

`plora rtl bench --preset full` measures the rest; what is left out here differs in shape, not in kind.
"""

from __future__ import annotations

import pytest

from plora.hw.cosim.device import RtlDevice
from plora.hw.defs.config import NdpConfig, preset
from plora.sw.rtl_bench import as_row, measure
from plora.sw.rtl_cases import BenchCase, bench_cases

ON_SMALL = (
    *("gemv-a-1m-batch1", "gemv-b-64k-batch1", "gemv-a-rank8-64k-batch2", "gemv-b-64k-batch2"),
    *("gemv-b-rank8-64k-batch2", "gemv-b-rank16-64k-batch1"),
    *("gemm-a-batch128", "gemm-a-tails-batch31", "gemm-b-batch32", "gemm-b-rank16-batch32"),
    *("lora-batch2", "lora-batch32"),
    *("attention-g2-d128-1m", "attention-g8-d64-64k"),
    *("gemv-a-1m-batch1-stall0.1", "gemv-b-1m-batch1-stall0.3"),
)
ON_FULL = ("gemv-b-1m-batch1", "gemv-a-1m-batch1-stall0.3", "gemm-a-batch32", "attention-g2-d128-1m")


def hold(config: NdpConfig, name: str) -> None:
    case = next(case for case in bench_cases(config) if case.name == name)

    def device(case: BenchCase) -> RtlDevice:
        return RtlDevice(config, stall=case.timing.stall)

    found = measure(case, config, device)
    assert found.checks, f"{name} is not judged"
    assert found.passed, f"plora rtl bench --preset {config.name} --cases {name}: {as_row(found)}"


@pytest.mark.parametrize("name", ON_SMALL)
def test_small_runs_at_the_speed_of_what_bounds_it(name: str) -> None:
    hold(preset("small"), name)


@pytest.mark.parametrize("name", ON_FULL)
def test_full_runs_at_the_speed_of_what_bounds_it(name: str) -> None:
    hold(preset("full"), name)
