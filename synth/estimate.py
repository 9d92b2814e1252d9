"""From activity in a small run to the power of the whole device at full rate.

Energy per cycle carries over block by block, in proportion to area: most of the PE array is the same in every
preset, and so are its figures. Blocks that only the large device has take the mean of the others by
area. Dynamic energy is scaled from the
share of cycles with work in the run to one beat a cycle; clocks run all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plora.synth.flow import DesignResult
from plora.synth.library import Node
from plora.synth.power import Activity, BusyWindow, SramUse
from plora.synth.report import table
from plora.synth.sram import Range, total_leakage_w

ZERO = Range(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class MeasuredRun:
    """A run of the RTL, replayed on the netlists.

    Attributes:
        name: of the workload.
        multiply_adds: useful ones in the run.
        window: when the array was at work.
        activities: of all blocks in that window.
        srams: of all memories in that window.
    """

    name: str
    multiply_adds: int
    window: BusyWindow
    activities: Sequence[Activity]
    srams: Sequence[SramUse]


@dataclass(frozen=True)
class PowerEstimate:
    """Power of a design in watts, at one beat a cycle, and energy of a useful multiply-add in the PE array."""

    name: str
    pe_w: Range
    other_w: Range
    buffers_w: Range
    pe_pj_per_multiply_add: Range
    pe_parts_w: dict[str, Range]
    buffer_access_w: Range
    leakage_w: float
    buffers_leakage_w: Range
    mismatches: int


def _dynamic(activity: Activity) -> Range:
    return activity.logic + activity.registers


def estimate(run: MeasuredRun, small: DesignResult, full: DesignResult, node: Node, clock_mhz: float) -> PowerEstimate:
    """Return the power of ``full`` for the workload of ``run``, which ran on ``small``.

    Args:
        run: what was measured.
        small: the design that ran, mapped.
        full: the design that is asked about, mapped.
        node: for leakage.
        clock_mhz: clock of ``full``.
    """
    assert node.leakage_nw_per_ge is not None, f"no leakage is known at {node.name}"
    hertz = clock_mhz * 1e6
    small_blocks = {block.name: block for block in small.blocks}
    activities = {activity.block: activity for activity in run.activities}
    pe, other = ZERO, ZERO
    parts: dict[str, Range] = {"logic": ZERO, "registers": ZERO, "clock": ZERO}
    unknown_ge = 0.0
    for block in full.blocks:
        name = block.name
        if name not in activities:
            assert not name.startswith("pe."), f"the PE array of {small.config.name} has no {name}"
            unknown_ge += block.total_ge
            continue
        activity = activities[name]
        assert activity.lanes or not name.startswith("pe."), f"{name} of the PE array is not in the dump of {run.name}"
        scale = block.count * block.ge / max(1.0, small_blocks[name].ge)
        watts = scale * 1e-12 * hertz
        shares = {
            "logic": activity.logic.scaled(watts / run.window.utilisation),
            "registers": activity.registers.scaled(watts / run.window.utilisation),
            "clock": activity.clock_energy_pj.scaled(watts),
        }
        total = shares["logic"] + shares["registers"] + shares["clock"]
        if name.startswith("pe."):
            pe += total
            parts = {part: parts[part] + share for part, share in shares.items()}
        else:
            other += total
    # A block that only the large design has is as active as the rest.
    other_ge = full.total_ge() - full.total_ge("pe.")
    if unknown_ge:
        other = other.scaled(other_ge / (other_ge - unknown_ge))
    leakage = full.total_ge() * node.leakage_nw_per_ge * 1e-9
    pe_leakage = full.total_ge("pe.") * node.leakage_nw_per_ge * 1e-9
    uses = {use.block: use for use in run.srams}
    accesses = ZERO
    for block in full.blocks:
        use = uses.get(block.name)
        if use is None:
            continue
        for macro, count in block.srams.items():
            rate = (use.reads + use.writes) / run.window.utilisation * count * block.count
            accesses += macro.access_pj().scaled(rate * 1e-12 * hertz)
    buffers_leakage = total_leakage_w(full.srams())
    per_run = ZERO
    for activity in run.activities:
        if activity.block.startswith("pe."):
            per_run += activity.energy_pj.scaled(small_blocks[activity.block].count * len(run.window.cycles))
    return PowerEstimate(
        name=run.name,
        pe_w=pe + Range(pe_leakage, pe_leakage, pe_leakage),
        other_w=other + Range(*(3 * [leakage - pe_leakage])),
        buffers_w=accesses + buffers_leakage,
        pe_pj_per_multiply_add=per_run.scaled(1 / run.multiply_adds),
        pe_parts_w=parts,
        buffer_access_w=accesses,
        leakage_w=leakage,
        buffers_leakage_w=buffers_leakage,
        mismatches=sum(activity.mismatches for activity in run.activities),
    )


def estimate_data(result: PowerEstimate) -> dict[str, Any]:
    """Return an estimate as a JSON object."""
    return {
        "workload": result.name,
        "pe_w": result.pe_w.as_dict(),
        "pe_parts_w": {part: share.as_dict() for part, share in result.pe_parts_w.items()},
        "pe_pj_per_multiply_add": result.pe_pj_per_multiply_add.as_dict(),
        "other_logic_w": result.other_w.as_dict(),
        "buffers_w": result.buffers_w.as_dict(),
        "buffers_access_w": result.buffer_access_w.as_dict(),
        "buffers_leakage_w": result.buffers_leakage_w.as_dict(),
        "logic_leakage_w": round(result.leakage_w, 4),
        "netlist_mismatches": result.mismatches,
    }


def estimate_text(results: Sequence[PowerEstimate]) -> str:
    """Return estimates as text."""

    def show(figure: Range, digits: int = 2) -> str:
        return f"{figure.best:.{digits}f} ({figure.low:.{digits}f} ... {figure.high:.{digits}f})"

    rows = [["at one beat a cycle", *(result.name for result in results)]]
    rows.append(["PE array, pJ a multiply-add", *(show(result.pe_pj_per_multiply_add) for result in results)])
    rows.append(["PE array, W", *(show(result.pe_w) for result in results)])
    for part in ("logic", "registers", "clock"):
        rows.append([f"  {part}", *(show(result.pe_parts_w[part]) for result in results)])
    rows.append(["other logic, W", *(show(result.other_w) for result in results)])
    rows.append(["buffers, W", *(show(result.buffers_w) for result in results)])
    rows.append(["  accesses", *(show(result.buffer_access_w) for result in results)])
    rows.append(["  leakage", *(show(result.buffers_leakage_w) for result in results)])
    rows.append(["leakage of all logic, W", *(f"{result.leakage_w:.3f}" for result in results)])
    rows.append(["cycles in which a netlist and the RTL differed", *(str(result.mismatches) for result in results)])
    return table(rows) + "\n"
