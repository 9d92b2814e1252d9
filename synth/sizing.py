"""Gives flip-flops the drive that their load asks for, after mapping: ABC sizes gates, but never registers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from plora.synth.liberty import Cell, Library
from plora.synth.netlist import Netlist

LOAD_PER_DRIVE = 6.0
"""Load, in inputs of the smallest inverter, from which a register of the next drive is taken."""

_DRIVE = re.compile(r"_?X\d+$")


def register_drives(library: Library) -> dict[str, list[str]]:
    """Return, for every flip-flop that comes in several drives, those of them from weak to strong.

    Drives of one flip-flop have the same pins, and names that differ only in a final ``X`` and number.
    """
    kinds: dict[tuple[object, ...], list[Cell]] = {}
    for cell in library.cells.values():
        if cell.clock is not None:
            stem = _DRIVE.sub("", cell.name)
            kinds.setdefault((stem, *sorted(cell.input_ff), *sorted(cell.functions.items())), []).append(cell)
    return {
        cell.name: [each.name for each in sorted(cells, key=lambda each: each.area)]
        for cells in kinds.values()
        if len(cells) > 1
        for cell in cells
    }


def size_registers(netlist: Netlist, library: Library, load_ff: Mapping[int, float]) -> Netlist:
    """Return ``netlist`` with the weakest flip-flops that have no more than `LOAD_PER_DRIVE` each, or the strongest.

    Args:
        netlist: after mapping.
        library: its cells.
        load_ff: load of every net, in fF.
    """
    drives = register_drives(library)
    unit_ff = LOAD_PER_DRIVE * next(iter(library.smallest_inverter().input_ff.values()))
    instances = []
    for instance in netlist.instances:
        choices = drives.get(instance.kind)
        if choices is not None:
            outputs = (instance.pins.get(pin) for pin in library.cells[instance.kind].functions)
            load = max((load_ff.get(net, 0.0) for net in outputs if isinstance(net, int)), default=0.0)
            index = min(int(load / unit_ff), len(choices) - 1)
            instance = dataclasses.replace(instance, kind=choices[index])
        instances.append(instance)
    return dataclasses.replace(netlist, instances=instances)
