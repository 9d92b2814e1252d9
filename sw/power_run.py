"""Runs real descriptors on the Verilated device and keeps the values of all its signals, for `plora.synth.power`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from plora.hw.build.verilog import TOP, device_verilog
from plora.hw.cosim.device import RtlDevice
from plora.hw.defs.config import NdpConfig
from plora.sw.matrix import multiply, store_matrix
from plora.sw.session import open_session
from plora.synth.estimate import MeasuredRun
from plora.synth.flow import DesignResult
from plora.synth.hierarchy import Block
from plora.synth.liberty import Library
from plora.synth.power import busy_window, replay_run, sram_use

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


def measure(
    config: NdpConfig,
    blocks: Sequence[Block],
    small: DesignResult,
    library: Library,
    tell: Callable[[str], None],
    workload: PowerWorkload,
) -> MeasuredRun:
    """Run ``workload`` on the RTL of ``config`` and replay it on ``small``, the blocks mapped to ``library``.

    Args:
        config: size of the device.
        blocks: of its Verilog.
        small: their netlists.
        library: what these are mapped to.
        tell: called with a line of text now and then.
        workload: the product.

    Raises:
        UserError: Verilator or a compiler is missing.
    """
    (operands,) = (block for block in blocks if block.name == "pe.operands")
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / f"{workload.name}.vcd"
        tell(f"running {workload.name} on the RTL")
        record(config, workload, dump)
        window = busy_window(dump, operands)
        activities = replay_run(
            dump, blocks, small.netlists, library, window.cycles, tell=lambda line: tell(f"{workload.name}, {line}")
        )
        uses = sram_use(dump, device_verilog(config), window.cycles)
    return MeasuredRun(workload.name, workload.multiply_adds, window, activities, uses)


def measure_all(
    config: NdpConfig,
    blocks: Sequence[Block],
    small: DesignResult,
    library: Library,
    tell: Callable[[str], None],
    jobs: int,
) -> list[MeasuredRun]:
    """`measure` for `GEMV` and `GEMM`, ``jobs`` at a time, each in a process of its own: a replay is a minute of work.

    ``tell`` must be a function that another process can be given.
    """
    one = partial(measure, config, blocks, small, library, tell)
    # Not forked: the mapping has left threads behind.
    with ProcessPoolExecutor(min(jobs, 2), get_context("spawn")) as pool:
        return list(pool.map(one, (GEMV, GEMM)))
