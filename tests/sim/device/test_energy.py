"""Energy of descriptors is that of what they move and multiply."""

from __future__ import annotations

import numpy as np
import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import Descriptor
from plora.hw.defs.errors import UserError
from plora.sim.core.demand import demands, shapes_of
from plora.sim.device.energy import amounts, energies
from plora.sim.hardware.energy import load_energies

FULL = preset("full")


def of(*shapes: tuple[int, int, int]) -> list[Descriptor]:
    return [Descriptor(device_rows=n, device_columns=k, gpu_rows=b) for n, k, b in shapes]


def test_amounts_of_a_descriptor_by_hand() -> None:
    moved = amounts(FULL, demands(FULL, shapes_of(FULL, of((64, 4096, 4)))))
    operand = 4 * 4096 * 2  # four rows of 4096 values, whole stripes
    weights, result = 64 * 4096 * 2, 4 * 64 * 2
    assert moved.to_device_bytes[0] == 64 + operand
    assert moved.from_device_bytes[0] == result + 64
    # Host and device each move descriptor, operand, result and completion; the device reads the weights too.
    assert moved.dram_bytes[0] == 2 * (64 + operand + result + 64) + weights
    # 512 beats of 1024 multiply-adds for each of two pairs of rows.
    assert moved.multiply_adds[0] == 2 * 512 * 1024
    assert moved.multiply_adds[0] == 4 * 64 * 4096
    words = weights // 64
    assert moved.sram_accesses[0] == words + 2 * words + operand // 64 + 2 * 4 * 2 * (4096 * 2 // 64) + 2 * result // 64


def test_padding_costs_energy() -> None:
    exact, padded = amounts(FULL, demands(FULL, shapes_of(FULL, of((16, 512, 2), (9, 300, 1))))).multiply_adds
    assert padded == 10 / 16 * exact  # ten beats instead of sixteen, both rows and all lanes of each
    assert padded > 9 * 300


def test_the_range_is_that_of_the_sources() -> None:
    wanted = demands(FULL, shapes_of(FULL, of((64, 4096, 1), (16, 256, 8))))
    low, best, high = energies(FULL, wanted)
    assert (low < best).all() and (best < high).all()
    dram = load_energies()["lpddr5x-8533"]
    weights = 64 * 4096 * 2
    assert low[0] > weights * dram.low_pj
    # Reading the weights is most of a matrix-vector product's energy.
    assert best[0] < 2 * weights * dram.best_pj + 1e6


def test_a_dearer_link_costs_more_and_an_unknown_one_is_refused() -> None:
    wanted = demands(FULL, shapes_of(FULL, of((64, 4096, 8))))
    cxl, c2c = (energies(FULL, wanted, link=name)[1][0] for name in ("cxl3.1-x16", "nvlink-c2c"))
    assert cxl > c2c
    with pytest.raises(UserError, match="unknown"):
        energies(FULL, wanted, link="carrier pigeon")


def test_a_thousand_descriptors_at_once() -> None:
    shapes = [(int(n), 4096, 1) for n in np.arange(1, 1001)]
    _, best, _ = energies(FULL, demands(FULL, shapes_of(FULL, of(*shapes))))
    assert (np.diff(best[::16]) > 0).all()
