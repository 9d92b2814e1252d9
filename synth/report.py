"""Tables and JSON of the flow's results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from plora.synth.flow import BlockResult, DesignResult
from plora.synth.library import Node, nodes
from plora.synth.mapping import Target
from plora.synth.paper import compare_area
from plora.synth.sram import SramMacro, paper_um2_per_bit, total_area_mm2, total_leakage_w
from plora.synth.timing import PathClass, TimingPath

GROUPS = (
    ("pe", "PE array"),
    ("sfu", "softmax units"),
    ("core", "control and buffers' logic"),
    ("front", "queue engine, host and memory ports"),
)
"""Parts of the device by the beginning of their blocks' names."""


def fmax_ghz(period_fo4: float, node: Node, corner: str = "typical") -> float:
    """Return the clock rate at which a path of ``period_fo4`` fits at ``node``; infinite for no path."""
    return 1000.0 / (period_fo4 * node.fo4_ps[corner]) if period_fo4 > 0 else float("inf")


def path_data(path: TimingPath, fo4_ps: float) -> dict[str, Any]:
    """Return a path as a JSON object: its length in FO4, and its cells in order."""
    return {
        "fo4": round(path.length_ps / fo4_ps, 1),
        "from": path.steps[0].net,
        "to": path.end,
        "cells": len(path.steps),
    }


def path_blocks(block: BlockResult, path: TimingPath, fo4_ps: float) -> str:
    """Return the blocks that a path leaves, each with the net and the time in FO4, and where it ends."""
    steps = [step for step in path.steps if step.cell not in block.cells]
    steps = steps or [path.steps[0]]
    hops = [f"{step.cell.rpartition('.')[2]} {step.net} at {step.at_ps / fo4_ps:.1f}" for step in steps]
    return f"{', '.join(hops)}, to {path.end}"


def block_data(block: BlockResult, target: Target, node: Node) -> dict[str, Any]:
    """Return a block as a JSON object."""
    fo4_ps = target.library.fo4_ps()
    period_fo4 = block.period_ps / fo4_ps
    return {
        "name": block.name,
        "count": block.count,
        "ge": round(block.ge, 1),
        "total_ge": round(block.total_ge, 1),
        "total_mm2": round(block.total_ge * node.um2_per_ge * 1e-6, 5),
        "flip_flops": block.flip_flops,
        "recipe": block.recipe,
        "period_fo4": round(period_fo4, 1),
        "fmax_ghz": round(fmax_ghz(period_fo4, node), 3) if block.period_ps else None,
        "paths": {kind.value: path_data(path, fo4_ps) for kind, path in block.paths.items()},
        "misses": [path_data(path, fo4_ps) for path in block.misses],
        "srams": sram_data(block.srams),
    }


def sram_data(macros: Counter[SramMacro]) -> list[dict[str, int]]:
    """Return memories as JSON objects."""
    return [
        {"width": macro.width, "depth": macro.depth, "count": count}
        for macro, count in sorted(macros.items(), key=lambda item: (item[0].width, item[0].depth))
    ]


def clock_periods_fo4(result: DesignResult, fo4_ps: float) -> dict[str, float]:
    """Return the longest register to register path in FO4: of the PE array, of every block, of the whole device.

    Paths of the array go through its blocks as well; those of the device go through several units, which are
    mapped apart and wired by the blocks called ``wiring``.
    """
    groups = {
        "PE array": [block for block in result.blocks if block.name.startswith("pe.")],
        "every unit": [block for block in result.blocks if not block.name.endswith(".wiring")],
        "across units": list(result.blocks),
    }
    return {
        name: round(max(block.period_ps for block in blocks) / fo4_ps, 1)
        for name, blocks in groups.items()
        if any(block.period_ps for block in blocks)
    }


