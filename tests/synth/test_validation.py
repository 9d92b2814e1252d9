"""The comparison of two libraries."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from plora.hw.defs.config import preset
from plora.synth.flow import BlockResult, DesignResult, synthesize
from plora.synth.mapping import file_target, shipped_target
from plora.synth.timing import PathClass, TimingPath
from plora.synth.validation import agreement, agreement_data, agreement_text, ranks, spearman

OSU_180NM = Path("/usr/share/qflow/tech/osu018/osu018_stdcells.lib")
"""A free library, where Debian's package qflow-tech-osu018 has put it."""

TARGET = shipped_target()
FO4_PS = TARGET.library.fo4_ps()


def design(*blocks: tuple[str, int, float]) -> DesignResult:
    """Blocks of NAND2s and one flip-flop, with a longest path in FO4."""
    results = []
    for name, gates, fo4 in blocks:
        cells = Counter({"NAND2_X1": gates, "DFF_X1": 1})
        paths = {PathClass.REGISTER: TimingPath(PathClass.REGISTER, fo4 * FO4_PS, "end", ())}
        results.append(BlockResult(name, name, 1, gates + 17 / 3, 1, cells, Counter(), paths, (), "area"))
    return DesignResult(preset("tiny"), tuple(results), {})


def test_ranks_of_equal_values_are_shared() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)


def test_a_design_agrees_with_itself_and_a_larger_one_by_its_ratio() -> None:
    one = design(("a", 100, 20.0), ("b", 300, 40.0), ("short", 10, 5.0))
    same = agreement(one, TARGET, one, TARGET)
    assert (same.area_ratio(), same.length_ratio(), same.rank_correlation()) == pytest.approx((1, 1, 1))
    other = agreement(one, TARGET, design(("a", 110, 44.0), ("b", 330, 40.0), ("short", 11, 5.0)), TARGET)
    assert other.logic_area_ratio() == pytest.approx(1.1)
    assert other.worst_logic_area_error() == pytest.approx(0.1)
    assert other.rank_correlation() == pytest.approx(-1.0)
    assert [name for name, *_ in other.lengths] == ["a", "b"], "short paths are long in no library"
    data = agreement_data(other)
    assert data["logic_area_ratio"] == 1.1
    assert "rank correlation -1.000" in agreement_text(other, "other")


@pytest.mark.skipif(not OSU_180NM.is_file(), reason="apt-get install qflow-tech-osu018")
def test_areas_agree_with_a_free_library() -> None:
    """Gates within a quarter of a 180 nm library with a third of the kinds of cells; docs/silicon.md has all blocks."""
    other = file_target(OSU_180NM)
    results = []
    for target in (TARGET, other):
        period_ps = 1000.0 / FO4_PS * target.library.fo4_ps()
        results.append(synthesize(preset("tiny"), target, units=["core.reader", "core.writer"], period_ps=period_ps))
    compared = agreement(results[0], TARGET, results[1], other)
    assert compared.worst_logic_area_error() < 0.25
