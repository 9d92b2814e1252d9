"""The shipped cell library: what its two rules give, against public figures."""

from __future__ import annotations

import itertools

import pytest

from plora.hw.defs.errors import UserError
from plora.synth.library import evaluate, liberty_text, library_cells, node, nodes, timing_sense
from plora.synth.mapping import shipped_target

# Areas over NAND2's that the open 45 nm library publishes (0.798 um2 for NAND2 X1).
PUBLISHED_GE = {
    "INV_X1": 0.667,
    "INV_X2": 1.0,
    "INV_X4": 1.667,
    "BUF_X1": 1.0,
    "BUF_X2": 1.333,
    "BUF_X4": 2.333,
    "NAND2_X1": 1.0,
    "NAND2_X2": 1.667,
    "NAND2_X4": 3.0,
    "NAND3_X1": 1.333,
    "NAND4_X1": 1.667,
    "NOR2_X1": 1.0,
    "NOR3_X1": 1.333,
    "NOR4_X1": 1.667,
    "AND2_X1": 1.333,
    "AND2_X2": 1.667,
    "AND3_X1": 1.667,
    "OR2_X1": 1.333,
    "OR3_X1": 1.667,
    "AOI21_X1": 1.333,
    "AOI22_X1": 1.667,
    "AOI211_X1": 1.667,
    "AOI221_X1": 2.0,
    "OAI21_X1": 1.333,
    "OAI22_X1": 1.667,
    "OAI211_X1": 1.667,
    "OAI221_X1": 2.0,
    "XOR2_X1": 2.0,
    "XOR2_X2": 3.0,
    "XNOR2_X1": 2.0,
    "MUX2_X1": 2.333,
    "FA_X1": 5.333,
    "HA_X1": 3.333,
    "DFF_X1": 5.667,
}


def test_areas_are_the_published_ratios() -> None:
    areas = {cell.name: cell.ge for cell in library_cells()}
    assert {name: round(areas[name], 3) for name in PUBLISHED_GE} == PUBLISHED_GE


def test_an_inverter_with_four_of_its_like_takes_the_nodes_fo4() -> None:
    library = shipped_target().library
    assert library.fo4_ps() == pytest.approx(node("45nm").fo4_ps["typical"], rel=1e-4)
    assert library.ge_area == pytest.approx(node("45nm").um2_per_ge)


def test_stronger_cells_are_larger_and_drive_more() -> None:
    by_kind = itertools.groupby(library_cells(), key=lambda cell: cell.name.rpartition("_X")[0])
    for kind, group in by_kind:
        for weak, strong in itertools.pairwise(sorted(group, key=lambda cell: cell.drive)):
            assert strong.ge > weak.ge, kind
            for output, arc in strong.arcs.items():
                assert arc.resistance < weak.arcs[output].resistance, kind


def test_unateness_of_simple_functions() -> None:
    assert timing_sense("!(A & B)", "A", ["A", "B"]) == "negative_unate"
    assert timing_sense("A | B", "B", ["A", "B"]) == "positive_unate"
    assert timing_sense("(S & B) | (!S & A)", "S", ["A", "B", "S"]) == "non_unate"


def test_full_adder_adds() -> None:
    (adder,) = (cell for cell in library_cells() if cell.name == "FA_X1")
    for bits in itertools.product((0, 1), repeat=3):
        values = dict(zip("ABC", bits, strict=True))
        assert evaluate(adder.functions["S"], values) + 2 * evaluate(adder.functions["CO"], values) == sum(bits)


def test_the_liberty_file_is_the_same_every_time() -> None:
    assert liberty_text(node("45nm")) == liberty_text(node("45nm"))


def test_corners_and_nodes_are_in_order() -> None:
    by_length = sorted(nodes().values(), key=lambda entry: entry.um2_per_ge)
    assert [entry.name for entry in by_length] == ["28nm", "45nm", "65nm", "130nm", "180nm"]
    for entry in by_length:
        assert entry.fo4_ps["fast"] < entry.fo4_ps["typical"] < entry.fo4_ps["slow"]
    for small, large in itertools.pairwise(by_length):
        assert small.fo4_ps["typical"] < large.fo4_ps["typical"]


def test_an_unknown_node_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"unknown node '7nm'; choose one of 45nm"):
        node("7nm")


def test_a_node_without_capacitance_has_no_liberty_file() -> None:
    with pytest.raises(UserError, match="28nm has no input capacitance; map for 45nm"):
        liberty_text(node("28nm"))
