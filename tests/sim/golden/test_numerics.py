"""The golden numerics against Python integers and fractions, which know nothing of floating point."""

from __future__ import annotations

import bisect
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.config import AccumulatorConfig
from plora.sim.golden.numerics import (
    LIMB_BITS,
    Fp16Array,
    Grid,
    fp16_product_grid,
    gemm_grid,
    golden_gemm,
    grid_to_fp16,
    grid_to_scores,
)

DEFAULT = AccumulatorConfig()
ACCUMULATORS = [
    DEFAULT,
    AccumulatorConfig(lsb_exponent=-48, msb_exponent=32),
    AccumulatorConfig(lsb_exponent=-24, msb_exponent=16, terms_log2=4),
    AccumulatorConfig(lsb_exponent=-40, msb_exponent=17, terms_log2=20),
]

SPECIAL = {
    "+0": 0x0000,
    "smallest subnormal": 0x0001,
    "largest subnormal": 0x03FF,
    "smallest normal": 0x0400,
    "exponent 1, all ones": 0x07FF,
    "1 - ulp": 0x3BFF,
    "1": 0x3C00,
    "1 + ulp": 0x3C01,
    "256": 0x5C00,
    "512": 0x6000,
    "512 - ulp": 0x5FFF,
    "65504": 0x7BFF,
    "32768": 0x7800,
    "+inf": 0x7C00,
    "signalling NaN": 0x7C01,
    "NaN": 0x7E00,
    "NaN, all ones": 0x7FFF,
    "redmule#58 a": 0x03EE,
    "redmule#58 b": 0x3C12,
}
SPECIAL_BITS = np.array([bits | sign for bits in SPECIAL.values() for sign in (0, 0x8000)], np.uint16)

Term = int | str


def fp16(bits: object) -> Fp16Array:
    return np.asarray(bits, np.uint16).view(np.float16)


