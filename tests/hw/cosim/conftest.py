"""The test top behind the test bench."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plora.hw.build.verilog import cached_verilog
from plora.hw.cosim.device import RtlDevice
from plora.hw.defs.config import preset

MakeDevice = Callable[..., RtlDevice]


@pytest.fixture(scope="session")
def verilog() -> str:
    """The Verilog of the test top for the channels of `tiny`."""
    return cached_verilog("tests.hw.cosim.passthrough:Passthrough", preset("tiny").channels, name="passthrough")


@pytest.fixture
def make_device(verilog: str) -> MakeDevice:
    """Makes a test device; keyword arguments go to `RtlDevice`."""

    def make(**settings: Any) -> RtlDevice:
        return RtlDevice(preset("tiny"), verilog=verilog, top="passthrough", **{"dram_bytes": 1 << 20, **settings})

    return make
