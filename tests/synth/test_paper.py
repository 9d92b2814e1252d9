"""The device-level verdict, with the paper's own figures and with others."""

from __future__ import annotations

import pytest

from plora.synth.paper import (
    PAPER_BUFFERS_W,
    PAPER_PE_MM2,
    PAPER_PE_W,
    PLACEMENT_UTILISATION,
    compare_area,
    compare_power,
    paper_um2_per_multiply_add,
    power_text,
)
from plora.synth.sram import PAPER_BUFFERS_MM2, Range


def exactly(value: float) -> Range:
    return Range(value, value, value)


def test_the_papers_figures_give_its_percentages() -> None:
    area = compare_area(PAPER_PE_MM2 * PLACEMENT_UTILISATION, 0.0, exactly(PAPER_BUFFERS_MM2))["share_of_dimm_percent"]
    assert area["ours"]["best"] == pytest.approx(3.350, abs=1e-3)
    assert area["claim_holds"]
    power = compare_power(exactly(PAPER_PE_W), exactly(0.0), exactly(PAPER_BUFFERS_W))["share_of_dimm_percent"]
    assert power["paper"] == pytest.approx(7.700)
    assert not power["claim_holds"], "3.08 W of 40 W is 7.7 %, not below it"


def test_a_claim_holds_only_where_the_whole_range_does() -> None:
    for high, holds in ((44.0, True), (48.0, False)):
        share = compare_area(0.5, 0.0, Range(10.0, 12.0, high))["share_of_dimm_percent"]
        assert share["claim_holds"] is holds


def test_the_low_end_of_area_is_cells_without_room_for_wires() -> None:
    share = compare_area(10.0, 5.0, exactly(0.0))["share_of_dimm_percent"]["ours"]
    assert share["low"] / share["best"] == pytest.approx(PLACEMENT_UTILISATION, rel=1e-3)


def test_the_papers_multiply_add_is_781_um2() -> None:
    assert paper_um2_per_multiply_add() == pytest.approx(781.25)


def test_power_as_text_says_whether_the_claim_holds() -> None:
    verdict = compare_power(exactly(1.0), exactly(0.5), exactly(0.5))
    text = power_text({"gemv": verdict})
    assert text.startswith("gemv: 5.0 (5.0 ... 5.0) % of 40 W")
    assert "holds" in text and "does not hold" not in text
