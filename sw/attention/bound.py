"""How far the devices' attention can be from exact: a proven bound, of which tests see that it holds.

For finite q, k and v, and the scale as the device takes it. With P = 2**(t - M) the exact terms under a device's
anchor M, in 0.5 ... 1 for the largest, w = P / sum(P) and out = sum(w v):

* a term p differs from P by the factor of ``2**dt`` (t is cut: `_t_error`), of 2**f by table (`EXP2_ERROR`) and of
  one rounding to FP16. As numerator and denominator have the same p, ``sum(|dp| w |v - out|)`` is left of that;
* below 2**-14 a rounding errs by half an FP16 step: once in p, once more in the p that the values are weighed with;
* the sum l loses less than ``2**-24`` each time the anchor grows, at most once a token;
* O loses at most a grid step for each product, and has one rounding of its own.

In BF16 the same holds of the operands as they are multiplied, times their powers of two and rounded to FP16, with two
more terms: a rounded operand differs by at most half an FP16 step, which the scores take as ``sum(|q| |dk| + |dq| |k| +
|dq| |dk|)`` and the output as ``sum(w |dv|)``; and the one rounding of O is that to BF16, which is never subnormal.

Merging in float64 adds nothing that counts: powers of two are exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import AccumulatorConfig
from plora.hw.defs.exp2 import FRACTION_BITS
from plora.hw.defs.queue import SUM_FRACTION_BITS, softmax_scale_value
from plora.sim.golden.bf16 import Bf16Array, to_float, to_fp16
from plora.sim.golden.numerics import SCORE_BITS
from plora.sw.attention.merge import Float64
from plora.sw.scaling import AttentionScaling

EXP2_ERROR = 2e-5
"""Largest relative error of the device's 2**f (`plora.hw.defs.exp2`)."""
T_STEP = 2.0**-FRACTION_BITS
ROUNDING = 2.0**-11
"""Largest relative error of one rounding to FP16."""
BF16_ROUNDING = 2.0**-8
"""The same of BF16."""
HALF_SUBNORMAL = 2.0**-25
SUM_STEP = 2.0**-SUM_FRACTION_BITS


def _t_error(t: Float64, dt: Float64, head_dim: int, factor: float, grid_step: float) -> Float64:
    """Largest distance of the device's scaled score from ``t``, where that of its operands is within ``dt`` of it."""
    cut = 2.0 ** (1 - SCORE_BITS)
    return np.abs(t) * cut + (dt + head_dim * grid_step * factor) * (1 + cut) + 2 * T_STEP


class _Operand(NamedTuple):
    """What a device multiplies, beside what it stands for."""

    exact: Float64
    multiplied: Float64

    @property
    def error(self) -> Float64:
        return np.abs(self.multiplied - self.exact)


def _fp16(values: npt.NDArray[Any]) -> _Operand:
    exact = np.asarray(values, np.float64)
    return _Operand(exact, exact)


def _bf16(bits: Bf16Array, exponent: int) -> _Operand:
    return _Operand(np.ldexp(to_float(bits).astype(np.float64), exponent), to_fp16(bits, exponent).astype(np.float64))


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
    return _bound(_fp16(q), _fp16(k), _fp16(v), softmax_scale_value(scale), accumulator, ROUNDING, 2 * HALF_SUBNORMAL)


def error_bound_bf16(
    q: Bf16Array, k: Bf16Array, v: Bf16Array, scaling: AttentionScaling, accumulator: AccumulatorConfig
) -> Float64:
    """Return the same for BF16, given as bit patterns, and the scaling of `plora.sw.scaling.attention_scaling`.

    With that scaling no operand, score or sum leaves its range.
    """
    scores, values = scaling.scores, scaling.values
    scaled = _bound(
        _bf16(q, scores.operand),
        _bf16(k, scores.device),
        _bf16(v, values.device),
        softmax_scale_value(scaling.scale),
        accumulator,
        BF16_ROUNDING,
        0.0,
    )
    return np.ldexp(scaled, -values.device)


def _bound(
    q: _Operand,
    k: _Operand,
    v: _Operand,
    factor: float,
    accumulator: AccumulatorConfig,
    rounding: float,
    subnormal: float,
) -> Float64:
    """`rounding` is the relative error of O's rounding, ``subnormal`` what it errs by beside that."""
    step, (tokens, head_dim) = 2.0**accumulator.lsb_exponent, k.exact.shape
    t = q.exact @ k.exact.T * factor
    of_operands = q.error @ np.abs(k.exact).T + (np.abs(q.exact) + q.error) @ k.error.T
    dt = _t_error(t, of_operands * factor, head_dim, factor, step)
    relative = np.exp2(dt) * (1 + EXP2_ERROR) * (1 + ROUNDING) - 1
    powers = np.exp2(t - t.max(axis=1, keepdims=True))
    # The largest term lies above a half, but for the error of its t.
    least_sum = (powers.sum(axis=1) * np.exp2(-1 - dt.max(axis=1)))[:, None]
    w = powers / powers.sum(axis=1, keepdims=True)
    values = v.multiplied
    out, largest = w @ values, np.abs(values).max(axis=0)
    of_terms = np.stack([(relative[row] * w[row]) @ np.abs(values - out[row]) for row in range(len(w))])
    small = tokens * (3 * HALF_SUBNORMAL + SUM_STEP) * largest / least_sum
    of_o = rounding * (w @ np.abs(values) + of_terms + small) + tokens * step / least_sum + subnormal
    lost = (relative * w).sum(axis=1, keepdims=True) + tokens * (HALF_SUBNORMAL + SUM_STEP) / least_sum
    return np.asarray((of_terms + small + of_o) / np.maximum(1 - lost, 2.0**-10) + w @ v.error)
