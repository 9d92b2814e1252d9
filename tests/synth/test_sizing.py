"""Drives of flip-flops and buffers by their load, and trees behind registers."""

from __future__ import annotations

import dataclasses

import pytest

from plora.synth.mapping import shipped_target
from plora.synth.netlist import Instance, Net, Netlist
from plora.synth.sizing import (
    LEAF_LOAD,
    LOAD_PER_BUFFER_DRIVE,
    LOAD_PER_DRIVE,
    TREE_LOAD,
    buffer_registers,
    drives,
    size_by_load,
    size_drivers,
)
from plora.synth.timing import PathClass, TimingAnalysis, net_loads

TARGET = shipped_target()
LIBRARY = TARGET.library


def fan_out(readers: int, kind: str = "DFF_X1") -> Netlist:
    """A flip-flop or buffer that drives ``readers`` inverters, one of which another flip-flop takes."""
    driver: dict[str, Net] = {"CK": 0, "D": "0", "Q": 1} if kind.startswith("DFF") else {"A": 3, "Y": 1}
    parts: list[tuple[str, str, dict[str, Net]]] = [
        ("a", kind, driver),
        ("b", "DFF_X1", {"CK": 0, "D": 10, "Q": 2}),
    ]
    parts += [(f"r{index}", "INV_X1", {"A": 1, "Y": 10 + index}) for index in range(readers)]
    return Netlist("block", {}, {}, [Instance(who, kind, pins, {}) for who, kind, pins in parts], {})


def sized(netlist: Netlist) -> Netlist:
    return size_by_load(netlist, LIBRARY, net_loads(netlist, LIBRARY.cells, LIBRARY))


def drive_of(netlist: Netlist) -> str:
    return next(instance.kind for instance in netlist.instances if instance.name == "a")


def longest_ps(netlist: Netlist) -> float:
    return TimingAnalysis(netlist, LIBRARY.cells, LIBRARY).paths()[PathClass.REGISTER].length_ps


def test_a_register_takes_the_drive_that_its_load_asks_for() -> None:
    below, above = int(LOAD_PER_DRIVE) - 1, int(LOAD_PER_DRIVE) + 1
    for before in ("DFF_X1", "DFF_X2"):
        assert drive_of(sized(fan_out(below, before))) == "DFF_X1"
        assert drive_of(sized(fan_out(above, before))) == "DFF_X2"
    assert drive_of(sized(fan_out(40))) == "DFF_X2", "there is none stronger"


def test_a_buffer_becomes_as_strong_as_its_load_asks_for_and_never_weaker() -> None:
    for factor, wanted in ((0.9, "BUF_X1"), (1.9, "BUF_X2"), (3.9, "BUF_X4"), (100, "BUF_X16")):
        assert drive_of(sized(fan_out(int(factor * LOAD_PER_BUFFER_DRIVE), "BUF_X1"))) == wanted
    assert drive_of(sized(fan_out(1, "BUF_X8"))) == "BUF_X8"


def test_a_sized_register_is_faster_under_load() -> None:
    slow = fan_out(20)
    assert longest_ps(sized(slow)) < longest_ps(slow)


@pytest.mark.parametrize("readers", [int(TREE_LOAD) + 1, 300, 3000])
def test_a_register_with_many_readers_gets_a_tree_in_which_nothing_is_overloaded(readers: int) -> None:
    before = fan_out(readers)
    after = buffer_registers(before, LIBRARY.cells, LIBRARY)
    unit = next(iter(LIBRARY.smallest_inverter().input_ff.values()))
    loads = net_loads(after, LIBRARY.cells, LIBRARY)
    assert loads[1] <= TREE_LOAD * unit
    assert max(load for net, load in loads.items() if net != 1) <= LEAF_LOAD * unit
    # Every inverter still sees the register, through buffers alone.
    above = {i.pins["Y"]: i.pins["A"] for i in after.instances if i.kind.startswith("BUF")}
    for instance in after.instances:
        if instance.kind == "INV_X1":
            net = instance.pins["A"]
            while net in above:
                net = above[net]
            assert net == 1
    assert longest_ps(size_drivers(before, LIBRARY.cells, LIBRARY)) < longest_ps(sized(before)) - 3 * LIBRARY.fo4_ps()


def test_a_register_of_few_readers_and_a_library_without_buffers_keep_their_nets() -> None:
    few = fan_out(int(TREE_LOAD) - 1)
    assert buffer_registers(few, LIBRARY.cells, LIBRARY) == few
    bare = dataclasses.replace(LIBRARY, cells={k: c for k, c in LIBRARY.cells.items() if not k.startswith("BUF")})
    assert buffer_registers(fan_out(300), bare.cells, bare) == fan_out(300)


def test_only_drives_of_one_cell_stand_for_each_other() -> None:
    kinds = (("DFF_X1", "DFF_X2"), tuple(f"BUF_X{drive}" for drive in (1, 2, 4, 8, 16)))
    assert drives(LIBRARY) == {name: list(kind) for kind in kinds for name in kind}
