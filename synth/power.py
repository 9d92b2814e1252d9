"""Power from switching activity: blocks of the mapped netlist, driven by what the RTL did in a real run.

A run of the Verilated device writes the values of all signals (VCD). Every block's mapped netlist is
then fed the values that its own instances saw at their ports, cycle by cycle, all instances side by
side, and every change of every net is charged:

- half of C V V for the pins on the net, and for a wire to each of them;
- the energy inside the driving cell;
- for every flip-flop and cycle the energy of its clock pin and inside it, and a share of a clock tree;
- leakage by area.

Memories are charged by their accesses in the run (`plora.synth.sram`).

Changes are counted with the gates' delays, so glitches are in; without them is the lower end of the
range. While it runs, the netlist's outputs are compared with the RTL's in every cycle: a figure from a
netlist that computes something else would be worthless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plora.hw.build.verilog import TOP
from plora.synth.gates import LANES, GateSimulation, across_lanes
from plora.synth.hierarchy import SRAM_MODULE, Block, merge_equal, module_places, split_modules
from plora.synth.liberty import Library
from plora.synth.netlist import Netlist
from plora.synth.sram import Range
from plora.synth.vcd import Signal, VcdReader

WIRE_FF = Range(0.3, 1.0, 2.0)
"""Wire per pin at 45 nm: 0.2 fF/um for 1.5, 5 and 10 um. A placed cell of 1.5 um2 has its next reader a few
cell pitches away; the open library's own wire load tables give 0.18 fF/um and 1.7 to 2 um per pin."""

CLOCK_TREE = Range(0.3, 1.0, 1.5)
"""Capacitance of clock wires and buffers over that of the clock pins. The low end stands for a tree
whose branches are gated where nothing is loaded."""

LARGEST_GE = 100_000.0
"""Larger blocks are not replayed: of the device that is the host port's buffers, idle while it computes."""

WARM_UP_CYCLES = 24
"""Cycles before outputs must agree: registers without reset hold other values at first."""


@dataclass(frozen=True)
class Activity:
    """What happened in a block over a window of a run, mean of one instance and cycle.

    Energies in pJ: ``logic`` and ``registers`` by their changes, ``clock`` without the tree.
    """

    block: str
    count: int
    cycles: int
    lanes: int
    mismatches: int
    logic: Range
    registers: Range
    clock_pj: float

    @property
    def energy_pj(self) -> Range:
        """Energy of one instance and cycle, with the clock tree, without leakage."""
        return self.logic + self.registers + self.clock_energy_pj

    @property
    def clock_energy_pj(self) -> Range:
        """Energy of the clock in one instance and cycle: pins, what is inside flip-flops, and the tree."""
        return Range(*(self.clock_pj * (1 + tree) for tree in (CLOCK_TREE.low, CLOCK_TREE.best, CLOCK_TREE.high)))


class _Replay:
    """One block's netlist fed with what its instances saw."""

    def __init__(self, block: Block, netlist: Netlist, library: Library, top: Signal) -> None:
        self.block = block
        self.library = library
        self.places = block.places[:LANES]
        self.netlist = netlist
        self.simulation = GateSimulation(netlist, library, len(self.places))
        self.inputs: dict[tuple[Signal, ...], list[tuple[int, int]]] = {}
        for port, nets in netlist.inputs.items():
            if port != "clk":
                self._watch((port,), list(enumerate(nets)), top)
        self.outputs = {port: [(*top, *place, port) for place in self.places] for port in netlist.outputs}
        for (instance, port), bits in self.simulation.box_outputs().items():
            self._watch((*instance.split("."), port), bits, top)
        self.words: dict[Signal, int] = {}
        self.mismatches = 0
        self.cycles = 0

    def _watch(self, tail: tuple[str, ...], bits: Sequence[tuple[int, object]], top: Signal) -> None:
        key = tuple((*top, *place, *tail) for place in self.places)
        self.inputs[key] = [(bit, net) for bit, net in bits if isinstance(net, int)]

    def signals(self) -> set[Signal]:
        """Return every signal that the replay needs."""
        return {signal for key in self.inputs for signal in key} | {
            signal for signals in self.outputs.values() for signal in signals
        }

    def cycle(self, changed: dict[Signal, int], *, glitches: bool, check: bool) -> None:
        values: dict[int, int] = {}
        for key, bits in self.inputs.items():
            if any(signal in changed for signal in key):
                for signal in key:
                    if signal in changed:
                        self.words[signal] = changed[signal]
                words = [self.words.get(signal, 0) for signal in key]
                values.update((net, across_lanes(words, bit)) for bit, net in bits)
        for signals in self.outputs.values():
            for signal in signals:
                if signal in changed:
                    self.words[signal] = changed[signal]
        self.simulation.cycle(values, glitches=glitches)
        self.cycles += 1
        if check:
            for port, signals in self.outputs.items():
                if self.simulation.output(port) != [self.words.get(signal, 0) for signal in signals]:
                    self.mismatches += 1


