"""Drives by load, after mapping: what ABC leaves to be done behind registers and in trees of buffers.

ABC sizes gates for paths within a block and never touches registers. A register that drives hundreds of pins, or a
tree of the weakest buffers in front of a port, is then as slow as its load makes it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from plora.synth.liberty import Cell, Library
from plora.synth.netlist import Instance, Netlist
from plora.synth.timing import net_loads

LOAD_PER_DRIVE = 6.0
"""Load, in inputs of the smallest inverter, from which a flip-flop of the next drive is taken."""

LOAD_PER_BUFFER_DRIVE = 12.0
"""The same for buffers: more, as most of them are on no long path and larger ones take area."""

LEAF_LOAD = 24.0
"""Load, in the same unit, that one buffer of a tree takes."""

TREE_LOAD = 3 * LEAF_LOAD
"""Load from which a register gets a tree of buffers."""

_DRIVE = re.compile(r"_?X(\d+)$")


def _strength(name: str) -> int:
    """Drive of the cell ``name`` against the weakest of its kind."""
    found = _DRIVE.search(name)
    return int(found[1]) if found else 1


def drives(library: Library) -> dict[str, list[str]]:
    """Return, for every flip-flop and buffer that comes in several drives, those of them from weak to strong.

    Drives of one cell have the same pins, and names that differ only in a final ``X`` and number.
    """
    buffers = {cell.name for cell in library.buffers()}
    kinds: dict[tuple[object, ...], list[Cell]] = {}
    for cell in library.cells.values():
        if cell.clock is not None or cell.name in buffers:
            stem = _DRIVE.sub("", cell.name)
            kinds.setdefault((stem, *sorted(cell.input_ff), *sorted(cell.functions.items())), []).append(cell)
    return {
        cell.name: [each.name for each in sorted(cells, key=lambda each: _strength(each.name))]
        for cells in kinds.values()
        if len(cells) > 1
        for cell in cells
    }


def _unit_ff(library: Library) -> float:
    return next(iter(library.smallest_inverter().input_ff.values()))


def size_by_load(netlist: Netlist, library: Library, load_ff: Mapping[int, float]) -> Netlist:
    """Return ``netlist`` with the weakest flip-flops and buffers that have no more load for each unit of
    their drive than `LOAD_PER_DRIVE` and `LOAD_PER_BUFFER_DRIVE`, or the strongest; buffers never become weaker.

    Args:
        netlist: after mapping.
        library: its cells.
        load_ff: load of every net, in fF.
    """
    choices_of, unit_ff = drives(library), _unit_ff(library)
    instances = []
    for instance in netlist.instances:
        choices = choices_of.get(instance.kind)
        if choices is not None:
            cell = library.cells[instance.kind]
            most_ff = LOAD_PER_DRIVE * unit_ff
            if cell.clock is None:
                most_ff = LOAD_PER_BUFFER_DRIVE * unit_ff
                choices = choices[choices.index(instance.kind) :]
            outputs = (instance.pins.get(pin) for pin in cell.functions)
            load = max((load_ff.get(net, 0.0) for net in outputs if isinstance(net, int)), default=0.0)
            enough = (name for name in choices if load <= most_ff * _strength(name))
            instance = dataclasses.replace(instance, kind=next(enough, choices[-1]))
        instances.append(instance)
    return dataclasses.replace(netlist, instances=instances)


def buffer_registers(netlist: Netlist, cells: Mapping[str, Cell], library: Library) -> Netlist:
    """Return ``netlist`` with a tree of buffers behind every flip-flop whose load is above `TREE_LOAD`.

    Sinks of a net are dealt to the buffers in the order of the netlist, up to `LEAF_LOAD` for each; output ports stay
    with the flip-flop. A library without buffers leaves all as it is.

    Args:
        netlist: after mapping.
        cells: the library's, and those that stand for blocks and memories in the netlist.
        library: cells to take.
    """
    buffers = library.buffers()
    if not buffers:
        return netlist
    buffer = min(buffers, key=lambda cell: cell.area)
    (in_pin,), (out_pin,) = buffer.input_ff, buffer.functions
    unit_ff = _unit_ff(library)
    load_ff = net_loads(netlist, dict(cells), library)
    heavy = {
        net
        for instance in netlist.instances
        if cells[instance.kind].clock is not None and instance.kind in library.cells
        for pin in library.cells[instance.kind].functions
        if isinstance(net := instance.pins.get(pin), int) and load_ff.get(net, 0.0) > TREE_LOAD * unit_ff
    }
    if not heavy:
        return netlist
    instances = list(netlist.instances)
    names = dict(netlist.net_names)
    last_net = max(net for instance in instances for net in instance.pins.values() if isinstance(net, int))
    sinks: dict[int, list[tuple[int, str]]] = {net: [] for net in sorted(heavy)}
    for index, instance in enumerate(instances):
        for pin in cells[instance.kind].input_ff:
            net = instance.pins.get(pin)
            if isinstance(net, int) and net in heavy:
                sinks[net].append((index, pin))
    for net, readers in sinks.items():
        while sum(_pin_ff(instances, cells, readers)) > TREE_LOAD * unit_ff and len(readers) > 1:
            parents = []
            for group in _dealt(readers, _pin_ff(instances, cells, readers), LEAF_LOAD * unit_ff):
                last_net += 1
                names[last_net] = f"{netlist.net_name(net)} buffered"
                for index, pin in group:
                    pins = {**instances[index].pins, pin: last_net}
                    instances[index] = dataclasses.replace(instances[index], pins=pins)
                pins = {in_pin: net, out_pin: last_net}
                parents.append((len(instances), in_pin))
                instances.append(Instance(f"$tree${net}${last_net}", buffer.name, pins, {}))
            if len(parents) == len(readers):  # single pins that are heavier than a leaf
                break
            readers = parents
    return dataclasses.replace(netlist, instances=instances, net_names=names)


def _pin_ff(instances: list[Instance], cells: Mapping[str, Cell], pins: Iterable[tuple[int, str]]) -> list[float]:
    return [cells[instances[index].kind].input_ff[pin] for index, pin in pins]


def _dealt(pins: list[tuple[int, str]], loads: list[float], most: float) -> list[list[tuple[int, str]]]:
    """Return ``pins`` in groups of up to ``most`` load each, or of one."""
    groups: list[list[tuple[int, str]]] = []
    room = 0.0
    for pin, load in zip(pins, loads, strict=True):
        if load > room or not groups:
            groups.append([])
            room = most
        groups[-1].append(pin)
        room -= load
    return groups


def size_drivers(netlist: Netlist, cells: Mapping[str, Cell], library: Library, wire_ff: float = 0.0) -> Netlist:
    """Return ``netlist`` with trees behind overloaded registers, and registers and buffers of the drive they need.

    Args:
        netlist: after mapping.
        cells: the library's, and those that stand for blocks and memories in the netlist.
        library: cells to take.
        wire_ff: wire at every input pin.
    """
    netlist = buffer_registers(netlist, cells, library)
    return size_by_load(netlist, library, net_loads(netlist, dict(cells), library, wire_ff))
