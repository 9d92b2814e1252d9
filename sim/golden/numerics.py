"""What the PE array computes, bit for bit: products on a fixed-point grid, exact sums, one rounding.

A product of two FP16 values is placed on the grid of step ``2**lsb_exponent`` by dropping the bits
of its magnitude below the step. From there on everything is an integer sum, so the order of the
terms, the tiling and the merging of partial sums make no difference. What does not fit on the grid
travels beside the sum as sticky flags. docs/numerics.md has the table of special values.

All functions work elementwise on arrays of any shape unless they say otherwise. FP16 arrays are
``numpy.float16``; view a ``uint16`` array of bit patterns as such to keep NaN payloads out of play.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import AccumulatorConfig

Fp16Array = npt.NDArray[np.float16]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

LIMB_BITS = 40
"""Bits of the low limb of a grid value: both limbs of any sum of `AccumulatorConfig` fit 63 bits."""

_LIMB = np.int64(1 << LIMB_BITS)

FP16_FRACTION_BITS = 10
FP16_MIN_EXPONENT = -24
"""Exponent of the last bit of an FP16 subnormal: no FP16 value needs a finer step."""
FP16_INFINITY = 0x7C00
FP16_NAN = 0x7E00
FP16_OVERFLOW = 65520
"""Half way between the largest finite FP16 value and the next step: rounds to infinity, as all above."""

SCORE_BITS = 22
"""Bits of a score's mantissa."""
SCORE_MIN_EXPONENT = -14
SCORE_LIMIT = 65536
"""Magnitudes from here on count as infinite scores."""

_BLOCK = 1 << 15
"""Products made at a time by `gemm_grid`: they and their operands stay in a second-level cache."""

_WORD_BITS = 56
"""Products of up to so many bits are summed in one int64, larger ones in limbs."""


@dataclass(frozen=True)
class Grid:
    """Sums on the grid: ``(high * 2**LIMB_BITS + low)`` steps of ``2**lsb_exponent``, and sticky flags.

    ``0 <= low < 2**LIMB_BITS``; all arrays have the same shape.
    """

    high: IntArray
    low: IntArray
    nan: BoolArray
    """A term was NaN: a NaN operand, or infinity times zero."""
    positive_infinity: BoolArray
    """A term was +infinity, from an infinite operand or beyond the grid."""
    negative_infinity: BoolArray
    clipped: BoolArray
    """A term of finite operands lay beyond the grid, and counts as infinite."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of every member."""
        return self.high.shape

    def __add__(self, other: Grid) -> Grid:
        """Return the sums of both: what the accumulators hold after either order of the terms."""
        return Grid(
            *_limbs(self.high + other.high, self.low + other.low),
            self.nan | other.nan,
            self.positive_infinity | other.positive_infinity,
            self.negative_infinity | other.negative_infinity,
            self.clipped | other.clipped,
        )

    def to_int(self, *index: int) -> int:
        """Return one sum as a Python integer, in grid steps."""
        return (int(self.high[index]) << LIMB_BITS) + int(self.low[index])


class Results(NamedTuple):
    """FP16 results and their numeric flags, all of one shape."""

    values: Fp16Array
    nan: BoolArray
    """The result is NaN."""
    overflow: BoolArray
    """Finite operands left the range: a product beyond the grid, or a sum that rounds to infinity."""


class Scores(NamedTuple):
    """Sums as the softmax unit takes them, and their numeric flags, all of one shape.

    The magnitude is ``mantissa * 2**(exponent + SCORE_MIN_EXPONENT - SCORE_BITS + 1)``, truncated toward
    zero; below ``2**SCORE_MIN_EXPONENT`` the exponent is 0 and the mantissa has fewer bits, so that every
    sum of the default grid is exact there.
    """

    mantissa: IntArray
    """0 ... ``2**SCORE_BITS - 1``; 0 where infinite or NaN."""
    exponent: IntArray
    """0 ... 29; 0 where infinite or NaN."""
    negative: BoolArray
    infinite: BoolArray
    """Infinite terms of one sign, or a magnitude of `SCORE_LIMIT` or more."""
    nan: BoolArray
    overflow: BoolArray
    """Finite operands left the range: a product beyond the grid, or a sum of `SCORE_LIMIT` or more."""


def _limbs(high: IntArray, low: IntArray) -> tuple[IntArray, IntArray]:
    return high + (low >> LIMB_BITS), low & (_LIMB - 1)


def _split(steps: npt.NDArray[np.float64]) -> tuple[IntArray, IntArray]:
    high = np.floor(steps * 2.0**-LIMB_BITS)
    return high.astype(np.int64), (steps - high * 2.0**LIMB_BITS).astype(np.int64)


