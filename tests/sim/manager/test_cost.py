"""The cost model against Tables IV and V written out for one adapter and one group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.sim.manager.cost import PLATEAU, AttentionCost, CostModel, GroupCost, Rates

RATES = Rates(
    hbm_byte=1.0,
    gpu_flop=0.01,
    dram_byte=3.0,
    far_flop=2.0,
    down_write=20.0,
    up_read=25.0,
    down_read=2.0,
    up_write=1.0,
    flag_bytes=128.0,
    round_trip=5000.0,
)
GROUP = GroupCost(count=4, base=1e6, input_dim=100, a_width=300, b_width=200, matrices=3, descriptor_bytes=64.0)
NO_ATTENTION = AttentionCost(4, 0, 0, 0, 0, 0, 0, 0, 0, False)
ROWS, RANK = 5, 8


def step(strategy: int, composition: str = "dependency", base: float = 0.0) -> float:
    group = GroupCost(GROUP.count, base, 100, 300, 200, 3, 64.0)
    model = CostModel([group], RATES, 2, composition)  # type: ignore[arg-type]
    sums = model.vector(ROWS, RANK, 1)[:, strategy : strategy + 1]
    time, _ = model.times(sums, NO_ATTENTION, np.array([0.0]))
    return float(time[0])


def close(value: float) -> object:
    return pytest.approx(value, rel=5 * PLATEAU)


def test_e1_streams_both_matrices_from_hbm() -> None:
    assert step(0) == close(4 * 2 * RANK * 500 * 1.0)


def test_e2_streams_both_matrices_over_the_link() -> None:
    assert step(1) == close(4 * (2 * RANK * 500 * 25.0 + 5000))


def test_e3_is_bound_by_the_device_here() -> None:
    per_rank = max(2 * 3.0, 2 * ROWS * 2.0)  # compute exceeds DRAM at five rows
    assert step(2) == close(4 * (RANK * per_rank * 500 + 5000))


def test_e4_does_a_on_the_device_and_b_on_the_gpu() -> None:
    per_rank = max(2 * 3.0, 2 * ROWS * 2.0)
    assert step(3) == close(4 * (RANK * per_rank * 300 + 5000))


def test_a_wave_hides_behind_the_base_model() -> None:
    assert step(2, base=1e6) == close(4 * 1e6)


def test_the_additive_composition_adds_it() -> None:
    per_rank = max(2 * 3.0, 2 * ROWS * 2.0)
    assert step(2, "additive", base=1e6) == close(4 * 1e6 + 4 * RANK * per_rank * 500)


def test_many_rows_pay_for_x_and_y_on_the_link() -> None:
    model = CostModel([GROUP], Rates(1, 0, 0.001, 0, 20, 25, 2, 1, 128, 0), 1, "additive")
    vector = model.vector(1000, RANK, 0)[:, 2:3]
    up = 1000 * (2 * 200 * 25.0 + 2 * 100 * 1.0) + 128 * 25.0 + 64 * 1.0
    time, _ = model.times(vector, NO_ATTENTION, np.array([0.0]))
    assert time[0] == close(4 * (up + GROUP.base))


def test_cached_bytes_count_both_matrices_for_e1_and_b_for_e4() -> None:
    model = CostModel([GROUP], RATES, 1, "dependency")
    assert model.cached_per_rank == (2 * 4 * 500, 0, 0, 2 * 4 * 200)


def test_adapters_on_experts_stream_what_is_touched_beside_dense_groups() -> None:
    experts = GroupCost(4, 0.0, 100, 300, 200, 3, 0.0, experts=8, used=2, inputs=1)
    both, dense = (CostModel(groups, RATES, 2, "dependency") for groups in ([GROUP, experts], [GROUP]))
    touched = 8 * (1 - 0.75**ROWS)
    time = [float(m.times(m.vector(ROWS, RANK, 1)[:, :1], NO_ATTENTION, np.array([0.0]))[0][0]) for m in (both, dense)]
    assert time[0] - time[1] == close(4 * 2 * RANK * touched * 500)
    assert both.cached_per_rank[0] == 2 * 4 * (500 + 8 * 500)


def test_a_sum_between_the_parts_of_a_wave_costs_its_time_and_an_exchange_of_the_intermediate() -> None:
    fast = Rates(1, 0, 0.001, 0, 20, 25, 0, 0, 0, 1000)
    group = GroupCost(4, 0.0, 100, 300, 200, 3, 0.0)
    whole, parts = (CostModel([group], fast, 1, "dependency", between=b) for b in (None, 300.0))
    up = [float(m.times(m.vector(ROWS, RANK, 0)[:, 2:3], NO_ATTENTION, np.array([0.0]))[0][0]) for m in (whole, parts)]
    assert up[1] - up[0] == close(4 * (300 + 2 * 3 * ROWS * RANK * 25))


@given(st.floats(0, 50), st.floats(0, 50), st.floats(1, 100), st.floats(1.2, 6), st.floats(0, 50), st.floats(1, 200))
def test_attention_balances_hbm_against_the_devices(
    base: float, floor: float, slope: float, sharpness: float, far_base: float, far_device: float
) -> None:
    attention = AttentionCost(
        10, base, slope, far_base, far_device, 0.0, 0.0, 0.0, 1000.0, True, near_floor=floor, sharpness=sharpness
    )
    _, time = attention.balance()
    grid = min(attention.time(p) for p in np.linspace(0, 1, 2001))
    assert time <= grid * 1.001


def test_room_for_copies_limits_their_share() -> None:
    attention = AttentionCost(10, 0.0, 30.0, 0.0, 60.0, 0.0, 0.0, 0.0, 1000.0, True)
    caps = np.array([0.0, 0.1, 0.5, 1.0])
    times, shares = attention.best(caps)
    assert shares.tolist() == pytest.approx([0.0, 0.1, 0.5, attention.balance()[0]])
    assert times.tolist() == pytest.approx([attention.time(p) for p in shares])


def test_overlap_takes_the_slowest_resource_and_spends_hbm_only_where_it_helps() -> None:
    model = CostModel([GROUP], RATES, 2, "overlap", rest=1000.0)
    idle_devices = AttentionCost(10, 0.0, 50.0, 0.0, 60.0, 0.0, 0.0, 0.0, 1000.0, True)
    nothing = np.zeros((model.feature_count, 1))
    time, share = model.times(nothing, idle_devices, np.array([1e9]))
    assert (time[0], share[0]) == (pytest.approx(4e6 + 1000), 0.0)
    busy = AttentionCost(10, 0.0, 5e5, 0.0, 1e6, 0.0, 0.0, 0.0, 1000.0, True)
    time, share = model.times(nothing, busy, np.array([1e9]))
    gpu, devices = 4e6 + 1000 + 5e6 * share[0], 1e7 * (1 - share[0])
    assert gpu == pytest.approx(devices)
    assert time[0] == pytest.approx(gpu)


def test_negative_room_is_infinitely_slow() -> None:
    model = CostModel([GROUP], RATES, 1, "dependency")
    time, _ = model.times(np.zeros((model.feature_count, 2)), NO_ATTENTION, np.array([-1.0, 0.0]))
    assert np.isinf(time).tolist() == [True, False]
