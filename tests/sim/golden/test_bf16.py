"""The golden BF16 functions against fractions, and against each other."""

from __future__ import annotations

import bisect
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.config import AccumulatorConfig
from plora.hw.defs.queue import MAX_OPERAND_EXPONENT, MIN_OPERAND_EXPONENT
from plora.sim.golden.bf16 import (
    exponent_for,
    from_float,
    golden_gemm_bf16,
    grid_to_bf16,
    to_float,
    to_fp16,
)
from plora.sim.golden.numerics import LIMB_BITS, Grid, golden_gemm

DEFAULT = AccumulatorConfig()
ALL = np.arange(1 << 16, dtype=np.uint16)
EXPONENTS = st.integers(MIN_OPERAND_EXPONENT, MAX_OPERAND_EXPONENT)


def two_to(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def value(bits: int) -> Fraction:
    """The value of a finite BF16 pattern, from its definition."""
    field, fraction = bits >> 7 & 255, bits & 127
    magnitude = (fraction + 128 * (field > 0)) * two_to(max(field, 1) - 134)
    return -magnitude if bits >> 15 else magnitude


def fp16_value(bits: int) -> Fraction:
    field, fraction = bits >> 10 & 31, bits & 1023
    return (fraction + 1024 * (field > 0)) * two_to(max(field, 1) - 25)


FP16_VALUES = [fp16_value(bits) for bits in range(0x7C01)]
BF16_VALUES = [value(bits) for bits in range(0x7F81)]


def nearest(magnitude: Fraction, values: list[Fraction]) -> int:
    """Index of the nearest value, ties to even; the last stands for infinity."""
    above = min(bisect.bisect_left(values, magnitude), len(values) - 1)
    below = max(above - 1, 0)
    down, up = magnitude - values[below], values[above] - magnitude
    return below if down < up or (down == up and below % 2 == 0) else above


@pytest.mark.parametrize("exponent", [MIN_OPERAND_EXPONENT, -112, -100, -13, -1, 0, 1, 7, 24, MAX_OPERAND_EXPONENT])
def test_every_bf16_value_becomes_the_nearest_fp16_value(exponent: int) -> None:
    got = to_fp16(ALL, exponent).view(np.uint16)
    for bits in range(0, 1 << 16, 7):
        sign = bits & 0x8000
        if bits & 0x7F80 == 0x7F80:
            expected = (0x7E00 if bits & 0x7F else 0x7C00) | sign
        else:
            expected = nearest(abs(value(bits)) * two_to(exponent), FP16_VALUES) | sign
        assert got[bits] == expected, f"{bits:#06x} times 2**{exponent}"


def test_a_significand_is_exact_down_to_the_last_bits() -> None:
    # 1.fraction * 2**-17 ends at 2**-24.
    for place in range(-17, 16):
        bits = ((place + 127) << 7 | np.arange(128)).astype(np.uint16)
        np.testing.assert_array_equal(to_fp16(bits, 0).astype(np.float64), to_float(bits))


@given(st.integers(0, 0x7F80), st.floats(0, 1), st.booleans())
def test_floats_round_to_the_nearest(bits: int, share: float, negative: bool) -> None:
    low = BF16_VALUES[bits]
    high = BF16_VALUES[min(bits + 1, 0x7F80)]
    number = np.float32(min(float(low + (high - low) * Fraction(share)), 3.4028234e38))
    expected = nearest(Fraction(float(number)), BF16_VALUES)
    assert from_float(-number if negative else number) == expected | (0x8000 if negative else 0)


def test_special_floats() -> None:
    got = from_float([np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38])
    assert got.tolist() == [0x7FC0, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x7F80]
    finite = ALL[ALL & 0x7F80 != 0x7F80]
    np.testing.assert_array_equal(from_float(to_float(finite)), finite)


def grid_of(steps: list[int]) -> Grid:
    none = np.zeros(len(steps), bool)
    high, low = zip(*[divmod(number, 1 << LIMB_BITS) for number in steps], strict=True)
    return Grid(np.array(high), np.array(low), none, none, none, none)


@given(EXPONENTS, EXPONENTS, st.integers(0, 15), st.integers(0, 66), st.data())
def test_rounding_of_any_sum(x: int, w: int, offset: int, bits: int, data: st.DataObject) -> None:
    limit = (1 << bits) - 1
    steps = data.draw(st.integers(-limit, limit))
    got = grid_to_bf16(grid_of([steps]), DEFAULT, x + w, offset)
    magnitude = Fraction(abs(steps), 1 << 32)
    scaled = magnitude * two_to(-x - w - offset)
    expected = 0x7F80 if magnitude >= two_to(31) else nearest(scaled, BF16_VALUES)
    assert got.values[0] == expected | (0x8000 if steps < 0 else 0), f"{steps} steps, {x}, {w}, offset {offset}"
    assert bool(got.overflow[0]) == (expected == 0x7F80)
    assert steps == 0 or expected >= 0x80, "a legal result is never subnormal"


def test_infinite_terms_count_as_out_of_range() -> None:
    flags = np.array([[nan, up, down] for nan in (0, 1) for up in (0, 1) for down in (0, 1)], bool)
    sums = grid_of([-(1 << 32)] * len(flags))
    nan, up, down = flags.T
    got = grid_to_bf16(Grid(sums.high, sums.low, nan, up, down, np.zeros(len(flags), bool)), DEFAULT, 0)
    none = nan | (up & down)
    np.testing.assert_array_equal(got.nan, none)
    np.testing.assert_array_equal(got.overflow, (up | down) & ~nan)
    np.testing.assert_array_equal(
        got.values, np.where(none, 0x7FC0, np.where(up, 0x7F80, np.where(down, 0xFF80, 0xBF80)))
    )


def test_a_product_within_fp16_is_that_of_fp16_rounded_to_bf16() -> None:
    rng = np.random.default_rng(3)
    x, w = (from_float(rng.standard_normal((rows, 64))) for rows in (4, 9))
    exact = to_float(x).astype(np.float64) @ to_float(w).astype(np.float64).T
    got = golden_gemm_bf16(x, w, 0, 0, DEFAULT)
    np.testing.assert_array_equal(to_float(got.values), to_float(from_float(exact)))
    np.testing.assert_allclose(golden_gemm(to_fp16(x, 0), to_fp16(w, 0), DEFAULT).values, exact, rtol=2**-10)
    # Other exponents only move the window.
    for sx, sw in ((3, -3), (-2, 5), (4, 4)):
        np.testing.assert_array_equal(golden_gemm_bf16(x, w, sx, sw, DEFAULT).values, got.values)


def test_values_beyond_fp16_are_brought_into_its_range() -> None:
    rng = np.random.default_rng(4)
    x = from_float(rng.standard_normal((3, 40)) * 2.0**90)
    w = from_float(rng.standard_normal((5, 40)) * 2.0**-30)
    sx, sw = (exponent_for(float(np.abs(to_float(matrix)).max()), 8) for matrix in (x, w))
    got = golden_gemm_bf16(x, w, sx, sw, DEFAULT)
    exact = to_float(x).astype(np.float64) @ to_float(w).astype(np.float64).T
    assert sx < -80 and sw > 30
    assert not got.overflow.any()
    np.testing.assert_allclose(to_float(got.values), exact, rtol=2**-8, atol=np.abs(exact).max() * 2.0**-18)
    # With a poor exponent the values are seen to leave the range.
    poor = golden_gemm_bf16(x, w, 0, 0, DEFAULT)
    assert (poor.overflow | poor.nan).all()


def test_the_exponent_brings_the_largest_magnitude_below_the_target() -> None:
    for largest in (1e-38, 2.0**-20, 0.9, 1.0, 1.5, 65504.0, 3e38):
        exponent = exponent_for(largest, 12)
        assert MIN_OPERAND_EXPONENT <= exponent <= MAX_OPERAND_EXPONENT
        if exponent < MAX_OPERAND_EXPONENT:
            assert 2.0**11 <= largest * 2.0**exponent < 2.0**12
    assert exponent_for(0.0, 12) == 0
