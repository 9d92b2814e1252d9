"""How far the PE array's results are from exact ones: `python -m tests.bench.numeric_error`.

Compared with the sum of the exact products in float64 (whose own error is far below all figures
here): the sum on the grid before it is rounded, and the FP16 result; beside them, float32 sums of
exact products in order, rounded to FP16, as a unit with an FP32 accumulator makes them. Then the same of
BF16 operands, with the exponents that the host chooses (`plora.sw.scaling`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import AccumulatorConfig
from plora.sim.golden.bf16 import from_float, grid_to_bf16, to_float, to_fp16
from plora.sim.golden.numerics import LIMB_BITS, Grid, gemm_grid, grid_to_fp16
from plora.sw.scaling import device_exponent, operand_exponent

ACCUMULATOR = AccumulatorConfig()
ROWS, OUTPUTS = 16, 64


@dataclass(frozen=True)
class Case:
    """Operands x and w: normal values of these standard deviations, a share of x 50 times larger."""

    name: str
    x: float
    w: float
    outliers: float = 0.0


CASES = (
    Case("activations x weights", 1.0, 0.02),
    Case("with 0.5 % outliers", 1.0, 0.02, 0.005),
    Case("m x B (small m)", 0.05, 0.02),
    Case("tiny (results near subnormal)", 0.01, 0.0005),
    Case("large (results in hundreds)", 4.0, 1.0),
)


BF16_CASES = (
    *CASES,
    Case("x sd 1e6, w sd 1e-4", 1e6, 1e-4),
    Case("x sd 1, 0.5 % 50 times larger, w sd 1e-6", 1.0, 1e-6, 0.005),
    Case("x sd 1e-12, w sd 1e12", 1e-12, 1e12),
)
COLUMNS = (8, 128, 4096, 16384)

Floats = npt.NDArray[np.float64]


def operands(case: Case, k: int) -> tuple[Floats, Floats]:
    """Return x (ROWS, k) and w (OUTPUTS, k), not rounded yet."""
    rng = np.random.default_rng(k)
    x = rng.normal(scale=case.x, size=(ROWS, k)) * np.where(rng.random((ROWS, k)) < case.outliers, 50, 1)
    return x, rng.normal(scale=case.w, size=(OUTPUTS, k))


def grid_values(grid: Grid) -> Floats:
    """Return sums as float64."""
    return np.asarray((grid.high * 2.0**LIMB_BITS + grid.low) * 2.0**ACCUMULATOR.lsb_exponent)


@dataclass(frozen=True)
class Sums:
    """Sums of the products of two matrices, three ways."""

    exact: Floats
    magnitude: Floats
    """Sums of the magnitudes of the terms."""
    fp32: Floats

    def errors(self, sums: Floats) -> tuple[float, float]:
        """Return the root mean square and the largest error of ``sums``, relative to the magnitudes."""
        error = np.abs(sums - self.exact) / self.magnitude
        return float(np.sqrt(np.mean(error**2))), float(error.max())


def sums_of(x: Floats, w: Floats) -> Sums:
    """Return the sums of operands that are already rounded to the type of the device."""
    terms = x[:, None] * w[None]
    sequential = np.zeros(terms.shape[:2], np.float32)
    for column in range(x.shape[1]):
        sequential += terms[:, :, column].astype(np.float32)
    return Sums(terms.sum(axis=2), np.abs(terms).sum(axis=2), sequential.astype(np.float64))


def fp16_line(case: Case, k: int) -> str:
    """Return the line of one case in FP16."""
    x, w = (matrix.astype(np.float16) for matrix in operands(case, k))
    sums, grid = sums_of(x.astype(np.float64), w.astype(np.float64)), gemm_grid(x, w, ACCUMULATOR)
    nearest = sums.exact.astype(np.float16)
    off = np.mean(grid_to_fp16(grid, ACCUMULATOR).values != nearest)
    return _line(case, k, sums, grid_values(grid), float(off), float(np.mean(sums.fp32.astype(np.float16) != nearest)))


def bf16_line(case: Case, k: int) -> str:
    """Return the line of one case in BF16."""
    x, w = (from_float(matrix) for matrix in operands(case, k))
    sx, sw = operand_exponent(x), device_exponent(w)
    sums = sums_of(to_float(x).astype(np.float64), to_float(w).astype(np.float64))
    grid = gemm_grid(to_fp16(x, sx), to_fp16(w, sw), ACCUMULATOR)
    result, nearest = grid_to_bf16(grid, ACCUMULATOR, sx + sw), from_float(sums.exact)
    assert not result.overflow.any()
    off, off32 = np.mean(result.values != nearest), np.mean(from_float(sums.fp32) != nearest)
    return _line(case, k, sums, np.ldexp(grid_values(grid), -sx - sw), float(off), float(off32))


def _line(case: Case, k: int, sums: Sums, on_grid: Floats, off: float, off32: float) -> str:
    rms, largest = sums.errors(on_grid)
    return f"{case.name:41} {k:6} {rms:9.1e} {largest:9.1e} {off:9.2%} {sums.errors(sums.fp32)[0]:9.1e} {off32:9.2%}"


def main() -> None:
    """Print one line for every type, case and K."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for what, cases, line in (("FP16", CASES, fp16_line), ("BF16", BF16_CASES, bf16_line)):
        print(f"{what:41} {'K':>6} {'grid rms':>9} {'grid max':>9} {'off':>9} {'FP32 rms':>9} {'FP32 off':>9}")
        for case in cases:
            for k in COLUMNS:
                print(line(case, k))


if __name__ == "__main__":
    main()
