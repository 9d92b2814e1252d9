"""The table of 2**f, over all its arguments."""

from __future__ import annotations

import numpy as np

from plora.hw.defs.exp2 import FRACTION_BITS, LINES, OFFSET_BITS, SEGMENTS, SLOPE_BITS, VALUE_BITS


def interpolated() -> np.ndarray:
    f = np.arange(1 << FRACTION_BITS)
    base, slope = np.array(LINES).T
    segment, offset = f >> OFFSET_BITS, f & (1 << OFFSET_BITS) - 1
    return np.asarray(base[segment] + (slope[segment] * offset >> OFFSET_BITS))


def test_the_relative_error_over_all_arguments_is_below_what_the_module_says() -> None:
    exact = 2.0 ** (np.arange(1 << FRACTION_BITS) / 2**FRACTION_BITS)
    error = np.abs(interpolated() / 2**VALUE_BITS / exact - 1)
    assert error.max() < 1.31e-5, f"{error.max():.3e} at f = {error.argmax()} / 2**{FRACTION_BITS}"


def test_it_starts_at_exactly_one_never_falls_and_stays_below_two() -> None:
    values = interpolated()
    assert values[0] == 1 << VALUE_BITS
    assert (np.diff(values) >= 0).all()
    assert values[-1] < 2 << VALUE_BITS


def test_the_table_has_the_sizes_that_the_hardware_is_built_for() -> None:
    assert len(LINES) == SEGMENTS
    assert all(1 << VALUE_BITS <= base < 2 << VALUE_BITS and 0 < slope < 1 << SLOPE_BITS for base, slope in LINES)
