"""Trades: speed against area by mapping, area against exactness of accumulation, area against rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from plora.hw.build.verilog import cached_verilog
from plora.hw.defs.config import DOT_LANES, PE_ROWS, WORD_BYTES, AccumulatorConfig
from plora.synth.flow import DesignResult
from plora.synth.hierarchy import Block
from plora.synth.library import Node
from plora.synth.mapping import RECIPES, Target, map_module
from plora.synth.report import table
from plora.synth.timing import PathClass, TimingAnalysis

WORD_BITS = 8 * WORD_BYTES

DOT_UNIT = "plora.hw.rtl.pe.dot_unit:DotUnit"
PRODUCT = "plora.hw.rtl.pe.product:Fp16Product"
ALIGN = "plora.hw.rtl.pe.align:GridAlign"

MULTIPLIER = """module multiplier(clk, a, b, p);
  input clk;
  input [10:0] a;
  input [10:0] b;
  output [21:0] p;
  reg [21:0] p;
  always @(posedge clk) p <= a * b;
endmodule
"""
"""What no FP16 multiply-add can be without: 11 x 11 bits, and a register for the product."""

SPEEDS = {recipe: (1.0,) for recipe in RECIPES} | {"delay": (1.0, 0.8, 0.6)}
"""Clock periods, over the one asked for, that logic is sized for. Only recipe ``delay`` maps for time: the
others' area and speed hardly change with it (`docs/silicon.md`)."""

LANE_PARTS = {
    "lane.multiplier": "11 x 11 bit multiplier and its register",
    "lane.product": "product, special cases included",
    "lane.align": "alignment to the grid, sign included",
}
"""What is in a lane of the dot unit, each a block of its own here."""

WINDOWS = (
    AccumulatorConfig(lsb_exponent=-24, msb_exponent=16, terms_log2=16),
    AccumulatorConfig(lsb_exponent=-28, msb_exponent=16, terms_log2=16),
    AccumulatorConfig(),
    AccumulatorConfig(lsb_exponent=-40, msb_exponent=24, terms_log2=16),
    AccumulatorConfig(lsb_exponent=-48, msb_exponent=32, terms_log2=16),
)
"""Grids from the last bit of an FP16 result to all bits of all products (exact, no clipping)."""


@dataclass(frozen=True)
class Point:
    """A mapping of the dot unit, or of a part of one lane.

    Attributes:
        label: what was varied.
        ge: area over its multiply-adds.
        period_fo4: longest path between registers, its operands' registers included; of a part the longest
            path there is.
    """

    label: str
    ge: float
    period_fo4: float

    def ghz(self, node: Node) -> float:
        """Clock rate at a node's typical corner."""
        return 1000 / (self.period_fo4 * node.fo4_ps["typical"])


def _dot_unit(accumulator: AccumulatorConfig, target: Target, recipe: str, period_ps: float, label: str) -> Point:
    verilog = cached_verilog(DOT_UNIT, accumulator, name="dot_unit")
    netlist = map_module(verilog, "dot_unit", target, RECIPES[recipe], period_ps)
    paths = TimingAnalysis(netlist, target.library.cells, target.library).paths()
    # Operands come from registers outside: their clock to output is part of the path.
    launch = target.register_ps - min(
        table(0.0, 0.0) for cell in target.library.cells.values() for tables in cell.setup.values() for table in tables
    )
    period = max(paths[PathClass.REGISTER].length_ps, paths[PathClass.INPUT].length_ps + launch)
    return Point(label, netlist.area_ge(target.library) / DOT_LANES, period / target.library.fo4_ps())


def _all(tasks: Sequence[tuple[str, Callable[[], Point]]], jobs: int, tell: Callable[[str], None]) -> list[Point]:
    """Return the points of ``tasks`` (what to tell, and what to do) in order, ``jobs`` at a time."""

    def done(task: tuple[str, Callable[[], Point]]) -> Point:
        tell(task[0])
        return task[1]()

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(done, tasks))


def speed_points(
    accumulator: AccumulatorConfig,
    target: Target,
    period_ps: float,
    *,
    jobs: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Point]:
    """Return the dot unit by every recipe and for several clock periods."""
    return _all(
        [
            (
                f"dot unit by {recipe}, sized for {speed:.0%} of the period",
                partial(_dot_unit, accumulator, target, recipe, speed * period_ps, f"{recipe} {speed:.0%}"),
            )
            for recipe, speeds in SPEEDS.items()
            for speed in speeds
        ],
        jobs,
        tell,
    )


def window_points(
    target: Target, period_ps: float, *, jobs: int = 1, tell: Callable[[str], None] = lambda line: None
) -> list[Point]:
    """Return the dot unit for accumulators of several widths."""
    tasks = []
    for window in WINDOWS:
        label = f"2**{window.lsb_exponent} ... 2**{window.msb_exponent}, {window.bits} bits"
        tasks.append((f"accumulator {label}", partial(_dot_unit, window, target, "area", period_ps, label)))
    return _all(tasks, jobs, tell)


def lane_part(name: str, accumulator: AccumulatorConfig) -> Block:
    """Return the part of a lane called ``name``, one of `LANE_PARTS`, as a block."""
    if name == "lane.product":
        module, verilog = "fp16_product", cached_verilog(PRODUCT, name="fp16_product")
    elif name == "lane.align":
        module, verilog = "grid_align", cached_verilog(ALIGN, accumulator, name="grid_align")
    else:
        module, verilog = "multiplier", MULTIPLIER
    return Block(name, module, verilog, Counter(), ((),))


