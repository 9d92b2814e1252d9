"""Drives of flip-flops by their load."""

from __future__ import annotations

from plora.synth.mapping import shipped_target
from plora.synth.netlist import Instance, Net, Netlist
from plora.synth.sizing import LOAD_PER_DRIVE, register_drives, size_registers
from plora.synth.timing import PathClass, TimingAnalysis, net_loads

TARGET = shipped_target()
LIBRARY = TARGET.library


def fan_out(readers: int, drive: int) -> Netlist:
    """A flip-flop that drives ``readers`` inverters, one of which another flip-flop takes."""
    parts: list[tuple[str, str, dict[str, Net]]] = [
        ("a", f"DFF_X{drive}", {"CK": 0, "D": "0", "Q": 1}),
        ("b", "DFF_X1", {"CK": 0, "D": 10, "Q": 2}),
    ]
    parts += [(f"r{index}", "INV_X1", {"A": 1, "Y": 10 + index}) for index in range(readers)]
    return Netlist("block", {}, {}, [Instance(who, kind, pins, {}) for who, kind, pins in parts], {})


def sized(netlist: Netlist) -> Netlist:
    return size_registers(netlist, LIBRARY, net_loads(netlist, LIBRARY.cells, LIBRARY))


def test_a_register_takes_the_drive_that_its_load_asks_for() -> None:
    below, above = int(LOAD_PER_DRIVE) - 1, int(LOAD_PER_DRIVE) + 1
    for before in (1, 2):
        assert sized(fan_out(below, before)).counts()["DFF_X2"] == 0
        assert sized(fan_out(above, before)).counts()["DFF_X2"] == 1
    assert sized(fan_out(40, 1)).counts()["DFF_X2"] == 1, "there is none stronger"


def test_a_sized_register_is_faster_under_load() -> None:
    slow = fan_out(20, 1)
    slow_ps, fast_ps = (
        TimingAnalysis(each, LIBRARY.cells, LIBRARY).paths()[PathClass.REGISTER].length_ps
        for each in (slow, sized(slow))
    )
    assert fast_ps < slow_ps


def test_only_drives_of_one_flip_flop_stand_for_each_other() -> None:
    drives = register_drives(LIBRARY)
    assert drives == {"DFF_X1": ["DFF_X1", "DFF_X2"], "DFF_X2": ["DFF_X1", "DFF_X2"]}
