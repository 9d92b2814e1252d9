"""Simulates mapped netlists, up to 64 instances of a block at once, and counts how often every net changes.

A net's values in all instances (lanes) are the bits of one 64-bit word. Gates of one kind are evaluated
together by numpy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plora.synth.liberty import Cell, Library
from plora.synth.netlist import Instance, Net, Netlist

LANES = 64
"""Most instances that are simulated side by side."""

Words = npt.NDArray[np.uint64]


def python_function(function: str) -> str:
    """Return the liberty expression ``function`` as a Python expression of the same names.

    Liberty writes not as ``!a`` or ``a'``, and as ``&``, ``*`` or a blank, or as ``|`` or ``+``, exclusive or
    as ``^``.

    Raises:
        ValueError: the expression is not one of these.
    """
    tokens = re.findall(r"[A-Za-z_]\w*|[01]|[!'&*|+^()]", function)
    if "".join(tokens) != re.sub(r'[\s"]', "", function):
        raise ValueError(f"cannot read the function {function!r}")
    tokens.append("")
    at = 0

    def chain(operators: str, symbol: str, operand: Callable[[], str]) -> str:
        nonlocal at
        text = operand()
        while tokens[at] and tokens[at] in operators:
            at += 1
            text = f"({text} {symbol} {operand()})"
        return text

    def either() -> str:
        return chain("|+", "|", lambda: chain("^", "^", both))

    def both() -> str:
        nonlocal at
        text = factor()
        while tokens[at] and tokens[at] not in ")|+^":
            if tokens[at] in "&*":
                at += 1
            text = f"({text} & {factor()})"
        return text

    def factor() -> str:
        nonlocal at
        token = tokens[at]
        at += 1
        if token == "!":
            return f"(~{factor()})"
        if token == "(":
            text = either()
            if tokens[at] != ")":
                raise ValueError(f"cannot read the function {function!r}")
            at += 1
        elif re.fullmatch(r"\w+", token):
            text = token
        else:
            raise ValueError(f"cannot read the function {function!r}")
        while tokens[at] == "'":
            at += 1
            text = f"(~{text})"
        return text

    text = either()
    if at != len(tokens) - 1:
        raise ValueError(f"cannot read the function {function!r}")
    return text


@dataclass(frozen=True)
class _Gates:
    """Gates that are evaluated together: one function, the nets it reads by input, and the nets it drives."""

    function: Callable[..., Words]
    sources: tuple[npt.NDArray[np.intp], ...]
    targets: npt.NDArray[np.intp]

    def evaluate(self, values: Words) -> Words:
        """Return the values of the targets."""
        return self.function(*(values[source] for source in self.sources))


@dataclass(frozen=True)
class _Output:
    """One output of a logic cell: which function of which nets, by index."""

    kind: tuple[str, str]
    sources: tuple[int, ...]
    target: int
    delay_steps: int


class GateSimulation:
    """A mapped block in a number of lanes, all registers and inputs zero at first.

    Args:
        netlist: the block.
        library: what it is mapped to.
        lanes: instances simulated side by side, 1 ... `LANES`.
        step_ps: resolution of delays.

    Attributes:
        toggles: changes of each net since `clear`, over all lanes; by `index`.
        index: position of each net.
        cycles: clock cycles since `clear`.

    Raises:
        ValueError: ``lanes`` is out of range, or there is a combinational loop.
    """

    def __init__(self, netlist: Netlist, library: Library, lanes: int, step_ps: float = 7.0) -> None:
        if not 1 <= lanes <= LANES:
            raise ValueError(f"lanes must be 1 ... {LANES}, not {lanes!r}")
        self.netlist = netlist
        self._library = library
        self.lanes = lanes
        self._mask = np.uint64((1 << lanes) - 1)
        logic: list[tuple[Instance, Cell]] = []
        registers: list[tuple[int, Net, bool]] = []
        self.boxes: list[Instance] = []
        loads: dict[int, float] = {}
        nets: dict[int, None] = {}
        for instance in netlist.instances:
            nets.update((net, None) for net in instance.pins.values() if isinstance(net, int))
            cell = library.cells.get(instance.kind)
            if cell is None:
                self.boxes.append(instance)
                continue
            for pin, capacitance in cell.input_ff.items():
                net = instance.pins.get(pin)
                if isinstance(net, int):
                    loads[net] = loads.get(net, 0.0) + capacitance
            if cell.clock is None:
                logic.append((instance, cell))
            else:
                (data,) = cell.setup
                for pin, function in cell.functions.items():
                    net = instance.pins.get(pin)
                    if isinstance(net, int):
                        inverted = python_function(function).startswith("(~") or function.strip('" ').endswith("N")
                        registers.append((net, instance.pins[data], inverted))
        for ports in (netlist.inputs, netlist.outputs):
            nets.update((net, None) for bits in ports.values() for net in bits if isinstance(net, int))
        # Two more values: constants 0 and 1.
        self.index = {net: position for position, net in enumerate(nets)}
        self._zero, self._one = len(nets), len(nets) + 1
        outputs = [output for instance, cell in logic for output in self._outputs(instance, cell, loads, step_ps)]
        functions = {
            kind: self._compiled(library.cells[kind[0]], kind[1]) for kind in {output.kind for output in outputs}
        }
        self._levels = self._levelled(outputs, functions)
        self._by_delay = self._grouped(outputs, functions)
        self._slowest = max((output.delay_steps for output in outputs), default=1)
        self._register_nets = np.array([self.index[net] for net, _, _ in registers], np.intp)
        self._register_data = np.array([self._position(data) for _, data, _ in registers], np.intp)
        self._register_flip = np.array(
            [~np.uint64(0) if inverted else np.uint64(0) for _, _, inverted in registers], np.uint64
        )
        self.values: Words = np.zeros(len(nets) + 2, np.uint64)
        self.values[self._one] = ~np.uint64(0)
        self._settle(self.values)
        self.clear()

    def clear(self) -> None:
        """Forget the counts, keep the state."""
        self.toggles: npt.NDArray[np.int64] = np.zeros(len(self.values), np.int64)
        self.cycles = 0

    def _position(self, net: Net) -> int:
        return self.index[net] if isinstance(net, int) else self._one if net == "1" else self._zero

    def _outputs(self, instance: Instance, cell: Cell, loads: dict[int, float], step_ps: float) -> list[_Output]:
        found = []
        for pin, arcs in cell.arcs.items():
            net = instance.pins.get(pin)
            if not isinstance(net, int):
                continue
            delays = [table(20.0, loads.get(net, 0.0)) for arc in arcs for table in arc.delay]
            mean = sum(delays) / len(delays) if delays else step_ps
            sources = tuple(self._position(instance.pins[name]) for name in cell.input_ff)
            found.append(_Output((cell.name, pin), sources, self.index[net], max(1, round(mean / step_ps))))
        return found

    @staticmethod
    def _compiled(cell: Cell, pin: str) -> Callable[..., Words]:
        text = f"lambda {', '.join(cell.input_ff)}: {python_function(cell.functions[pin])}"
        function: Callable[..., Words] = eval(text)
        return function

    @staticmethod
    def _gates(outputs: Sequence[_Output], function: Callable[..., Words]) -> _Gates:
        return _Gates(
            function,
            tuple(np.array(column, np.intp) for column in zip(*(output.sources for output in outputs), strict=True)),
            np.array([output.target for output in outputs], np.intp),
        )

    def _levelled(self, outputs: list[_Output], functions: dict[tuple[str, str], Callable[..., Words]]) -> list[_Gates]:
        """Return the gates in an order in which each comes after those it reads."""
        by_target = {output.target: output for output in outputs}
        waiting = {
            output.target: len({source for source in output.sources if source in by_target}) for output in outputs
        }
        readers: dict[int, list[int]] = {}
        for output in outputs:
            for source in set(output.sources):
                if source in by_target:
                    readers.setdefault(source, []).append(output.target)
        level = [target for target, count in waiting.items() if count == 0]
        groups: list[_Gates] = []
        done = 0
        while level:
            done += len(level)
            kinds: dict[tuple[str, str], list[_Output]] = {}
            for target in level:
                kinds.setdefault(by_target[target].kind, []).append(by_target[target])
            groups += [self._gates(members, functions[kind]) for kind, members in kinds.items()]
            following = []
            for target in level:
                for reader in readers.get(target, []):
                    waiting[reader] -= 1
                    if waiting[reader] == 0:
                        following.append(reader)
            level = following
        if done != len(outputs):
            raise ValueError(f"{self.netlist.name} has a combinational loop")
        return groups

    def _grouped(
        self, outputs: list[_Output], functions: dict[tuple[str, str], Callable[..., Words]]
    ) -> list[tuple[int, list[_Gates]]]:
        """Return the gates by delay and kind."""
        delays: dict[int, dict[tuple[str, str], list[_Output]]] = {}
        for output in outputs:
            delays.setdefault(output.delay_steps, {}).setdefault(output.kind, []).append(output)
        return [
            (delay, [self._gates(members, functions[kind]) for kind, members in kinds.items()])
            for delay, kinds in sorted(delays.items())
        ]

    def _settle(self, values: Words) -> None:
        for gates in self._levels:
            values[gates.targets] = gates.evaluate(values)

    def _count(self, old: Words, new: Words) -> None:
        self.toggles += np.bitwise_count((old ^ new) & self._mask).astype(np.int64)

    def cycle(self, inputs: Mapping[int, int], *, glitches: bool = False) -> None:
        """Clock the registers, apply ``inputs`` (by net; others keep their value) and let the logic settle.

        Args:
            inputs: values, a bit a lane, of input nets and of nets that black boxes drive.
            glitches: let changes travel with the gates' delays and count those on the way too.
                Otherwise a net changes at most once a cycle.
        """
        before = self.values
        start = before.copy()
        start[self._register_nets] = before[self._register_data] ^ self._register_flip
        for net, value in inputs.items():
            start[self.index[net]] = value
        if glitches:
            after = self._race(before, start)
        else:
            after = start
            self._settle(after)
            self._count(before, after)
        self.values = after
        self.cycles += 1

    def _race(self, before: Words, start: Words) -> Words:
        """Return the settled values, counting every change on the way.

        Delays are inertial: an output changes once its inputs have asked for the new value for as long
        as the gate's delay; shorter pulses are lost, as in a real gate.
        """
        self._count(before, start)
        asked: dict[int, list[list[Words]]] = {
            delay: [[before[gates.targets]] * delay for gates in groups] for delay, groups in self._by_delay
        }
        now = start
        quiet = 0
        while quiet <= self._slowest:
            following = now.copy()
            for delay, groups in self._by_delay:
                for gates, history in zip(groups, asked[delay], strict=True):
                    history.append(gates.evaluate(now))
                    history.pop(0)
                    always = ever = history[0]
                    for wanted in history[1:]:
                        always, ever = always & wanted, ever | wanted
                    following[gates.targets] = always | (now[gates.targets] & ever)
            changed = ((now ^ following) & self._mask).any()
            if changed:
                self._count(now, following)
            quiet = 0 if changed else quiet + 1
            now = following
        return now

    def box_outputs(self) -> dict[tuple[str, str], list[tuple[int, int]]]:
        """Return, by instance and port of a black box, the bits that drive nets here, and those nets."""
        driven = {net for nets in self.netlist.inputs.values() for net in nets}
        for instance in self.netlist.instances:
            cell = self._library.cells.get(instance.kind)
            if cell is not None:
                driven.update(instance.pins[pin] for pin in cell.functions if pin in instance.pins)
        found: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for box in self.boxes:
            for pin, net in box.pins.items():
                if isinstance(net, int) and net not in driven:
                    port, _, bit = pin.rstrip("]").partition("[")
                    found.setdefault((box.name, port), []).append((int(bit or 0), net))
        return found

    def output(self, port: str) -> list[int]:
        """Return the value of an output port in every lane."""
        bits = [int(self.values[self._position(net)]) for net in self.netlist.outputs[port]]
        return [sum((bit >> lane & 1) << place for place, bit in enumerate(bits)) for lane in range(self.lanes)]

    def input_bits(self, port: str, words: Sequence[int]) -> dict[int, int]:
        """Return the values of the nets of input ``port`` for its words in every lane."""
        return {
            net: across_lanes(words, bit) for bit, net in enumerate(self.netlist.inputs[port]) if isinstance(net, int)
        }


def across_lanes(words: Sequence[int], bit: int) -> int:
    """Return the integer whose bit i is bit ``bit`` of the i-th word."""
    value = 0
    for lane, word in enumerate(words):
        value |= (word >> bit & 1) << lane
    return value
