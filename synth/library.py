"""The shipped cell library: from the topology in ``cells.toml`` to a liberty file.

See the comments of ``cells.toml`` for the two rules (poly pitches for area, logical effort for delay)
and their sources, and of ``nodes.toml`` for what a node adds.
"""

from __future__ import annotations

import functools
import itertools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plora.hw.defs.errors import UserError

HERE = Path(__file__).resolve().parent

REFERENCE_NODE = "45nm"
"""The node for which netlists are mapped; area in GE and depth in FO4 hold for every other one."""

FO4_TAU = 5.0
"""An FO4 in tau: g * 4 + p of an inverter, with p = 1."""

PITCHES_PER_GE = 3
"""Poly pitches of a NAND2: two transistor pairs and one pitch of isolation."""

MAX_LOAD_PER_DRIVE = 32.0
"""Largest load of an output per drive, in inverter inputs: beyond it edges become too slow to trust."""

SLEW_PER_DELAY = 0.9
"""Output transition (30 % to 70 %, extrapolated rail to rail by tools) over the RC part of a stage's delay.

An RC edge takes ln(0.7 / 0.3) = 0.85 RC from 30 % to 70 %, and its 50 % delay is 0.69 RC; a driver
that is itself driven by an edge is slower. Only tools that report slews see this figure: delays here
do not depend on it, since logical effort takes equal edges for granted.
"""


@dataclass(frozen=True)
class Node:
    """A technology node; see ``nodes.toml``.

    Attributes:
        name: as in ``--node``.
        um2_per_ge: area of a NAND2 of drive 1.
        fo4_ps: delay of an inverter that drives four like it, by corner (fast, typical, slow).
        vdd_v: supply in volts.
        input_ff: input capacitance of an inverter of drive 1, or ``None`` where not known.
        leakage_nw_per_ge: static power, or ``None`` where not known.
    """

    name: str
    um2_per_ge: float
    fo4_ps: dict[str, float]
    vdd_v: float
    input_ff: float | None = None
    leakage_nw_per_ge: float | None = None

    @property
    def tau_ps(self) -> float:
        """Delay unit of logical effort in the typical corner."""
        return self.fo4_ps["typical"] / FO4_TAU


@functools.cache
def nodes() -> dict[str, Node]:
    """Return all nodes by name."""
    table = tomllib.loads((HERE / "nodes.toml").read_text())
    return {
        name: Node(
            name=name,
            um2_per_ge=entry["um2_per_ge"],
            fo4_ps=entry["fo4_ps"],
            vdd_v=entry["vdd_v"],
            input_ff=entry.get("input_ff"),
            leakage_nw_per_ge=entry.get("leakage_nw_per_ge"),
        )
        for name, entry in table.items()
    }


def node(name: str) -> Node:
    """Return the node called ``name``.

    Raises:
        UserError: there is none; the message lists those there are.
    """
    try:
        return nodes()[name]
    except KeyError:
        raise UserError(f"unknown node {name!r}; choose one of {', '.join(nodes())}") from None


@dataclass(frozen=True)
class Arc:
    """Delay from an input to an output: ``tau * (intrinsic + resistance * load)``, load in inverter inputs."""

    intrinsic: float
    resistance: float


@dataclass(frozen=True)
class LibraryCell:
    """A cell of one drive.

    Attributes:
        name: ``KIND_Xdrive``.
        ge: area in gate equivalents.
        pins: load of each input pin in inverter inputs.
        functions: logic function of each output.
        arcs: per output, the same from every input.
        drive: multiple of an inverter's output strength.
        setup: of a flip-flop, in tau; ``None`` for logic.
        internal: capacitance that an output charges or discharges inside the cell when it changes, in
            inverter inputs.
        clock_internal: likewise for the clock pin of a flip-flop.
    """

    name: str
    ge: float
    pins: dict[str, float]
    functions: dict[str, str]
    arcs: dict[str, Arc]
    drive: int
    clock: str | None = None
    data: str | None = None
    setup: float | None = None
    internal: float = 0.0
    clock_internal: float = 0.0


@dataclass(frozen=True)
class _Path:
    """What the stages from an input to an output add up to; see `LibraryCell` for the units."""

    arc: Arc
    pairs: float
    internal: float


