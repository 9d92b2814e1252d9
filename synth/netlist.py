"""Mapped netlists: the JSON that Yosys writes after mapping, as cells and nets."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plora.synth.liberty import Library

Net = int | str
"""A net by its number, or a constant: ``"0"``, ``"1"`` or ``"x"``."""


@dataclass(frozen=True)
class Instance:
    """A cell or a black box in a netlist.

    Attributes:
        name: its name.
        kind: library cell or module.
        pins: the net of each pin. A port of several bits is one pin a bit: ``port[0]``, ``port[1]``, ...
        parameters: of a black box, as text.
    """

    name: str
    kind: str
    pins: dict[str, Net]
    parameters: dict[str, str]


@dataclass(frozen=True)
class Netlist:
    """One mapped module.

    Attributes:
        name: of the module.
        inputs: nets of its input ports.
        outputs: nets of its output ports.
        instances: cells and black boxes.
        net_names: a readable name of each net that has one.
    """

    name: str
    inputs: dict[str, list[Net]]
    outputs: dict[str, list[Net]]
    instances: list[Instance]
    net_names: dict[int, str]

    def net_name(self, net: int) -> str:
        """Return the name of a net."""
        return self.net_names.get(net, f"net {net}")

    def counts(self) -> Counter[str]:
        """Return how many instances there are of each kind."""
        return Counter(instance.kind for instance in self.instances)

    def area_ge(self, library: Library) -> float:
        """Return the area of the library cells in gate equivalents; black boxes count nothing."""
        return (
            sum(library.cells[kind].area * count for kind, count in self.counts().items() if kind in library.cells)
            / library.ge_area
        )

    def flip_flops(self, library: Library) -> int:
        """Return the number of flip-flops."""
        return sum(
            count
            for kind, count in self.counts().items()
            if kind in library.cells and library.cells[kind].clock is not None
        )


def _pins(connections: dict[str, list[Net]]) -> dict[str, Net]:
    pins: dict[str, Net] = {}
    for port, nets in connections.items():
        if len(nets) == 1:
            pins[port] = nets[0]
        else:
            pins.update({f"{port}[{index}]": net for index, net in enumerate(nets)})
    return pins


def _module(name: str, module: dict[str, Any]) -> Netlist:
    ports: dict[str, dict[str, list[Net]]] = {"input": {}, "output": {}}
    for port, entry in module["ports"].items():
        ports[entry["direction"]][port] = entry["bits"]
    names: dict[int, str] = {}
    for wire, entry in module["netnames"].items():
        # Names made up by the tool only where there is no better one.
        for index, bit in enumerate(entry["bits"]):
            if isinstance(bit, int) and (bit not in names or not entry.get("hide_name", 0)):
                names[bit] = f"{wire}[{index}]" if len(entry["bits"]) > 1 else wire
    return Netlist(
        name=name,
        inputs=ports["input"],
        outputs=ports["output"],
        instances=[
            Instance(instance, entry["type"], _pins(entry["connections"]), entry.get("parameters", {}))
            for instance, entry in module["cells"].items()
        ],
        net_names=names,
    )


def read_netlists(path: Path) -> dict[str, Netlist]:
    """Return the modules of a Yosys JSON file that have contents, by name."""
    modules = json.loads(path.read_text())["modules"]
    return {
        name: _module(name, module)
        for name, module in modules.items()
        if not int(str(module["attributes"].get("blackbox", "0")), 2)
    }