def clock_data(periods: dict[str, float]) -> list[dict[str, Any]]:
    """Return the clock rates in GHz that ``periods`` (FO4) allow at every node, in each corner."""
    return [
        {
            "node": each.name,
            "corner": corner,
            "fo4_ps": each.fo4_ps[corner],
            "fmax_ghz": {name: round(fmax_ghz(period, each, corner), 3) for name, period in periods.items()},
        }
        for each in nodes().values()
        for corner in ("typical", "slow")
    ]


def clock_text(clocks: Sequence[dict[str, Any]]) -> str:
    """Return `clock_data` as text."""
    names = list(clocks[0]["fmax_ghz"])
    rows = [["GHz at", "corner", *names]]
    rows += [[c["node"], c["corner"], *(f"{c['fmax_ghz'][name]:.2f}" for name in names)] for c in clocks]
    return table(rows)


def design_data(result: DesignResult, target: Target, node: Node) -> dict[str, Any]:
    """Return a whole design as a JSON object, with the comparison where it is the paper's size."""
    pe_ge, all_ge = result.total_ge("pe."), result.total_ge()
    srams = result.srams()
    data: dict[str, Any] = {
        "preset": result.config.name,
        "node": node.name,
        "library": target.label,
        "fo4_ps": round(target.library.fo4_ps(), 2),
        "blocks": [block_data(block, target, node) for block in result.blocks],
        "ge_by_part": {part: round(result.total_ge(f"{part}."), 1) for part, _ in GROUPS},
        "total_ge": round(all_ge, 1),
        "total_mm2": round(all_ge * node.um2_per_ge * 1e-6, 4),
        "multiply_adds": result.config.multiply_adds,
        "srams": sram_data(srams),
        "clock": clock_data(clock_periods_fo4(result, target.library.fo4_ps())),
    }
    if pe_ge and result.blocks[-1].name == "front.wiring":
        other_ge = all_ge - pe_ge
        data["pe_ge_per_multiply_add"] = round(result.ge_per_multiply_add(), 1)
        data["other_logic_over_pe"] = round(other_ge / pe_ge, 3)
        if node.name == "45nm":
            buffers = total_area_mm2(srams)
            data["buffers_mm2"] = buffers.as_dict()
            data["buffers_leakage_w"] = total_leakage_w(srams).as_dict()
            if result.config.multiply_adds == 1024:
                data["paper"] = compare_area(pe_ge * node.um2_per_ge * 1e-6, other_ge * node.um2_per_ge * 1e-6, buffers)
    return data