def _path(stages: list[str], table: dict[str, Any], drive: int) -> _Path:
    """Return the sums along ``stages``; the last has ``drive``, those before it half of it."""
    first = max(1, drive // 2)
    intrinsic = pairs = internal = 0.0
    for name, following in zip(stages, [*stages[1:], None], strict=True):
        stage = table[name]
        own = drive if following is None else first
        pairs += stage["pairs"] * own
        intrinsic += stage["p"]
        # The parasitic delay p is that of the stage's own capacitance through its resistance g.
        internal += stage["p"] / stage["g"] * own
        if following is not None:
            load = drive if following == stages[-1] else first
            intrinsic += stage["g"] * load / own
            internal += load
    return _Path(Arc(intrinsic, table[stages[-1]]["g"] / drive), pairs, internal)


def _logic_cell(entry: dict[str, Any], drive: int, table: dict[str, Any]) -> LibraryCell:
    functions, stages = entry["function"], entry["stages"]
    if isinstance(functions, str):
        functions, stages = {"Y": functions}, {"Y": stages}
    paths = {output: _path(stages[output], table, drive) for output in functions}
    pairs = entry.get("pairs", sum(path.pairs for path in paths.values()) + entry.get("extra_pairs", 0))
    # The pins of the first stage grow with that stage's drive.
    some = next(iter(stages.values()))
    pin_drive = drive if len(some) == 1 else max(1, drive // 2)
    return LibraryCell(
        name=f"{entry['name']}_X{drive}",
        ge=(pairs + 1) / PITCHES_PER_GE,
        pins={pin: load * pin_drive for pin, load in entry["pins"].items()},
        functions=functions,
        arcs={output: path.arc for output, path in paths.items()},
        drive=drive,
        internal=max(path.internal for path in paths.values()),
    )


def _flip_flop(entry: dict[str, Any], drive: int) -> LibraryCell:
    pairs = entry["pairs"] + entry["pairs_per_drive"] * (drive - 1)
    return LibraryCell(
        name=f"{entry['name']}_X{drive}",
        ge=(pairs + 1) / PITCHES_PER_GE,
        pins=entry["pins"],
        functions={entry["output"]: "IQ"},
        arcs={entry["output"]: Arc(entry["clock_to_output_tau"] - 1.0, 1.0 / drive)},
        drive=drive,
        clock=entry["clock"],
        data=entry["data"],
        setup=entry["setup_tau"],
        internal=entry["internal"] + drive,
        clock_internal=entry["clock_internal"],
    )


@functools.cache
def library_cells() -> tuple[LibraryCell, ...]:
    """Return every cell of the shipped library, in every drive."""
    table = tomllib.loads((HERE / "cells.toml").read_text())
    return tuple(
        _flip_flop(entry, drive) if "clock" in entry else _logic_cell(entry, drive, table["stages"])
        for entry in table["cells"]
        for drive in entry["drives"]
    )


def evaluate(function: str, values: dict[str, int]) -> int:
    """Return the bit that ``function`` (operators ``! & | ^``) gives for input ``values`` of 0 or 1."""
    return int(eval(function.replace("!", "~"), {"__builtins__": {}}, values)) & 1


def timing_sense(function: str, pin: str, pins: list[str]) -> str:
    """Return liberty's ``timing_sense`` of ``pin``: does the output follow it, oppose it, or either."""
    others = [name for name in pins if name != pin]
    rises = falls = False
    for bits in itertools.product((0, 1), repeat=len(others)):
        values = dict(zip(others, bits, strict=True))
        change = evaluate(function, {**values, pin: 1}) - evaluate(function, {**values, pin: 0})
        rises |= change > 0
        falls |= change < 0
    return "non_unate" if rises and falls else "positive_unate" if rises else "negative_unate"


@dataclass(frozen=True)
class _Scale:
    """What turns tau and inverter inputs into ps and fF, and the points at which tables are written."""

    tau_ps: float
    input_ff: float

    @property
    def slews_ps(self) -> tuple[float, float]:
        return self.tau_ps, 100 * self.tau_ps

    @property
    def loads_ff(self) -> tuple[float, ...]:
        # ABC takes the slope between the first and the last but one: two points crash it.
        return tuple(load * self.input_ff for load in (1.0, 8.0, MAX_LOAD_PER_DRIVE))

    def table(self, kind: str, arc: Arc) -> str:
        """Return one table of ``arc``: two slews (the delay depends on none) by two loads (it is linear)."""
        values = []
        for load_ff in self.loads_ff:
            rc = arc.resistance * load_ff / self.input_ff
            values.append(SLEW_PER_DELAY * (arc.resistance + rc) if "transition" in kind else arc.intrinsic + rc)
        row = ", ".join(f"{self.tau_ps * value:.4f}" for value in values)
        axes = f"{self.index(1, self.slews_ps)} {self.index(2, self.loads_ff)}"
        return f'{kind} (linear) {{ {axes} values ("{row}", "{row}"); }}'

    @staticmethod
    def index(number: int, points: tuple[float, ...]) -> str:
        """Return the statement that lists the points of one axis of a table."""
        return f'index_{number} ("{", ".join(f"{point:.4f}" for point in points)}");'

    def timing(self, arc: Arc, related: str, attributes: str) -> str:
        """Return the timing group of ``arc`` from pin ``related``."""
        tables = " ".join(
            self.table(kind, arc) for kind in ("cell_rise", "rise_transition", "cell_fall", "fall_transition")
        )
        return f'      timing () {{ related_pin : "{related}"; {attributes}{tables} }}'


def _internal_power(inputs: float, input_ff: float, vdd_v: float) -> str:
    """Return the group for a capacitance of ``inputs`` inverter inputs: half of C V V for every change.

    Liberty counts energy in units of load times volts squared.
    """
    values = f'{{ values ("{0.5 * inputs * input_ff * vdd_v**2:.4f}"); }}'
    return f"internal_power () {{ rise_power (scalar) {values} fall_power (scalar) {values} }}"


def liberty_text(target: Node) -> str:
    """Return the library as a liberty file for ``target``: areas in um2, times in ps, loads in fF.

    Raises:
        UserError: the node has no known input capacitance.
    """
    if target.input_ff is None:
        raise UserError(f"node {target.name} has no input capacitance; map for {REFERENCE_NODE}")
    input_ff = target.input_ff
    scale = _Scale(target.tau_ps, input_ff)
    slews, loads = scale.index(1, scale.slews_ps), scale.index(2, scale.loads_ff)
    lines = [
        f"/* Made from cells.toml for {target.name}: gate equivalents and logical effort, see there. */",
        f"library (plora_{target.name}) {{",
        "  delay_model : table_lookup;",
        '  time_unit : "1ps";',
        '  voltage_unit : "1V";',
        '  current_unit : "1uA";',
        '  leakage_power_unit : "1nW";',
        '  pulling_resistance_unit : "1kohm";',
        "  capacitive_load_unit (1, ff);",
        f"  nom_voltage : {target.vdd_v};",
        "  slew_lower_threshold_pct_rise : 30; slew_upper_threshold_pct_rise : 70;",
        "  slew_lower_threshold_pct_fall : 30; slew_upper_threshold_pct_fall : 70;",
        "  input_threshold_pct_rise : 50; input_threshold_pct_fall : 50;",
        "  output_threshold_pct_rise : 50; output_threshold_pct_fall : 50;",
        "  lu_table_template (linear) {",
        "    variable_1 : input_net_transition; variable_2 : total_output_net_capacitance;",
        f"    {slews} {loads}",
        "  }",
        "  lu_table_template (constant) {",
        "    variable_1 : constrained_pin_transition; variable_2 : related_pin_transition;",
        f"    {slews} {scale.index(2, scale.slews_ps)}",
        "  }",
    ]
    for cell in library_cells():
        lines += [f"  cell ({cell.name}) {{", f"    area : {cell.ge * target.um2_per_ge:.6f};"]
        if target.leakage_nw_per_ge is not None:
            lines.append(f"    cell_leakage_power : {cell.ge * target.leakage_nw_per_ge:.4f};")
        if cell.clock is not None:
            lines.append(f'    ff (IQ, IQN) {{ clocked_on : "{cell.clock}"; next_state : "{cell.data}"; }}')
        for pin, load in cell.pins.items():
            head = f"    pin ({pin}) {{ direction : input; capacitance : {load * input_ff:.4f};"
            if pin == cell.clock:
                lines.append(f"{head} clock : true;")
                lines += [f"      {_internal_power(cell.clock_internal, input_ff, target.vdd_v)}", "    }"]
            elif pin == cell.data:
                assert cell.setup is not None
                lines.append(head)
                for check, tau in (("setup_rising", cell.setup), ("hold_rising", 0.0)):
                    ps = f"{tau * target.tau_ps:.4f}"
                    values = f'(constant) {{ values ("{ps}, {ps}", "{ps}, {ps}"); }}'
                    lines.append(
                        f'      timing () {{ related_pin : "{cell.clock}"; timing_type : {check};'
                        f" rise_constraint {values} fall_constraint {values} }}"
                    )
                lines.append("    }")
            else:
                lines.append(f"{head} }}")
        for output, function in cell.functions.items():
            limit = MAX_LOAD_PER_DRIVE * cell.drive * input_ff
            lines.append(
                f'    pin ({output}) {{ direction : output; function : "{function}"; max_capacitance : {limit:.4f};'
            )
            lines.append(f"      {_internal_power(cell.internal, input_ff, target.vdd_v)}")
            if cell.clock is not None:
                attributes = "timing_type : rising_edge; timing_sense : non_unate; "
                lines.append(scale.timing(cell.arcs[output], cell.clock, attributes))
            else:
                for pin in cell.pins:
                    attributes = f"timing_sense : {timing_sense(function, pin, list(cell.pins))}; "
                    lines.append(scale.timing(cell.arcs[output], pin, attributes))
            lines.append("    }")
        lines.append("  }")
    lines.append("}")
    return "\n".join(lines) + "\n"
