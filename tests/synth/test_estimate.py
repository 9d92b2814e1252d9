"""From a small run to a large device, with round figures."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from plora.hw.defs.config import preset
from plora.synth.estimate import MeasuredRun, estimate, estimate_data, estimate_text
from plora.synth.flow import BlockResult, DesignResult
from plora.synth.library import node
from plora.synth.power import CLOCK_TREE, Activity, BusyWindow
from plora.synth.sram import Range


def design(name: str, *blocks: tuple[str, int, float]) -> DesignResult:
    return DesignResult(
        preset(name),
        tuple(BlockResult(b, b, count, ge, 0, Counter(), Counter(), {}, (), "area") for b, count, ge in blocks),
        {},
    )


def activity(block: str, logic_pj: float, clock_pj: float = 0.0) -> Activity:
    still = Range(0.0, 0.0, 0.0)
    return Activity(block, 1, 100, 1, 0, Range(logic_pj, logic_pj, logic_pj), still, clock_pj)


SMALL = design("tiny", ("pe.dot", 8, 1000.0), ("pe.merge", 2, 100.0), ("core.feeder", 1, 200.0))
RUN = MeasuredRun(
    "gemv",
    multiply_adds=1000,
    window=BusyWindow(range(100), 50),
    activities=[activity("pe.dot", 2.0, 1.0), activity("pe.merge", 1.0), activity("core.feeder", 4.0)],
    srams=[],
)
LEAKAGE_W = 1e-9 * (node("45nm").leakage_nw_per_ge or 0.0)


def test_energy_scales_with_instances_and_area_and_work_but_clocks_run_always() -> None:
    full = design("full", ("pe.dot", 64, 1000.0), ("pe.merge", 2, 800.0), ("core.feeder", 1, 1000.0))
    result = estimate(RUN, SMALL, full, node("45nm"), 1000.0)
    # Half of the cycles had work: a beat a cycle doubles what moves. 1 pJ a cycle at 1 GHz is a milliwatt.
    moving = 64 * 2.0 * 2 + 2 * 1.0 * 8 * 2
    clock = 64 * 1.0 * (1 + CLOCK_TREE.best)
    pe_leakage = LEAKAGE_W * (64 * 1000 + 2 * 800)
    assert result.pe_w.best == pytest.approx(1e-3 * (moving + clock) + pe_leakage)
    assert result.other_w.best == pytest.approx(1e-3 * 4.0 * 5 * 2 + LEAKAGE_W * 1000)
    # The run itself: 100 cycles of eight dot units and two merges, for a thousand multiply-adds.
    assert result.pe_pj_per_multiply_add.best == pytest.approx(
        100 * (8 * (2.0 + 1.0 * (1 + CLOCK_TREE.best)) + 2 * 1.0) / 1000
    )


def test_a_block_that_only_the_large_device_has_is_as_active_as_the_rest() -> None:
    full = design("full", ("pe.dot", 64, 1000.0), ("core.feeder", 1, 200.0), ("core.sfu", 1, 600.0))
    result = estimate(RUN, SMALL, full, node("45nm"), 1000.0)
    assert result.other_w.best == pytest.approx(1e-3 * 4.0 * 2 * 4 + LEAKAGE_W * 800)


def test_an_array_that_was_not_in_the_dump_is_no_array_without_power() -> None:
    still = dataclasses.replace(activity("pe.dot", 0.0, 1.0), lanes=0)
    run = dataclasses.replace(RUN, activities=[still, *RUN.activities[1:]])
    with pytest.raises(AssertionError, match=r"pe\.dot of the PE array is not in the dump of gemv"):
        estimate(run, SMALL, SMALL, node("45nm"), 1000.0)


def test_the_table_says_what_the_object_says() -> None:
    result = estimate(RUN, SMALL, SMALL, node("45nm"), 1000.0)
    data = estimate_data(result)
    assert f"{data['pe_pj_per_multiply_add']['best']:.2f} (" in estimate_text([result])
    assert data["netlist_mismatches"] == 0