def power_of_two(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def finite_value(bits: int) -> Fraction:
    """The value of a finite FP16 bit pattern, from its definition."""
    exponent, fraction = bits >> 10 & 31, bits & 1023
    magnitude = (fraction + 1024 * (exponent > 0)) * power_of_two(max(exponent, 1) - 25)
    return -magnitude if bits >> 15 else magnitude


def kind(bits: int) -> str:
    return "finite" if bits & 0x7C00 != 0x7C00 else "nan" if bits & 0x3FF else "inf"


def reference_term(a: int, b: int, accumulator: AccumulatorConfig) -> Term:
    """A product on the grid in whole steps, or what it counts as: nan, +inf, -inf, +clip, -clip."""
    sign = "-" if (a ^ b) >> 15 else "+"
    kinds = {kind(a), kind(b)}
    if kinds == {"finite"}:
        steps = abs(finite_value(a) * finite_value(b)) * power_of_two(-accumulator.lsb_exponent)
        if steps >= 1 << accumulator.product_bits:
            return sign + "clip"
        whole = steps.numerator // steps.denominator
        return -whole if sign == "-" else whole
    if "nan" in kinds or 0 in (a & 0x7FFF, b & 0x7FFF):
        return "nan"
    return sign + "inf"


FINITE = [finite_value(bits) for bits in range(0x7C00)]


def reference_round(steps: int, accumulator: AccumulatorConfig, offset: int = 0) -> int:
    """The FP16 bit pattern nearest to a number of grid steps times 2**-offset, ties to the even pattern."""
    magnitude = abs(steps) * power_of_two(accumulator.lsb_exponent - offset)
    above = bisect.bisect_left(FINITE, magnitude)
    below = max(above - 1, 0)
    step_up = FINITE[above] if above < 0x7C00 else Fraction(65536)
    down, up = magnitude - FINITE[below], step_up - magnitude
    bits = below if down < up or (down == up and below % 2 == 0) else above
    return bits | (0x8000 if steps < 0 else 0)


def reference_result(terms: list[Term], accumulator: AccumulatorConfig) -> tuple[int, bool, bool]:
    """FP16 bits, NaN flag and overflow flag of a sum of terms."""
    clipped = "+clip" in terms or "-clip" in terms
    positive = "+inf" in terms or "+clip" in terms
    negative = "-inf" in terms or "-clip" in terms
    if "nan" in terms or (positive and negative):
        return 0x7E00, True, clipped
    if positive or negative:
        return 0xFC00 if negative else 0x7C00, False, clipped
    bits = reference_round(sum(term for term in terms if isinstance(term, int)), accumulator)
    return bits, False, bits & 0x7FFF == 0x7C00


def assert_product(grid: Grid, index: int, term: Term, context: str) -> None:
    flags = (grid.nan[index], grid.positive_infinity[index], grid.negative_infinity[index], grid.clipped[index])
    expected = (term == "nan", term in ("+inf", "+clip"), term in ("-inf", "-clip"), term in ("+clip", "-clip"))
    assert tuple(map(bool, flags)) == expected, context
    assert grid.to_int(index) == (term if isinstance(term, int) else 0), context


def check_products(a: np.ndarray, b: np.ndarray, accumulator: AccumulatorConfig) -> None:
    grid = fp16_product_grid(fp16(a), fp16(b), accumulator)
    for index, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        assert_product(grid, index, reference_term(x, y, accumulator), f"{x:#06x} * {y:#06x} on {accumulator}")


@pytest.mark.parametrize("accumulator", ACCUMULATORS, ids=str)
def test_products_of_all_pairs_of_special_values(accumulator: AccumulatorConfig) -> None:
    a, b = (axis.ravel() for axis in np.meshgrid(SPECIAL_BITS, SPECIAL_BITS))
    check_products(a, b, accumulator)


@pytest.mark.parametrize("accumulator", ACCUMULATORS, ids=str)
def test_products_of_random_bit_patterns(accumulator: AccumulatorConfig) -> None:
    a, b = np.random.default_rng(1).integers(0, 1 << 16, (2, 3000), dtype=np.uint16)
    check_products(a, b, accumulator)


def test_products_at_the_ends_of_the_grid() -> None:
    # 2**-16 * 2**-16 is one step, anything less is nothing; 512 * 512 is 2**18, the first infinity.
    one_step = fp16_product_grid(fp16([0x0100, 0x0100, 0x8100]), fp16([0x0100, 0x00FF, 0x00FF]), DEFAULT)
    assert [one_step.to_int(i) for i in range(3)] == [1, 0, 0]
    top = fp16_product_grid(fp16([0x6000, 0x6000, 0x5FFF]), fp16([0x6000, 0xDFFF, 0x5FFF]), DEFAULT)
    assert top.clipped.tolist() == [True, False, False]
    assert top.to_int(1) == -(1 << 50) + (1 << 39)


def random_operands(rng: np.random.Generator, rows: int, k: int, specials: float) -> np.ndarray:
    bits = rng.integers(0, 1 << 16, (rows, k), dtype=np.uint16)
    bits = np.where(bits & 0x7C00 == 0x7C00, bits & 0x83FF, bits)
    picked = rng.random((rows, k)) < specials
    return np.where(picked, rng.choice(SPECIAL_BITS, (rows, k)), bits).astype(np.uint16)


@pytest.mark.parametrize("accumulator", ACCUMULATORS, ids=str)
@pytest.mark.parametrize("specials", [0.0, 0.02, 0.5])
def test_sums_and_results_of_random_matrices(accumulator: AccumulatorConfig, specials: float) -> None:
    rng = np.random.default_rng(2)
    k = min(17, accumulator.max_terms)
    x, w = random_operands(rng, 5, k, specials), random_operands(rng, 7, k, specials)
    # Moderate exponents in some rows, so that sums round to finite values too.
    x[:3] = np.where(x[:3] & 0x7C00 == 0x7C00, x[:3], x[:3] & 0xBFFF)
    w[:3] = np.where(w[:3] & 0x7C00 == 0x7C00, w[:3], w[:3] & 0xBFFF)
    grid = gemm_grid(fp16(x), fp16(w), accumulator)
    result = grid_to_fp16(grid, accumulator)
    for b, n in np.ndindex(grid.shape):
        terms = [reference_term(p, q, accumulator) for p, q in zip(x[b].tolist(), w[n].tolist(), strict=True)]
        assert grid.to_int(b, n) == sum(term for term in terms if isinstance(term, int))
        got = (int(result.values.view(np.uint16)[b, n]), bool(result.nan[b, n]), bool(result.overflow[b, n]))
        assert got == reference_result(terms, accumulator), f"row {b} of x, row {n} of w"


def grid_of(steps: list[int]) -> Grid:
    none = np.zeros(len(steps), bool)
    high, low = zip(*[divmod(value, 1 << LIMB_BITS) for value in steps], strict=True)
    return Grid(np.array(high), np.array(low), none, none, none, none)


def test_rounding_around_every_fp16_value() -> None:
    # Each value, one step beside it, and the same for the midpoint to the next value.
    steps_of = [int(here * 2**32) for here in FINITE] + [65536 << 32]
    steps, expected = [], []
    for bits in range(0x7C00):
        here, following = steps_of[bits], steps_of[bits + 1]
        middle = (here + following) // 2
        even = bits + bits % 2
        steps += [here, here + 1, middle - 1, middle, middle + 1, following - 1]
        expected += [bits, bits, bits, even, bits + 1, bits + 1]
    result = grid_to_fp16(grid_of(steps), DEFAULT)
    np.testing.assert_array_equal(result.values.view(np.uint16), expected)
    np.testing.assert_array_equal(result.overflow, np.array(expected) == 0x7C00)
    negated = grid_to_fp16(grid_of([-value for value in steps]), DEFAULT).values.view(np.uint16)
    # A zero sum is +0; a nonzero negative sum keeps its sign even where it rounds to zero.
    np.testing.assert_array_equal(negated, np.where(np.array(steps) == 0, 0, np.array(expected) | 0x8000))


@given(st.sampled_from(ACCUMULATORS), st.integers(0, 110), st.integers(0, 15), st.data())
def test_rounding_of_any_sum_at_any_offset(
    accumulator: AccumulatorConfig, bits: int, offset: int, data: st.DataObject
) -> None:
    limit = (1 << min(bits, accumulator.bits - 1)) - 1
    steps = data.draw(st.integers(-limit - 1, limit))
    got = grid_to_fp16(grid_of([steps]), accumulator, offset)
    expected = reference_round(steps, accumulator, offset)
    assert got.values.view(np.uint16)[0] == expected, f"{steps} steps on {accumulator}, offset {offset}"
    assert bool(got.overflow[0]) == (expected & 0x7FFF == 0x7C00)


def test_offsets_broadcast() -> None:
    sums, offsets = [3 << 32, -(5 << 32)], np.arange(16)[:, None]
    got = grid_to_fp16(grid_of(sums), DEFAULT, offsets).values
    np.testing.assert_array_equal(got, np.array([3.0, -5.0]) * 2.0**-offsets)


@given(st.sampled_from(ACCUMULATORS), st.integers(0, 110), st.data())
def test_scores_of_any_sum(accumulator: AccumulatorConfig, bits: int, data: st.DataObject) -> None:
    limit = (1 << min(bits, accumulator.bits - 1)) - 1
    steps = data.draw(st.integers(-limit - 1, limit))
    scores = grid_to_scores(grid_of([steps]), accumulator)
    magnitude = abs(steps) * power_of_two(accumulator.lsb_exponent)
    assert not scores.nan[0]
    assert scores.negative[0] == (steps < 0)
    assert scores.infinite[0] == scores.overflow[0] == (magnitude >= 65536)
    if scores.infinite[0]:
        assert (scores.mantissa[0], scores.exponent[0]) == (0, 0)
        return
    mantissa, exponent = int(scores.mantissa[0]), int(scores.exponent[0])
    assert 0 <= exponent <= 29
    assert mantissa < 1 << 22
    assert exponent == 0 or mantissa >> 21 == 1
    step = power_of_two(exponent - 14 - 21)
    assert mantissa * step <= magnitude < (mantissa + 1) * step
    if accumulator == DEFAULT and magnitude < power_of_two(-14):
        assert mantissa * step == magnitude


def test_scores_of_sums_with_terms_that_are_no_numbers() -> None:
    flags = np.array(
        [[nan, up, down, clip] for nan in (0, 1) for up in (0, 1) for down in (0, 1) for clip in (0, 1)], bool
    )
    sums = grid_of([-(1 << 32)] * len(flags))
    nan, up, down, clipped = flags.T
    scores = grid_to_scores(Grid(sums.high, sums.low, nan, up, down, clipped), DEFAULT)
    np.testing.assert_array_equal(scores.nan, nan | (up & down))
    np.testing.assert_array_equal(scores.infinite, (up | down) & ~scores.nan)
    np.testing.assert_array_equal(scores.negative, ~scores.nan & ~up)
    np.testing.assert_array_equal(scores.overflow, clipped)


def test_results_do_not_depend_on_order_or_tiling() -> None:
    rng = np.random.default_rng(3)
    x, w = (fp16(random_operands(rng, rows, 300, 0.01)) for rows in (4, 6))
    order = rng.permutation(300)
    whole = grid_to_fp16(gemm_grid(x, w, DEFAULT), DEFAULT)
    parts = [gemm_grid(x[:, order[i::7]], w[:, order[i::7]], DEFAULT) for i in range(7)]
    tiled = grid_to_fp16(sum(parts[1:], parts[0]), DEFAULT)
    for one, other in zip(whole, tiled, strict=True):
        assert one.tobytes() == other.tobytes()


def test_the_largest_number_of_the_largest_terms_does_not_wrap() -> None:
    k = DEFAULT.max_terms
    x, w = np.full((1, k), fp16(0x5FFF)), np.full((1, k), fp16(0x5FFF))
    assert gemm_grid(x, w, DEFAULT).to_int(0, 0) == k * (0x7FF**2 << 28)  # 511.75 = 2047 * 2**-2
    result = golden_gemm(x, w, DEFAULT)
    assert result.values[0, 0] == np.inf and result.overflow[0, 0] and not result.nan[0, 0]


def test_large_terms_cancel_exactly() -> None:
    rng = np.random.default_rng(4)
    big = rng.uniform(-500, 500, (1, 4000)).astype(np.float16)
    x = np.concatenate([big, big, [[2.0**-16]]], axis=1).astype(np.float16)
    w = np.concatenate([big, -big, [[2.0**-8]]], axis=1).astype(np.float16)
    assert golden_gemm(x, w, DEFAULT).values[0, 0] == np.float16(2.0**-24)


def test_small_integers_give_the_rounded_exact_sum() -> None:
    rng = np.random.default_rng(5)
    x, w = (rng.integers(-8, 9, shape).astype(np.float16) for shape in ((9, 513), (11, 513)))
    exact = (x.astype(np.float64) @ w.astype(np.float64).T).astype(np.float16)
    np.testing.assert_array_equal(golden_gemm(x, w, DEFAULT).values, exact)


def test_blocks_of_every_shape_agree_with_single_rows() -> None:
    # Shapes on both sides of the block size, with an infinity by clipping in one block only.
    rng = np.random.default_rng(6)
    x, w = rng.normal(size=(3, 9000)).astype(np.float16), rng.normal(size=(5, 9000)).astype(np.float16)
    x[1, 8500] = w[2, 8500] = np.float16(600)
    whole = golden_gemm(x, w, DEFAULT)
    assert whole.overflow.sum() == 1 and whole.values[1, 2] == np.inf
    for b, n in np.ndindex(3, 5):
        single = golden_gemm(x[b : b + 1], w[n : n + 1], DEFAULT)
        assert [array[0, 0] for array in single] == [array[b, n] for array in whole]


def test_dropping_bits_errs_by_less_than_one_step_a_term() -> None:
    rng = np.random.default_rng(7)
    x, w = (rng.normal(scale=scale, size=(8, 4096)).astype(np.float16) for scale in (1.0, 0.02))
    grid = gemm_grid(x, w, DEFAULT)
    for b, n in np.ndindex(8, 8):
        terms = [Fraction(p) * Fraction(q) for p, q in zip(x[b].tolist(), w[n].tolist(), strict=True)]
        error = abs(grid.to_int(b, n) - sum(terms, Fraction(0)) * 2**32)
        assert 0 < error < 4096


def test_operands_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="same number of columns"):
        gemm_grid(np.zeros((2, 3), np.float16), np.zeros((2, 4), np.float16), DEFAULT)
    with pytest.raises(ValueError, match="17 terms"):
        gemm_grid(*(np.zeros((1, 17), np.float16),) * 2, AccumulatorConfig(terms_log2=4))