def _part(label: str, part: Block, target: Target, period_ps: float) -> Point:
    netlist = map_module(part.verilog, part.module, target, RECIPES["area"], period_ps)
    paths = TimingAnalysis(netlist, target.library.cells, target.library).paths()
    longest = max(path.length_ps for path in paths.values())
    return Point(label, netlist.area_ge(target.library), longest / target.library.fo4_ps())


def part_points(
    accumulator: AccumulatorConfig,
    target: Target,
    period_ps: float,
    *,
    jobs: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Point]:
    """Return the parts of a lane, each mapped alone."""
    return _all(
        [
            (label, partial(_part, label, lane_part(name, accumulator), target, period_ps))
            for name, label in LANE_PARTS.items()
        ],
        jobs,
        tell,
    )


def one_row_ge_per_multiply_add(result: DesignResult) -> float:
    """Return the PE array's area per multiply-add if it had one row of twice the columns instead of ``PE_ROWS``.

    Dot units, adders, drains and input registers go with the multiply-adds; weight registers, lane
    masks and control would serve half as many. What of ``pe.operands`` is for weights is told by its
    flip-flops: all but a word of inputs for every row.
    """
    operands = result.block("pe.operands")
    inputs = PE_ROWS * WORD_BITS
    shared = operands.total_ge * (1 - inputs / operands.flip_flops) + result.block("pe.control").total_ge
    return result.ge_per_multiply_add() + (PE_ROWS - 1) * shared / result.config.multiply_adds


def points_data(points: Sequence[Point], node: Node) -> list[dict[str, Any]]:
    """Return points as JSON objects."""
    return [
        {
            "what": point.label,
            "ge_per_multiply_add": round(point.ge, 1),
            "period_fo4": round(point.period_fo4, 1),
            "fmax_ghz": round(point.ghz(node), 3),
        }
        for point in points
    ]


def points_text(points: Sequence[Point], node: Node, what: str = "dot unit") -> str:
    """Return points as text, under the heading ``what``."""
    rows = [[what, "GE a multiply-add", "um2", "FO4", "GHz"]]
    rows += [
        [
            point.label,
            f"{point.ge:.0f}",
            f"{point.ge * node.um2_per_ge:.0f}",
            f"{point.period_fo4:.1f}",
            f"{point.ghz(node):.2f}",
        ]
        for point in points
    ]
    return table(rows) + "\n"


def scatter_svg(points: Sequence[Point], node: Node, goal_ghz: float) -> str:
    """Return a plot of clock rate against area as an SVG image, with a line at the goal."""
    width, height, left, bottom, top, right = 640, 400, 70, 50, 30, 130
    x = [point.ge for point in points]
    y = [point.ghz(node) for point in points]
    x_low, x_high = 100 * (min(x) // 100), 100 * (max(x) // 100 + 1)
    y_low, y_high = 0.1 * (min([*y, goal_ghz]) // 0.1), 0.1 * (max([*y, goal_ghz]) // 0.1 + 1)

    def across(value: float) -> float:
        return left + (value - x_low) / (x_high - x_low) * (width - left - right)

    def up(value: float) -> float:
        return height - bottom - (value - y_low) / (y_high - y_low) * (height - bottom - top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="18">Dot unit at {node.name}, typical, before layout</text>',
    ]
    steps = 5
    for step in range(steps + 1):
        ge, ghz = x_low + (x_high - x_low) * step / steps, y_low + (y_high - y_low) * step / steps
        parts += [
            f'<line x1="{across(ge):.1f}" y1="{top}" x2="{across(ge):.1f}" y2="{height - bottom}" stroke="#ddd"/>',
            f'<line x1="{left}" y1="{up(ghz):.1f}" x2="{width - right}" y2="{up(ghz):.1f}" stroke="#ddd"/>',
            f'<text x="{across(ge):.1f}" y="{height - bottom + 16}" text-anchor="middle">{ge:.0f}</text>',
            f'<text x="{left - 8}" y="{up(ghz) + 4:.1f}" text-anchor="end">{ghz:.2f}</text>',
        ]
    parts += [
        f'<line x1="{left}" y1="{up(goal_ghz):.1f}" x2="{width - right}" y2="{up(goal_ghz):.1f}"'
        ' stroke="#c00" stroke-dasharray="4"/>',
        f'<text x="{(left + width - right) / 2}" y="{height - 12}" text-anchor="middle">GE a multiply-add</text>',
        f'<text transform="translate(18 {height / 2}) rotate(-90)" text-anchor="middle">GHz</text>',
    ]
    colours = ("#1b6ca8", "#e07b00", "#2e8b57", "#8040a0", "#606060")
    kinds = list(dict.fromkeys(point.label.rpartition(" ")[0] for point in points))
    for point, ge, ghz in zip(points, x, y, strict=True):
        colour = colours[kinds.index(point.label.rpartition(" ")[0]) % len(colours)]
        parts.append(f'<circle cx="{across(ge):.1f}" cy="{up(ghz):.1f}" r="4" fill="{colour}"/>')
    for index, kind in enumerate(kinds):
        place = top + 10 + 18 * index
        parts += [
            f'<circle cx="{width - right + 20}" cy="{place}" r="4" fill="{colours[index % len(colours)]}"/>',
            f'<text x="{width - right + 30}" y="{place + 4}">{kind}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