def _row(columns: Sequence[str], widths: Sequence[int]) -> str:
    head, *rest = (
        text.ljust(width) if i == 0 else text.rjust(width)
        for i, (text, width) in enumerate(zip(columns, widths, strict=True))
    )
    return "  ".join([head, *rest]).rstrip()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return ``rows`` (the first is the head) as aligned text, the first column to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [_row(row, widths) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _fo4(block: BlockResult, kind: PathClass, fo4_ps: float) -> str:
    path = block.paths.get(kind)
    return f"{path.length_ps / fo4_ps:.1f}" if path is not None else ""


def design_text(result: DesignResult, target: Target, node: Node) -> str:
    """Return a whole design as text."""
    fo4_ps = target.library.fo4_ps()
    rows = [["block", "count", "GE each", "GE", "mm2", "flip-flops", "reg-reg", "in-reg", "reg-out", "GHz", "recipe"]]
    for block in result.blocks:
        period = block.period_ps / fo4_ps
        rows.append(
            [
                block.name,
                str(block.count),
                f"{block.ge:.0f}",
                f"{block.total_ge:.0f}",
                f"{block.total_ge * node.um2_per_ge * 1e-6:.4f}",
                str(block.flip_flops * block.count),
                *(_fo4(block, kind, fo4_ps) for kind in (PathClass.REGISTER, PathClass.INPUT, PathClass.OUTPUT)),
                f"{fmax_ghz(period, node):.2f}" if block.period_ps else "",
                block.recipe,
            ]
        )
    lines = [
        f"{result.config.name}: {target.label}, figures for {node.name}"
        f" ({node.um2_per_ge} um2 a GE, FO4 {node.fo4_ps['typical']} ps typical); paths in FO4",
        "",
        table(rows),
        "",
    ]
    misses = [(block, path) for block in result.blocks for path in block.misses]
    if misses:
        lines.append(
            "register to register paths over the clock period, the longest through each chain of blocks (FO4):"
        )
        for block, path in sorted(misses, key=lambda miss: -miss[1].length_ps):
            lines.append(f"{path.length_ps / fo4_ps:6.1f}  in {block.name}: {path_blocks(block, path, fo4_ps)}")
        lines.append("")
    for part, what in GROUPS:
        ge = result.total_ge(f"{part}.")
        if ge:
            lines.append(f"{part:<6} {ge:12.0f} GE  {ge * node.um2_per_ge * 1e-6:8.4f} mm2  {what}")
    total = result.total_ge()
    lines.append(f"{'all':<6} {total:12.0f} GE  {total * node.um2_per_ge * 1e-6:8.4f} mm2")
    data = design_data(result, target, node)
    if "pe_ge_per_multiply_add" in data:
        lines += [
            "",
            f"PE array per multiply-add: {data['pe_ge_per_multiply_add']} GE,"
            f" {data['pe_ge_per_multiply_add'] * node.um2_per_ge:.0f} um2;"
            f" other logic is {data['other_logic_over_pe']} x the PE array",
        ]
    if "buffers_mm2" in data:
        kib = sum(macro.bits * count for macro, count in result.srams().items()) / 8192
        lines.append(f"SRAM {kib:.0f} KiB: {_range(data['buffers_mm2'])} mm2 (the model of synth/sram.py)")
    if data["clock"] and data["clock"][0]["fmax_ghz"]:
        lines += ["", clock_text(data["clock"])]
    if "paper" in data:
        lines += ["", *_paper_lines(data["paper"])]
    return "\n".join(lines) + "\n"


def _range(figures: dict[str, float]) -> str:
    return f"{figures['best']} ({figures['low']} ... {figures['high']})"


def _paper_lines(paper: dict[str, Any]) -> list[str]:
    share = paper["share_of_dimm_percent"]
    holds = "holds" if share["claim_holds"] else "does not hold over the whole range"
    rows = [
        ["", "ours", "paper"],
        ["PE array, mm2", str(paper["pe_mm2"]["ours"]), str(paper["pe_mm2"]["paper"])],
        [
            "um2 per multiply-add",
            str(paper["um2_per_multiply_add"]["ours"]),
            str(paper["um2_per_multiply_add"]["paper"]),
        ],
        ["other logic, mm2", str(paper["other_logic_mm2"]["ours"]), "not stated"],
        ["buffers, mm2", _range(paper["buffers_mm2"]["ours"]), str(paper["buffers_mm2"]["paper"])],
        ["share of a 1344 mm2 device, %", _range(share["ours"]), str(share["paper"])],
    ]
    return [
        table(rows),
        f'"below {share["claimed_below"]} %" {holds}; with the paper\'s own buffers it is'
        f" {share['ours_with_paper_buffers']} %. Its buffers take {paper_um2_per_bit():.2f} um2 a bit.",
    ]


def paths_text(result: DesignResult, target: Target) -> str:
    """Return the longest path of every class and block, gate by gate, with times in FO4."""
    fo4_ps = target.library.fo4_ps()
    lines = []
    for block in result.blocks:
        for kind, path in block.paths.items():
            lines.append(f"{block.name}, {kind.value}: {path.length_ps / fo4_ps:.1f} FO4, to {path.end}")
            lines += [f"  {step.at_ps / fo4_ps:6.1f}  {step.cell:<12} {step.net}" for step in path.steps]
    return "\n".join(lines) + "\n"
