"""``plora synth``: what the RTL costs in silicon."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plora.hw.defs.config import PRESETS, preset
from plora.hw.defs.errors import UserError
from plora.sw.cli.command import CommandParser, Result, say

if TYPE_CHECKING:
    from plora.synth.estimate import PowerEstimate
    from plora.synth.flow import DesignResult
    from plora.synth.library import Node
    from plora.synth.mapping import Target

SUMMARY = "area and timing of the device's RTL, block by block, by an open flow"

EXIT_REGRESSION = 1


def configure(parser: CommandParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("--preset", default="full", help=f"size of the device: {', '.join(PRESETS)} (default: full)")
    parser.add_argument(
        "--unit",
        action="append",
        default=[],
        metavar="BLOCK",
        help="only this block and those in it, such as pe.dot; may be repeated (default: the whole device)",
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
    parser.add_argument("--flat", action="store_true", help="map the device as one block (small presets only)")
    parser.add_argument("--paths", action="store_true", help="print the longest paths gate by gate")
    parser.add_argument(
        "--power", action="store_true", help="estimate the power of a GEMV and a GEMM, from runs of the tiny RTL"
    )
    parser.add_argument(
        "--trade", action="store_true", help="map PE rows at other clocks and accumulator widths, for comparison"
    )
    parser.add_argument(
        "--fpga",
        action="append",
        default=[],
        metavar="BLOCK",
        help="place and route this block on an ECP5 too, a second opinion on its timing; may be repeated",
    )
    parser.add_argument(
        "--check", action="store_true", help="fail where a block is 5 %% larger than synth/baseline.json"
    )
    parser.add_argument("--update-baseline", action="store_true", help="write the figures to synth/baseline.json")


def run(args: argparse.Namespace) -> Result:
    """Synthesize and report."""
    from plora.synth import baseline, report, validation
    from plora.synth.flow import design_blocks, synthesize
    from plora.synth.library import node
    from plora.synth.mapping import file_target, shipped_target

    if not 1.0 <= args.clock_mhz <= 100_000.0:
        raise UserError(f"--clock-mhz {args.clock_mhz}: choose 1 ... 100000")
    against_baseline = args.check or args.update_baseline
    if against_baseline and (args.liberty or args.flat or args.recipe != "auto" or args.clock_mhz != 1000.0):
        raise UserError("the baseline is of the shipped library, recipe auto, 1000 MHz, block by block")
    if args.update_baseline and args.unit:
        raise UserError("--update-baseline needs the whole device: leave out --unit")
    config, at = preset(args.preset), node(args.node)
    if args.power and (args.unit or args.liberty or args.flat):
        raise UserError(
            "--power is of the whole device and the shipped library: leave out --unit, --liberty and --flat"
        )
    if args.list_units:
        blocks = design_blocks(config)
        return Result(
            data={"preset": config.name, "units": [{"name": b.name, "count": b.count} for b in blocks]},
            text="\n".join(f"{block.name:<26} x {block.count}" for block in blocks),
        )
    target = file_target(args.liberty) if args.liberty else shipped_target()
    start = time.perf_counter()

    def synthesized(library: Target) -> DesignResult:
        # The clock is asked for at the node; a library of another node gets the same number of FO4.
        period_fo4 = 1e6 / args.clock_mhz / at.fo4_ps["typical"]
        return synthesize(
            config,
            library,
            units=args.unit,
            recipe=args.recipe,
            period_ps=period_fo4 * library.library.fo4_ps(),
            flat=args.flat,
            tell=lambda line: say(f"{time.perf_counter() - start:6.1f} s  {line}"),
        )

    result = synthesized(target)
    data: dict[str, Any] = {
        **report.design_data(result, target, at),
        "clock_mhz": args.clock_mhz,
        "recipe": args.recipe,
        "flat": args.flat,
        "tools": baseline.tool_versions(),
    }
    text = report.design_text(result, target, at)
    if args.paths:
        text += "\n" + report.paths_text(result, target)
    if args.against:
        other = file_target(args.against)
        compared = validation.agreement(result, target, synthesized(other), other)
        data["against"] = {"library": other.label, **validation.agreement_data(compared)}
        text += "\n" + validation.agreement_text(compared, other.label)
    if args.power:
        from plora.synth.estimate import estimate_data, estimate_text
        from plora.synth.paper import compare_power

        estimates = _power(result, target, at, args.clock_mhz)
        data["power"] = [estimate_data(each) for each in estimates]
        text += "\n" + estimate_text(estimates)
        if config.multiply_adds == 1024:
            data["paper_power"] = {
                each.name: compare_power(each.pe_w, each.other_w, each.buffers_w) for each in estimates
            }
    files: dict[str, str] = {}
    if args.trade:
        from plora.synth import trade

        period_ps = 1e6 / args.clock_mhz / at.fo4_ps["typical"] * target.library.fo4_ps()
        speeds = trade.speed_points(config, target, period_ps, say)
        windows = [point for _, point in trade.window_points(config, target, period_ps, say)]
        data["trade"] = {"speed": trade.points_data(speeds, at), "accumulator": trade.points_data(windows, at)}
        text += "\n" + trade.points_text(speeds, at) + "\n" + trade.points_text(windows, at)
        if "pe_ge_per_multiply_add" in data:
            data["trade"]["one_row_ge_per_multiply_add"] = round(trade.one_row_ge_per_multiply_add(result), 1)
            text += f"\none row instead of two: {data['trade']['one_row_ge_per_multiply_add']} GE a multiply-add\n"
        files["fmax_area.svg"] = trade.scatter_svg(speeds, at, args.clock_mhz / 1000)
    if args.fpga:
        from plora.synth.fpga import place_and_route

        timings = [
            place_and_route(block) for name in args.fpga for block in design_blocks(config) if block.name == name
        ]
        data["fpga"] = [{"block": t.block, "fmax_mhz": round(t.fmax_mhz, 1), "cells": t.cells} for t in timings]
        text += "".join(f"\n{t.block} on an ECP5-85: {t.fmax_mhz:.1f} MHz, {t.cells}" for t in timings) + "\n"
    failed: list[str] = []
    if args.check:
        failed = baseline.regressions(result, baseline.read_baseline())
        data["regressions"] = failed
        text += "\n" + "\n".join(failed or ["no block is larger than the baseline allows"]) + "\n"
    if args.update_baseline:
        old = baseline.read_baseline() if baseline.BASELINE.exists() else {}
        settings = {"node": at.name, "recipe": args.recipe, "clock_mhz": args.clock_mhz}
        baseline.write_baseline(baseline.updated(old, result, target.library.fo4_ps(), settings))
        say(f"figures of {config.name} are in {baseline.BASELINE}")
    # All that may differ from one run to the next.
    data["timing"] = {"wall_s": round(time.perf_counter() - start, 1)}
    return Result(data=data, text=text, files=files, exit_status=EXIT_REGRESSION if failed else 0)


def _power(result: DesignResult, target: Target, at: Node, clock_mhz: float) -> list[PowerEstimate]:
    """Return the power of a mapped device for a GEMV and a GEMM, from runs of the smallest one."""
    import tempfile

    from plora.hw.build.verilog import device_verilog
    from plora.sw.power_run import GEMM, GEMV, record
    from plora.synth.estimate import MeasuredRun, estimate
    from plora.synth.flow import design_blocks, synthesize
    from plora.synth.power import busy_window, replay_run, sram_use

    config = preset("tiny")
    period_ps = 1e6 / clock_mhz
    small = synthesize(config, target, period_ps=period_ps, tell=lambda line: say(f"for power: {line}"))
    blocks = design_blocks(config)
    (operands,) = (block for block in blocks if block.name == "pe.operands")
    estimates = []
    with tempfile.TemporaryDirectory() as folder:
        for workload in (GEMV, GEMM):
            dump = Path(folder) / f"{workload.name}.vcd"
            say(f"running {workload.name} on the RTL")
            record(config, workload, dump)
            window = busy_window(dump, operands)
            activities = replay_run(
                dump, blocks, small.netlists, target.library, window.cycles, tell=lambda line: say(f"replaying: {line}")
            )
            uses = sram_use(dump, device_verilog(config), window.cycles)
            run = MeasuredRun(workload.name, workload.multiply_adds, window, activities, uses)
            estimates.append(estimate(run, small, result, at, clock_mhz))
            dump.unlink()
    return estimates
