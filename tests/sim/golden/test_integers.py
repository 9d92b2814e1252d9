"""INT8 and INT4 keys and values: every product of integer and scale is an FP16 value; rounding to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.descriptor import DType
from plora.hw.defs.integers import INTEGER_BITS, SCALE_NAN
from plora.sim.golden.integers import Quantized, dequantize, quantize, scale_values

ALL_SCALES = np.arange(256, dtype=np.uint8)
ALL_INTEGERS = np.tile(np.arange(-128, 128, dtype=np.int8), (256, 1))


def test_every_product_of_an_integer_and_a_scale_is_exact_or_beyond_fp16() -> None:
    found = dequantize(Quantized(ALL_INTEGERS, ALL_SCALES))
    exact = ALL_INTEGERS * scale_values(ALL_SCALES)[:, None]
    nan, beyond = np.isnan(exact), np.abs(exact) >= 65536
    assert np.array_equal(nan, np.broadcast_to(ALL_SCALES[:, None] >= SCALE_NAN, nan.shape))
    assert np.isnan(found[nan]).all()
    assert np.array_equal(found[beyond], np.where(exact[beyond] > 0, np.inf, -np.inf))
    inside = ~nan & ~beyond
    assert inside.sum() > 50_000
    assert np.array_equal(found[inside].astype(np.float64), exact[inside])
    assert np.array_equal(np.signbit(found), ALL_INTEGERS < 0)


def test_scales_are_the_fp16_values_with_three_bits_of_fraction() -> None:
    numbers = scale_values(ALL_SCALES)[:SCALE_NAN]
    assert (np.diff(numbers) > 0).all()
    assert (numbers[0], numbers[1], numbers[8], numbers[-1]) == (0.0, 2.0**-17, 2.0**-14, 61440.0)
    assert np.array_equal(numbers, numbers.astype(np.float16))


@given(st.sampled_from([DType.INT8, DType.INT4]), st.integers(-30, 15), st.integers(0, 2**32 - 1))
def test_a_row_has_the_least_scale_that_holds_it_and_errs_by_half_a_step(dtype: DType, log2: int, seed: int) -> None:
    rows = (np.random.default_rng(seed).uniform(-1, 1, (9, 40)) * 2.0**log2).astype(np.float16)
    values, scales = quantize(rows, dtype)
    most = (1 << INTEGER_BITS[dtype] - 1) - 1
    steps, largest = scale_values(scales), np.abs(rows.astype(np.float64)).max(axis=1)
    assert np.abs(values).max(axis=1, initial=0).max() <= most
    assert (most * steps >= largest).all()
    less = scales > 0
    assert (most * scale_values(scales[less] - np.uint8(1)) < largest[less]).all()
    assert (np.abs(values * steps[:, None] - rows.astype(np.float64)) <= steps[:, None] / 2).all()


def test_rows_of_zeros_and_rows_with_a_value_that_is_not_finite() -> None:
    rows = np.array([[0, -0.0], [np.inf, 1], [1, np.nan], [-np.inf, np.inf], [65504, -1]], np.float16)
    values, scales = quantize(rows, DType.INT8)
    assert scales[:4].tolist() == [0, SCALE_NAN, SCALE_NAN, SCALE_NAN]
    assert not values[:4].any()
    stored = dequantize(Quantized(values, scales))
    assert not stored[0].any() and np.isnan(stored[1:4]).all() and np.isfinite(stored[4]).all()


@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT4])
def test_nothing_finite_becomes_infinite(dtype: DType) -> None:
    rows = np.linspace(60000, 65504, 1000).astype(np.float16)[:, None] * np.array([[1, -1]], np.float16)
    quantized = quantize(rows, dtype)
    stored, steps = dequantize(quantized).astype(np.float64), scale_values(quantized.scales)[:, None]
    assert np.isfinite(stored).all()
    assert (np.abs(stored - rows.astype(np.float64)) < steps).all()
