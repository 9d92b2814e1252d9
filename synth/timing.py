"""Static timing analysis of one mapped netlist: the longest paths, by lookup tables, before layout.

Edges and transitions are propagated separately for rise and fall, in topological order. A net's load
is the sum of the input pins on it and, where asked for, a wire per pin. The clock is ideal.

Four classes of paths are kept apart, since only the first bounds the clock by itself: register to
register; input port to register; register to output port; input port to output port. Ports are ideal:
inputs arrive at time 0 with the edge of an inverter, outputs drive one flip-flop input.

Blocks that were mapped on their own appear in their parent as cells: `block_cell` boils a block's own
analysis down to the delay from its clock to each output bit, from each input bit to a register, and
from each input bit to each output bit it reaches without a register. So paths that cross blocks are
found without ever analysing the whole design flat.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import Enum

from plora.synth.liberty import Cell, Library, Table, TimingArc
from plora.synth.netlist import Instance, Net, Netlist

Edges = tuple[float, float]
"""A figure for the rising and for the falling edge."""

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
class _Arrivals:
    """Of every net that some start reaches: time, transition, and the net and edge before it."""

    at: dict[int, Edges]
    slew: dict[int, Edges]
    origin: dict[tuple[int, int], tuple[int, int]]


def net_loads(netlist: Netlist, cells: dict[str, Cell], library: Library, wire_ff: float = 0.0) -> dict[int, float]:
    """Return the load of every net in fF: the pins that it drives, and ``wire_ff`` for each of them.

    An output port drives the lightest data pin of the flip-flops in ``library``.

    Raises:
        ValueError: a cell is not known.
    """
    loads: dict[int, float] = {}
    for instance in netlist.instances:
        cell = cells.get(instance.kind)
        if cell is None:
            raise ValueError(f"{netlist.name}: instance {instance.name} of the unknown cell {instance.kind}")
        for pin, capacitance in cell.input_ff.items():
            net = instance.pins.get(pin)
            if isinstance(net, int):
                loads[net] = loads.get(net, 0.0) + capacitance + wire_ff
    registers = [cell.input_ff[pin] for cell in library.cells.values() for pin in cell.setup if pin in cell.input_ff]
    output_ff = min(registers, default=next(iter(library.smallest_inverter().input_ff.values())))
    for nets in netlist.outputs.values():
        for net in nets:
            if isinstance(net, int):
                loads[net] = loads.get(net, 0.0) + output_ff + wire_ff
    return loads


class TimingAnalysis:
    """Arrival times in one netlist.

    Args:
        netlist: a mapped module.
        cells: the library's cells, and those that stand for blocks and memories in it.
        library: for the ports: what drives them and what they drive.
        wire_ff: capacitance of the wire to each input pin, in fF; 0 is before layout.

    Raises:
        ValueError: a cell is not known, or there is a combinational loop.
    """

    def __init__(self, netlist: Netlist, cells: dict[str, Cell], library: Library, wire_ff: float = 0.0) -> None:
        self.netlist = netlist
        inverter = library.smallest_inverter()
        (arcs,) = inverter.arcs.values()
        input_ff = next(iter(inverter.input_ff.values()))
        self.port_edge: Edges = (
            arcs[0].transition[0](0.0, 4 * input_ff),
            arcs[0].transition[1](0.0, 4 * input_ff),
        )
        self.load = net_loads(netlist, cells, library, wire_ff)
        self.logic: dict[int, tuple[Instance, list[tuple[int, TimingArc]]]] = {}
        self.launches: list[tuple[int, list[TimingArc]]] = []
        self.captures: list[tuple[int, str, tuple[Table, Table]]] = []
        self.drivers: dict[int, str] = {}
        for instance in netlist.instances:
            self._add(instance, cells[instance.kind])
        self.inputs = [net for nets in netlist.inputs.values() for net in nets if isinstance(net, int)]
        self.order = self._topological()
        self.from_registers = self._arrivals(self._launched())
        self.from_inputs = self._arrivals({net: ((0.0, 0.0), self.port_edge) for net in self.inputs})

    def _add(self, instance: Instance, cell: Cell) -> None:
        for pin, tables in cell.setup.items():
            net = instance.pins.get(pin)
            if isinstance(net, int):
                self.captures.append((net, f"{instance.name}.{pin}", tables))
        for pin, arcs in cell.arcs.items():
            net = instance.pins.get(pin)
            if not isinstance(net, int):
                continue
            self.drivers[net] = instance.kind
            launching = [arc for arc in arcs if arc.related == cell.clock]
            if launching:
                self.launches.append((net, launching))
            through = [
                (source, arc)
                for arc in arcs
                if arc.related != cell.clock and isinstance(source := instance.pins.get(arc.related), int)
            ]
            if through:
                self.logic[net] = (instance, through)

    def _topological(self) -> list[int]:
        readers: dict[int, list[int]] = {}
        missing: dict[int, int] = {}
        for net, (_, arcs) in self.logic.items():
            sources = [source for source, _ in arcs if source in self.logic]
            missing[net] = len(sources)
            for source in sources:
                readers.setdefault(source, []).append(net)
        ready = [net for net, count in missing.items() if count == 0]
        order = []
        while ready:
            net = ready.pop()
            order.append(net)
            for reader in readers.get(net, []):
                missing[reader] -= 1
                if missing[reader] == 0:
                    ready.append(reader)
        if len(order) != len(self.logic):
            stuck = next(net for net, count in missing.items() if count > 0)
            raise ValueError(f"{self.netlist.name} has a combinational loop through {self.netlist.net_name(stuck)}")
        return order

    def _launched(self) -> dict[int, tuple[Edges, Edges]]:
        clock_edge = self.port_edge[0]
        starts = {}
        for net, arcs in self.launches:
            load = self.load.get(net, 0.0)
            rise, fall = (max(arc.delay[edge](clock_edge, load) for arc in arcs) for edge in (0, 1))
            slow_rise, slow_fall = (max(arc.transition[edge](clock_edge, load) for arc in arcs) for edge in (0, 1))
            starts[net] = ((rise, fall), (slow_rise, slow_fall))
        return starts

    def _arrivals(self, starts: dict[int, tuple[Edges, Edges]]) -> _Arrivals:
        at = {net: times for net, (times, _) in starts.items()}
        slew = {net: slews for net, (_, slews) in starts.items()}
        origin: dict[tuple[int, int], tuple[int, int]] = {}
        for net in self.order:
            load = self.load.get(net, 0.0)
            latest, slowest = list(at.get(net, (NEVER, NEVER))), list(slew.get(net, (0.0, 0.0)))
            for source, arc in self.logic[net][1]:
                if source not in at:
                    continue
                arrivals, slews = at[source], slew[source]
                for before, edge in edge_pairs(arc.sense):
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
        return _Arrivals(at, slew, origin)

    def _setup(self, tables: tuple[Table, Table], slews: Edges) -> Edges:
        clock_edge = self.port_edge[0]
        return tables[0](clock_edge, slews[0]), tables[1](clock_edge, slews[1])

    def paths(self) -> dict[PathClass, TimingPath]:
        """Return the longest path of each class that exists."""
        found = {}
        for arrivals, inner, outer in (
            (self.from_registers, PathClass.REGISTER, PathClass.OUTPUT),
            (self.from_inputs, PathClass.INPUT, PathClass.THROUGH),
        ):
            for kind, ends in ((inner, self._captured(arrivals)), (outer, self._put_out(arrivals))):
                worst = max(ends, default=None)
                if worst is not None and worst[0] != NEVER:
                    found[kind] = self._path(kind, worst, arrivals)
        return found

    def misses(self, period_ps: float, gates: Container[str]) -> list[TimingPath]:
        """Return register to register paths longer than ``period_ps``: of those through the same blocks, the longest.

        Args:
            period_ps: clock period.
            gates: names of cells that are no blocks.
        """
        worst: dict[tuple[str, ...], TimingPath] = {}
        for end in sorted(self._captured(self.from_registers), reverse=True):
            if end[0] <= period_ps:
                break
            path = self._path(PathClass.REGISTER, end, self.from_registers)
            blocks = (*(step.cell for step in path.steps if step.cell not in gates), path.end.partition(".")[0])
            # Paths within one block all end at cells of their own: one of them stands for the rest.
            worst.setdefault(blocks if len(blocks) > 1 else (), path)
        return list(worst.values())

    def _captured(self, arrivals: _Arrivals) -> Iterator[tuple[float, int, int, str]]:
        for net, end, tables in self.captures:
            if net in arrivals.at:
                setup = self._setup(tables, arrivals.slew[net])
                for edge in (0, 1):
                    yield arrivals.at[net][edge] + setup[edge], net, edge, end

    def _put_out(self, arrivals: _Arrivals) -> Iterator[tuple[float, int, int, str]]:
        for port, nets in self.netlist.outputs.items():
            for net in nets:
                if isinstance(net, int) and net in arrivals.at:
                    for edge in (0, 1):
                        yield arrivals.at[net][edge], net, edge, port

    def _path(self, kind: PathClass, worst: tuple[float, int, int, str], arrivals: _Arrivals) -> TimingPath:
        length, net, edge, end = worst
        steps = []
        while True:
            steps.append(Step(self.netlist.net_name(net), self.drivers.get(net, "port"), arrivals.at[net][edge]))
            if (net, edge) not in arrivals.origin:
                break
            net, edge = arrivals.origin[net, edge]
        return TimingPath(kind, length, end, tuple(reversed(steps)))

    def delays_to_registers(self) -> dict[int, float]:
        """Return, for every input net from which a register is reached, the longest delay with its setup."""
        slew = self.from_inputs.slew
        tail: dict[int, list[float]] = {}
        for net, _, tables in self.captures:
            if net in slew:
                ends = tail.setdefault(net, [NEVER, NEVER])
                for edge, setup in enumerate(self._setup(tables, slew[net])):
                    ends[edge] = max(ends[edge], setup)
        for net in reversed(self.order):
            if net not in tail:
                continue
            load = self.load.get(net, 0.0)
            for source, arc in self.logic[net][1]:
                if source not in slew:
                    continue
                ends = tail.setdefault(source, [NEVER, NEVER])
                for before, edge in edge_pairs(arc.sense):
                    delay = arc.delay[edge](slew[source][before], load)
                    ends[before] = max(ends[before], delay + tail[net][edge])
        return {net: max(tail[net]) for net in self.inputs if net in tail}

    def delays_through(self) -> dict[int, dict[int, float]]:
        """Return, for every output net, the input nets that reach it without a register, with the longest delay."""
        slew = self.from_inputs.slew
        wanted = {net for nets in self.netlist.outputs.values() for net in nets if isinstance(net, int)}
        useful = set(wanted)
        for net in reversed(self.order):
            if net in useful:
                useful.update(source for source, _ in self.logic[net][1])
        reach: dict[int, dict[int, float]] = {net: {net: 0.0} for net in self.inputs if net in useful}
        for net in self.order:
            if net not in useful or net not in slew:
                continue
            load = self.load.get(net, 0.0)
            merged: dict[int, float] = {}
            for source, arc in self.logic[net][1]:
                if source in reach:
                    delay = max(arc.delay[edge](slew[source][before], load) for before, edge in edge_pairs(arc.sense))
                    for start, time in reach[source].items():
                        if time + delay > merged.get(start, NEVER):
                            merged[start] = time + delay
            if merged:
                reach[net] = merged
        return {net: reach[net] for net in sorted(wanted) if net in reach}


def edge_pairs(sense: str) -> tuple[tuple[int, int], ...]:
    """Return the pairs of input and output edge (0 rising, 1 falling) that an arc of ``sense`` has."""
    if sense == "positive_unate":
        return (0, 0), (1, 1)
    if sense == "negative_unate":
        return (0, 1), (1, 0)
    return (0, 0), (0, 1), (1, 0), (1, 1)


def constant(value_ps: float) -> Table:
    """Return a table that is the same everywhere."""
    return Table((0.0,), (0.0,), ((value_ps,),))


def bit_pins(port: str, width: int) -> list[str]:
    """Return the names that the bits of a port have as pins of an instance (`plora.synth.netlist.Instance`)."""
    return [f"{port}[{index}]" for index in range(width)] if width > 1 else [port]


def port_bits(ports: dict[str, list[Net]]) -> Iterator[tuple[str, Net]]:
    """Yield every bit of ``ports`` as the pin name it has in a parent, and its net."""
    for port, nets in ports.items():
        yield from zip(bit_pins(port, len(nets)), nets, strict=True)


def block_cell(analysis: TimingAnalysis, area: float) -> Cell:
    """Return a cell that stands for the analysed block in its parent's netlist.

    Its delays are those under the loads that the block's own analysis gives its outputs (a flip-flop);
    the parent's load comes on top only in the parent's buffers.
    """
    clock = "clk"
    netlist = analysis.netlist
    edge = analysis.port_edge
    transition = (constant(edge[0]), constant(edge[1]))
    to_register = analysis.delays_to_registers()
    through = analysis.delays_through()
    input_bits = dict(port_bits(netlist.inputs))
    input_pins = {net: pin for pin, net in input_bits.items() if isinstance(net, int)}
    arcs: dict[str, tuple[TimingArc, ...]] = {}
    for pin, net in port_bits(netlist.outputs):
        found = []
        if isinstance(net, int):
            launched = analysis.from_registers.at.get(net)
            if launched is not None:
                rise, fall = (time if time != NEVER else max(launched) for time in launched)
                found.append(TimingArc(clock, "non_unate", (constant(rise), constant(fall)), transition))
            for source, delay in through.get(net, {}).items():
                found.append(TimingArc(input_pins[source], "non_unate", (constant(delay), constant(delay)), transition))
        arcs[pin] = tuple(found)
    return Cell(
        name=netlist.name,
        area=area,
        input_ff={
            pin: analysis.load.get(net, 0.0) if isinstance(net, int) else 0.0
            for pin, net in input_bits.items()
            if pin != clock
        },
        arcs=arcs,
        functions={},
        clock=clock,
        setup={
            pin: (constant(to_register[net]), constant(to_register[net]))
            for pin, net in input_bits.items()
            if isinstance(net, int) and net in to_register
        },
        leakage_nw=0.0,
    )
