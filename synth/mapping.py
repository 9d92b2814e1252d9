"""Maps Verilog onto a cell library: synthesis by Yosys, technology mapping and sizing by ABC, cached by content."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plora.hw.build.cache import cached, content_key
from plora.synth.liberty import Library, parse_liberty, read_liberty
from plora.synth.library import REFERENCE_NODE, liberty_text, node
from plora.synth.netlist import Netlist, read_netlists
from plora.synth.yosys import find_yosys


@dataclass(frozen=True)
class Recipe:
    """How to map: options of Yosys' ``synth`` and a script for ABC, with ``{D}`` for its delay target in ps.

    Measured on the dot unit (docs/silicon.md): area-oriented structural mapping (``amap``) beats
    delay-oriented mapping by a fifth of the area at the same speed, because it keeps the XORs and
    complex gates of adders; scripts with ``dc2`` turn prefix adders back into ripple chains.
    """

    name: str
    options: str
    abc: str


_AMAP = "strash; dch -f; amap; topo; buffer -c -N 16; upsize -D {D}; dnsize -D {D}"

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        # Booth multipliers and Kogge-Stone adders: a few per cent more area than `dense`, a tenth faster.
        Recipe("fast", "-booth -extra-map +/choices/kogge-stone.v", _AMAP),
        # Booth multipliers and Brent-Kung adders: least area.
        Recipe("dense", "-booth", _AMAP),
        # Array multipliers and delay-oriented mapping, for comparison.
        Recipe(
            "delay",
            "-extra-map +/choices/kogge-stone.v",
            "strash; dch; map -B 0.9 -D {D}; topo; buffer -c -N 16; upsize -D {D}; dnsize -D {D}",
        ),
    )
}

DEFAULT_RECIPE = "fast"


@dataclass(frozen=True)
class Target:
    """What to map to.

    Attributes:
        library: cells, for area and timing.
        text: the library as a liberty file, for the tools.
        label: its name for people.
    """

    library: Library
    text: str
    label: str

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
    return Target(library, path.read_text(errors="replace"), path.name)


def map_module(verilog: str, top: str, target: Target, recipe: Recipe, period_ps: float) -> Netlist:
    """Return the mapped netlist of module ``top``, everything in it flat except black boxes.

    Args:
        verilog: its text, with every module below it; black boxes as modules marked ``(* blackbox *)``.
        top: name of the module.
        target: library to map to.
        recipe: how.
        period_ps: clock period that logic is sized for.

    Raises:
        UserError: there is no Yosys.
        RuntimeError: Yosys failed.
    """
    yosys = find_yosys()
    delay = max(1.0, period_ps - target.register_ps)
    abc = recipe.abc.format(D=f"{delay:.0f}").replace("; ", ";").replace(" ", ",")
    script = "\n".join(
        [
            "read_verilog -sv design.v",
            f"synth -flatten -noabc -noshare {recipe.options} -top {top}",
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
    folder = cached(f"map-{top.lstrip(chr(92))}", key, build)
    return read_netlists(folder / "netlist.json")[top.lstrip("\\")]
