"""BF16 operands and results of the PE array, bit for bit.

The array multiplies FP16. A BF16 operand is multiplied by a power of two that the descriptor states and
rounded to FP16 (`to_fp16`); its significand always fits, so that only what lies 2**31 and more below the
largest FP16 value is rounded at all. The sum on the grid is divided by the powers of two of both operands
and rounded to BF16, once (`grid_to_bf16`). What is between is `plora.sim.golden.numerics` as it stands.

BF16 arrays are bit patterns, ``numpy.uint16``: the upper halves of FP32 values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import AccumulatorConfig
from plora.hw.defs.queue import MAX_OPERAND_EXPONENT, MIN_OPERAND_EXPONENT
from plora.sim.golden.numerics import BoolArray, Fp16Array, Grid, IntArray, gemm_grid, sum_magnitude

Bf16Array = npt.NDArray[np.uint16]

FRACTION_BITS = 7
MIN_EXPONENT = -133
"""Exponent of the last bit of a subnormal."""
INFINITY = 0x7F80
NAN = 0x7FC0
_BIAS = 127

SUM_LIMIT_LOG2 = 31
"""Sums on the grid of 2**31 or more in magnitude count as infinite, before they are scaled."""


class Bf16Results(NamedTuple):
    """BF16 results and their numeric flags, all of one shape."""

    values: Bf16Array
    nan: BoolArray
    overflow: BoolArray
    """A sum too large, or an infinite term and no NaN one: an infinite operand counts as one out of range."""


def from_float(values: npt.ArrayLike) -> Bf16Array:
    """Round to BF16: nearest, ties to even, subnormals kept, infinity from 2**128 - 2**119 on; NaN is 0x7FC0."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), NAN, rounded).astype(np.uint16)


def to_float(bits: Bf16Array) -> npt.NDArray[np.float32]:
    """Return the values of BF16 patterns; exact."""
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


def to_fp16(bits: Bf16Array, exponent: int) -> Fp16Array:
    """Return the values times ``2**exponent`` in FP16: nearest, ties to even, subnormals kept, beyond 65504 infinite.

    No value of BF16 lies between 65504 and 65536. NaN becomes 0x7E00, with its sign.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        # Exact in float64, and rounded once.
        scaled = np.ldexp(to_float(bits).astype(np.float64), exponent).astype(np.float16)
    nan = np.asarray(bits & 0x8000 | 0x7E00, np.uint16)
    return np.where(np.isnan(scaled), nan, scaled.view(np.uint16)).view(np.float16)


def infinite_as_clipped(grid: Grid) -> Grid:
    """Return sums of BF16 operands with infinite terms counted as those of finite operands out of range.

    Not beside a NaN term: the result is NaN for that alone.
    """
    infinite = (grid.positive_infinity | grid.negative_infinity) & ~grid.nan
    return replace(grid, clipped=grid.clipped | infinite)


def grid_to_bf16(
    grid: Grid, accumulator: AccumulatorConfig, exponent: int | IntArray, offset: int | IntArray = 0
) -> Bf16Results:
    """Round sums times ``2**(-exponent - offset)`` to BF16: nearest, ties to even, a zero sum is +0.

    Args:
        grid: the sums.
        accumulator: their grid.
        exponent: sum of the exponents of both operands; broadcasts with the sums, as the next does.
        offset: 0 ... 15, for attention.
    """
    steps, negative = sum_magnitude(grid)
    magnitude = np.ldexp(steps, accumulator.lsb_exponent)
    too_large = magnitude >= 2.0**SUM_LIMIT_LOG2
    magnitude = np.ldexp(magnitude, -exponent - np.asarray(offset))
    fraction, place = np.frexp(magnitude)
    # The last step of the value; results of legal exponents are never subnormal.
    quantum = np.maximum(np.where(fraction > 0, place, -1000) - 1 - FRACTION_BITS, MIN_EXPONENT)
    kept = np.rint(np.ldexp(magnitude, -quantum)).astype(np.int64)
    # The hidden bit counts as one exponent step, and so does a carry out of the rounding.
    bits = (quantum.astype(np.int64) - MIN_EXPONENT << FRACTION_BITS) + kept
    too_large = too_large | (bits >= INFINITY)

    any_infinity = grid.positive_infinity | grid.negative_infinity
    nan = grid.nan | (grid.positive_infinity & grid.negative_infinity)
    bits = np.where(any_infinity | too_large, INFINITY, bits)
    sign = np.where(any_infinity, grid.negative_infinity, negative)
    bits = np.where(nan, NAN, bits | sign.astype(np.int64) << 15)
    return Bf16Results(
        bits.astype(np.uint16), nan, infinite_as_clipped(grid).clipped | (too_large & ~any_infinity & ~nan)
    )


def golden_gemm_bf16(
    x: Bf16Array, w: Bf16Array, x_exponent: int, w_exponent: int, accumulator: AccumulatorConfig
) -> Bf16Results:
    """Return what the device answers to y = x w^T in BF16: x (B, K), w (N, K), y (B, N).

    Raises:
        ValueError: see `gemm_grid`.
    """
    grid = gemm_grid(to_fp16(x, x_exponent), to_fp16(w, w_exponent), accumulator)
    return grid_to_bf16(grid, accumulator, x_exponent + w_exponent)


def exponent_for(largest: float, target: int) -> int:
    """Return the exponent that brings magnitudes up to ``largest`` below ``2**target``, as far as the device goes."""
    if not largest:
        return 0
    exponent = target - int(np.frexp(largest)[1])
    return int(np.clip(exponent, MIN_OPERAND_EXPONENT, MAX_OPERAND_EXPONENT))
