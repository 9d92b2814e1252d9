"""What is proved of the SFU's units for all operands; each proof finds a seeded bug."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value

from plora.hw.defs.exp2 import VALUE_BITS
from plora.hw.rtl.pe.product import FRACTION_BITS
from plora.hw.rtl.sfu import unit_maximum, weight_round
from tests.hw.rtl.formal import Assert, free_inputs, mutated, prove, refute

DEPTH = 5


def given(m: Module, value: Any, cycles: int) -> Value:
    """Return what ``value`` was so many cycles ago."""
    result = Value.cast(value)
    for cycle in range(cycles):
        following = Signal(len(result), name=f"given{cycle}")
        m.d.sync += following.eq(result)
        result = following
    return result


def full(m: Module, cycles: int) -> Value:
    """Return whether so many cycles have passed since reset."""
    age = Signal(range(cycles + 1))
    with m.If(age < cycles):
        m.d.sync += age.eq(age + 1)
    return age == cycles


def maximum_properties(source: ModuleType) -> tuple[Module, list[Any]]:
    """The largest is one of the values, and none is larger."""
    count, width = 6, 4
    m = Module()
    m.submodules.dut = dut = source.UnitMaximum(count, width)
    values = given(m, dut.values, dut.LATENCY)
    each = [values[width * index : width * (index + 1)] for index in range(count)]
    with m.If(full(m, dut.LATENCY)):
        m.d.comb += Assert(Cat(value == dut.largest for value in each).any())
        m.d.comb += [Assert(value <= dut.largest) for value in each]
    return m, free_inputs(dut)


def rounding_properties(source: ModuleType) -> tuple[Module, list[Any]]:
    """p is within half its last place of the exact number, an even neighbour in a tie; zero from far below."""
    m = Module()
    m.submodules.dut = dut = source.WeightRound()
    down, value, finite, nan = (
        given(m, part, dut.LATENCY) for part in ((dut.anchor - dut.floor)[:16], dut.value, dut.finite, dut.nan)
    )
    # Everything in steps of 2**-44, of which the exact number is a whole number down to 2**-26.
    most = 26
    exact, p = Signal(VALUE_BITS + most + 1), Signal(VALUE_BITS + most + 2)
    exponent, fraction = dut.p[FRACTION_BITS:], dut.p[:FRACTION_BITS]
    last_place = Signal(range(45))
    m.d.comb += [
        exact.eq((Cat(value, Const(1, 1)) << most) >> down[:5]),
        last_place.eq(20 + Mux(exponent > 0, exponent - 1, 0)),
        p.eq(Cat(fraction, exponent > 0) << last_place),
    ]
    off = Signal(len(p) + 1)
    m.d.comb += off.eq(Mux(p > exact, p - exact, exact - p) << 1)
    step = Signal(len(p) + 1)
    m.d.comb += step.eq(1 << last_place)
    with m.If(full(m, dut.LATENCY)):
        with m.If(nan):
            m.d.comb += Assert(dut.p == 0x7E00)
        with m.Elif(~finite | (down > most)):
            m.d.comb += Assert(dut.p == 0)
        with m.Else():
            m.d.comb += [Assert(off <= step), Assert((off != step) | ~dut.p[0])]
    return m, free_inputs(dut)


PROOFS = {
    "maximum": (unit_maximum, maximum_properties, "group[one] >= group[other]", "group[one][1:] >= group[other][1:]"),
    "rounding": (weight_round, rounding_properties, "(rest_register[0] | kept_register[0])", "1"),
}


@pytest.mark.parametrize("name", PROOFS)
def test_proved(name: str, tmp_path: Path) -> None:
    source, properties, _, _ = PROOFS[name]
    prove(*properties(source), tmp_path, depth=DEPTH)


@pytest.mark.parametrize("name", PROOFS)
def test_a_seeded_bug_is_found(name: str, tmp_path: Path) -> None:
    source, properties, right, wrong = PROOFS[name]
    refute(*properties(mutated(source, right, wrong)), tmp_path, depth=DEPTH)
