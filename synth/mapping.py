"""Maps Verilog onto a cell library: synthesis by Yosys, technology mapping and sizing by ABC, cached by content."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plora.hw.build.cache import build_root, cached, content_key
from plora.hw.defs.errors import UserError
from plora.synth.liberty import Library, parse_liberty, read_liberty
from plora.synth.library import REFERENCE_NODE, liberty_text, node
from plora.synth.netlist import Netlist, read_netlists
from plora.synth.yosys import find_yosys


@dataclass(frozen=True)
class Recipe:
    """How to map: options of Yosys' ``synth`` and a script for ABC, with ``{D}`` for its delay target in ps."""

    name: str
    options: str
    abc: str


_FAST_ADDERS = "-booth -extra-map +/choices/kogge-stone.v"
_SIZING = "topo; buffer -c -N 16; upsize -D {D}; dnsize -D {D}"

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        # Structural choices, then mapping for area, which keeps the XORs and complex gates of adders:
        # on the dot unit a fifth less area than mapping for delay, at the same speed.
        Recipe("area", _FAST_ADDERS, f"strash; dch -f; amap; {_SIZING}"),
        # Choices twice: sometimes finds the tree where the first recipe leaves a chain of gates.
        Recipe("balanced", _FAST_ADDERS, f"strash; dch; dch; amap; {_SIZING}"),
        Recipe("delay", _FAST_ADDERS, f"strash; dch; map -B 0.9 -D {{D}}; {_SIZING}"),
        # Not in `auto`: Brent-Kung instead of Kogge-Stone adders, the least area where time does not matter.
        Recipe("slow", "-booth", f"strash; dch -f; amap; {_SIZING}"),
    )
}
"""All with Booth multipliers. Scripts with ``dc2`` are not here: they turn prefix adders into ripple chains."""

AUTO = "auto"
AUTO_ORDER = ("area", "balanced", "delay")
"""What ``auto`` tries on a block, until one meets the clock (`plora.synth.flow`)."""


def recipes(name: str) -> list[Recipe]:
    """Return the recipes that ``name`` stands for, in the order in which they are tried.

    Raises:
        UserError: there is none of that name.
    """
    if name != AUTO and name not in RECIPES:
        raise UserError(f"unknown recipe {name!r}; choose one of {', '.join([AUTO, *RECIPES])}")
    return [RECIPES[entry] for entry in (AUTO_ORDER if name == AUTO else (name,))]


@dataclass(frozen=True)
class Target:
    """What to map to.

    Attributes:
        library: cells, for area and timing.
        text: the library as a liberty file, for the tools.
        label: its name for people.
        given: it is the user's own, from a file.
    """

    library: Library
    text: str
    label: str
    given: bool = False

    @property
    def register_ps(self) -> float:
        """What a register takes of a clock period: clock to output into four inverters, and setup."""
        inverter = self.library.smallest_inverter()
        load = 4 * next(iter(inverter.input_ff.values()))
        (arcs,) = inverter.arcs.values()
        edge = arcs[0].transition[0](0.0, load)
        times = [
            max(
                arc.delay[e](edge, load)
                for arcs in cell.arcs.values()
                for arc in arcs
                if arc.related == cell.clock
                for e in (0, 1)
            )
            + max(table(edge, edge) for tables in cell.setup.values() for table in tables)
            for cell in self.library.cells.values()
            if cell.clock is not None
            and cell.setup
            and any(arc.related == cell.clock for arcs in cell.arcs.values() for arc in arcs)
        ]
        return min(times, default=0.0)


def shipped_target() -> Target:
    """Return the shipped library at its reference node."""
    text = liberty_text(node(REFERENCE_NODE))
    return Target(parse_liberty(text, "shipped library"), text, f"shipped ({REFERENCE_NODE})")


def file_target(path: Path) -> Target:
    """Return the library in a liberty file.

    Raises:
        UserError: the file cannot be read or used.
    """
    library = read_liberty(path)
    library.smallest_inverter()
    if not any(cell.clock is not None and cell.setup for cell in library.cells.values()):
        raise UserError(f"{path.name}: no flip-flop with a setup time, so nothing can be mapped to it")
    if not library.buffers():
        raise UserError(f"{path.name}: no buffer (a cell whose output is its one input), without which ABC fails")
    return Target(library, path.read_text(errors="replace"), path.name, given=True)


def map_module(verilog: str, top: str, target: Target, recipe: Recipe, period_ps: float) -> Netlist:
    """Return the mapped netlist of module ``top``, everything in it flat except black boxes.

    Args:
        verilog: its text, with every module below it; black boxes as modules marked ``(* blackbox *)``.
        top: name of the module.
        target: library to map to.
        recipe: how.
        period_ps: clock period that logic is sized for.

    Raises:
        UserError: there is no Yosys, or it cannot use the user's own library.
        RuntimeError: Yosys failed.
    """
    yosys = find_yosys()
    delay = max(1.0, period_ps - target.register_ps)
    abc = recipe.abc.format(D=f"{delay:.0f}").replace("; ", ";").replace(" ", ",")
    script = "\n".join(
        [
            "read_verilog -sv -noassert -noassume design.v",
            f"synth -flatten -noabc -noshare {recipe.options} -top {top}",
            "delete t:$print t:$check",
            "dfflibmap -liberty cells.lib",
            "opt_clean",
            f"abc -liberty cells.lib -constr constraints -script +{abc}",
            "setundef -zero",
            "opt_clean -purge",
            "check -mapped",
            "write_json netlist.json",
            "",
        ]
    )
    inverter = target.library.smallest_inverter()
    constraints = f"set_driving_cell {inverter.name}\nset_load {4 * next(iter(inverter.input_ff.values())):.3f}\n"

    def build(folder: Path) -> None:
        (folder / "design.v").write_text(verilog)
        (folder / "cells.lib").write_text(target.text)
        (folder / "constraints").write_text(constraints)
        yosys.run(script, folder)
        for name in ("design.v", "cells.lib"):
            (folder / name).unlink()

    key = content_key("map", yosys.version, verilog, target.text, script, constraints)
    name = f"map-{top.lstrip(chr(92))}"
    try:
        folder = cached(name, key, build)
    except RuntimeError as error:
        message = f"{top}: {error} (log: {build_root() / f'{name}-{key}.log'})"
        if target.given:
            raise UserError(f"{target.label} cannot be mapped to: {message}") from error
        raise RuntimeError(message) from error
    return read_netlists(folder / "netlist.json")[top.lstrip("\\")]
