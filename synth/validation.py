"""The shipped library against another one: do they agree on areas, and on which paths are long?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plora.synth.flow import BlockResult, DesignResult
from plora.synth.mapping import Target
from plora.synth.report import table
from plora.synth.timing import PathClass


@dataclass(frozen=True)
class Agreement:
    """A design mapped to two libraries.

    Attributes:
        areas: block, and its area in gate equivalents of either library.
        logic_areas: the same without flip-flops, whose drawings differ more than those of gates.
        lengths: block and class of path, and the longest path's length in FO4 of either library.
    """

    areas: list[tuple[str, float, float]]
    logic_areas: list[tuple[str, float, float]]
    lengths: list[tuple[str, PathClass, float, float]]

    def area_ratio(self) -> float:
        """Return the total area of the second over the first."""
        return _ratio(self.areas)

    def logic_area_ratio(self) -> float:
        """Return the total area without flip-flops of the second over the first."""
        return _ratio(self.logic_areas)

    def worst_logic_area_error(self) -> float:
        """Return the largest difference of a block's areas without flip-flops, as a share of the first."""
        return max(abs(second / first - 1) for _, first, second in self.logic_areas)

    def length_ratio(self) -> float:
        """Return the mean of the second's path length over the first's."""
        ratios = [second / first for _, _, first, second in self.lengths]
        return sum(ratios) / len(ratios)

    def rank_correlation(self) -> float:
        """Return Spearman's rank correlation of the path lengths: 1 where both put them in the same order."""
        return spearman([first for _, _, first, _ in self.lengths], [second for _, _, _, second in self.lengths])


def _ratio(areas: Sequence[tuple[str, float, float]]) -> float:
    return sum(second for _, _, second in areas) / sum(first for _, first, _ in areas)


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value from 1 up; equal values share the mean of their ranks."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) + 1) / 2 for value in values]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the correlation of the ranks of two lists of the same length, which must not be constant."""
    a, b = ranks(first), ranks(second)
    mean = (len(a) + 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)
    return float(covariance / spread**0.5)


SHORTEST_FO4 = 10.0
"""Shorter paths (a register and a gate) are left out: they are long in no library."""


def agreement(first: DesignResult, first_target: Target, second: DesignResult, second_target: Target) -> Agreement:
    """Compare one design mapped to two libraries."""
    fo4 = first_target.library.fo4_ps(), second_target.library.fo4_ps()
    areas, logic_areas, lengths = [], [], []
    for one, other in zip(first.blocks, second.blocks, strict=True):
        if one.ge:
            areas.append((one.name, one.ge, other.ge))
            logic_areas.append((one.name, _logic_ge(one, first_target), _logic_ge(other, second_target)))
        for kind, path in one.paths.items():
            length = path.length_ps / fo4[0]
            if length >= SHORTEST_FO4 and kind in other.paths:
                lengths.append((one.name, kind, length, other.paths[kind].length_ps / fo4[1]))
    return Agreement(areas, logic_areas, lengths)


def _logic_ge(block: BlockResult, target: Target) -> float:
    cells = target.library.cells
    area = sum(cells[name].area * count for name, count in block.cells.items() if cells[name].clock is None)
    return area / target.library.ge_area


def agreement_data(result: Agreement) -> dict[str, Any]:
    """Return the comparison as a JSON object."""
    return {
        "area_ratio": round(result.area_ratio(), 3),
        "logic_area_ratio": round(result.logic_area_ratio(), 3),
        "worst_logic_area_error": round(result.worst_logic_area_error(), 3),
        "length_ratio": round(result.length_ratio(), 3),
        "rank_correlation": round(result.rank_correlation(), 3),
        "areas_ge": [{"block": name, "ours": round(a, 1), "other": round(b, 1)} for name, a, b in result.areas],
        "lengths_fo4": [
            {"block": name, "paths": kind.value, "ours": round(a, 1), "other": round(b, 1)}
            for name, kind, a, b in result.lengths
        ],
    }


def agreement_text(result: Agreement, label: str) -> str:
    """Return the comparison as text."""
    areas = [["block", "GE, shipped", f"GE, {label}", "ratio", "without flip-flops"]]
    areas += [
        [name, f"{a:.0f}", f"{b:.0f}", f"{b / a:.3f}", f"{logic_b / logic_a:.3f}"]
        for (name, a, b), (_, logic_a, logic_b) in zip(result.areas, result.logic_areas, strict=True)
    ]
    lengths = [["block, longest path", "FO4, shipped", f"FO4, {label}", "ratio"]]
    lengths += [
        [f"{name}, {kind.value}", f"{a:.1f}", f"{b:.1f}", f"{b / a:.3f}"] for name, kind, a, b in result.lengths
    ]
    return "\n".join(
        [
            table(areas),
            "",
            table(lengths),
            "",
            f"area {result.area_ratio():.3f} of ours, without flip-flops {result.logic_area_ratio():.3f}"
            f" (blocks within {100 * result.worst_logic_area_error():.1f} %);"
            f" path lengths {result.length_ratio():.3f} of ours on average,"
            f" rank correlation {result.rank_correlation():.3f}",
            "",
        ]
    )
