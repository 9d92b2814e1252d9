"""An adapter on a device: loaded, run by strategy E3 or E4, and held against the golden model.

Strategies are those of the paper, section V-A: with E3 the device computes y = x A B, with E4 it computes
m = x A, and the GPU, which caches B, does the rest.
"""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import AccumulatorConfig
from plora.hw.defs.descriptor import DType
from plora.hw.defs.errors import UserError
from plora.sim.golden.bf16 import golden_gemm_bf16
from plora.sim.golden.numerics import golden_gemm
from plora.sw.adapters import Adapter, DeviceModule, LoraModule, host_values, to_device
from plora.sw.driver import LinkTraffic
from plora.sw.matrix import (
    PlacedMatrix,
    Product,
    chain_exponents,
    multiply,
    multiply_twice,
    product_exponents,
    store_matrix,
)
from plora.sw.session import Session


class Strategy(StrEnum):
    """Who computes what."""

    E3 = "e3"
    """Device: y = x A B."""
    E4 = "e4"
    """Device: m = x A; GPU: y = m B."""


def choose_modules(adapter: Adapter, pattern: str | None) -> list[LoraModule]:
    """Return the modules that ``pattern`` names: all without one.

    Parameters:
        pattern: comma-separated; a number is a layer, anything else a shell pattern for the end of a module's
            path (``q_proj``, ``layers.0.mlp.*``), or for the whole of it.

    Raises:
        UserError: a part of the pattern names nothing.
    """
    if pattern is None:
        return list(adapter.modules)
    chosen: dict[str, LoraModule] = {}
    for part in pattern.split(","):
        found = [module for module in adapter.modules if _matches(module.label, part.strip())]
        if not found:
            some = ", ".join(module.label for module in adapter.modules[:3])
            raise UserError(
                f"--layers {part.strip()!r} names no module of adapter {adapter.name}: give a layer number or a pattern"
                f" for paths such as {some}"
            )
        chosen |= {module.label: module for module in found}
    return [module for module in adapter.modules if module.label in chosen]


def _matches(label: str, part: str) -> bool:
    if part.isdigit():
        return re.search(rf"(^|\.){part}\.", label) is not None
    if label == part or label.endswith(f".{part}"):
        return True  # an expert's index would be a set of characters in a pattern
    return any(fnmatch.fnmatchcase(label, pattern) for pattern in (part, f"*.{part}", f"*.{part}[[]*]"))


@dataclass(frozen=True)
class LoadedModule:
    """A module in device memory; without B where the GPU holds it."""

    device: DeviceModule
    a: PlacedMatrix
    b: PlacedMatrix | None

    @property
    def size_bytes(self) -> int:
        """Device memory that it takes."""
        return self.a.region.size_bytes + (self.b.region.size_bytes if self.b else 0)


class DeviceAdapter:
    """Modules of an adapter in device memory.

    Parameters:
        session: the device.
        modules: what to load.
        strategy: how they will be run.
        dtype: the device's type for all of them, or None: for each module the one in which it is stored, FP16
            where that is neither FP16 nor BF16.

    Raises:
        UserError: a value does not fit the type, or the modules do not fit the memory (nothing is held then).
    """

    def __init__(
        self,
        session: Session,
        modules: Sequence[LoraModule],
        strategy: Strategy,
        dtype: DType | None = DType.FP16,
    ) -> None:
        self._session = session
        self.strategy = strategy
        self.modules: list[LoadedModule] = []
        try:
            for module in modules:
                stored = DType.BF16 if module.dtype == "BF16" else DType.FP16
                self.modules.append(self._load(to_device(module, stored if dtype is None else dtype)))
        except UserError:
            self.unload()
            raise

    def _load(self, device: DeviceModule) -> LoadedModule:
        driver, allocator, label = self._session.driver, self._session.allocator, device.module.label
        a = store_matrix(driver, allocator, device.a, f"{label} A", device.dtype)
        if self.strategy is Strategy.E4:
            return LoadedModule(device, a, None)
        try:
            return LoadedModule(device, a, store_matrix(driver, allocator, device.b, f"{label} B", device.dtype))
        except UserError:
            allocator.free(a.region)
            raise

    def unload(self) -> None:
        """Give the memory back."""
        for module in self.modules:
            self._session.allocator.free(module.a.region)
            if module.b is not None:
                self._session.allocator.free(module.b.region)
        self.modules = []

    def run(self, module: LoadedModule, x: npt.NDArray[Any]) -> Product:
        """Run one module on x (B x K, of the module's type): y (E3) or m (E4)."""
        if module.b is None:
            return multiply(self._session.queue, module.a, x)
        return multiply_twice(self._session.queue, module.a, module.b, x)


@dataclass(frozen=True)
class ModuleReport:
    """A run of one module beside the golden model and beside float64."""

    device: DeviceModule
    batch_size: int
    product: Product
    traffic: LinkTraffic
    run_s: float
    """Wall time of the run, without the comparison."""
    match: bool
    """The device's result has the golden model's bits."""
    non_finite: int
    """Results that are NaN or infinite."""
    max_abs_error: float
    """Largest distance of a finite result from float64 on the adapter as stored."""
    max_relative_error: float
    """The same as a share of the largest float64 result."""


def run_and_compare(
    adapter: DeviceAdapter, module: LoadedModule, x: npt.NDArray[Any], session: Session
) -> ModuleReport:
    """Run one module and compare its result bit for bit with the golden model."""
    before = session.driver.traffic.copy()
    start = time.perf_counter()
    product = adapter.run(module, x)
    run_s = time.perf_counter() - start
    traffic = session.driver.traffic.since(before)
    golden = _golden(module, x, adapter.strategy, session.driver.config.accumulator)
    source, dtype = module.device.module, module.device.dtype
    exact = host_values(x, dtype).astype(np.float64) @ source.a.astype(np.float64).T
    if adapter.strategy is Strategy.E3:
        exact = exact @ (source.b.astype(np.float64) * source.scaling).T
    y = host_values(product.y, dtype)
    finite = np.isfinite(y)
    error = np.abs(y.astype(np.float64) - exact)[finite].max(initial=0.0)
    largest = np.abs(exact).max()
    return ModuleReport(
        device=module.device,
        batch_size=x.shape[0],
        product=product,
        traffic=traffic,
        run_s=run_s,
        match=bool(np.array_equal(product.y.view(np.uint16), golden.view(np.uint16))),
        non_finite=int(np.count_nonzero(~finite)),
        max_abs_error=float(error),
        max_relative_error=float(error / largest) if largest else 0.0,
    )


def _golden(
    module: LoadedModule, x: npt.NDArray[Any], strategy: Strategy, accumulator: AccumulatorConfig
) -> npt.NDArray[Any]:
    a, b = module.device.a, module.device.b
    if module.device.dtype != DType.BF16:
        m = golden_gemm(x, a, accumulator).values
        return m if strategy is Strategy.E4 else golden_gemm(m, b, accumulator).values
    if module.b is None:
        first = product_exponents(x, module.a)
        return golden_gemm_bf16(x, a, first.operand, first.device, accumulator).values
    first, second = chain_exponents(x, module.a, module.b)
    m_bits = golden_gemm_bf16(x, a, first.operand, first.device, accumulator).values
    return golden_gemm_bf16(m_bits, b, second.operand, second.device, accumulator).values
