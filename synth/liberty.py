"""Reads the part of a liberty file that area, timing and power need.

The shipped library goes through the same reader as a foundry's, so that one static timing analysis
serves both.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from plora.hw.defs.errors import UserError

_TOKEN = re.compile(
    r'/\*.*?\*/|//[^\n]*|\\\r?\n|\s+|(?P<string>"(?:[^"\\]|\\.)*")|(?P<punct>[(){}:;,])|(?P<word>[^\s(){}:;,"]+)',
    re.DOTALL,
)


@dataclass
class Group:
    """A liberty group ``kind (arguments) { ... }``.

    Attributes:
        kind: its keyword.
        arguments: what stands in the parentheses.
        attributes: simple (``name : value``) and complex (``name (values)``) attributes, last one wins.
        groups: the groups within.
    """

    kind: str
    arguments: list[str]
    attributes: dict[str, list[str]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)

    def all(self, kind: str) -> list[Group]:
        """Return the groups of one kind directly within."""
        return [group for group in self.groups if group.kind == kind]

    def text(self, name: str, default: str = "") -> str:
        """Return a simple attribute without quotes."""
        return self.attributes.get(name, [default])[0]

    def number(self, name: str, default: float) -> float:
        """Return a simple attribute as a number."""
        return float(self.attributes[name][0]) if name in self.attributes else default


def _tokens(text: str, where: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            line = text.count("\n", 0, position) + 1
            raise UserError(f"{where}: line {line} is not liberty: {text[position : position + 20]!r}")
        position = match.end()
        if match.lastgroup is not None:
            value = match.group()
            yield match.lastgroup, value[1:-1] if match.lastgroup == "string" else value


def parse_groups(text: str, where: str) -> Group:
    """Return the library group of liberty ``text``.

    Raises:
        UserError: the text is not liberty; the message names ``where``.
    """
    tokens = list(_tokens(text, where))
    tokens.append(("end", ""))
    root = Group("file", [])
    stack = [root]
    at = 0
    while tokens[at][0] != "end":
        kind, value = tokens[at]
        if value == "}" and kind == "punct":
            if len(stack) == 1:
                raise UserError(f"{where}: a closing brace too many")
            stack.pop()
            at += 1
        elif value == ";" and kind == "punct":
            at += 1
        elif tokens[at + 1][1] == ":":
            words: list[str] = []
            at += 2
            while tokens[at][1] not in (";", "}") and tokens[at][0] != "end":
                # A missing semicolon ends a value where the next statement starts.
                if words and tokens[at + 1][1] in (":", "("):
                    break
                words.append(tokens[at][1])
                at += 1
            stack[-1].attributes[value] = [" ".join(words)]
        elif tokens[at + 1][1] == "(":
            arguments = []
            at += 2
            while tokens[at][1] != ")":
                if tokens[at][0] == "end":
                    raise UserError(f"{where}: {value} ( is never closed")
                if tokens[at][1] != ",":
                    arguments.append(tokens[at][1])
                at += 1
            at += 1
            if tokens[at][1] == "{":
                group = Group(value, arguments)
                stack[-1].groups.append(group)
                stack.append(group)
                at += 1
            else:
                stack[-1].attributes[value] = arguments
        else:
            raise UserError(f"{where}: unexpected {value!r}")
    if len(stack) != 1 or len(root.groups) != 1 or root.groups[0].kind != "library":
        raise UserError(f"{where}: not one complete library group")
    return root.groups[0]


@dataclass(frozen=True)
class Table:
    """A lookup table over input transition (ps) and load (fF); linear between points and beyond the ends."""

    slews_ps: tuple[float, ...]
    loads_ff: tuple[float, ...]
    values_ps: tuple[tuple[float, ...], ...]
    """By slew, then load."""

    def __call__(self, slew_ps: float, load_ff: float) -> float:
        """Return the value at one point, in ps."""
        slews, loads, values = self.slews_ps, self.loads_ff, self.values_ps
        j, v = 0, 0.0
        if len(loads) > 1:
            j = min(max(bisect.bisect(loads, load_ff) - 1, 0), len(loads) - 2)
            v = (load_ff - loads[j]) / (loads[j + 1] - loads[j])
        if len(slews) == 1:
            row = values[0]
            return row[j] + v * (row[j + 1] - row[j]) if len(loads) > 1 else row[0]
        i = min(max(bisect.bisect(slews, slew_ps) - 1, 0), len(slews) - 2)
        u = (slew_ps - slews[i]) / (slews[i + 1] - slews[i])
        low, high = values[i], values[i + 1]
        if len(loads) == 1:
            return low[0] + u * (high[0] - low[0])
        a = low[j] + v * (low[j + 1] - low[j])
        b = high[j] + v * (high[j + 1] - high[j])
        return a + u * (b - a)


@dataclass(frozen=True)
class TimingArc:
    """From an input pin (or clock) to an output pin.

    Attributes:
        related: the input.
        sense: ``positive_unate``, ``negative_unate`` or ``non_unate``.
        delay: tables for the rising and the falling output.
        transition: likewise.
    """

    related: str
    sense: str
    delay: tuple[Table, Table]
    transition: tuple[Table, Table]


@dataclass(frozen=True)
class Cell:
    """A library cell.

    Attributes:
        name: its name.
        area: in the library's unit.
        input_ff: capacitance of each input pin.
        arcs: arcs of each output pin; clock to output for a flip-flop.
        clock: clock pin of a flip-flop, or ``None``.
        setup: of each data pin of a flip-flop: tables for a rising and a falling data pin, over the
            clock's and the data's transition.
        leakage_nw: static power.
        internal_fj: energy inside the cell of one change of an output, mean of rise and fall; the
            charging of what hangs on the output comes on top.
        clock_fj: energy inside a flip-flop of one clock cycle without a change of its output.
    """

    name: str
    area: float
    input_ff: dict[str, float]
    arcs: dict[str, tuple[TimingArc, ...]]
    functions: dict[str, str]
    clock: str | None
    setup: dict[str, tuple[Table, Table]]
    leakage_nw: float
    internal_fj: dict[str, float] = field(default_factory=dict)
    clock_fj: float = 0.0


@dataclass(frozen=True)
class Library:
    """A cell library: ``cells`` by name, the area of its smallest two-input NAND (one GE), and its supply."""

    name: str
    cells: dict[str, Cell]
    ge_area: float
    vdd_v: float

    def fo4_ps(self) -> float:
        """Return the delay of the smallest inverter with four of itself as load, driven by its like."""
        inverter = self.smallest_inverter()
        (arcs,) = inverter.arcs.values()
        load = 4 * next(iter(inverter.input_ff.values()))
        rise_slew, fall_slew, delay = 0.0, 0.0, 0.0
        for _ in range(20):  # the edges of a chain of such inverters settle within a few
            rise_slew, fall_slew, delay = (
                arcs[0].transition[0](fall_slew, load),
                arcs[0].transition[1](rise_slew, load),
                (arcs[0].delay[0](fall_slew, load) + arcs[0].delay[1](rise_slew, load)) / 2,
            )
        return delay

    def buffers(self) -> list[Cell]:
        """Return the cells that only repeat their input."""
        return [
            cell
            for cell in self.cells.values()
            if len(cell.input_ff) == 1
            and cell.clock is None
            and [re.sub(r"[()\s]", "", function) for function in cell.functions.values()] == list(cell.input_ff)
        ]

    def smallest_inverter(self) -> Cell:
        """Return the inverter with the least input capacitance.

        Raises:
            UserError: the library has none.
        """
        inverters = [
            cell
            for cell in self.cells.values()
            if len(cell.input_ff) == 1
            and len(cell.arcs) == 1
            and cell.clock is None
            and re.sub(r"[()\s]", "", next(iter(cell.functions.values())))
            in {f"!{pin}" for pin in cell.input_ff} | {f"{pin}'" for pin in cell.input_ff}
            and next(iter(cell.arcs.values()))
        ]
        if not inverters:
            raise UserError(f"library {self.name} has no inverter with timing tables")
        return min(inverters, key=lambda cell: next(iter(cell.input_ff.values())))


def _numbers(texts: list[str]) -> tuple[float, ...]:
    return tuple(float(word) for text in texts for word in text.replace(",", " ").split())


class _Reader:
    """Turns the group of a library into a `Library`, in ps and fF."""

    def __init__(self, group: Group, where: str) -> None:
        self.group = group
        self.where = where
        units = re.fullmatch(r"\s*([\d.]+)\s*(fs|ps|ns|us)\s*", group.text("time_unit", "1ns"))
        load = group.attributes.get("capacitive_load_unit", ["1", "pf"])
        if units is None or len(load) != 2 or load[1].lower() not in ("ff", "pf"):
            raise UserError(f"{where}: time or load unit is not one this reader knows")
        self.ps = float(units[1]) * {"fs": 1e-3, "ps": 1.0, "ns": 1e3, "us": 1e6}[units[2]]
        self.ff = float(load[0]) * {"ff": 1.0, "pf": 1e3}[load[1].lower()]
        power = re.fullmatch(r"\s*([\d.]+)\s*(fW|pW|nW|uW|mW)\s*", group.text("leakage_power_unit", "1nW"))
        self.nw = (
            float(power[1]) * {"fW": 1e-6, "pW": 1e-3, "nW": 1.0, "uW": 1e3, "mW": 1e6}[power[2]] if power else 1.0
        )
        volt = re.fullmatch(r"\s*([\d.]+)\s*(mV|V)\s*", group.text("voltage_unit", "1V"))
        volts = float(volt[1]) * (1e-3 if volt[2] == "mV" else 1.0) if volt else 1.0
        self.fj = self.ff * volts**2
        self.templates = {template.arguments[0]: template for template in group.all("lu_table_template")}

    def table(self, group: Group, slow_axis: str) -> Table:
        """Return a table with the axis ``slow_axis`` (a transition) first."""
        template = self.templates.get(group.arguments[0] if group.arguments else "")
        values = [_numbers([row]) for row in group.attributes.get("values", [])]
        if not values:
            raise UserError(f"{self.where}: a {group.kind} table without values")
        axes: list[tuple[str, tuple[float, ...]]] = []
        for number in (1, 2):
            source = group if f"index_{number}" in group.attributes else template
            if source is not None and f"index_{number}" in source.attributes:
                variable = template.text(f"variable_{number}") if template is not None else ""
                axes.append((variable, _numbers(source.attributes[f"index_{number}"])))
        if len(axes) == 0:  # a scalar
            return Table((0.0,), (0.0,), ((values[0][0] * self.ps,),))
        flat = [value * self.ps for row in values for value in row]
        if len(flat) != math.prod(len(points) for _, points in axes):
            raise UserError(f"{self.where}: a {group.kind} table has {len(flat)} values, not one for each point")
        if len(axes) == 1:
            variable, points = axes[0]
            if "capacitance" in variable:
                return Table((0.0,), tuple(p * self.ff for p in points), (tuple(flat),))
            return Table(tuple(p * self.ps for p in points), (0.0,), tuple((value,) for value in flat))
        (first, rows), (second, columns) = axes
        grid = [flat[i * len(columns) : (i + 1) * len(columns)] for i in range(len(rows))]
        if slow_axis not in first and slow_axis in second:
            grid = [list(column) for column in zip(*grid, strict=True)]
            (first, rows), (second, columns) = (second, columns), (first, rows)
        scale = self.ff if "capacitance" in second else self.ps
        return Table(
            tuple(p * self.ps for p in rows), tuple(p * scale for p in columns), tuple(tuple(row) for row in grid)
        )

    def pair(self, timing: Group, rise: str, fall: str, slow_axis: str) -> tuple[Table, Table] | None:
        """Return the tables ``rise`` and ``fall`` of a timing group, either standing in for the other."""
        found = {kind: group for kind in (rise, fall) for group in timing.all(kind)}
        if not found:
            return None
        return (
            self.table(found.get(rise, found.get(fall, timing)), slow_axis),
            self.table(found.get(fall, found.get(rise, timing)), slow_axis),
        )

    def cell(self, group: Group) -> Cell:
        """Return one cell."""
        inputs: dict[str, float] = {}
        arcs: dict[str, tuple[TimingArc, ...]] = {}
        functions: dict[str, str] = {}
        setup: dict[str, tuple[Table, Table]] = {}
        internal: dict[str, float] = {}
        clock_fj = 0.0
        flip_flop = group.all("ff")
        clock = re.sub(r"[()!'\s]", "", flip_flop[0].text("clocked_on")) if flip_flop else None
        for pin in group.all("pin"):
            for name in pin.arguments:
                if pin.text("direction") == "input":
                    inputs[name] = pin.number("capacitance", 0.0) * self.ff
                    if name == clock:
                        clock_fj = 2 * self.internal_fj(pin)
                    for timing in pin.all("timing"):
                        if timing.text("timing_type") in ("setup_rising", "setup_falling"):
                            tables = self.pair(timing, "rise_constraint", "fall_constraint", "related_pin_transition")
                            if tables is not None:
                                setup[name] = tables
                elif pin.text("direction") == "output":
                    functions[name] = pin.text("function")
                    arcs[name] = tuple(self.arcs(pin))
                    internal[name] = self.internal_fj(pin)
        return Cell(
            name=group.arguments[0],
            area=group.number("area", 0.0),
            input_ff=inputs,
            arcs=arcs,
            functions=functions,
            clock=clock,
            setup=setup,
            leakage_nw=group.number("cell_leakage_power", 0.0) * self.nw,
            internal_fj=internal,
            clock_fj=clock_fj,
        )

    def internal_fj(self, pin: Group) -> float:
        """Return the energy inside the cell of one change of ``pin``: the mean over edges and related pins.

        Of a table the first row and column count: the fastest edge and the smallest load, where no
        short-circuit current is added.
        """
        energies = [
            _numbers(table.attributes["values"])[0]
            for power in pin.all("internal_power")
            for kind in ("rise_power", "fall_power")
            for table in power.all(kind)
            if "values" in table.attributes
        ]
        return max(0.0, sum(energies) / len(energies)) * self.fj if energies else 0.0

    def arcs(self, pin: Group) -> Iterator[TimingArc]:
        """Yield the arcs of an output pin, without those of asynchronous resets and three-state enables."""
        for timing in pin.all("timing"):
            kind = timing.text("timing_type", "combinational")
            if kind not in ("combinational", "rising_edge", "falling_edge"):
                continue
            delay = self.pair(timing, "cell_rise", "cell_fall", "input_net_transition")
            transition = self.pair(timing, "rise_transition", "fall_transition", "input_net_transition")
            if delay is None or transition is None:
                continue
            sense = "non_unate" if kind != "combinational" else timing.text("timing_sense", "non_unate")
            for related in timing.text("related_pin").split():
                yield TimingArc(related, sense, delay, transition)

    def library(self) -> Library:
        """Return the whole library."""
        cells = {cell.name: cell for cell in map(self.cell, self.group.all("cell"))}
        nands = [
            cell.area
            for cell in cells.values()
            if cell.area > 0 and _is_nand2(cell.functions.get(next(iter(cell.functions), ""), ""), list(cell.input_ff))
        ]
        if not nands:
            raise UserError(f"{self.where}: no two-input NAND, which a gate equivalent is measured by")
        return Library(
            name=self.group.arguments[0],
            cells=cells,
            ge_area=min(nands),
            vdd_v=self.group.number("nom_voltage", 1.0),
        )


def _is_nand2(function: str, pins: list[str]) -> bool:
    if len(pins) != 2:
        return False
    squeezed = re.sub(r"[()\s*&]", "", function)
    return squeezed in {f"!{a}{b}" for a, b in (pins, pins[::-1])} | {f"{a}{b}'" for a, b in (pins, pins[::-1])}


def parse_liberty(text: str, where: str) -> Library:
    """Return the library in liberty ``text``.

    Args:
        text: the file's contents.
        where: its name, for messages.

    Raises:
        UserError: it is not liberty, or lacks a NAND2.
    """
    group = parse_groups(text, where)
    try:
        return _Reader(group, where).library()
    except (ValueError, IndexError, KeyError) as error:
        raise UserError(f"{where}: a number or a name is missing or out of place: {error}") from error


def read_liberty(path: Path) -> Library:
    """Return the library in the file ``path``.

    Raises:
        UserError: the file cannot be read or is not a usable library.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UserError(f"cannot read liberty file {path}: {error.strerror}") from error
    return parse_liberty(text, path.name)
