"""How far the devices' attention can be from exact: a proven bound, of which tests see that it holds.

For finite q, k and v, and the scale as the device takes it. With P = 2**(t - M) the exact terms under a device's
anchor M, in 0.5 ... 1 for the largest, w = P / sum(P) and out = sum(w v):

* a term p differs from P by the factor of ``2**dt`` (t is cut: `_t_error`), of 2**f by table (`EXP2_ERROR`) and of
  one rounding to FP16. As numerator and denominator have the same p, ``sum(|dp| w |v - out|)`` is left of that;
* below 2**-14 a rounding errs by half an FP16 step: once in p, once more in the p that the values are weighed with;
* the sum l loses less than ``2**-24`` each time the anchor grows, at most once a token;
* O loses at most a grid step for each product, and has one rounding of its own.

Merging in float64 adds nothing that counts: powers of two are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import AccumulatorConfig
from plora.hw.defs.exp2 import FRACTION_BITS
from plora.hw.defs.queue import SUM_FRACTION_BITS, softmax_scale_value
from plora.sim.golden.numerics import SCORE_BITS
from plora.sw.attention.merge import Float64

EXP2_ERROR = 2e-5
"""Largest relative error of the device's 2**f (`plora.hw.defs.exp2`)."""
T_STEP = 2.0**-FRACTION_BITS
ROUNDING = 2.0**-11
"""Largest relative error of one rounding to FP16."""
HALF_SUBNORMAL = 2.0**-25
SUM_STEP = 2.0**-SUM_FRACTION_BITS


def _t_error(t: Float64, head_dim: int, factor: float, grid_step: float) -> Float64:
    """Largest distance of the device's scaled score from ``t``."""
    cut = 2.0 ** (1 - SCORE_BITS)
    return np.abs(t) * cut + head_dim * grid_step * factor * (1 + cut) + 2 * T_STEP


def error_bound(
    q: npt.NDArray[Any],
    k: npt.NDArray[Any],
    v: npt.NDArray[Any],
    scale: int,
    accumulator: AccumulatorConfig,
) -> Float64:
    """Return a bound, (rows, dims), of the distance of merged device results from softmax(q k^T) v.

    Parameters:
        q, k, v: (rows, head_dim), (tokens, head_dim), (tokens, dims), finite.
        scale: softmax scale, FP32 bits.
        accumulator: the devices' grid.
    """
    q, k, v = (np.asarray(each, np.float64) for each in (q, k, v))
    factor, step, tokens = softmax_scale_value(scale), 2.0**accumulator.lsb_exponent, len(k)
    t = q @ k.T * factor
    dt = _t_error(t, q.shape[1], factor, step)
    relative = np.exp2(dt) * (1 + EXP2_ERROR) * (1 + ROUNDING) - 1
    powers = np.exp2(t - t.max(axis=1, keepdims=True))
    # The largest term lies above a half, but for the error of its t.
    least_sum = (powers.sum(axis=1) * np.exp2(-1 - dt.max(axis=1)))[:, None]
    w = powers / powers.sum(axis=1, keepdims=True)
    out, largest = w @ v, np.abs(v).max(axis=0)
    of_terms = np.stack([(relative[row] * w[row]) @ np.abs(v - out[row]) for row in range(len(q))])
    small = tokens * (3 * HALF_SUBNORMAL + SUM_STEP) * largest / least_sum
    of_o = ROUNDING * (w @ np.abs(v) + of_terms + small) + tokens * step / least_sum + 2 * HALF_SUBNORMAL
    lost = (relative * w).sum(axis=1, keepdims=True) + tokens * (HALF_SUBNORMAL + SUM_STEP) / least_sum
    return np.asarray((of_terms + small + of_o) / np.maximum(1 - lost, 2.0**-10))
