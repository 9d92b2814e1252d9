"""The dot unit: sums, sticky flags, masks and the first-beat control."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from amaranth.sim import Simulator

from plora.hw.defs.config import DOT_LANES
from plora.hw.rtl.pe.dot_unit import DotUnit, dot_sum_layout, segment_starts
from plora.sim.golden.numerics import LIMB_BITS, fp16_product_grid
from tests.hw.rtl.pe.compiled import ACCUMULATOR, Array, Units, sum_sticky, sum_value
from tests.hw.rtl.pe.operands import KINDS, SPECIAL, SPECIAL_BITS, operands


def expected_sums(a: Array, b: Array, enable: Array, first: Array) -> tuple[list[int], Array]:
    """Return the sums and sticky flags after every row of operands."""
    zero = np.float16(0)
    grid = fp16_product_grid(
        np.where(enable, a.view(np.float16), zero), np.where(enable, b.view(np.float16), zero), ACCUMULATOR
    )
    high, low = grid.high.sum(axis=1).tolist(), grid.low.sum(axis=1).tolist()
    flags = np.empty((len(a), 4), bool)
    for index, terms in enumerate((grid.nan, grid.positive_infinity, grid.negative_infinity, grid.clipped)):
        flags[:, index] = terms.any(axis=1)
    sums: list[int] = []
    for row in range(len(a)):
        if not first[row]:
            flags[row] |= flags[row - 1]
        sums.append((high[row] << LIMB_BITS) + low[row] + (0 if first[row] else sums[-1]))
    return sums, flags


def check(words: list[int], a: Array, b: Array, enable: Array, first: Array) -> None:
    sums, flags = expected_sums(a, b, enable, first)
    for row, word in enumerate(words):
        got, expected = sum_sticky(word), tuple(flags[row].tolist())
        # Infinities are of no account beside NaN, and the sum beside any flag.
        if got[0] and expected[0]:
            got, expected = (got[0], got[3]), (expected[0], expected[3])
        good = got == expected and (any(expected) or sum_value(word) == sums[row])
        assert good, f"row {row}: a {a[row]} b {b[row]} enable {enable[row]} first {first[row]}"


def stimuli(seed: int, rows: int, kind: str, enabled: float, firsts: float) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(seed)
    a, b = (operands(rng, (rows, DOT_LANES), kind) for _ in range(2))
    enable, first = rng.random((rows, DOT_LANES)) < enabled, rng.random(rows) < firsts
    first[0] = True
    return a, b, enable, first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("enabled", "firsts"), [(1.0, 1.0), (0.8, 0.1), (0.1, 0.02)])
def test_random_sums(units: Units, kind: str, enabled: float, firsts: float) -> None:
    vectors = stimuli(1, 8000, kind, enabled, firsts)
    check(units.dot(*vectors), *vectors)


def test_sums_of_alternating_sign_carry_and_borrow_through_the_whole_accumulator(units: Units) -> None:
    # The largest product and the smallest one of the other sign: long runs of ones come and go.
    rows = 400
    a = np.zeros((rows, DOT_LANES), np.uint16)
    b = np.zeros_like(a)
    a[:, 0], b[:, 0] = 0x5FFF, np.where(np.arange(rows) % 2, 0xDFFF, 0x5FFF)
    a[:, 5], b[:, 5] = 0x0100, np.where(np.arange(rows) % 3, 0x8100, 0x0100)
    a[:, 9], b[:, 9] = 0x3C00, np.where(np.arange(rows) % 5, 0xA000, 0x2C00)
    first = np.arange(rows) == 0
    enable = np.ones_like(a, bool)
    check(units.dot(a, b, enable, first), a, b, enable, first)


def test_the_largest_number_of_the_largest_terms_does_not_wrap(units: Units) -> None:
    rows = ACCUMULATOR.max_terms // DOT_LANES
    a, enable = np.full((rows, DOT_LANES), 0x5FFF, np.uint16), np.ones((rows, DOT_LANES), bool)
    first = np.arange(rows) == 0
    for b in (a, a | 0x8000):
        words = units.dot(a, b, enable, first)
        sign = 1 if b is a else -1
        assert sum_value(words[-1]) == sign * ACCUMULATOR.max_terms * (2047**2 << 28)


@pytest.mark.parametrize("name", SPECIAL)
def test_a_special_value_in_any_lane(units: Units, name: str) -> None:
    # Lane i has the special value in row i, against each kind of partner; all others are ordinary.
    partners = np.repeat(SPECIAL_BITS, DOT_LANES)
    a, b, enable, first = stimuli(2, len(partners), "moderate", 1.0, 1.0)
    lanes = np.arange(len(partners)) % DOT_LANES
    rows = np.arange(len(partners))
    a[rows, lanes], b[rows, lanes] = SPECIAL[name], partners
    for one, other in ((a, b), (b, a)):
        check(units.dot(one, other, enable, first), one, other, enable, first)
    enable[rows, lanes] = False
    check(units.dot(a, b, enable, first), a, b, enable, first)


def test_flags_stay_until_the_next_first_beat(units: Units) -> None:
    a = np.full((9, DOT_LANES), 0x3C00, np.uint16)
    b = a.copy()
    a[2, 3], b[2, 3] = 0x7C00, 0x3C00  # +infinity
    a[6, 3], b[6, 3] = 0x6000, 0xE000  # -(2**18), the first product beyond the grid
    enable, first = np.ones_like(a, bool), np.isin(np.arange(9), [0, 4, 8])
    words = units.dot(a, b, enable, first)
    assert [sum_sticky(word) for word in words] == [
        *([(False, False, False, False)] * 2),
        *([(False, True, False, False)] * 2),
        *([(False, False, False, False)] * 2),
        *([(False, False, True, True)] * 2),
        (False, False, False, False),
    ]
    assert sum_value(words[8]) == 16 << 32


def test_pieces_of_the_accumulator_cover_it() -> None:
    starts = segment_starts(ACCUMULATOR)
    assert starts[0] == 0
    assert all(16 <= end - start <= 17 for start, end in pairwise([*starts, ACCUMULATOR.bits]))


def test_amaranth_simulator_agrees() -> None:
    a, b, enable, first = stimuli(3, 60, "special", 0.9, 0.2)
    dut = DotUnit(ACCUMULATOR)
    words: list[int] = []

    async def drive(ctx: object) -> None:
        rows = len(a)
        for row in range(rows + DotUnit.LATENCY):
            live = row < rows
            ctx.set(dut.a, a[row % rows].tolist())  # type: ignore[attr-defined]
            ctx.set(dut.b, b[row % rows].tolist())  # type: ignore[attr-defined]
            mask = int.from_bytes(np.packbits(enable[row % rows], bitorder="little").tobytes(), "little")
            ctx.set(dut.enable, mask if live else 0)  # type: ignore[attr-defined]
            ctx.set(dut.first, int(live and first[row]))  # type: ignore[attr-defined]
            await ctx.tick()  # type: ignore[attr-defined]
            words.append(ctx.get(dut.sum.as_value()))  # type: ignore[attr-defined]

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(drive)
    simulator.run()
    assert dut.sum.as_value().shape().width == dot_sum_layout(ACCUMULATOR).size
    check(words[DotUnit.LATENCY - 1 : -1], a, b, enable, first)
