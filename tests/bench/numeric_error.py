"""How far the PE array's results are from exact ones: `python tests/bench/numeric_error.py`.

Compared with the sum of the exact products in float64 (whose own error is far below all figures
here): the sum on the grid before it is rounded, and the FP16 result; beside them, float32 sums of
exact products in order, rounded to FP16, as a unit with an FP32 accumulator makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import AccumulatorConfig
from plora.sim.golden.numerics import LIMB_BITS, gemm_grid, grid_to_fp16

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


def operands(case: Case, k: int) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Return x (ROWS, k) and w (OUTPUTS, k)."""
    rng = np.random.default_rng(k)
    x = rng.normal(scale=case.x, size=(ROWS, k)) * np.where(rng.random((ROWS, k)) < case.outliers, 50, 1)
    return x.astype(np.float16), rng.normal(scale=case.w, size=(OUTPUTS, k)).astype(np.float16)


def main() -> None:
    """Print one line for every case and K."""
    print(f"{'operands':31} {'K':>6} {'grid rms':>9} {'grid max':>9} {'FP16 off':>9} {'FP32 rms':>9} {'FP32 off':>9}")
    for case in CASES:
        for k in (8, 128, 4096, 16384):
            x, w = operands(case, k)
            terms = x.astype(np.float64)[:, None] * w.astype(np.float64)[None]
            exact, magnitude = terms.sum(axis=2), np.abs(terms).sum(axis=2)
            grid = gemm_grid(x, w, ACCUMULATOR)
            on_grid = (grid.high * 2.0**LIMB_BITS + grid.low) * 2.0**ACCUMULATOR.lsb_exponent
            sequential = np.zeros(exact.shape, np.float32)
            for column in range(k):
                sequential += terms[:, :, column].astype(np.float32)
            nearest = exact.astype(np.float16)
            error, error32 = (np.abs(sums - exact) / magnitude for sums in (on_grid, sequential.astype(np.float64)))
            off = np.mean(grid_to_fp16(grid, ACCUMULATOR).values != nearest)
            off32 = np.mean(sequential.astype(np.float16) != nearest)
            print(
                f"{case.name:31} {k:6} {np.sqrt(np.mean(error**2)):9.1e} {error.max():9.1e} {off:9.2%}"
                f" {np.sqrt(np.mean(error32**2)):9.1e} {off32:9.2%}"
            )


if __name__ == "__main__":
    main()
