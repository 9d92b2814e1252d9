"""The golden softmax against fractions, and against float64 softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.config import AccumulatorConfig, NdpConfig, preset
from plora.hw.defs.exp2 import FRACTION_BITS, VALUE_BITS
from plora.sim.golden.numerics import (
    SCORE_BITS,
    SCORE_MIN_EXPONENT,
    Fp16Array,
    Scores,
    gemm_grid,
    grid_to_scores,
)
from plora.sim.golden.softmax import (
    NO_ANCHOR,
    Attention,
    Partial,
    RowState,
    exp2_fp16,
    exp2_fraction,
    fp16_steps,
    golden_attention,
    merge_partials,
    rescale_weights,
    scale_scores,
    softmax_tile,
    split_scale,
)

DEFAULT = AccumulatorConfig()
FULL = preset("full")
INF, NAN = float("inf"), float("nan")


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def channels(count: int) -> NdpConfig:
    return replace(FULL, name=f"{count} channels", channels=count)


def score_value(scores: Scores, index: int) -> Fraction:
    magnitude = int(scores.mantissa[index]) * power(int(scores.exponent[index]) + SCORE_MIN_EXPONENT - (SCORE_BITS - 1))
    return -magnitude if scores.negative[index] else magnitude


def cut(value: Fraction, step: Fraction) -> Fraction:
    """``value`` cut toward zero to whole steps."""
    return math.trunc(value / step) * step


finite_scores = st.builds(
    lambda exponent, mantissa, negative: (exponent, mantissa | (exponent > 0) << SCORE_BITS - 1, negative),
    st.integers(0, 29),
    st.integers(0, (1 << SCORE_BITS) - 1),
    st.booleans(),
)


def scores_of(parts: Sequence[tuple[int, int, bool]]) -> Scores:
    exponent, mantissa, negative = zip(*parts, strict=True)
    none = np.zeros(len(parts), bool)
    return Scores(np.array(mantissa), np.array(exponent), np.array(negative), none, none, none)


@given(finite_scores, st.integers(0, (1 << 23) - 1), st.integers(-24, 7))
def test_t_is_score_times_scale_cut_to_the_grid(score: tuple[int, int, bool], fraction: int, exponent: int) -> None:
    scale = float(np.array(exponent + 127 << 23 | fraction, np.uint32).view(np.float32))
    counted = (1 + Fraction(fraction >> 7, 1 << 16)) * power(exponent)
    assert split_scale(scale) == (int(counted * power(16 - exponent)), exponent)
    scores = scores_of([score])
    t = scale_scores(scores, scale)
    exact = cut(score_value(scores, 0) * counted, power(-FRACTION_BITS))
    infinite = abs(exact) >= 32767
    assert (t.positive_infinity[0] | t.negative_infinity[0]) == t.overflow[0] == infinite
    assert t.positive_infinity[0] == (infinite and exact > 0)
    assert t.steps[0] * power(-FRACTION_BITS) == (0 if infinite else exact)


@pytest.mark.parametrize("scale", [0.0, -1.0, 2.0**-25, 256.0, INF, NAN])
def test_a_scale_out_of_range_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="scale"):
        split_scale(scale)


def test_every_exponential_is_the_interpolated_one_rounded_once() -> None:
    f = np.arange(1 << FRACTION_BITS)
    value = exp2_fraction(f) / 2**VALUE_BITS
    for n in [*range(-30, 0), -1000, -65535]:
        # float64 holds the value exactly, and numpy's conversion rounds it once.
        expected = (value * 2.0**n).astype(np.float16).view(np.uint16)
        np.testing.assert_array_equal(exp2_fp16(f + (n << FRACTION_BITS)), expected, err_msg=f"n = {n}")
    assert exp2_fp16(np.array([0]))[0] == 0x3C00


def test_every_weight_is_rescaled_with_one_rounding() -> None:
    bits = np.arange(0x3C01, dtype=np.uint16)[:, None]
    p = bits.view(np.float16)
    for delta in [*range(30), 1000, 65535]:
        got = rescale_weights(p, np.zeros(p.shape, np.int64), np.full(len(p), delta), FULL)
        expected = (p.astype(np.float64) * 2.0**-delta).astype(np.float16)
        np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16), err_msg=f"delta = {delta}")


def test_every_weight_is_a_whole_number_of_steps_of_the_sum() -> None:
    bits = np.arange(0x3C01, dtype=np.uint16)
    np.testing.assert_array_equal(fp16_steps(bits), bits.view(np.float16).astype(np.float64) * 2**24)


def fp16(values: object) -> Fp16Array:
    return np.asarray(values, np.float64).astype(np.float16)


def scores_from(values: object) -> Scores:
    """Scores of FP16 values (rows, tokens), which a dot product with 1 gives."""
    rows = fp16(values)
    grids = [golden_scores(row) for row in rows]
    return Scores(*(np.concatenate(members) for members in zip(*grids, strict=True)))


def golden_scores(row: Fp16Array) -> Scores:
    return grid_to_scores(gemm_grid(fp16([[1.0]]), row[:, None], DEFAULT), DEFAULT)


SPECIAL_ROWS: dict[str, tuple[list[float], list[float], int, int]] = {
    # scores; p; anchor; l in steps of 2**-24
    "length 1": ([3.0], [1.0], 3, 1 << 24),
    "length 1, between integers": ([2.5], [2**-0.5], 3, -1),
    "zero": ([0.0], [1.0], 0, 1 << 24),
    "all equal": ([-7.0] * 9, [1.0] * 9, -7, 9 << 24),
    "all -infinity": ([-INF] * 5, [0.0] * 5, NO_ANCHOR, 0),
    "one +infinity": ([1.0, INF, 0.0], [1.0, NAN, 0.5], 1, 3 << 23),
    "one -infinity": ([1.0, -INF, 0.0], [1.0, 0.0, 0.5], 1, 3 << 23),
    "both infinities": ([INF, -INF], [NAN, 0.0], NO_ANCHOR, 0),
    "one NaN": ([1.0, NAN], [1.0, NAN], 1, 1 << 24),
    "only NaN": ([NAN, NAN], [NAN, NAN], NO_ANCHOR, 0),
    "spread of 65504": ([32752.0, -32752.0], [1.0, 0.0], 32752, 1 << 24),
    "around the last subnormal": ([0.0, -24.0, -25.0, -24.5], [1.0, 2.0**-24, 0.0, 2.0**-24], 0, (1 << 24) + 2),
}


@pytest.mark.parametrize("name", SPECIAL_ROWS)
def test_special_rows(name: str) -> None:
    scores, p, anchor, total = SPECIAL_ROWS[name]
    weights, state = softmax_tile(scores_from([scores]), 1.0, RowState.start(1), FULL)
    np.testing.assert_array_equal(weights.p[0], fp16(p))
    assert state.anchor[0] == anchor
    assert state.total[0] == (total if total >= 0 else fp16_steps(weights.p.view(np.uint16)).sum())
    np.testing.assert_array_equal(weights.nan, np.isnan(fp16([p])))
    assert state.nan[0] == np.isnan(fp16(p)).any()
    assert not weights.overflow.any()


@pytest.mark.parametrize("sign", [1, -1])
def test_t_beyond_its_range_is_infinite_and_an_overflow(sign: int) -> None:
    weights, state = softmax_tile(scores_from([[sign * 65504.0, 0.0]]), 1.0, RowState.start(1), FULL)
    np.testing.assert_array_equal(weights.p[0], fp16([NAN, 1.0] if sign > 0 else [0.0, 1.0]))
    assert weights.overflow.tolist() == [[True, False]]
    assert weights.nan.tolist() == [[sign > 0, False]]
    assert (state.anchor[0], state.total[0]) == (0, 1 << 24)


def test_an_infinity_in_v_meets_a_weight_of_zero_as_nan() -> None:
    result = golden_attention(fp16([[1.0]]), fp16([[0.0], [-60.0]]), fp16([[2.0], [INF]]), 1.0, FULL)
    assert result.scaled[0, 1] == 0 and np.isnan(result.output.values[0, 0]) and result.output.nan[0, 0]


def random_attention(
    rng: np.random.Generator, rows: int, tokens: int, head_dim: int, spread: float = 1.0
) -> tuple[Fp16Array, Fp16Array, Fp16Array, float]:
    q, k = (rng.normal(size=(count, head_dim)) for count in (rows, tokens))
    v = rng.normal(size=(tokens, head_dim))
    return fp16(spread * q), fp16(k), fp16(v), math.log2(math.e) / math.sqrt(head_dim)


def exact_t(q: Fp16Array, k: Fp16Array, scale: float) -> np.ndarray:
    significand, exponent = split_scale(scale)
    return np.asarray(q.astype(np.float64) @ k.astype(np.float64).T * significand * 2.0 ** (exponent - 16))


def exact_softmax(q: Fp16Array, k: Fp16Array, scale: float) -> np.ndarray:
    t = exact_t(q, k, scale)
    p = np.exp2(t - t.max(axis=1, keepdims=True))
    return np.asarray(p / p.sum(axis=1, keepdims=True))


def probabilities(result: Attention) -> np.ndarray:
    return np.asarray(result.scaled.astype(np.float64) / (result.state.total / 2.0**24)[:, None])


def ulp(values: np.ndarray) -> np.ndarray:
    """Distance of FP16 values around positive ones."""
    return np.asarray(2.0 ** np.maximum(np.floor(np.log2(np.maximum(values, 1e-300))) - 10, -24))


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 100, 1000, 8192])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_weights_are_within_one_ulp_and_probabilities_within_two(tokens: int, spread: float) -> None:
    q, k, v, scale = random_attention(np.random.default_rng(tokens), 8, tokens, 128, spread)
    result = golden_attention(q, k, v, scale, FULL)
    weights = np.exp2(exact_t(q, k, scale) - result.state.anchor[:, None])
    error = np.abs(result.scaled - weights) / ulp(weights)
    assert error.max() <= 1.0, f"{error.max():.2f} ulp at {np.unravel_index(error.argmax(), error.shape)}"
    # Half an ulp of p is up to one of p / l, whose fraction may be larger; l errs by as much.
    exact = exact_softmax(q, k, scale)
    error = np.abs(probabilities(result) - exact) / ulp(exact)
    assert error.max() <= 2.0, f"{error.max():.2f} ulp at {np.unravel_index(error.argmax(), error.shape)}"


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_outputs_are_close_to_float64_attention(head_dim: int) -> None:
    q, k, v, scale = random_attention(np.random.default_rng(head_dim), 8, 777, head_dim)
    result = golden_attention(q, k, v, scale, FULL)
    exact = exact_softmax(q, k, scale) @ v.astype(np.float64)
    # Half an FP16 step of O * 2**-e, which is at least half of O / l, and the weights' own rounding.
    bound = 2.0**-10 * np.abs(exact) + 2.0**-11 * (exact_softmax(q, k, scale) @ np.abs(v.astype(np.float64)))
    assert (np.abs(merge_partials([result.partial]) - exact) <= bound + 2.0**-24).all()


@given(
    st.integers(0, 2**32), st.integers(1, 5), st.lists(st.integers(1, 6), min_size=0, max_size=5), st.integers(1, 40)
)
def test_tiles_of_whole_units_change_no_bit(seed: int, rows: int, units: list[int], rest: int) -> None:
    config = channels(4)
    tiles = [4 * count for count in units] + [rest]
    q, k, v, scale = random_attention(np.random.default_rng(seed), rows, sum(tiles), 8, 8.0)
    whole = golden_attention(q, k, v, scale, config)
    tiled = golden_attention(q, k, v, scale, config, tiles)
    for of_whole, of_tiles in ((whole.weights, tiled.weights), (whole.partial, tiled.partial)):
        for name in of_whole._fields:
            assert getattr(of_whole, name).tobytes() == getattr(of_tiles, name).tobytes(), name


def test_rows_do_not_see_each_other() -> None:
    q, k, v, scale = random_attention(np.random.default_rng(5), 6, 90, 16, 8.0)
    whole = golden_attention(q, k, v, scale, FULL)
    for row in range(6):
        alone = golden_attention(q[row : row + 1], k, v, scale, FULL)
        for name in Partial._fields:
            one, other = getattr(whole.partial, name), getattr(alone.partial, name)
            assert one[row].tobytes() == other[0].tobytes(), name


def test_the_size_of_a_unit_shows_only_in_the_last_places() -> None:
    # The second token is 1.3 steps of 2**-24 under its first anchor, 0.66 under the last one. Rounded
    # twice it is 0, rounded once it is one step; l loses as much by its shift.
    q, k, v = fp16([[1.0]]), fp16([[0.0], [-23.6], [1.0]]), fp16([[1.0], [2.0], [3.0]])
    one, sixteen = (golden_attention(q, k, v, 1.0, channels(count)) for count in (1, 16))
    assert [fp16_steps(result.scaled.view(np.uint16))[0, 1] for result in (one, sixteen)] == [0, 1]
    assert [result.state.total[0] for result in (one, sixteen)] == [3 << 23, (3 << 23) + 1]
    np.testing.assert_allclose(merge_partials([one.partial]), merge_partials([sixteen.partial]), rtol=2.0**-10)


def test_l_of_a_long_row_does_not_drift() -> None:
    tokens = 32768
    q, k, v = fp16([[1.0]]), fp16(np.zeros((tokens, 1))), fp16(np.full((tokens, 1), 65504.0))
    result = golden_attention(q, k, v, 1.0, FULL)
    assert (result.state.anchor[0], result.state.total[0], result.state.shift[0]) == (0, tokens << 24, 15)
    assert result.output.values[0, 0] == 65504 and not result.output.overflow.any()


def test_l_errs_by_less_than_two_steps_however_often_the_anchor_moves() -> None:
    scores = np.arange(2000.0) / 4
    weights, state = softmax_tile(scores_from([scores]), 1.0, RowState.start(1), channels(1))
    exact = sum(
        Fraction(float(p)) * power(int(anchor - state.anchor[0]))
        for p, anchor in zip(weights.p[0], weights.anchors[0], strict=True)
    )
    assert 0 <= exact - Fraction(int(state.total[0]), 1 << 24) < Fraction(2, 1 << 24)


@given(st.integers(1, 1 << 39))
def test_shift_brings_l_into_half_to_one(total: int) -> None:
    shift = int(RowState(np.zeros(1, np.int64), np.array([total]), np.zeros(1, bool)).shift[0])
    assert total <= 1 << 24 + shift and (shift == 0 or total > 1 << 23 + shift)
    assert 0 <= shift <= 15


@given(st.integers(0, 2**32), st.lists(st.integers(1, 50), min_size=1, max_size=6), st.data())
def test_partials_merge_in_any_order_and_split(seed: int, parts: list[int], data: st.DataObject) -> None:
    q, k, v, scale = random_attention(np.random.default_rng(seed), 3, sum(parts), 16, 6.0)
    ends = np.cumsum(parts)
    split: list[Partial] = [
        golden_attention(q, k[end - part : end], v[end - part : end], scale, FULL).partial
        for part, end in zip(parts, ends, strict=True)
    ]
    exact = exact_softmax(q, k, scale) @ v.astype(np.float64)
    magnitude = exact_softmax(q, k, scale) @ np.abs(v.astype(np.float64))
    order = data.draw(st.permutations(split))
    assert (np.abs(merge_partials(order) - exact) <= 2.0**-9 * magnitude + 2.0**-22).all()


def test_partials_without_weight_add_nothing_and_nan_stays() -> None:
    q, v = fp16([[1.0]]), fp16([[3.0]])
    empty = golden_attention(q, fp16([[-INF]]), v, 1.0, FULL).partial
    some = golden_attention(q, fp16([[2.0]]), v, 1.0, FULL).partial
    bad = golden_attention(q, fp16([[INF]]), v, 1.0, FULL).partial
    assert merge_partials([empty]).tolist() == [[0.0]]
    assert merge_partials([empty, some]).tolist() == merge_partials([some]).tolist() == [[3.0]]
    assert np.isnan(merge_partials([some, bad])[0, 0]) and bad.nan[0] and not some.nan[0]


@pytest.mark.parametrize(("tiles", "tokens"), [([3, 2], 5), ([16], 17), ([0, 16], 16)])
def test_tiles_that_do_not_fit_are_refused(tiles: list[int], tokens: int) -> None:
    q, k, v, scale = random_attention(np.random.default_rng(0), 1, tokens, 4)
    with pytest.raises(ValueError, match="tiles"):
        golden_attention(q, k, v, scale, FULL, tiles)