def net_energies_fj(netlist: Netlist, library: Library, wire_ff: float) -> tuple[dict[int, float], set[int], float]:
    """Return the energy of one change of every net, the nets that registers drive, and clock energy per cycle.

    The clock energy is that of all flip-flops' clock pins and what is inside them, without a tree.
    """
    half_v2 = 0.5 * library.vdd_v**2
    energies: dict[int, float] = {}
    registered: set[int] = set()
    clock_fj = 0.0
    for instance in netlist.instances:
        cell = library.cells.get(instance.kind)
        if cell is None:
            continue
        for pin, capacitance in cell.input_ff.items():
            net = instance.pins.get(pin)
            if pin == cell.clock:
                clock_fj += 2 * half_v2 * capacitance + cell.clock_fj
            elif isinstance(net, int):
                energies[net] = energies.get(net, 0.0) + half_v2 * (capacitance + wire_ff)
        for pin in cell.functions:
            net = instance.pins.get(pin)
            if isinstance(net, int):
                energies[net] = energies.get(net, 0.0) + cell.internal_fj.get(pin, 0.0)
                if cell.clock is not None:
                    registered.add(net)
    return energies, registered, clock_fj


def clock_only(block: Block, netlist: Netlist, library: Library) -> Activity:
    """Return the activity of a block in which nothing moves but the clock."""
    still = Range(0.0, 0.0, 0.0)
    clock_fj = net_energies_fj(netlist, library, 0.0)[2]
    return Activity(block.name, block.count, 0, 0, 0, still, still, clock_fj * 1e-3)


def _activity(replay: _Replay, settled: dict[int, float], raced: dict[int, float]) -> Activity:
    """Return the activity for changes per instance and cycle without (``settled``) and with glitches."""
    parts: dict[str, list[float]] = {"logic": [], "registers": []}
    clock_fj = 0.0
    for changes, wire_ff in ((settled, WIRE_FF.low), (raced, WIRE_FF.best), (raced, WIRE_FF.high)):
        energies, registered, clock_fj = net_energies_fj(replay.netlist, replay.library, wire_ff)
        sums = {"logic": 0.0, "registers": 0.0}
        for net, energy in energies.items():
            sums["registers" if net in registered else "logic"] += energy * changes.get(net, 0.0)
        for name, total in sums.items():
            parts[name].append(float(total) * 1e-3)
    return Activity(
        block=replay.block.name,
        count=replay.block.count,
        cycles=replay.cycles,
        lanes=len(replay.places),
        mismatches=replay.mismatches,
        logic=Range(*parts["logic"]),
        registers=Range(*parts["registers"]),
        clock_pj=clock_fj * 1e-3,
    )


