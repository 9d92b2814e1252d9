"""The drain: rounding of sums and what the sticky flags make of it."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from plora.hw.defs.queue import NUMERIC_NAN, NUMERIC_OVERFLOW
from plora.hw.rtl.pe.dot_unit import segment_starts
from plora.sim.golden.numerics import LIMB_BITS, Grid, grid_to_fp16
from tests.hw.rtl.pe.compiled import ACCUMULATOR, STICKY, Array, Units, sum_bits, sum_sticky, sum_value, sum_words

LIMIT = 1 << ACCUMULATOR.bits - 2


def check_results(got: tuple[Array, Array], sums: Grid) -> None:
    values, nan, overflow = grid_to_fp16(sums, ACCUMULATOR)
    expected = values.view(np.uint16), nan * NUMERIC_NAN | overflow * NUMERIC_OVERFLOW
    for what, one, other in zip(("value", "numeric"), got, expected, strict=True):
        wrong = np.flatnonzero(one != other)
        assert not len(wrong), (
            f"{what} of {sums.to_int(wrong[0])} steps: {one[wrong[0]]:#x}, not {other[wrong[0]]:#x}"
            f" ({len(wrong)} wrong ones)"
        )


def check(units: Units, words: list[int]) -> None:
    high, low = np.array([divmod(sum_value(word), 1 << LIMB_BITS) for word in words]).T
    flags = np.array([sum_sticky(word) for word in words]).T
    check_results(units.drain(sum_words(words)), Grid(high, low, *flags))


@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_around_every_fp16_value_and_midpoint(units: Units, sign: int) -> None:
    values = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    here = np.append(values, 65536.0).astype(np.int64) << 32
    here[:-1] += ((values % 1) * 2**32).astype(np.int64)
    middle = (here[:-1] + here[1:]) // 2
    steps = sign * np.concatenate([here, here + 1, here - 1, middle, middle + 1, middle - 1])
    # A sum of grid steps in words: two of 32 bits, then the sign in what is left of the accumulator.
    words = np.stack([steps & 0xFFFF_FFFF, steps >> 32 & 0xFFFF_FFFF, steps >> 63 & (1 << ACCUMULATOR.bits - 64) - 1])
    none = np.zeros(len(steps), bool)
    sums = Grid(steps >> LIMB_BITS, steps & (1 << LIMB_BITS) - 1, none, none, none, none)
    check_results(units.drain(np.ascontiguousarray(words.T, np.uint32)), sums)


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
    check(units, [sum_bits(value, 0, sticky) for value in steps])


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
    values, numeric = units.drain(sum_words([word for word, _, _ in cases.values()]))
    for index, (name, (_, value, flags)) in enumerate(cases.items()):
        assert (values[index], numeric[index]) == (value, flags), name
