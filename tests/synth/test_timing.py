"""Static timing on small netlists, against sums by hand in units of logical effort."""

from __future__ import annotations

import pytest

from plora.synth.library import node
from plora.synth.mapping import shipped_target
from plora.synth.netlist import Instance, Net, Netlist
from plora.synth.timing import PathClass, TimingAnalysis, block_cell

TARGET = shipped_target()
TAU = node("45nm").tau_ps
CLOCK_TO_OUTPUT, SETUP = 13.0, 7.5
"""Of the flip-flop, in tau, without load."""


Part = tuple[str, str, dict[str, Net]]


def netlist(
    instances: list[Part],
    inputs: dict[str, list[Net]] | None = None,
    outputs: dict[str, list[Net]] | None = None,
    name: str = "block",
) -> Netlist:
    return Netlist(
        name, inputs or {}, outputs or {}, [Instance(who, kind, pins, {}) for who, kind, pins in instances], {}
    )


def lengths(design: Netlist, wire_ff: float = 0.0) -> dict[PathClass, float]:
    analysis = TimingAnalysis(design, TARGET.library.cells, TARGET.library, wire_ff)
    return {kind: path.length_ps / TAU for kind, path in analysis.paths().items()}


def flip_flop(name: str, data: Net, output: int, drive: int = 1) -> Part:
    return name, f"DFF_X{drive}", {"CK": 0, "D": data, "Q": output}


def test_register_to_register_through_one_gate() -> None:
    design = netlist([flip_flop("a", "0", 1), ("g", "INV_X1", {"A": 1, "Y": 2}), flip_flop("b", 2, 3)])
    # The flip-flop drives one inverter input, the inverter one flip-flop input.
    assert lengths(design)[PathClass.REGISTER] == pytest.approx(CLOCK_TO_OUTPUT + 1 + (1 + 1) + SETUP, rel=1e-3)


def test_load_counts_every_reader_and_its_wire() -> None:
    readers: list[Part] = [(f"r{i}", "INV_X4", {"A": 1, "Y": 10 + i}) for i in range(3)]
    design = netlist([flip_flop("a", "0", 1), *readers, flip_flop("b", 10, 3)])
    alone = CLOCK_TO_OUTPUT + 3 * 4 + (1 + 1 / 4) + SETUP
    assert lengths(design)[PathClass.REGISTER] == pytest.approx(alone, rel=1e-3)
    input_ff = node("45nm").input_ff
    assert input_ff is not None
    # One inverter input of wire at each of the three pins, and at the flip-flop behind them.
    assert lengths(design, input_ff)[PathClass.REGISTER] == pytest.approx(alone + 3 + 1 / 4, rel=1e-3)


def test_classes_of_paths_are_kept_apart() -> None:
    design = netlist(
        [
            flip_flop("a", 7, 1),
            ("g", "NAND2_X1", {"A": 1, "B": 8, "Y": 2}),
            flip_flop("b", 2, 3),
            ("i", "INV_X1", {"A": 8, "Y": 7}),
        ],
        inputs={"x": [8]},
        outputs={"y": [2], "z": [3]},
    )
    found = lengths(design)
    assert set(found) == set(PathClass)
    # The NAND2 (p = 2, g = 4/3) drives a flip-flop and an output port that stands for one.
    assert found[PathClass.THROUGH] == pytest.approx(2 + 4 / 3 * 2, rel=1e-3)
    assert found[PathClass.INPUT] == pytest.approx(2 + 4 / 3 * 2 + SETUP, rel=1e-3)
    assert found[PathClass.REGISTER] == pytest.approx(CLOCK_TO_OUTPUT + 1 + 2 + 4 / 3 * 2 + SETUP, rel=1e-3)
    assert found[PathClass.OUTPUT] == pytest.approx(CLOCK_TO_OUTPUT + 1 + 2 + 4 / 3 * 2, rel=1e-3)


def test_edges_follow_the_gates() -> None:
    """An input that only rises late cannot delay the edge it does not cause."""
    design = netlist([("g", "AND2_X1", {"A": 1, "B": 2, "Y": 3})], inputs={"x": [1, 2]}, outputs={"y": [3]})
    analysis = TimingAnalysis(design, TARGET.library.cells, TARGET.library)
    late = {1: ((100.0, float("-inf")), (1.0, 1.0)), 2: ((0.0, 0.0), (1.0, 1.0))}
    arrivals = analysis._arrivals(late)
    assert arrivals.at[3][0] > 100.0
    assert arrivals.at[3][1] < 100.0


def test_a_combinational_loop_is_refused() -> None:
    design = netlist([("a", "INV_X1", {"A": 1, "Y": 2}), ("b", "INV_X1", {"A": 2, "Y": 1})])
    with pytest.raises(ValueError, match="combinational loop through net"):
        TimingAnalysis(design, TARGET.library.cells, TARGET.library)


def test_an_unknown_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="instance a of the unknown cell MYSTERY"):
        TimingAnalysis(netlist([("a", "MYSTERY", {"A": 1})]), TARGET.library.cells, TARGET.library)


def test_a_block_as_a_cell_gives_the_paths_of_the_flat_design() -> None:
    inner: list[Part] = [
        ("i", "INV_X1", {"A": 1, "Y": 2}),
        ("g", "NAND2_X1", {"A": 2, "B": 4, "Y": 3}),
        flip_flop("f", 3, 4),
        ("t", "NOR2_X1", {"A": 1, "B": 4, "Y": 5}),
    ]
    block = netlist(inner, inputs={"clk": [0], "d": [1]}, outputs={"q": [4], "t": [5]}, name="inner")
    cell = block_cell(TimingAnalysis(block, TARGET.library.cells, TARGET.library), 0.0)
    outer = [flip_flop("s", "0", 11), flip_flop("e", 15, 16), flip_flop("k", 14, 17)]
    whole = netlist([*outer, ("u", "inner", {"clk": 0, "d": 11, "q": 14, "t": 15})])
    by_parts = TimingAnalysis(whole, {**TARGET.library.cells, "inner": cell}, TARGET.library).paths()

    moved: dict[Net, Net] = {0: 0, 1: 11, 2: 12, 3: 13, 4: 14, 5: 15}
    flat = netlist(
        [*outer, *((who, kind, {pin: moved[net] for pin, net in pins.items()}) for who, kind, pins in inner)]
    )
    expected = lengths(flat)[PathClass.REGISTER]
    # Flat, the flip-flop in the block drives one more flip-flop than the block's own analysis assumes.
    assert by_parts[PathClass.REGISTER].length_ps / TAU == pytest.approx(expected, rel=0.03)
    assert by_parts[PathClass.REGISTER].end == "u.d"
