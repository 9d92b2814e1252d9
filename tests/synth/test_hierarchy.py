"""Cutting Verilog into blocks."""

from __future__ import annotations

import pytest

from plora.synth.hierarchy import block_name, cut_into_blocks, merge_equal, ports_of, split_modules

LEAF = """module \\{name} (clk, a, y);
  reg \\$auto$verilog_backend.cc:2355:dump_module${number}  = 0;
  input [3:0] a;
  wire [3:0] a;
  input clk;
  wire clk;
  output y;
  wire y;
  assign y = {operator}a;
endmodule
"""

TOP = """(* generator = "Amaranth" *)
module ndp_device(clk, a,
  y);
  input [3:0] a;
  input clk;
  output [1:0] y;
  \\ndp_device.channel_0  channel_0 (
    .a(a),
    .clk(clk),
    .y(y[0])
  );
  \\ndp_device.channel_1  channel_1 (
    .a(a),
    .clk(clk),
    .y(y[1])
  );
  plora_sram #(
    .WIDTH(32'd4)
  ) words (
    .clk(clk)
  );
endmodule
"""

SRAM = """module plora_sram #(
    parameter WIDTH = 512
) (
    input wire clk
);
endmodule
"""


def design(second: str = "&") -> str:
    first = LEAF.format(name="ndp_device.channel_0", number=1, operator="&")
    return SRAM + first + LEAF.format(name="ndp_device.channel_1", number=2, operator=second) + TOP


def test_siblings_with_the_same_text_become_one_block() -> None:
    blocks = cut_into_blocks(design(), "ndp_device")
    assert [(block.name, block.count) for block in blocks] == [("front.channel", 2), ("front.wiring", 1)]
    assert blocks[0].places == (("channel_0",), ("channel_1",))
    assert "\\ndp_device.channel_1 " not in blocks[1].verilog


def test_siblings_that_differ_stay_apart() -> None:
    blocks = cut_into_blocks(design("|"), "ndp_device")
    assert [(block.name, block.count) for block in blocks] == [
        ("front.channel", 1),
        ("front.channel.2", 1),
        ("front.wiring", 1),
    ]


def test_blocks_and_memories_below_a_block_are_black_boxes_to_it() -> None:
    top = cut_into_blocks(design(), "ndp_device")[-1]
    assert top.verilog.count("(* blackbox *)") == 2
    assert "assign y" not in top.verilog
    assert dict(top.children) == {"ndp_device.channel_0": 2}


def test_only_the_chosen_modules_become_blocks_with_everything_in_them() -> None:
    (whole,) = cut_into_blocks(design(), "ndp_device", only={"ndp_device"})
    assert whole.name == "front.wiring"
    assert "assign y" in whole.verilog
    assert whole.verilog.count("(* blackbox *)") == 1
    (channel,) = cut_into_blocks(design(), "ndp_device", only={"ndp_device.channel_0"})
    assert (channel.name, channel.count) == ("front.channel", 2)


def shared_units(name: str, body: str, uses: int = 2) -> str:
    """A core with a component in it that uses a unit, emitted apart, ``uses`` times."""
    instances = "".join(f"  {name} unit_{index} (\n    .clk(clk)\n  );\n" for index in range(uses))
    return f"""module {name}(clk);
  input clk;
{body}
endmodule
module \\ndp_device.core.gather (clk);
  input clk;
{instances}endmodule
module \\ndp_device.core (clk);
  input clk;
  \\ndp_device.core.gather  gather (
    .clk(clk)
  );
endmodule
module ndp_device(clk);
  input clk;
  \\ndp_device.core  core (
    .clk(clk)
  );
endmodule
"""


REGISTER = "  reg q;\n  always @(posedge clk)\n    q <= ~q;"


def test_a_new_component_and_a_unit_that_it_repeats_are_blocks_without_an_entry_anywhere() -> None:
    blocks = cut_into_blocks(shared_units("exp2_lane_full_16", REGISTER), "ndp_device")
    assert [(block.name, block.count) for block in blocks] == [
        ("core.exp2_lane", 2),
        ("core.gather", 1),
        ("core.wiring", 1),
        ("front.wiring", 1),
    ]


@pytest.mark.parametrize(
    ("name", "body", "uses"),
    [
        ("exp2_table", "  assign q = 1'h1;", 2),  # no registers
        ("exp2_lane", REGISTER, 1),  # not repeated
        ("sum_adder_32_18_16", REGISTER, 2),  # measured to belong to its surroundings
    ],
)
def test_other_units_stay_with_what_is_around_them(name: str, body: str, uses: int) -> None:
    blocks = cut_into_blocks(shared_units(name, body, uses), "ndp_device")
    assert [block.name for block in blocks] == ["core.gather", "core.wiring", "front.wiring"]
    assert body in blocks[0].verilog


def test_instances_are_found_with_and_without_parameters() -> None:
    modules = split_modules(design())
    assert modules["ndp_device"].instances == (
        ("channel_0", "ndp_device.channel_0"),
        ("channel_1", "ndp_device.channel_1"),
        ("words", "plora_sram"),
    )
    assert set(merge_equal(modules, "ndp_device")) == {"ndp_device", "ndp_device.channel_0", "plora_sram"}


def test_ports_have_their_widths() -> None:
    assert ports_of(design(), "ndp_device.channel_0") == ({"a": 4, "clk": 1}, {"y": 1})


def test_names_of_blocks_do_not_depend_on_numbers() -> None:
    assert block_name("ndp_device.core.counters$178") == "core.counters"
    assert block_name("ndp_device.channel_15") == "front.channel"
    assert block_name("dot_unit_32_18_16") == "pe.dot"
    assert block_name("fp16_product") is None
    assert block_name("ndp_device.core.control.loader") is None
