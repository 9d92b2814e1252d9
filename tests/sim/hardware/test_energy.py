"""Energy ranges."""

from __future__ import annotations

from pathlib import Path

import pytest

from plora.hw.defs.errors import UserError
from plora.sim.hardware.energy import Energy, load_energies, work_energy


def test_the_papers_multiply_adds_draw_the_papers_power() -> None:
    # 1024 multiply-adds a nanosecond: pJ per ns is mW, so 1.17 W (section VII-H)
    assert work_energy(multiply_adds=1024).best_pj / 1000 == pytest.approx(1.17, abs=0.01)


def test_a_byte_is_eight_bits() -> None:
    assert work_energy(dram_bytes=1, dram="lpddr5-6400").low_pj == pytest.approx(8 * 4.34)


def test_energies_add_up_end_by_end() -> None:
    both = work_energy(dram_bytes=64, link_bytes=64)
    assert both == work_energy(dram_bytes=64) + work_energy(link_bytes=64)


def test_ranges_are_in_order() -> None:
    for name, energy in load_energies().items():
        assert 0 < energy.low_pj <= energy.best_pj <= energy.high_pj, name


def test_moving_a_result_costs_less_than_moving_its_operand() -> None:
    # one row of x A^T at rank 8, K = 4096: operand 64 KiB, result 16 bytes
    near = work_energy(dram_bytes=65536, link_bytes=8192 + 16, multiply_adds=8 * 4096)
    far = work_energy(dram_bytes=65536, link_bytes=65536)
    assert near.best_pj < far.best_pj


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('[x]\nunit = "pj_per_bit"\nlow = 2\nbest = 1\nhigh = 3\n', "must be in order"),
        ('[x]\nunit = "pj_per_bit"\nlow = -2\nbest = 1\nhigh = 3\n', "low is -2"),
        ('[x]\nunit = "nj"\nlow = 1\nbest = 1\nhigh = 3\n', "unit"),
    ],
)
def test_bad_energy_data_is_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "energy.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=word):
        load_energies(path)


def test_unknown_memories_and_negative_amounts_are_refused() -> None:
    with pytest.raises(UserError, match="unknown memory with an energy 'ddr9'"):
        work_energy(dram_bytes=1, dram="ddr9")
    with pytest.raises(UserError, match="dram_bytes"):
        work_energy(dram_bytes=-1)


def test_energy_is_plain_arithmetic() -> None:
    assert Energy(1, 2, 3) * 2 + Energy(1, 1, 1) == Energy(3, 5, 7)
