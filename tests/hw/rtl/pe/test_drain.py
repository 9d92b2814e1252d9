"""The drain: rounding of sums and what the sticky flags make of it."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from plora.hw.defs.queue import MAX_OPERAND_EXPONENT, MIN_OPERAND_EXPONENT, NUMERIC_NAN, NUMERIC_OVERFLOW
from plora.hw.rtl.pe.dot_unit import segment_starts
from plora.hw.rtl.pe.drain import MAX_OFFSET, score_layout
from plora.sim.golden.bf16 import grid_to_bf16, infinite_as_clipped
from plora.sim.golden.numerics import LIMB_BITS, Grid, grid_to_fp16, grid_to_scores
from tests.hw.rtl.pe.compiled import (
    ACCUMULATOR,
    FROM_BF16,
    STICKY,
    TO_BF16,
    Array,
    Drained,
    Units,
    sum_bits,
    sum_sticky,
    sum_value,
    sum_words,
)

LIMIT = 1 << ACCUMULATOR.bits - 2


def check_results(got: Drained, sums: Grid, offsets: Array | int = 0) -> None:
    values, nan, overflow = grid_to_fp16(sums, ACCUMULATOR, offsets)
    check_field("value", got.values, values.view(np.uint16), sums, offsets)
    check_field("numeric", got.numeric, nan * NUMERIC_NAN | overflow * NUMERIC_OVERFLOW, sums, offsets)
    if np.any(offsets):
        return
    scores = grid_to_scores(sums, ACCUMULATOR)
    number, signed = ~(scores.infinite | scores.nan), ~scores.nan
    fields = {name: score_layout[name] for name, _ in score_layout}
    for name, relevant in {"mantissa": number, "exponent": number, "negative": signed, "infinite": signed}.items():
        bits = got.scores >> fields[name].offset & (1 << fields[name].width) - 1
        check_field(f"score's {name}", bits * relevant, getattr(scores, name) * relevant, sums, offsets)
    check_field("score's nan", got.scores >> fields["nan"].offset & 1, scores.nan, sums, offsets)
    numeric = scores.nan * NUMERIC_NAN | scores.overflow * NUMERIC_OVERFLOW
    check_field("score's numeric", got.score_numeric, numeric, sums, offsets)


def check_bf16(units: Units, words: list[int], scales: Array, offsets: Array | int = 0) -> None:
    high, low = np.array([divmod(sum_value(word), 1 << LIMB_BITS) for word in words]).T
    sums = Grid(high, low, *np.array([sum_sticky(word) for word in words]).T)
    got = units.drain(sum_words(words), offsets, TO_BF16 | FROM_BF16, scales)
    values, nan, overflow = grid_to_bf16(infinite_as_clipped(sums), ACCUMULATOR, scales, offsets)
    check_field("BF16 value", got.values, values, sums, offsets)
    check_field("numeric", got.numeric, nan * NUMERIC_NAN | overflow * NUMERIC_OVERFLOW, sums, offsets)


def check_field(what: str, got: Array, expected: Array, sums: Grid, offsets: Array | int) -> None:
    wrong = np.flatnonzero(got != expected)
    if len(wrong):
        first = wrong[0]
        offset = np.broadcast_to(offsets, got.shape)[first]
        pytest.fail(
            f"{what} of {sums.to_int(first)} steps at offset {offset}: {int(got[first]):#x}, not"
            f" {int(expected[first]):#x} ({len(wrong)} wrong ones)"
        )


def check(units: Units, words: list[int], offsets: Array | int = 0) -> None:
    high, low = np.array([divmod(sum_value(word), 1 << LIMB_BITS) for word in words]).T
    flags = np.array([sum_sticky(word) for word in words]).T
    check_results(units.drain(sum_words(words), offsets), Grid(high, low, *flags), offsets)


def drain_steps(units: Units, steps: Array, offsets: Array | int) -> None:
    """Check sums that fit an int64."""
    # Two words of 32 bits, then the sign in what is left of the accumulator.
    words = np.stack([steps & 0xFFFF_FFFF, steps >> 32 & 0xFFFF_FFFF, steps >> 63 & (1 << ACCUMULATOR.bits - 64) - 1])
    none = np.zeros(len(steps), bool)
    sums = Grid(steps >> LIMB_BITS, steps & (1 << LIMB_BITS) - 1, none, none, none, none)
    check_results(units.drain(np.ascontiguousarray(words.T, np.uint32), offsets), sums, offsets)


@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_around_every_fp16_value_and_midpoint(units: Units, sign: int) -> None:
    values = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    here = np.append(values, 65536.0).astype(np.int64) << 32
    here[:-1] += ((values % 1) * 2**32).astype(np.int64)
    middle = (here[:-1] + here[1:]) // 2
    steps = sign * np.concatenate([here, here + 1, here - 1, middle, middle + 1, middle - 1])
    drain_steps(units, steps, 0)


@pytest.mark.parametrize("offset", range(1, MAX_OFFSET + 1))
def test_rounding_around_fp16_values_and_midpoints_at_an_offset(units: Units, offset: int) -> None:
    # All subnormals and the first normal ones, the ends of every binade, the largest.
    patterns = [
        range(0x480),
        *(range(max(0, end - 3), end + 3) for end in range(0x800, 0x7C00, 0x400)),
        range(0x7BF0, 0x7C00),
    ]
    bits = np.concatenate([np.arange(part.start, part.stop) for part in patterns])
    values = np.where(bits < 0x7C00, bits, 0).astype(np.uint16).view(np.float16).astype(np.float64)
    following = np.where(bits < 0x7BFF, bits + 1, 0).astype(np.uint16).view(np.float16).astype(np.float64)
    following = np.where(following == 0, 65536.0, following)
    here, middle = (np.ldexp(number, 32 + offset).astype(np.int64) for number in (values, (values + following) / 2))
    steps = np.concatenate([here, here + 1, here - 1, middle, middle + 1, middle - 1])
    drain_steps(units, np.concatenate([steps, -steps]), offset)


def test_scores_around_every_cut(units: Units) -> None:
    # Mantissas of 22 ones and of a single one, at every exponent, and a step to both sides.
    steps = [1 << 47 + 1, (1 << 48) - 1, 1 << 48, 65520 << 32]
    for top in range(50):
        for number in (1 << top, (1 << top + 1) - 1, (1 << top + 1) - (1 << max(0, top - 21))):
            steps += [number - 1, number, number + 1]
    sums = np.array(steps)
    drain_steps(units, np.concatenate([sums, -sums]), 0)


def test_sums_of_every_length_with_carries_held_back(units: Units) -> None:
    rng = random.Random(12)
    words: list[int] = []
    for bits in range(ACCUMULATOR.bits - 1):
        for _ in range(60):
            total = rng.choice([1, -1]) * rng.randrange(1 << bits)
            carries = rng.randrange(1 << len(segment_starts(ACCUMULATOR)) - 1)
            held = sum((carries >> i & 1) << start for i, start in enumerate(segment_starts(ACCUMULATOR)[1:]))
            word = sum_bits(total - held, carries)
            assert sum_value(word) == total
            words.append(word)
    check(units, words)
    check(units, words, np.array([rng.randrange(MAX_OFFSET + 1) for _ in words]))


def test_carries_run_through_pieces_of_ones(units: Units) -> None:
    starts = [*segment_starts(ACCUMULATOR), ACCUMULATOR.bits]
    words = []
    for pattern in range(3 ** (len(starts) - 1)):
        value, rest = 0, pattern
        for start, end in pairwise(starts):
            piece = (0, (1 << end - start) - 1, (1 << end - start) - 2)[rest % 3]
            value, rest = value | piece << start, rest // 3
        words += [sum_bits(value, carries) for carries in range(8)]
    check(units, [word for word in words if abs(sum_value(word)) < 1 << ACCUMULATOR.bits - 1])


@pytest.mark.parametrize("sticky", range(1 << len(STICKY)))
def test_sticky_flags(units: Units, sticky: int) -> None:
    steps = [0, 1, -1, 5 << 30, -(7 << 40), 65504 << 32, -(65520 << 32), LIMIT, -LIMIT]
    for offset in (0, 1, MAX_OFFSET):
        check(units, [sum_bits(value, 0, sticky) for value in steps], offset)


def test_special_results_by_name(units: Units) -> None:
    nan, positive, negative, clipped = (1 << STICKY.index(name) for name in STICKY)
    both = NUMERIC_NAN | NUMERIC_OVERFLOW
    cases = {
        "zero sum is +0": (sum_bits(0), 0x0000, 0),
        "tiny negative sum is -0": (sum_bits(-1), 0x8000, 0),
        "half the smallest subnormal ties to 0": (sum_bits(128), 0x0000, 0),
        "just above it is the smallest subnormal": (sum_bits(129), 0x0001, 0),
        "NaN term": (sum_bits(1 << 32, 0, nan), 0x7E00, NUMERIC_NAN),
        "infinity": (sum_bits(-1, 0, positive), 0x7C00, 0),
        "minus infinity": (sum_bits(1, 0, negative), 0xFC00, 0),
        "opposite infinities": (sum_bits(0, 0, positive | negative), 0x7E00, NUMERIC_NAN),
        "product beyond the grid": (sum_bits(0, 0, positive | clipped), 0x7C00, NUMERIC_OVERFLOW),
        "opposite ones": (sum_bits(0, 0, positive | negative | clipped), 0x7E00, both),
        "largest finite": (sum_bits((65520 << 32) - 1), 0x7BFF, 0),
        "first infinity": (sum_bits(65520 << 32), 0x7C00, NUMERIC_OVERFLOW),
        "far beyond, negative": (sum_bits(-LIMIT), 0xFC00, NUMERIC_OVERFLOW),
    }
    values, numeric, _, _ = units.drain(sum_words([word for word, _, _ in cases.values()]))
    for index, (name, (_, value, flags)) in enumerate(cases.items()):
        assert (values[index], numeric[index]) == (value, flags), name


LARGEST_SCALE, SMALLEST_SCALE = 2 * MAX_OPERAND_EXPONENT, 2 * MIN_OPERAND_EXPONENT


def test_bf16_sums_of_every_length_scale_and_offset(units: Units) -> None:
    rng = random.Random(13)
    words, scales, offsets = [], [], []
    for bits in range(ACCUMULATOR.bits - 1):
        for number in range(90):
            # Bits around the cut: all ones, a single one, anything.
            total = ((1 << bits) - 1, 1 << bits >> 1, rng.randrange(1 << bits))[number % 3] ^ rng.randrange(2)
            if number % 9 > 5:
                total &= -1 << max(0, bits - rng.randrange(7, 11))
            carries = rng.randrange(1 << len(segment_starts(ACCUMULATOR)) - 1)
            held = sum((carries >> i & 1) << start for i, start in enumerate(segment_starts(ACCUMULATOR)[1:]))
            words.append(sum_bits(rng.choice([1, -1]) * total - held, carries))
            scales.append(rng.choice([0, LARGEST_SCALE, SMALLEST_SCALE, rng.randint(SMALLEST_SCALE, LARGEST_SCALE)]))
            offsets.append(rng.choice([0, 0, MAX_OFFSET, rng.randrange(MAX_OFFSET + 1)]))
    check_bf16(units, words, np.array(scales), np.array(offsets))


def test_bf16_rounding_around_every_value_of_a_binade(units: Units) -> None:
    # Every significand and midpoint, a step to both sides, at every place of the leading one.
    words = []
    for top in range(9, 63):
        for half in range(256, 512):
            middle = half << top - 8
            words += [sum_bits(sign * (middle + step)) for sign in (1, -1) for step in (-1, 0, 1)]
    for scale in (0, -41, LARGEST_SCALE):
        check_bf16(units, words, np.full(len(words), scale))


@pytest.mark.parametrize("sticky", range(1 << len(STICKY)))
def test_bf16_sticky_flags_and_the_largest_sums(units: Units, sticky: int) -> None:
    steps = [0, 1, -1, 5 << 30, -(7 << 40), (1 << 63) - 1, 1 << 63, -(1 << 63), LIMIT, -LIMIT]
    words = [sum_bits(value, 0, sticky) for value in steps]
    for scale in (0, LARGEST_SCALE, SMALLEST_SCALE, -97, -98):
        check_bf16(units, words, np.full(len(words), scale))


def test_infinite_terms_count_as_clipped_where_operands_were_bf16(units: Units) -> None:
    positive = 1 << STICKY.index("positive_infinity")
    drained = units.drain(sum_words([sum_bits(1 << 32, 0, positive)]), 0, FROM_BF16)
    assert (drained.values[0], drained.numeric[0], drained.score_numeric[0]) == (0x7C00, 2, 2)
    drained = units.drain(sum_words([sum_bits(1 << 32, 0, positive)]))
    assert (drained.values[0], drained.numeric[0], drained.score_numeric[0]) == (0x7C00, 0, 0)
