"""Blocks mapped apart against the same in one piece: what cutting a design into blocks adds to its area.

At a block's border constants and shared terms are not seen, so the sum of the blocks is an upper bound in
principle; in practice mapping has some noise in either direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plora.synth.flow import DesignResult
from plora.synth.hierarchy import Block
from plora.synth.report import table

TOLERANCE = 0.03
"""By how much of the area in one piece the sum of the blocks may be off."""


@dataclass(frozen=True)
class FlatComparison:
    """A unit mapped in both ways, areas in gate equivalents without memories."""

    unit: str
    by_blocks_ge: float
    flat_ge: float

    @property
    def error(self) -> float:
        """Excess of the sum of the blocks, as a share of the area in one piece."""
        return self.by_blocks_ge / self.flat_ge - 1

    @property
    def holds(self) -> bool:
        """Whether the sum of the blocks may stand for the unit."""
        return abs(self.error) <= TOLERANCE


def whole_ge(by_blocks: DesignResult, blocks: Sequence[Block], unit: Block) -> float:
    """Return the area of one ``unit`` with everything in it, summed over its blocks."""
    by_module = {block.module: block for block in blocks}
    inner = sum(count * whole_ge(by_blocks, blocks, by_module[child]) for child, count in unit.children.items())
    return by_blocks.block(unit.name).ge + inner


def compare_flat(by_blocks: DesignResult, blocks: Sequence[Block], flat: DesignResult) -> list[FlatComparison]:
    """Return the comparison for every block of ``flat``.

    Args:
        by_blocks: the design, block by block.
        blocks: the blocks it was cut into.
        flat: units of the same design, each in one piece.
    """
    modules = {block.module: block for block in blocks}
    return [
        FlatComparison(whole.name, whole_ge(by_blocks, blocks, modules[whole.module]), whole.ge)
        for whole in flat.blocks
    ]


def flat_data(comparisons: Sequence[FlatComparison]) -> list[dict[str, Any]]:
    """Return comparisons as JSON objects."""
    return [
        {
            "unit": each.unit,
            "by_blocks_ge": round(each.by_blocks_ge, 1),
            "flat_ge": round(each.flat_ge, 1),
            "error": round(each.error, 4),
            "holds": each.holds,
        }
        for each in comparisons
    ]


def flat_text(comparisons: Sequence[FlatComparison]) -> str:
    """Return comparisons as text."""
    rows = [["unit", "GE, sum of blocks", "GE, one piece", "difference"]]
    rows += [
        [each.unit, f"{each.by_blocks_ge:.0f}", f"{each.flat_ge:.0f}", f"{100 * each.error:+.1f} %"]
        for each in comparisons
    ]
    return table(rows) + "\n"
