"""Simulation of mapped netlists: logic, registers, lanes, and which pulses count."""

from __future__ import annotations

import random

import pytest

from plora.synth.gates import GateSimulation, across_lanes, python_function
from plora.synth.mapping import shipped_target
from plora.synth.netlist import Instance, Net, Netlist

LIBRARY = shipped_target().library


def simulation(
    instances: list[tuple[str, dict[str, Net]]],
    inputs: dict[str, list[Net]],
    outputs: dict[str, list[Net]],
    lanes: int = 1,
) -> GateSimulation:
    cells = [Instance(f"g{i}", kind, pins, {}) for i, (kind, pins) in enumerate(instances)]
    return GateSimulation(Netlist("block", inputs, outputs, cells, {}), LIBRARY, lanes)


@pytest.mark.parametrize(
    ("function", "values", "result"),
    [
        ("!(A B)", {"A": 1, "B": 1}, 0),
        ("(A*B)+C'", {"A": 0, "B": 1, "C": 0}, 1),
        ("A ^ B & C", {"A": 1, "B": 1, "C": 0}, 1),
        ("!A | B", {"A": 1, "B": 0}, 0),
        ("(S & B) | (!S & A)", {"S": 1, "A": 0, "B": 1}, 1),
    ],
)
def test_liberty_functions_are_read_with_their_precedence(function: str, values: dict[str, int], result: int) -> None:
    assert eval(python_function(function), dict(values)) & 1 == result


@pytest.mark.parametrize("function", ["A ? B : C", "(A", "A &", "A)"])
def test_what_is_not_a_liberty_function_is_refused(function: str) -> None:
    with pytest.raises(ValueError, match="cannot read the function"):
        python_function(function)


def test_a_ripple_adder_adds_in_every_lane() -> None:
    bits = 8
    a, b, s = (list(range(start, start + bits)) for start in (10, 20, 30))
    carries: list[Net] = ["0", *range(40, 40 + bits)]
    adders: list[tuple[str, dict[str, Net]]] = [
        ("FA_X1", {"A": a[i], "B": b[i], "C": carries[i], "S": s[i], "CO": carries[i + 1]}) for i in range(bits)
    ]
    adder = simulation(adders, {"a": [*a], "b": [*b]}, {"s": [*s, carries[-1]]}, lanes=64)
    rng = random.Random(7)
    x, y = ([rng.randrange(256) for _ in range(64)] for _ in range(2))
    for glitches in (False, True):
        adder.cycle({**adder.input_bits("a", x), **adder.input_bits("b", y)}, glitches=glitches)
        assert adder.output("s") == [p + q for p, q in zip(x, y, strict=True)]
        x, y = y, [value ^ 0x5A for value in x]


def test_registers_take_what_was_there_before_the_edge() -> None:
    shift = simulation(
        [("DFF_X1", {"CK": 0, "D": 1, "Q": 2}), ("DFF_X1", {"CK": 0, "D": 2, "Q": 3})], {"d": [1]}, {"q": [3]}
    )
    seen = []
    for bit in (1, 0, 1, 1, 0):
        shift.cycle({1: bit})
        seen.append(shift.output("q")[0])
    assert seen == [0, 0, 1, 0, 1]


def test_toggles_count_lanes_apart() -> None:
    inverter = simulation([("INV_X1", {"A": 1, "Y": 2})], {"a": [1]}, {"y": [2]}, lanes=3)
    inverter.cycle({1: 0b101})
    inverter.cycle({1: 0b100})
    assert inverter.toggles[inverter.index[2]] == 3
    inverter.clear()
    assert inverter.toggles.sum() == 0


def hazard(inverters: int) -> tuple[GateSimulation, int]:
    """a AND NOT a, with the inversion delayed: a pulse as long as the delay when a rises."""
    chain: list[tuple[str, dict[str, Net]]] = [("INV_X1", {"A": 1 + i, "Y": 2 + i}) for i in range(inverters)]
    last = 1 + inverters
    gate = simulation([*chain, ("AND2_X1", {"A": 1, "B": last, "Y": 50})], {"a": [1]}, {"y": [50]})
    return gate, gate.index[50]


def test_a_long_pulse_counts_only_with_glitches() -> None:
    for glitches, changes in ((False, 0), (True, 2)):
        gate, output = hazard(9)
        gate.cycle({1: 1}, glitches=glitches)
        assert gate.toggles[output] == changes
        assert gate.output("y") == [0]


def test_a_pulse_shorter_than_the_gate_is_lost() -> None:
    gate, output = hazard(1)
    gate.cycle({1: 1}, glitches=True)
    assert gate.toggles[output] == 0


def test_lanes_are_bits() -> None:
    assert across_lanes([0b10, 0b01, 0b11], 1) == 0b101


def test_too_many_lanes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lanes must be 1 \.\.\. 64, not 65"):
        simulation([], {}, {}, lanes=65)
