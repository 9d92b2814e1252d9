"""``plora synth``: what the RTL costs in silicon."""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plora.hw.defs.config import PRESETS, NdpConfig, preset
from plora.hw.defs.errors import UserError
from plora.sw.cli.command import CommandParser, Result, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plora.synth.estimate import PowerEstimate
    from plora.synth.flow import DesignResult
    from plora.synth.hierarchy import Block
    from plora.synth.library import Node
    from plora.synth.mapping import Target

SUMMARY = "area, timing and power of the device's RTL, block by block, by an open flow"

EXIT_REGRESSION = 1

MEASURED_PRESET = "tiny"
"""The device whose runs power is estimated from."""


def configure(parser: CommandParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("--preset", default="full", help=f"size of the device: {', '.join(PRESETS)} (default: full)")
    parser.add_argument(
        "--unit",
        action="append",
        default=[],
        metavar="BLOCK",
        help="only this block and those in it, such as pe.dot, or a part, such as pe; may be repeated"
        " (default: the whole device)",
    )
    parser.add_argument("--list-units", action="store_true", help="list the blocks and stop")
    parser.add_argument("--node", default="45nm", help="technology node of the figures (default: 45nm)")
    parser.add_argument(
        "--liberty", type=Path, metavar="FILE", default=None, help="map to this cell library instead of the shipped one"
    )
    parser.add_argument(
        "--against", type=Path, metavar="FILE", default=None, help="map to this library too and compare areas and paths"
    )
    parser.add_argument(
        "--recipe",
        default="auto",
        help="mapping: area, balanced, delay, slow, or auto: the first of the first three that meets the clock",
    )
    parser.add_argument(
        "--clock-mhz", type=float, default=1000.0, help="clock that logic is sized for, at the node (default: 1000)"
    )
    parser.add_argument(
        "--wire-ff",
        type=float,
        default=0.0,
        metavar="FF",
        help="wire at every input pin for timing, in fF; 1 is usual at 45 nm (default: 0, before layout)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="Yosys processes at a time (default: all processors)",
    )
    parser.add_argument(
        "--flat", action="store_true", help="map each unit, or the device, in one piece with all that is in it"
    )
    parser.add_argument(
        "--against-flat", action="store_true", help="do both, and fail where the sum of the blocks is 3 %% off"
    )
    parser.add_argument("--paths", action="store_true", help="print the longest paths gate by gate")
    parser.add_argument(
        "--power", action="store_true", help="estimate the power of a GEMV and a GEMM, from runs of the tiny RTL"
    )
    parser.add_argument(
        "--trade",
        action="store_true",
        help="the dot unit by every recipe and accumulator width, for comparison (--out DIR gets a plot)",
    )
    parser.add_argument(
        "--fpga",
        action="append",
        default=[],
        metavar="BLOCK",
        help="place and route this block, or lane.product or lane.align, on an ECP5 too, a second opinion on its"
        " timing; may be repeated",
    )
    parser.add_argument(
        "--check", action="store_true", help="fail where a block is 5 %% larger than synth/baseline.json"
    )
    parser.add_argument(
        "--update-baseline",
        action="store_true",
        help="write the figures of tiny and full to synth/baseline.json; with --unit, of these blocks alone",
    )


def run(args: argparse.Namespace) -> Result:
    """Synthesize and report."""
    from plora.synth.flow import design_blocks
    from plora.synth.library import node
    from plora.synth.mapping import file_target, shipped_target

    _check_flags(args)
    config, at = preset(args.preset), node(args.node)
    target = file_target(args.liberty) if args.liberty else shipped_target()
    other = file_target(args.against) if args.against else None
    _check_spelling(args)
    if not args.list_units:
        _check_tools(args)
    blocks = design_blocks(config)
    if args.list_units:
        return Result(
            data={"preset": config.name, "units": [{"name": b.name, "count": b.count} for b in blocks]},
            text="\n".join(f"{block.name:<26} x {block.count}" for block in blocks),
        )
    _check_names(args, blocks)
    report = _Report(args, config, at, target, blocks)
    report.design()
    if args.paths:
        report.paths()
    if args.against_flat:
        report.against_flat()
    if other is not None:
        report.against(other)
    if args.power:
        report.power()
    if args.trade:
        report.trade()
    if args.fpga:
        report.fpga()
    if args.check:
        report.check()
    if args.update_baseline:
        report.update_baseline()
    # All that may differ from one run to the next.
    report.data["timing"] = {"wall_s": round(time.perf_counter() - report.start, 1)}
    return Result(
        data=report.data,
        text="\n".join(report.texts),
        files=report.files,
        exit_status=EXIT_REGRESSION if report.failed else 0,
    )


def _check_spelling(args: argparse.Namespace) -> None:
    """Refuse names of recipes and units that are not known, as far as that is seen before the Verilog is emitted."""
    from plora.synth.baseline import read_baseline, refuse_slip
    from plora.synth.mapping import recipes
    from plora.synth.trade import LANE_PARTS

    recipes(args.recipe)
    if args.update_baseline:
        return  # units may be new
    committed = read_baseline()
    for name in [*args.unit, *(name for name in args.fpga if name not in LANE_PARTS)]:
        refuse_slip(name, committed)


def _check_names(args: argparse.Namespace, blocks: Sequence[Block]) -> None:
    """Refuse names of blocks that are not known, before minutes of work."""
    from plora.synth.flow import named_blocks
    from plora.synth.fpga import refuse_unless_alone
    from plora.synth.trade import LANE_PARTS

    for name in args.unit:
        named_blocks(blocks, name)
    for name in args.fpga:
        for block in named_blocks(blocks, name) if name not in LANE_PARTS else ():
            refuse_unless_alone(block)


def _check_tools(args: argparse.Namespace) -> None:
    """Say at once which tool is missing."""
    from plora.hw.build.toolchain import find_cxx, find_make, find_verilator
    from plora.synth.fpga import find_nextpnr
    from plora.synth.yosys import find_yosys

    find_yosys()
    if args.fpga:
        find_nextpnr()
    if args.power:
        find_verilator()
        find_cxx()
        find_make()


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse values that are out of range, and flags that do not go together."""
    if not 1.0 <= args.clock_mhz <= 100_000.0:
        raise UserError(f"--clock-mhz {args.clock_mhz}: choose 1 ... 100000")
    if not 0.0 <= args.wire_ff <= 1000.0:
        raise UserError(f"--wire-ff {args.wire_ff}: choose 0 ... 1000")
    if not 1 <= args.jobs <= 1024:
        raise UserError(f"--jobs {args.jobs}: choose 1 ... 1024")
    if (args.check or args.update_baseline) and (
        args.liberty
        or args.flat
        or args.wire_ff
        or args.recipe != "auto"
        or args.clock_mhz != 1000.0
        or args.node != "45nm"
    ):
        raise UserError("the baseline is of the shipped library, 45nm, recipe auto, 1000 MHz, block by block")
    if args.update_baseline and args.preset != "full":
        raise UserError("--update-baseline is of tiny and full: leave out --preset")
    if args.against_flat and args.flat:
        raise UserError("--against-flat maps in both ways: leave out --flat")
    if args.power and (args.unit or args.liberty or args.flat or args.node != "45nm"):
        raise UserError("--power is of the whole device, the shipped library and 45nm: leave out --unit and the like")


def _say_since(start: float, line: str) -> None:
    say(f"{time.perf_counter() - start:6.1f} s  {line}")


@dataclass
class _Report:
    """What the flags ask for, piece by piece: each adds to the object and to the text."""

    args: argparse.Namespace
    config: NdpConfig
    at: Node
    target: Target
    blocks: Sequence[Block]
    failed: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)

    def _tell(self, line: str) -> None:
        _say_since(self.start, line)

    def _period_ps(self, target: Target) -> float:
        """The clock is asked for at the node; a library of another node gets the same number of FO4."""
        return 1e6 / float(self.args.clock_mhz) / self.at.fo4_ps["typical"] * target.library.fo4_ps()

    def _synthesized(self, target: Target, config: NdpConfig, flat: bool | None = None) -> DesignResult:
        from plora.synth.flow import synthesize

        return synthesize(
            config,
            target,
            units=self.args.unit,
            recipe=self.args.recipe,
            period_ps=self._period_ps(target),
            flat=self.args.flat if flat is None else flat,
            wire_ff=self.args.wire_ff,
            jobs=self.args.jobs,
            tell=self._tell,
        )

    def design(self) -> None:
        """Area and timing, block by block."""
        from plora.synth.baseline import tool_versions
        from plora.synth.report import design_data, design_text

        small = preset(MEASURED_PRESET)
        with ThreadPoolExecutor(1) as pool:
            # Beside the large design, whose largest blocks leave processors idle at the end.
            beside = self.args.power and self.config != small
            measured = pool.submit(self._synthesized, self.target, small) if beside else None
            self.result = self._synthesized(self.target, self.config)
            self.measured = measured.result() if measured else self.result
        self.data |= {
            **design_data(self.result, self.target, self.at),
            "clock_mhz": self.args.clock_mhz,
            "recipe": self.args.recipe,
            "flat": self.args.flat,
            "wire_ff": self.args.wire_ff,
            "tools": tool_versions(),
        }
        self.texts.append(design_text(self.result, self.target, self.at))

    def paths(self) -> None:
        """The longest paths, gate by gate."""
        from plora.synth.report import paths_text

        self.texts.append(paths_text(self.result, self.target))

    def against_flat(self) -> None:
        """The same units in one piece."""
        from plora.synth.flat import compare_flat, flat_data, flat_text

        flat = self._synthesized(self.target, self.config, flat=True)
        compared = compare_flat(self.result, self.blocks, flat)
        self.failed |= not all(each.holds for each in compared)
        self.data["against_flat"] = flat_data(compared)
        self.texts.append(flat_text(compared))

    def against(self, other: Target) -> None:
        """The same design in another library."""
        from plora.synth.validation import agreement, agreement_data, agreement_text

        compared = agreement(self.result, self.target, self._synthesized(other, self.config), other)
        self.data["against"] = {"library": other.label, **agreement_data(compared)}
        self.texts.append(agreement_text(compared, other.label))

    def power(self) -> None:
        """Power, from runs of the tiny RTL."""
        from plora.synth.estimate import estimate_data, estimate_text
        from plora.synth.paper import compare_power, power_text

        estimates = self._estimates()
        self.data["power"] = [estimate_data(each) for each in estimates]
        self.texts.append(estimate_text(estimates))
        if self.config.multiply_adds == 1024:
            verdicts = {each.name: compare_power(each.pe_w, each.other_w, each.buffers_w) for each in estimates}
            self.data["paper_power"] = verdicts
            self.texts.append(power_text(verdicts))

    def _estimates(self) -> list[PowerEstimate]:
        from plora.sw.power_run import measure_all
        from plora.synth.estimate import estimate
        from plora.synth.flow import design_blocks

        small = preset(MEASURED_PRESET)
        tell = partial(_say_since, self.start)
        runs = measure_all(small, design_blocks(small), self.measured, self.target.library, tell, self.args.jobs)
        return [estimate(each, self.measured, self.result, self.at, self.args.clock_mhz) for each in runs]

    def trade(self) -> None:
        """Speed against area, area against exactness and against rows."""
        from plora.synth import trade

        period_ps = self._period_ps(self.target)
        accumulator, jobs = self.config.accumulator, self.args.jobs
        speeds = trade.speed_points(accumulator, self.target, period_ps, jobs=jobs, tell=self._tell)
        windows = trade.window_points(self.target, period_ps, jobs=jobs, tell=self._tell)
        parts = trade.part_points(accumulator, self.target, period_ps, jobs=jobs, tell=self._tell)
        found: dict[str, Any] = {
            "speed": trade.points_data(speeds, self.at),
            "accumulator": trade.points_data(windows, self.at),
            "parts": trade.points_data(parts, self.at),
        }
        self.texts += [
            trade.points_text(speeds, self.at),
            trade.points_text(windows, self.at),
            trade.points_text(parts, self.at, "one lane"),
        ]
        if "pe_ge_per_multiply_add" in self.data:
            found["one_row_ge_per_multiply_add"] = round(trade.one_row_ge_per_multiply_add(self.result), 1)
            self.texts.append(f"one row instead of two: {found['one_row_ge_per_multiply_add']} GE a multiply-add\n")
        self.data["trade"] = found
        self.files["fmax_area.svg"] = trade.scatter_svg(speeds, self.at, self.args.clock_mhz / 1000)

    def fpga(self) -> None:
        """Blocks on an FPGA."""
        from plora.synth.flow import named_blocks
        from plora.synth.fpga import place_and_route
        from plora.synth.trade import LANE_PARTS, lane_part

        chosen: list[Block] = []
        for name in self.args.fpga:
            if name in LANE_PARTS:
                chosen.append(lane_part(name, self.config.accumulator))
            else:
                chosen += named_blocks(self.blocks, name)
        self._tell(f"on an ECP5: {', '.join(block.name for block in chosen)}")
        with ThreadPoolExecutor(self.args.jobs) as pool:
            timings = list(pool.map(place_and_route, chosen))
        self.data["fpga"] = [{"block": t.block, "fmax_mhz": round(t.fmax_mhz, 1), "cells": t.cells} for t in timings]
        self.texts.append(
            "\n".join(f"{t.block} on an ECP5-85: {t.fmax_mhz:.1f} MHz, {t.cells}" for t in timings) + "\n"
        )

    def check(self) -> None:
        """Compare with the baseline."""
        from plora.synth.baseline import read_baseline, regressions

        found = regressions(self.result, read_baseline())
        self.failed |= bool(found)
        self.data["regressions"] = found
        self.texts.append("\n".join(found or ["no block is larger than the baseline allows"]) + "\n")

    def update_baseline(self) -> None:
        """Write the figures as the new baseline."""
        from plora.synth.baseline import BASELINE, PRESETS, new_baseline, read_baseline, write_baseline

        results = [
            self.result if name == self.config.name else self._synthesized(self.target, preset(name))
            for name in PRESETS
        ]
        settings = {"node": self.at.name, "recipe": self.args.recipe, "clock_mhz": self.args.clock_mhz}
        write_baseline(new_baseline(results, settings, read_baseline() if self.args.unit else None))
        say(f"the figures are in {BASELINE}")
