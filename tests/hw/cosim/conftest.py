"""The test top behind the test bench."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plora.hw.build.verilog import cached_verilog
from plora.hw.cosim.device import SimulatedDevice
from plora.hw.defs.config import preset
from tests.hw.cosim.passthrough import Passthrough

MakeDevice = Callable[..., SimulatedDevice]


@pytest.fixture(scope="session")
def verilog() -> str:
    """The Verilog of the test top for the channels of `tiny`."""
    return cached_verilog(Passthrough, preset("tiny").channels, name="passthrough")


@pytest.fixture
def make_device(verilog: str) -> MakeDevice:
    """Makes a test device; keyword arguments go to `SimulatedDevice`."""

    def make(**settings: Any) -> SimulatedDevice:
        return SimulatedDevice(preset("tiny"), verilog, "passthrough", **{"dram_bytes": 1 << 20, **settings})

    return make
