"""Cutting Verilog into blocks."""

from __future__ import annotations

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


def test_flat_makes_one_block_with_everything_in_it() -> None:
    (whole,) = cut_into_blocks(design(), "ndp_device", flat=True)
    assert whole.name == "front.wiring"
    assert "assign y" in whole.verilog
    assert whole.verilog.count("(* blackbox *)") == 1


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
