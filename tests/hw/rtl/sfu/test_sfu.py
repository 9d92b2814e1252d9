"""The SFU, compiled, against the golden softmax."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.exp2 import FRACTION_BITS, VALUE_BITS
from plora.hw.rtl.sfu.row_state import RowState, sum_shift
from plora.hw.rtl.sfu.sfu import Sfu
from plora.sim.golden.softmax import exp2_fp16, exp2_fraction
from tests.hw.rtl.sfu.bench import CONFIGS, ROWS
from tests.hw.rtl.sfu.compiled import Answer, Run, SfuUnits, State, Unit, check_run
from tests.hw.rtl.sfu.stimuli import KINDS, fp32, noise, random_unit, random_units, score, score_of

NAMES = list(CONFIGS)
REST = Sfu.LATENCY + Sfu.SETTLE + RowState.READ_LATENCY


def run(bench: SfuUnits, name: str, units: list[Unit], seed: int = 0) -> tuple[list[Unit], list[int], Run]:
    """Run units, then every row's state is asked for while the ports hold noise."""
    rng = np.random.default_rng(seed)
    units = units + [noise(rng, CONFIGS[name]) for _ in range(REST + ROWS)]
    rows = rng.integers(0, ROWS, len(units)).tolist()
    first = len(units) - ROWS - RowState.READ_LATENCY
    rows[first : first + ROWS] = range(ROWS)
    return units, rows, bench.run(name, units, rows)


def check(bench: SfuUnits, name: str, units: list[Unit], seed: int = 0) -> None:
    units, rows, got = run(bench, name, units, seed)
    check_run(name, units, got, rows)


def test_exp2_over_all_fractions(units: SfuUnits) -> None:
    fractions = np.random.default_rng(0).permutation(1 << FRACTION_BITS)
    np.testing.assert_array_equal(units.exp2(fractions) | 1 << VALUE_BITS, exp2_fraction(fractions))


def unit_of(values: list[int], *, row: int = 0, begin: bool = True, exists: int = 0xFFFF, tag: int = 0) -> Unit:
    return Unit(tuple(values), 0, exists, row, begin, fp32(1.0), tag)


def test_every_fraction_comes_out_as_its_rounded_exponential(units: SfuUnits) -> None:
    lanes = CONFIGS["sixteen"].channels
    # t = -f is in -1 ... 0: of 22 bits, so exact.
    fractions = np.arange(1, (1 << FRACTION_BITS) + 1).reshape(-1, lanes)
    fractions[-1, -1] = 1
    stream = [
        unit_of([score_of(-f / 2**FRACTION_BITS) for f in row], row=index % ROWS)
        for index, row in enumerate(fractions.tolist())
    ]
    _, _, got = run(units, "sixteen", stream)
    p = np.array(
        [Answer.from_bits(got.weights[index + Sfu.LATENCY], CONFIGS["sixteen"]).p for index in range(len(stream))]
    )
    np.testing.assert_array_equal(p, exp2_fp16(-fractions))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [2, 3, ROWS])
@pytest.mark.parametrize("name", NAMES)
def test_random_units_of_several_rows(units: SfuUnits, name: str, rows: int, kind: str) -> None:
    rng = np.random.default_rng(rows)
    check(units, name, random_units(rng, CONFIGS[name], kind, 400, rows))


@pytest.mark.parametrize("distance", [2, 3, 4, 5])
def test_units_of_one_row_as_close_as_they_may_come(units: SfuUnits, distance: int) -> None:
    rng, config = np.random.default_rng(distance), CONFIGS["two"]
    stream: list[Unit] = []
    for index in range(150):
        stream.append(random_unit(rng, config, "rising", index, 5, begin=index == 0))
        stream += [noise(rng, config) for _ in range(distance - 1)]
    check(units, "two", stream)


def test_two_rows_in_turn_every_cycle(units: SfuUnits) -> None:
    rng, config = np.random.default_rng(1), CONFIGS["two"]
    stream = [random_unit(rng, config, "rising", index, index % 2, begin=index < 2) for index in range(300)]
    check(units, "two", stream)


def test_a_row_begun_again_knows_nothing_of_before(units: SfuUnits) -> None:
    one, half = unit_of([score_of(9.0)] * 16), unit_of([score_of(-4.0)] + [score_of(-5.0)] * 15)
    for distance in (2, 3, 4, 30):
        rng = np.random.default_rng(distance)
        gap = [noise(rng, CONFIGS["sixteen"]) for _ in range(distance - 1)]
        check(units, "sixteen", [one, *gap, one, *gap, half])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
    rows=st.integers(2, ROWS),
    count=st.integers(1, 60),
    name=st.sampled_from(NAMES),
)
def test_any_units(units: SfuUnits, seed: int, kind: str, rows: int, count: int, name: str) -> None:
    rng = np.random.default_rng(seed)
    check(units, name, random_units(rng, CONFIGS[name], kind, count, rows), seed)


INF, NAN = score(0, 0, False, infinite=True), score(0, 0, False, nan=True)
MINUS_INF = score(0, 0, True, infinite=True)
ONE, HALF, P_NAN = 0x3C00, 0x3800, 0x7E00

