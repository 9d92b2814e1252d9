"""Runs real descriptors on the Verilated device and keeps the values of all its signals, for `plora.synth.power`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plora.hw.build.verilog import TOP, device_verilog
from plora.hw.cosim.device import RtlDevice
from plora.hw.defs.config import NdpConfig
from plora.sw.matrix import multiply, store_matrix
from plora.sw.session import open_session

LARGE_BYTES = 4096

WEIGHT_SCALE = 0.02
"""Standard deviation of the weights, that of initialised and of trained projections alike; inputs have 1."""


@dataclass(frozen=True)
class PowerWorkload:
    """A product y = x W^T: x of ``batch`` rows, W of ``rows`` x ``columns``."""

    name: str
    batch: int
    rows: int
    columns: int

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds that it needs."""
        return self.batch * self.rows * self.columns


GEMV = PowerWorkload("gemv", batch=1, rows=64, columns=512)
GEMM = PowerWorkload("gemm", batch=8, rows=32, columns=512)


class _QuickLoad(RtlDevice):
    """Puts large static data into memory through the back door: thousands of cycles of stores less in the dump."""

    def hdm_write(self, address: int, data: bytes) -> None:
        if len(data) > LARGE_BYTES:
            self.poke(address, data)
        else:
            super().hdm_write(address, data)


def record(config: NdpConfig, workload: PowerWorkload, dump: Path, seed: int = 0) -> None:
    """Run ``workload`` with normally distributed values on the RTL and write its signals to ``dump`` (VCD).

    Raises:
        UserError: Verilator or a compiler is missing.
        AssertionError: the result is not what it should be.
    """
    random = np.random.default_rng(seed)
    w = (random.standard_normal((workload.rows, workload.columns)) * WEIGHT_SCALE).astype(np.float16)
    x = random.standard_normal((workload.batch, workload.columns)).astype(np.float16)
    # The device's own build for waves leaves dot units and drains out of them; this one has every port.
    with _QuickLoad(config, verilog=device_verilog(config), top=TOP, seed=seed, trace=dump) as device:
        session = open_session(device, memory_bytes=device.memory.size)
        product = multiply(session.queue, store_matrix(session.driver, session.allocator, w, "W"), x)
    expected = x.astype(np.float64) @ w.astype(np.float64).T
    error = np.abs(product.y.astype(np.float64) - expected).max()
    assert error < 1e-2 * np.abs(expected).max(), f"{workload.name} on the RTL is off by {error}"
