"""Static timing analysis of one mapped netlist: the longest paths, by lookup tables, before layout.

Edges and transitions are propagated separately for rise and fall, in topological order. A net's load
is the sum of the input pins on it and, where asked for, a wire per pin. The clock is ideal.

Four classes of paths are kept apart, since only the first bounds the clock by itself: register to
register; input port to register; register to output port; input port to output port. Ports are ideal:
inputs arrive at time 0 with the edge of an inverter, outputs drive one flip-flop input.
Black boxes (SRAM, blocks analysed on their own) start and end paths like registers, with no delay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from plora.synth.liberty import Cell, Library, TimingArc
from plora.synth.netlist import Instance, Netlist

NEVER = float("-inf")


class PathClass(Enum):
    """Where a path starts and ends."""

    REGISTER = "register to register"
    INPUT = "input to register"
    OUTPUT = "register to output"
    THROUGH = "input to output"


@dataclass(frozen=True)
class Step:
    """One cell on a path: its output net, the cell and the time at which the net is stable, in ps."""

    net: str
    cell: str
    at_ps: float


@dataclass(frozen=True)
class TimingPath:
    """A longest path: its length, with the setup time of the register at its end, and its steps."""

    kind: PathClass
    length_ps: float
    end: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Timing:
    """The longest path of each class that exists."""

    paths: dict[PathClass, TimingPath]

    @property
    def period_ps(self) -> float:
        """Shortest clock period that register to register paths allow; 0 where there are none."""
        path = self.paths.get(PathClass.REGISTER)
        return path.length_ps if path is not None else 0.0


class _Analysis:
    """Arrival times of all nets for one set of starting points."""

    def __init__(self, netlist: Netlist, library: Library, wire_ff: float) -> None:
        self.netlist = netlist
        self.library = library
        self.drivers: dict[int, tuple[Instance, str]] = {}
        self.load: dict[int, float] = {}
        self.inverter = library.smallest_inverter()
        (inverter_arcs,) = self.inverter.arcs.values()
        self.inverter_ff = next(iter(self.inverter.input_ff.values()))
        self.edge = (
            inverter_arcs[0].transition[0](0.0, 4 * self.inverter_ff),
            inverter_arcs[0].transition[1](0.0, 4 * self.inverter_ff),
        )
        self.register_ff = self._register_load()
        self.logic: list[tuple[Instance, Cell]] = []
        self.registers: list[tuple[Instance, Cell]] = []
        self.boxes: list[Instance] = []
        for instance in netlist.instances:
            cell = library.cells.get(instance.kind)
            if cell is None:
                self.boxes.append(instance)
                continue
            (self.logic if cell.clock is None else self.registers).append((instance, cell))
            for pin, capacitance in cell.input_ff.items():
                for net in instance.pins.get(pin, []):
                    if isinstance(net, int):
                        self.load[net] = self.load.get(net, 0.0) + capacitance + wire_ff
            for pin in cell.arcs:
                for net in instance.pins.get(pin, []):
                    if isinstance(net, int):
                        self.drivers[net] = (instance, pin)
        for nets in netlist.outputs.values():
            for net in nets:
                if isinstance(net, int):
                    self.load[net] = self.load.get(net, 0.0) + self.register_ff + wire_ff
        self.order = self._topological()

    def _register_load(self) -> float:
        loads = [
            cell.input_ff[pin] for cell in self.library.cells.values() for pin in cell.setup if pin in cell.input_ff
        ]
        return min(loads) if loads else self.inverter_ff

    def _topological(self) -> list[tuple[Instance, Cell]]:
        readers: dict[int, list[int]] = {}
        missing = [0] * len(self.logic)
        logic_nets = {
            net
            for instance, cell in self.logic
            for pin in cell.arcs
            for net in instance.pins.get(pin, [])
            if isinstance(net, int)
        }
        for index, (instance, cell) in enumerate(self.logic):
            for pin in cell.input_ff:
                for net in instance.pins.get(pin, []):
                    if isinstance(net, int) and net in logic_nets:
                        readers.setdefault(net, []).append(index)
                        missing[index] += 1
        ready = [index for index, count in enumerate(missing) if count == 0]
        order: list[tuple[Instance, Cell]] = []
        while ready:
            index = ready.pop()
            instance, cell = self.logic[index]
            order.append((instance, cell))
            for pin in cell.arcs:
                for net in instance.pins.get(pin, []):
                    for reader in readers.get(net, []) if isinstance(net, int) else []:
                        missing[reader] -= 1
                        if missing[reader] == 0:
                            ready.append(reader)
        if len(order) != len(self.logic):
            raise ValueError(f"{self.netlist.name} has a combinational loop")
        return order

    def run(self, *, from_registers: bool) -> Iterator[TimingPath]:
        """Yield the longest path to a register and to an output from all registers or all inputs."""
        at: dict[int, tuple[float, float]] = {}
        slew: dict[int, tuple[float, float]] = {}
        origin: dict[tuple[int, int], tuple[int, int]] = {}
        if from_registers:
            for instance, cell in self.registers:
                for pin, arcs in cell.arcs.items():
                    for net in instance.pins.get(pin, []):
                        if isinstance(net, int) and arcs:
                            load = self.load.get(net, 0.0)
                            at[net] = tuple(max(arc.delay[e](self.edge[0], load) for arc in arcs) for e in (0, 1))  # type: ignore[assignment]
                            slew[net] = tuple(
                                max(arc.transition[e](self.edge[0], load) for arc in arcs) for e in (0, 1)
                            )  # type: ignore[assignment]
            for instance in self.boxes:
                for nets in instance.pins.values():
                    for net in nets:
                        if isinstance(net, int) and net not in self.drivers:
                            at[net], slew[net] = (0.0, 0.0), self.edge
        for nets in self.netlist.inputs.values():
            for net in nets:
                if isinstance(net, int):
                    if from_registers:
                        at.pop(net, None)
                    else:
                        at[net], slew[net] = (0.0, 0.0), self.edge
        for instance, cell in self.order:
            for output, arcs in cell.arcs.items():
                for net in instance.pins.get(output, []):
                    if isinstance(net, int):
                        self._propagate(instance, arcs, net, at, slew, origin)
        yield from self._ends(at, slew, origin, from_registers=from_registers)

    def _propagate(
        self,
        instance: Instance,
        arcs: tuple[TimingArc, ...],
        net: int,
        at: dict[int, tuple[float, float]],
        slew: dict[int, tuple[float, float]],
        origin: dict[tuple[int, int], tuple[int, int]],
    ) -> None:
        load = self.load.get(net, 0.0)
        latest = [NEVER, NEVER]
        slowest = [0.0, 0.0]
        for arc in arcs:
            sources = instance.pins.get(arc.related)
            source = sources[0] if sources else None
            if not isinstance(source, int) or source not in at:
                continue
            arrivals, slews = at[source], slew[source]
            for edge in (0, 1):
                inputs = (edge,) if arc.sense == "positive_unate" else (1 - edge,)
                for before in (0, 1) if arc.sense == "non_unate" else inputs:
                    if arrivals[before] == NEVER:
                        continue
                    arrival = arrivals[before] + arc.delay[edge](slews[before], load)
                    slowest[edge] = max(slowest[edge], arc.transition[edge](slews[before], load))
                    if arrival > latest[edge]:
                        latest[edge] = arrival
                        origin[net, edge] = (source, before)
        if latest != [NEVER, NEVER]:
            at[net] = (latest[0], latest[1])
            slew[net] = (slowest[0], slowest[1])

    def _ends(
        self,
        at: dict[int, tuple[float, float]],
        slew: dict[int, tuple[float, float]],
        origin: dict[tuple[int, int], tuple[int, int]],
        *,
        from_registers: bool,
    ) -> Iterator[TimingPath]:
        worst: tuple[float, int, int, str] | None = None
        for instance, cell in self.registers:
            for pin, tables in cell.setup.items():
                for net in instance.pins.get(pin, []):
                    if isinstance(net, int) and net in at:
                        for edge in (0, 1):
                            length = at[net][edge] + tables[edge](self.edge[0], slew[net][edge])
                            if worst is None or length > worst[0]:
                                worst = (length, net, edge, instance.name)
        for instance in self.boxes:
            for nets in instance.pins.values():
                for net in nets:
                    if isinstance(net, int) and net in at and net in self.drivers:
                        for edge in (0, 1):
                            if worst is None or at[net][edge] > worst[0]:
                                worst = (at[net][edge], net, edge, instance.name)
        if worst is not None:
            yield self._path(PathClass.REGISTER if from_registers else PathClass.INPUT, worst, at, origin)
        worst = None
        for port, nets in self.netlist.outputs.items():
            for net in nets:
                if isinstance(net, int) and net in at:
                    for edge in (0, 1):
                        if worst is None or at[net][edge] > worst[0]:
                            worst = (at[net][edge], net, edge, port)
        if worst is not None:
            yield self._path(PathClass.OUTPUT if from_registers else PathClass.THROUGH, worst, at, origin)

    def _path(
        self,
        kind: PathClass,
        worst: tuple[float, int, int, str],
        at: dict[int, tuple[float, float]],
        origin: dict[tuple[int, int], tuple[int, int]],
    ) -> TimingPath:
        length, net, edge, end = worst
        steps = []
        while True:
            driver = self.drivers.get(net)
            steps.append(
                Step(
                    net=self.netlist.net_names.get(net, str(net)),
                    cell=driver[0].kind if driver is not None else "",
                    at_ps=at[net][edge],
                )
            )
            if (net, edge) not in origin:
                break
            net, edge = origin[net, edge]
        return TimingPath(kind, length, end, tuple(reversed(steps)))


def analyse(netlist: Netlist, library: Library, wire_ff: float = 0.0) -> Timing:
    """Return the longest paths of ``netlist``.

    Args:
        netlist: a mapped module.
        library: the library it was mapped to.
        wire_ff: capacitance of the wire to each input pin, in fF; 0 is before layout.

    Raises:
        ValueError: the netlist has a combinational loop.
    """
    analysis = _Analysis(netlist, library, wire_ff)
    paths = {
        path.kind: path for from_registers in (True, False) for path in analysis.run(from_registers=from_registers)
    }
    return Timing(paths)