def fp16_product_grid(a: Fp16Array, b: Fp16Array, accumulator: AccumulatorConfig) -> Grid:
    """Return the products ``a * b`` as terms on the grid; ``a`` and ``b`` broadcast."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float16), np.asarray(b, np.float16))
    with np.errstate(invalid="ignore"):
        # Exact: 22 significant bits, and exponents far inside those of float64.
        product = a.astype(np.float64) * b.astype(np.float64)
    nan = np.isnan(product)
    clipped = np.isfinite(product) & (np.abs(product) >= 2.0**accumulator.msb_exponent)
    infinite = clipped | np.isinf(product)
    on_grid = np.where(nan | infinite, 0.0, product) * 2.0**-accumulator.lsb_exponent
    high, low = _split(np.trunc(on_grid))
    return Grid(high, low, nan, infinite & (product > 0), infinite & (product < 0), clipped)


def gemm_grid(x: Fp16Array, w: Fp16Array, accumulator: AccumulatorConfig) -> Grid:
    """Return the sums of ``x @ w.T`` on the grid, shape (B, N), before they are rounded.

    Args:
        x: (B, K) GPU operand.
        w: (N, K) device operand.
        accumulator: the grid.

    Raises:
        ValueError: the operands are no matrices of equal K, or K exceeds ``accumulator.max_terms``.
    """
    x, w = np.asarray(x, np.float16), np.asarray(w, np.float16)
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x {x.shape} and w {w.shape} must be matrices with the same number of columns")
    if x.shape[1] > accumulator.max_terms:
        raise ValueError(f"{x.shape[1]} terms: the accumulator is made for {accumulator.max_terms}")
    x_finite, w_finite = np.isfinite(x), np.isfinite(w)
    shape = (x.shape[0], w.shape[0])
    if x_finite.all() and w_finite.all():
        nan, positive, negative = (np.zeros(shape, bool) for _ in range(3))
    else:
        nan, positive, negative = _special_terms(x, w)
        x, w = np.where(x_finite, x, np.float16(0)), np.where(w_finite, w, np.float16(0))
    high, low, clipped = (np.zeros(shape, dtype) for dtype in (np.int64, np.int64, bool))
    # Scaled to grid steps once, so that a product is a number of steps.
    steps_of_x = x.astype(np.float64) * 2.0**-accumulator.lsb_exponent
    columns = min(max(x.shape[1], 1), _terms_per_word(accumulator), _BLOCK)
    rows = max(1, _BLOCK // columns)
    for n in range(0, w.shape[0], rows):
        for k in range(0, x.shape[1], columns):
            part = w[n : n + rows, k : k + columns].astype(np.float64)
            largest = np.abs(part).max(initial=0.0) * 2.0**-accumulator.product_bits
            batch = max(1, _BLOCK // part.size)
            for b in range(0, x.shape[0], batch):
                here = np.s_[b : b + batch, n : n + rows]
                chunk = steps_of_x[b : b + batch, None, k : k + columns]
                steps = chunk * part
                if np.abs(chunk).max(initial=0.0) * largest >= 1.0:
                    clip = np.abs(steps) >= 2.0**accumulator.product_bits
                    clipped[here] |= clip.any(axis=2)
                    positive[here] |= (clip & (steps > 0)).any(axis=2)
                    negative[here] |= (clip & (steps < 0)).any(axis=2)
                    steps[clip] = 0.0
                more_high, more_low = _sum_steps(steps, accumulator)
                high[here] += more_high
                low[here] += more_low
    return Grid(*_limbs(high, low), nan, positive, negative, clipped)


def _terms_per_word(accumulator: AccumulatorConfig) -> int:
    """Products that `_sum_steps` can sum: so many surely fit an int64, or the limbs of so many two of them."""
    return 1 << 63 - (accumulator.product_bits if accumulator.product_bits <= _WORD_BITS else LIMB_BITS)


def _sum_steps(steps: npt.NDArray[np.float64], accumulator: AccumulatorConfig) -> tuple[IntArray, IntArray]:
    """Truncate products to whole steps and sum them along the last axis, as limbs."""
    if accumulator.product_bits <= _WORD_BITS:
        total = steps.astype(np.int64).sum(axis=-1)  # the conversion truncates toward zero
        return total >> LIMB_BITS, total & (_LIMB - 1)
    high, low = _split(np.trunc(steps))
    return high.sum(axis=-1), low.sum(axis=-1)


def _special_terms(x: Fp16Array, w: Fp16Array) -> tuple[BoolArray, BoolArray, BoolArray]:
    """Return where x @ w.T has a NaN, +infinity or -infinity among its terms, by infinite or NaN operands."""

    def meet(a: BoolArray, b: BoolArray) -> BoolArray:
        counts = a.astype(np.float32) @ b.astype(np.float32).T  # exact: fewer than 2**24 terms
        return np.asarray(counts > 0)

    infinity = np.float16(np.inf)
    no_number = np.isnan(x).any(axis=1, keepdims=True) | np.isnan(w).any(axis=1, keepdims=True).T
    nan = no_number | meet(np.isinf(x), w == 0) | meet(x == 0, np.isinf(w))
    positive = meet(x == infinity, w > 0) | meet(x == -infinity, w < 0)
    positive |= meet(x > 0, w == infinity) | meet(x < 0, w == -infinity)
    negative = meet(x == infinity, w < 0) | meet(x == -infinity, w > 0)
    negative |= meet(x > 0, w == -infinity) | meet(x < 0, w == infinity)
    return nan, positive, negative


def _bit_length(values: IntArray) -> IntArray:
    top, bottom = (values >> 32).astype(np.float64), (values & 0xFFFF_FFFF).astype(np.float64)
    # frexp of an integer below 2**53 gives its bit length, 0 for 0.
    return np.where(top > 0, np.frexp(top)[1] + 32, np.frexp(bottom)[1]).astype(np.int64)


def sum_magnitude(grid: Grid) -> tuple[npt.NDArray[np.float64], BoolArray]:
    """Return the magnitudes of sums in grid steps, and which are negative.

    Truncated to 53 bits, the last of them set where something was cut off ("round to odd"): rounding
    that to anything of fewer than 52 bits is rounding the sum itself.
    """
    negative = grid.high < 0
    borrow = negative & (grid.low != 0)
    high = np.where(negative, -grid.high, grid.high) - borrow
    low = np.where(borrow, _LIMB - grid.low, grid.low)
    # 62 bits at most, then 53.
    cut = LIMB_BITS - np.clip(62 - _bit_length(high), 0, LIMB_BITS)
    steps = high << LIMB_BITS - cut | low >> cut | (low & (np.int64(1) << cut) - 1 != 0)
    excess = np.maximum(_bit_length(steps) - 53, 0)
    steps = steps >> excess | (steps & (np.int64(1) << excess) - 1 != 0)
    return np.ldexp(steps.astype(np.float64), cut + excess), negative


def _exponent(magnitude: npt.NDArray[np.float64]) -> IntArray:
    """Return floor(log2) of positive values; below all others for 0."""
    fraction, exponent = np.frexp(magnitude)
    return np.where(fraction > 0, exponent.astype(np.int64) - 1, np.iinfo(np.int32).min)


def grid_to_fp16(grid: Grid, accumulator: AccumulatorConfig, offset: int | IntArray = 0) -> Results:
    """Round sums to FP16: nearest, ties to even, subnormals kept, sign of the exact sum, a zero sum is +0.

    NaN terms, or infinite terms of both signs, give the NaN 0x7E00; infinite terms of one sign that
    infinity.

    Args:
        grid: the sums.
        accumulator: their grid.
        offset: what is rounded, once, is the sum times ``2**-offset``; broadcasts with the sums.
    """
    steps, negative = sum_magnitude(grid)
    magnitude = np.ldexp(steps, accumulator.lsb_exponent - offset)
    quantum = np.maximum(_exponent(magnitude) - FP16_FRACTION_BITS, FP16_MIN_EXPONENT)
    # rint rounds ties to even. The hidden bit counts as one exponent step, and so does a carry out of the rounding.
    too_large = magnitude >= FP16_OVERFLOW
    kept = np.rint(np.ldexp(np.where(too_large, 0.0, magnitude), -quantum)).astype(np.int64)
    bits = (quantum - FP16_MIN_EXPONENT << FP16_FRACTION_BITS) + kept

    any_infinity = grid.positive_infinity | grid.negative_infinity
    nan = grid.nan | (grid.positive_infinity & grid.negative_infinity)
    bits = np.where(any_infinity | too_large, FP16_INFINITY, bits)
    sign = np.where(any_infinity, grid.negative_infinity, negative)
    bits = np.where(nan, FP16_NAN, bits | sign.astype(np.int64) << 15)
    overflow = grid.clipped | (too_large & ~any_infinity & ~nan)
    return Results(bits.astype(np.uint16).view(np.float16), nan, overflow)


def grid_to_scores(grid: Grid, accumulator: AccumulatorConfig) -> Scores:
    """Truncate the magnitudes of sums to what the softmax unit takes, see `Scores`."""
    steps, negative = sum_magnitude(grid)
    magnitude = np.ldexp(steps, accumulator.lsb_exponent)
    any_infinity = grid.positive_infinity | grid.negative_infinity
    nan = grid.nan | (grid.positive_infinity & grid.negative_infinity)
    too_large = magnitude >= SCORE_LIMIT
    infinite = (any_infinity | too_large) & ~nan
    exponent = np.maximum(_exponent(magnitude) - SCORE_MIN_EXPONENT, 0)
    mantissa = np.ldexp(magnitude, SCORE_BITS - 1 - SCORE_MIN_EXPONENT - exponent).astype(np.int64)
    special = infinite | nan
    return Scores(
        np.where(special, 0, mantissa),
        np.where(special, 0, exponent),
        np.where(any_infinity, grid.negative_infinity, negative) & ~nan,
        infinite,
        nan,
        grid.clipped | (too_large & ~any_infinity & ~nan),
    )


def golden_gemm(x: Fp16Array, w: Fp16Array, accumulator: AccumulatorConfig) -> Results:
    """Return what the device answers to y = x w^T: x (B, K), w (N, K), y (B, N).

    Raises:
        ValueError: see `gemm_grid`.
    """
    return grid_to_fp16(gemm_grid(x, w, accumulator), accumulator)
