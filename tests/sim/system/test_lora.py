"""Table IV of the paper, term by term, on one group of Llama2-7B's shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plora.sim.system.config import RunOptions, resolve
from plora.sim.system.decode import machine_of, setting_of
from plora.sim.system.engine import TaskGraph
from plora.sim.system.layers import Group
from plora.sim.system.lora import JobBytes, Part, add_group, lora_job, middle_bytes
from plora.sim.system.machine import Machine
from plora.sim.system.tasks import Load, tiles
from plora.sim.system.work import Batch, Placement, serving

D, ROWS, RANK = 4096, 3, 16
QKV = Group("attention_in", D, (D, 1024, 1024), weight_bytes=1, flops_per_token=1.0, base_ps=1)
A_BYTES, B_BYTES = 2 * RANK * 3 * D, 2 * RANK * (D + 2048)


def machine(preset: str) -> Machine:
    resolved = resolve(RunOptions(preset=preset))  # type: ignore[arg-type]
    return machine_of(resolved, resolved.systems[0])


def job(strategy: int, preset: str = "paper") -> JobBytes:
    return lora_job(machine(preset), QKV, ROWS, RANK, strategy)


def test_e1_reads_both_matrices_from_hbm_and_nothing_else() -> None:
    assert job(0) == JobBytes(0, 0, 0, 0, A_BYTES + B_BYTES, ROWS * (A_BYTES + B_BYTES))


def test_e2_brings_both_matrices_up_the_link() -> None:
    assert job(1) == JobBytes(0, A_BYTES + B_BYTES, A_BYTES + B_BYTES, 0, 0, ROWS * (A_BYTES + B_BYTES))


def test_e3_sends_x_once_for_the_group_and_returns_y() -> None:
    returned = 2 * ROWS * (D + 2048)
    assert job(2) == JobBytes(2 * ROWS * D, returned, A_BYTES + B_BYTES, ROWS * (A_BYTES + B_BYTES), 0, 0)


def test_e4_returns_the_rank_wide_intermediate_and_reads_b_from_hbm() -> None:
    returned = 2 * ROWS * RANK * 3
    assert job(3) == JobBytes(2 * ROWS * D, returned, A_BYTES, ROWS * A_BYTES, B_BYTES, ROWS * B_BYTES)


@pytest.mark.parametrize("strategy", [1, 2, 3])
def test_protocol_costs_come_on_top_of_the_payload(strategy: int) -> None:
    bare, priced = job(strategy), job(strategy, "priced")
    assert priced.down_wire > bare.down_wire
    assert priced.up_wire > bare.up_wire
    assert replace(priced, down_wire=0, up_wire=0) == replace(bare, down_wire=0, up_wire=0)


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_both_parts_of_a_sharded_wave_do_the_work_of_the_whole(strategy: int) -> None:
    on = machine("paper")
    whole, first, second = (lora_job(on, QKV, ROWS, RANK, strategy, part) for part in Part)
    for name in ("dram", "far_flops", "hbm", "gpu_flops"):
        assert getattr(first, name) + getattr(second, name) == getattr(whole, name), name
    middle = middle_bytes(QKV, np.array([ROWS]), np.array([RANK]))
    assert middle == 2 * ROWS * RANK * 3
    if strategy == 2:
        assert (first.down_wire, first.up_wire) == (whole.down_wire, middle)
        assert (second.down_wire, second.up_wire) == (middle, whole.up_wire)


def test_adapters_on_experts_read_what_is_touched_and_exchange_every_pair() -> None:
    gate_up = replace(QKV, experts=8, used=2)
    down = replace(gate_up, own_inputs=True)
    touched = 8 * (1 - 0.75**ROWS)
    assert gate_up.touched(ROWS) == pytest.approx(touched)
    one, two = (lora_job(machine("paper"), group, ROWS, RANK, 2) for group in (gate_up, down))
    assert one.dram == two.dram == pytest.approx(touched * (A_BYTES + B_BYTES), abs=1)
    assert (one.down_wire, two.down_wire) == (2 * ROWS * D, 2 * 2 * ROWS * D)
    assert one.up_wire == two.up_wire == 2 * (2 * ROWS) * (D + 2048)
    assert one.far_flops == 2 * job(2).far_flops


def test_an_operand_above_the_20_bit_size_takes_a_second_descriptor() -> None:
    assert tiles(128, 4096) == 2  # one byte too large
    assert tiles(127, 4096) == 1
    assert tiles(4096, 128) == 2
    assert tiles(128, 11008) == 3


def test_a_group_that_adapters_do_not_touch_has_no_wave() -> None:
    resolved = resolve(RunOptions())
    setting = setting_of(resolved, resolved.systems[0], 4)
    batch = Batch(np.full(4, 9), np.arange(4))
    placement = Placement(np.full(4, 2), np.zeros(4, dtype=np.int64))
    load = Load(batch, serving(batch, np.full(10, 8), 4), placement)
    graph = TaskGraph()
    add_group(graph, setting, setting.work.kinds[0], replace(QKV, output_dims=()), load, [], "g")
    assert graph.kind == ["base"]
