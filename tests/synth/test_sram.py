"""The SRAM model: it reproduces the points it is made of, and orders sizes and organisations rightly."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from plora.synth.sram import BIT_CELL_UM2, KIB, SramMacro, paper_um2_per_bit, total_area_mm2


def test_two_port_cacti_totals_for_3_mb_come_out_again() -> None:
    big = SramMacro(width=512, depth=64 * KIB * 8 // 512)
    small = SramMacro(width=512, depth=8 * KIB * 8 // 512)
    assert total_area_mm2(Counter({big: 48})).high == pytest.approx(20.4, rel=1e-6)
    assert total_area_mm2(Counter({small: 384})).high == pytest.approx(25.7, rel=1e-6)
    assert total_area_mm2(Counter({big: 48})).low == pytest.approx(9.8, rel=1e-6)


def test_ranges_are_ordered_and_above_the_bare_cell() -> None:
    for depth in (64, 256, 1024, 4096):
        macro = SramMacro(512, depth)
        for figure in (macro.um2_per_bit(), macro.access_pj(), macro.leakage_mw()):
            assert figure.low < figure.best < figure.high
        assert macro.um2_per_bit().low > BIT_CELL_UM2[0]


def test_smaller_macros_take_more_area_a_bit_and_less_time() -> None:
    macros = [SramMacro(512, depth) for depth in (32, 128, 512, 2048)]
    for small, large in itertools.pairwise(macros):
        assert small.um2_per_bit().best > large.um2_per_bit().best
        assert small.access_ns() < large.access_ns()


def test_the_papers_buffers_are_five_bare_cells_a_bit() -> None:
    assert paper_um2_per_bit() == pytest.approx(1.757, abs=0.001)
    assert paper_um2_per_bit() / BIT_CELL_UM2[0] == pytest.approx(5.08, abs=0.01)