def replay_run(
    dump: Path,
    blocks: Sequence[Block],
    netlists: dict[str, Netlist],
    library: Library,
    window: range,
    raced_cycles: int = 16,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Activity]:
    """Return the activity of ``blocks`` in the cycles ``window`` of a run of the Verilated device.

    Of blocks whose ports are not in the dump by name, and of those above `LARGEST_GE`, only the clock counts.

    Args:
        dump: VCD of the run, from reset on.
        blocks: what to replay.
        netlists: mapped netlist of each, by block name.
        library: what they are mapped to.
        window: cycles (rising edges since the start of the dump) that count.
        raced_cycles: so many of them, spread evenly, are simulated with the gates' delays; the ratio of
            changes there, net by net, is taken for the whole window.
        tell: called with a line of text now and then.
    """
    reader = VcdReader(dump)
    top = reader.scope_of(TOP)
    small = [block for block in blocks if netlists[block.name].area_ge(library) <= LARGEST_GE]
    replays = [_Replay(block, netlists[block.name], library, top) for block in small]
    # Blocks with ports that Amaranth named cannot be followed in the dump (`plora.synth.hierarchy`).
    replays = [replay for replay in replays if replay.signals() <= reader.codes.keys()]
    followed = {replay.block.name for replay in replays}
    wanted = set().union(*(replay.signals() for replay in replays))
    stride = max(1, len(window) // raced_cycles)
    settled = [np.zeros(len(replay.simulation.values), np.int64) for replay in replays]
    raced = [np.zeros(len(replay.simulation.values), np.int64) for replay in replays]
    raced_count = settled_count = 0
    for cycle, changed in enumerate(reader.before_edges((*top, "clk"), wanted)):
        if cycle >= window.stop:
            break
        inside = cycle in window
        glitches = inside and (cycle - window.start) % stride == 0
        raced_count += glitches
        settled_count += inside and not glitches
        for replay, slow, fast in zip(replays, raced, settled, strict=True):
            replay.simulation.clear()
            replay.cycle(changed, glitches=glitches, check=cycle >= WARM_UP_CYCLES)
            if glitches:
                slow += replay.simulation.toggles
            elif inside:
                fast += replay.simulation.toggles
        if cycle % 256 == 0:
            tell(f"cycle {cycle}")
    result = [clock_only(block, netlists[block.name], library) for block in blocks if block.name not in followed]
    for replay, slow, fast in zip(replays, raced, settled, strict=True):
        lanes = len(replay.places)
        index = replay.simulation.index
        result.append(
            _activity(
                replay,
                {net: fast[at] / max(1, settled_count * lanes) for net, at in index.items()},
                {net: slow[at] / max(1, raced_count * lanes) for net, at in index.items()},
            )
        )
    return result


@dataclass(frozen=True)
class BusyWindow:
    """When the PE array of a run was at work.

    Attributes:
        cycles: from the first to the last cycle in which a lane was enabled.
        busy: cycles of those in which one was.
    """

    cycles: range
    busy: int

    @property
    def utilisation(self) -> float:
        """Share of cycles with work."""
        return self.busy / len(self.cycles)


def busy_window(dump: Path, operands: Block) -> BusyWindow:
    """Return when the array was at work, by the ``enable`` ports of the block ``pe.operands``.

    Raises:
        ValueError: it never was.
    """
    reader = VcdReader(dump)
    top = reader.scope_of(TOP)
    enables = {(*top, *place, "enable"): 0 for place in operands.places}
    busy = []
    for cycle, changed in enumerate(reader.before_edges((*top, "clk"), enables)):
        enables.update(changed)
        if any(enables.values()):
            busy.append(cycle)
    if not busy:
        raise ValueError(f"{dump} shows no work of the PE array")
    return BusyWindow(range(busy[0], busy[-1] + 1), len(busy))


@dataclass(frozen=True)
class SramUse:
    """Accesses of the memories of one block, mean of one memory and cycle."""

    block: str
    reads: float
    writes: float


def sram_use(dump: Path, verilog: str, window: range) -> list[SramUse]:
    """Return how often the memories of the design in ``verilog`` were accessed in the cycles ``window``.

    A write of some lanes of a word counts by their share.
    """
    reader = VcdReader(dump)
    top = reader.scope_of(TOP)
    modules = merge_equal(split_modules(verilog), TOP)
    places = module_places(modules, TOP)[SRAM_MODULE]
    words = {(*top, *place, port): 0 for place in places for port in ("read_enable", "write_enable")}
    lanes = {signal: reader.widths[signal] for signal in words}
    counts = dict.fromkeys(words, 0.0)
    for cycle, changed in enumerate(reader.before_edges((*top, "clk"), words)):
        words.update(changed)
        if cycle in window:
            for signal, value in words.items():
                if value:
                    counts[signal] += value.bit_count() / lanes[signal]
    blocks: dict[str, list[tuple[str, ...]]] = {}
    for place in places:
        blocks.setdefault(".".join(place[:2]), []).append(place)

    def mean(members: list[tuple[str, ...]], port: str) -> float:
        return sum(counts[*top, *place, port] for place in members) / (len(members) * len(window))

    return [
        SramUse(block, mean(members, "read_enable"), mean(members, "write_enable")) for block, members in blocks.items()
    ]
