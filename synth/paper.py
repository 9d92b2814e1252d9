"""The paper's figures on area and power (section VII-H), and ours beside them."""

from __future__ import annotations

from typing import Any

from plora.synth.sram import PAPER_BUFFERS_MM2, Range, paper_um2_per_bit

PAPER_PE_MM2 = 0.80
PAPER_PE_W = 1.17
PAPER_BUFFERS_W = 1.91
PAPER_MULTIPLY_ADDS = 1024
PAPER_CLOCK_MHZ = 1000

DIMM_MM2 = 1344.0
"""Area of the memory device that the paper compares with, "above 1344 mm2"."""
DIMM_W = 40.0
CLAIMED_AREA_PERCENT = 3.4
CLAIMED_POWER_PERCENT = 7.7

PLACEMENT_UTILISATION = 0.75
"""Share of a placed block that is cells; the rest is room for wires. 0.7 to 0.8 is usual for datapaths."""


def paper_um2_per_multiply_add() -> float:
    """Return what the paper's PE array takes per FP16 multiply-add."""
    return PAPER_PE_MM2 * 1e6 / PAPER_MULTIPLY_ADDS


def compare_area(pe_mm2: float, overhead_mm2: float, buffers_mm2: Range) -> dict[str, Any]:
    """Return area beside the paper's, and the device-level verdict.

    Args:
        pe_mm2: cells of the PE array.
        overhead_mm2: cells of all other logic.
        buffers_mm2: SRAM.
    """
    logic = pe_mm2 + overhead_mm2
    placed = logic / PLACEMENT_UTILISATION
    percent = Range(
        *(
            100 * (cells + sram) / DIMM_MM2
            for cells, sram in ((logic, buffers_mm2.low), (placed, buffers_mm2.best), (placed, buffers_mm2.high))
        )
    )
    with_paper_buffers = 100 * (placed + PAPER_BUFFERS_MM2) / DIMM_MM2
    return {
        "pe_mm2": {"ours": round(pe_mm2, 3), "paper": PAPER_PE_MM2, "ratio": round(pe_mm2 / PAPER_PE_MM2, 2)},
        "other_logic_mm2": {"ours": round(overhead_mm2, 3), "paper": None},
        "buffers_mm2": {"ours": buffers_mm2.as_dict(), "paper": PAPER_BUFFERS_MM2},
        "um2_per_multiply_add": {
            "ours": round(pe_mm2 * 1e6 / PAPER_MULTIPLY_ADDS, 1),
            "paper": round(paper_um2_per_multiply_add(), 1),
        },
        "paper_um2_per_bit": round(paper_um2_per_bit(), 3),
        "share_of_dimm_percent": {
            "ours": percent.as_dict(),
            "ours_with_paper_buffers": round(with_paper_buffers, 3),
            "paper": round(100 * (PAPER_PE_MM2 + PAPER_BUFFERS_MM2) / DIMM_MM2, 3),
            "claimed_below": CLAIMED_AREA_PERCENT,
            "claim_holds": percent.high < CLAIMED_AREA_PERCENT,
        },
    }


def compare_power(pe_w: Range, other_w: Range, buffers_w: Range) -> dict[str, Any]:
    """Return power beside the paper's, and the device-level verdict."""
    total = pe_w + other_w + buffers_w
    percent = total.scaled(100 / DIMM_W)
    return {
        "pe_w": {"ours": pe_w.as_dict(), "paper": PAPER_PE_W},
        "other_logic_w": {"ours": other_w.as_dict(), "paper": None},
        "buffers_w": {"ours": buffers_w.as_dict(), "paper": PAPER_BUFFERS_W},
        "share_of_dimm_percent": {
            "ours": percent.as_dict(),
            "paper": round(100 * (PAPER_PE_W + PAPER_BUFFERS_W) / DIMM_W, 3),
            "claimed_below": CLAIMED_POWER_PERCENT,
            "claim_holds": percent.high < CLAIMED_POWER_PERCENT,
        },
    }


def power_text(verdicts: dict[str, dict[str, Any]]) -> str:
    """Return `compare_power` for several workloads as text."""
    lines = []
    for name, verdict in verdicts.items():
        share = verdict["share_of_dimm_percent"]
        ours = share["ours"]
        holds = "holds" if share["claim_holds"] else "does not hold"
        lines.append(
            f"{name}: {ours['best']} ({ours['low']} ... {ours['high']}) % of {DIMM_W:.0f} W;"
            f' the paper\'s {share["paper"]} %, "below {share["claimed_below"]} %", {holds}'
        )
    return "\n".join(lines) + "\n"
