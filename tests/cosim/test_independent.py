"""The device's ports against bus models written by others: cocotb with cocotbext-axi, on the `tiny` device."""

from __future__ import annotations

from pathlib import Path

import pytest

from plora.hw.build.verilog import TOP, device_verilog
from plora.hw.defs.config import preset
from tests.cosim.simulator import simulate


@pytest.mark.parametrize(
    ("module", "tests"),
    [("tests.cosim.bench_transport", 4), ("tests.cosim.bench_driver", 2)],
    ids=["loads and stores", "driver"],
)
def test_the_device_under_cocotb(module: str, tests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = simulate(device_verilog(preset("tiny")), TOP, module, results=tmp_path, seed=1, monkeypatch=monkeypatch)
    assert len(seconds) == tests


def test_a_failing_cocotb_test_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With an expectation that no device meets: the check itself must be able to fail.
    monkeypatch.setenv("PLORA_TEST_EXPECT_ID", "0")
    with pytest.raises(AssertionError, match="cocotb tests failed"):
        simulate(
            device_verilog(preset("tiny")),
            TOP,
            "tests.cosim.bench_transport",
            results=tmp_path,
            seed=1,
            monkeypatch=monkeypatch,
        )