SPECIAL_UNITS: dict[str, tuple[list[int], list[int], int]] = {
    # scores of both lanes; their p; numeric flags
    "all equal": ([score_of(3.0)] * 2, [ONE, ONE], 0),
    "zeros of both signs": ([score(0, 0, False), score(0, 0, True)], [ONE, ONE], 0),
    "all -infinity": ([MINUS_INF] * 2, [0, 0], 0),
    "a +infinity": ([INF, score_of(1.0)], [P_NAN, ONE], 1),
    "a NaN": ([score_of(1.0), NAN], [ONE, P_NAN], 1),
    "NaN and -infinity": ([NAN, MINUS_INF], [P_NAN, 0], 1),
    "t of 32768": ([score_of(32768.0), score_of(1.0)], [P_NAN, ONE], 3),
    "t of -32768": ([score_of(-32768.0), score_of(1.0)], [0, ONE], 2),
    "t of 32766 and less": ([score_of(32766.0), score_of(32765.0)], [ONE, HALF], 0),
    "a spread beyond p": ([score_of(0.0), score_of(-26.0)], [ONE, 0], 0),
    "the last subnormal": ([score_of(0.0), score_of(-24.0)], [ONE, 1], 0),
    "half of the last subnormal": ([score_of(0.0), score_of(-25.0)], [ONE, 0], 0),
    "more than half of it": ([score_of(0.0), score_of(-24.99)], [ONE, 1], 0),
}


@pytest.mark.parametrize("case", SPECIAL_UNITS)
def test_special_units(units: SfuUnits, case: str) -> None:
    scores, p, numeric = SPECIAL_UNITS[case]
    stream, _, got = run(units, "two", [unit_of(scores, exists=3)])
    answer = Answer.from_bits(got.weights[Sfu.LATENCY], CONFIGS["two"])
    assert answer.p == tuple(p)
    assert answer.numeric == numeric
    check(units, "two", stream[:1])


def test_overflow_of_the_drain_counts_only_where_the_score_is_no_number(units: SfuUnits) -> None:
    # A sum of 65520 ... 65536 rounds to infinity as FP16 but is a finite score.
    for scores, numeric in (([score_of(65530.0), score_of(1.0)], 0), ([score_of(1.0), MINUS_INF], 2)):
        unit = Unit(tuple(scores), 3, 3, 0, True, fp32(2.0**-4), 0)
        _, _, got = run(units, "two", [unit])
        assert Answer.from_bits(got.weights[Sfu.LATENCY], CONFIGS["two"]).numeric == numeric


def test_lanes_without_a_score_count_nowhere(units: SfuUnits) -> None:
    wild = [INF, NAN, score_of(500.0), MINUS_INF] * 4
    unit = Unit(tuple([score_of(2.0), *wild[1:]]), 0xFFFF, 1, 7, True, fp32(1.0), 0)
    _, rows, got = run(units, "sixteen", [unit])
    answer = Answer.from_bits(got.weights[Sfu.LATENCY], CONFIGS["sixteen"])
    assert answer == Answer((ONE, *[0] * 15), 0, 2, 0)
    cycle = len(rows) - ROWS - RowState.READ_LATENCY + 7
    assert State.from_bits(got.states[cycle + RowState.READ_LATENCY]) == State(2, 0, 1 << 24, False)


def test_busy_ends_when_the_state_is_complete(units: SfuUnits) -> None:
    stream, _, got = run(units, "two", [unit_of([score_of(1.0)] * 2, exists=3)])
    assert got.busy.index(True) == 1
    assert [cycle for cycle, busy in enumerate(got.busy) if busy] == list(range(1, Sfu.LATENCY + Sfu.SETTLE))
    # Asked for in every cycle: right from the first cycle that is not busy.
    got = units.run("two", stream, [0] * len(stream))
    states = [State.from_bits(bits) for bits in got.states]
    first = Sfu.LATENCY + Sfu.SETTLE + RowState.READ_LATENCY
    assert set(states[first:]) == {State(1, 1, 2 << 24, False)}


def test_a_constructor_refuses_what_it_cannot_be() -> None:
    with pytest.raises(ValueError, match="tag_bits"):
        Sfu(CONFIGS["two"], tag_bits=0)
    with pytest.raises(ValueError, match="rows"):
        RowState(24, total_bits=25, total_delay=8)
    with pytest.raises(ValueError, match="total_delay"):
        RowState(32, total_bits=25, total_delay=3)


def test_shift_of_every_length_of_the_sum() -> None:
    from amaranth.hdl import Module, Signal
    from amaranth.sim import Simulator

    from plora.hw.rtl.sfu.row_state import SUM_BITS

    total, shift = Signal(SUM_BITS), Signal(4)
    m = Module()
    m.d.comb += shift.eq(sum_shift(total))
    values = [0, 1] + [(1 << bit) + step for bit in range(1, SUM_BITS) for step in (-1, 0, 1)]

    async def bench(ctx: object) -> None:
        for value in values:
            if value > 1 << SUM_BITS - 1:
                continue
            ctx.set(total, value)  # type: ignore[attr-defined]
            expected = max((value - 1).bit_length() - 24, 0) if value else 0
            assert ctx.get(shift) == expected, f"{value:#x}"  # type: ignore[attr-defined]

    simulator = Simulator(m)
    simulator.add_testbench(bench)
    simulator.run()
