"""Energy from activity: a dump written by hand, replayed on a netlist of three cells."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from plora.synth.hierarchy import Block
from plora.synth.mapping import shipped_target
from plora.synth.netlist import Instance, Netlist
from plora.synth.power import CLOCK_TREE, WIRE_FF, busy_window, clock_only, net_energies_fj, replay_run, sram_use
from plora.synth.vcd import VcdReader

LIBRARY = shipped_target().library
CYCLES = 64

# y follows d a cycle later, inverted: two registers' worth of work for one instance at ``core``.
NETLIST = Netlist(
    "unit",
    {"clk": [0], "d": [1]},
    {"y": [3]},
    [
        Instance("f", "DFF_X1", {"CK": 0, "D": 1, "Q": 2}, {}),
        Instance("i", "INV_X1", {"A": 2, "Y": 3}, {}),
    ],
    {},
)
BLOCK = Block("core.unit", "unit", "", Counter(), (("unit",),))


def dump(path: Path, *, period: int, wrong_at: int = -1) -> Path:
    """A run in which ``d`` changes every ``period`` cycles; ``y`` of one cycle may be false."""
    lines = ["$scope module TOP $end", "$scope module ndp_device $end", "$var wire 1 c clk $end"]
    lines += ["$scope module unit $end", "$var wire 1 d d $end", "$var wire 1 y y $end", "$var wire 2 e enable $end"]
    lines += ["$upscope $end", "$upscope $end", "$upscope $end", "$enddefinitions $end"]
    held = 0
    for cycle in range(CYCLES):
        d = cycle // period % 2
        y = (1 - held) ^ (cycle == wrong_at)
        lines += [f"#{10 * cycle}", "0c", f"{d}d", f"{y}y", f"b{cycle % 4:b} e", f"#{10 * cycle + 5}", "1c"]
        held = d
    path.write_text("\n".join([*lines, f"#{10 * CYCLES}", ""]))
    return path


def test_the_reader_yields_values_before_each_edge(tmp_path: Path) -> None:
    reader = VcdReader(dump(tmp_path / "run.vcd", period=3))
    top = reader.scope_of("ndp_device")
    signal = (*top, "unit", "d")
    seen, value = [], 0
    for changed in reader.before_edges((*top, "clk"), [signal]):
        value = changed.get(signal, value)
        seen.append(value)
    assert seen == [cycle // 3 % 2 for cycle in range(CYCLES)]
    with pytest.raises(ValueError, match="has no signal nobody"):
        list(reader.before_edges((*top, "clk"), [("nobody",)]))
    (tmp_path / "no.vcd").write_text("text")
    with pytest.raises(ValueError, match="not a value change dump"):
        VcdReader(tmp_path / "no.vcd")


@pytest.mark.parametrize("period", [1, 3])
def test_energy_is_half_c_v_v_for_every_change(tmp_path: Path, period: int) -> None:
    # Every second cycle is simulated with delays; changes in every third fall into both halves evenly.
    run = dump(tmp_path / "run.vcd", period=period)
    (activity,) = replay_run(run, [BLOCK], {"core.unit": NETLIST}, LIBRARY, range(28, 64))
    assert activity.mismatches == 0
    assert (activity.block, activity.count, activity.lanes, activity.cycles) == ("core.unit", 1, 1, CYCLES)
    # Nets 2 and 3 change once every ``period`` cycles; the inverter's output port has no load here.
    inverter, register = LIBRARY.cells["INV_X1"], LIBRARY.cells["DFF_X1"]
    half_v2 = 0.5 * LIBRARY.vdd_v**2
    for wire, energy in ((WIRE_FF.low, activity.registers.low), (WIRE_FF.high, activity.registers.high)):
        per_change = half_v2 * (inverter.input_ff["A"] + wire) + register.internal_fj["Q"]
        assert energy == pytest.approx(1e-3 * per_change / period, rel=0.02)
    # The primary input charges the register's pin: net 1 belongs to whoever drives it, by the sinks.
    data_pin = half_v2 * (register.input_ff["D"] + WIRE_FF.low)
    assert activity.logic.low == pytest.approx(1e-3 * (inverter.internal_fj["Y"] + data_pin) / period, rel=0.02)
    clock_fj = 2 * half_v2 * register.input_ff["CK"] + register.clock_fj
    assert activity.clock_pj == pytest.approx(1e-3 * clock_fj)
    assert activity.clock_energy_pj.best == pytest.approx(1e-3 * clock_fj * (1 + CLOCK_TREE.best))


def test_a_netlist_that_computes_something_else_is_noticed(tmp_path: Path) -> None:
    run = dump(tmp_path / "run.vcd", period=2, wrong_at=40)
    (activity,) = replay_run(run, [BLOCK], {"core.unit": NETLIST}, LIBRARY, range(32, 64))
    assert activity.mismatches == 1


def test_a_block_whose_ports_are_not_in_the_dump_counts_by_its_clock(tmp_path: Path) -> None:
    lost = Block("core.lost", "lost", "", Counter(), (("lost",),))
    (activity,) = replay_run(
        dump(tmp_path / "run.vcd", period=1), [lost], {"core.lost": NETLIST}, LIBRARY, range(32, 64)
    )
    assert activity == clock_only(lost, NETLIST, LIBRARY)
    assert activity.logic.high == 0


def test_registers_and_logic_are_told_apart() -> None:
    energies, registered, clock_fj = net_energies_fj(NETLIST, LIBRARY, 1.0)
    assert set(energies) == {1, 2, 3}
    assert registered == {2}
    assert clock_fj > 0


def test_the_window_is_from_the_first_to_the_last_cycle_with_a_lane_enabled(tmp_path: Path) -> None:
    window = busy_window(dump(tmp_path / "run.vcd", period=1), BLOCK)
    # ``enable`` is 0 in every fourth cycle, the first included.
    assert window.cycles == range(1, 64)
    assert window.busy == 48
    assert window.utilisation == pytest.approx(48 / 63)


def test_memory_accesses_count_by_the_lanes_written(tmp_path: Path) -> None:
    verilog = """module plora_sram (
    input wire clk
);
endmodule
module \\ndp_device.core (clk);
  plora_sram words (
    .clk(clk)
  );
endmodule
module ndp_device(clk);
  \\ndp_device.core  core (
    .clk(clk)
  );
endmodule
"""
    lines = ["$scope module ndp_device $end", "$var wire 1 c clk $end", "$scope module core $end"]
    lines += ["$scope module words $end", "$var wire 1 r read_enable $end", "$var wire 4 w write_enable $end"]
    lines += ["$upscope $end", "$upscope $end", "$upscope $end", "$enddefinitions $end"]
    for cycle in range(8):
        lines += [f"#{10 * cycle}", "0c", f"{cycle % 2}r", f"b{'1' * (cycle % 4 + 1)} w", f"#{10 * cycle + 5}", "1c"]
    path = tmp_path / "run.vcd"
    path.write_text("\n".join([*lines, "#80", ""]))
    (use,) = sram_use(path, verilog, range(0, 8))
    assert use.block == "core.words"
    assert use.reads == pytest.approx(0.5)
    assert use.writes == pytest.approx((1 + 2 + 3 + 4) / 4 / 4)
