from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.errors import UserError
from plora.sim.manager.cost import AttentionCost, CostModel, GroupCost, Rates
from plora.sim.manager.online import Manager
from plora.sim.manager.select import Problem, select

D, WIDE = 4096, 11008
# Llama2-7B on an H100 with four devices behind CXL 3.1, in nanoseconds.
RATES = Rates(1 / 3350, 1 / 989.4e3, 1 / 1100, 1 / 2.048e3, 1 / 96, 1 / 108, 0.27 / 128, 0.09 / 128, 128.0, 1000.0)
MODEL = CostModel(
    [
        GroupCost(32, 30_000.0, D, 3 * D, 3 * D, 3, 384.0),
        GroupCost(32, 10_000.0, D, D, D, 1, 128.0),
        GroupCost(32, 54_000.0, D, 2 * D, 2 * WIDE, 2, 256.0),
        GroupCost(32, 27_000.0, WIDE, WIDE, D, 1, 256.0),
    ],
    RATES,
    4,
    "dependency",
)
RANKS = np.random.default_rng(0).choice([8, 16, 32, 64, 128], 1000)
BYTES_E1, _, _, BYTES_E4 = MODEL.cached_per_rank


def attention(requests: int, context: int = 400) -> AttentionCost:
    layer = requests * context * 4.0 * D
    sent, back = requests * 2 * D / 128, 4 * requests * (2 * D + 256) / 128
    return AttentionCost(32, 0.0, layer / 3350, 1000.0, layer / 4400, 0.0, sent, back, max(layer * 32, 1.0), True)


ALL, NOT_E2 = (0, 1, 2, 3), (0, 2, 3)


def manager(budget: float, adapters: int = 1000, allowed: tuple[int, ...] = ALL, **options: object) -> Manager:
    ranks, devices = RANKS[:adapters], np.arange(adapters) % 4
    return Manager(MODEL, ranks, devices, allowed, budget, **options)  # type: ignore[arg-type]


def cached_bytes(of: Manager) -> float:
    per_rank = np.array([0.0, BYTES_E4, BYTES_E1])[of.cached]
    return float((per_rank * of.ranks).sum())


def check(of: Manager, kv_bytes: float) -> None:
    serving = of.serving()
    needed = np.array([2, 0, 0, 1])[of.strategies[serving]]
    assert (of.cached[serving] >= needed).all(), "a strategy reads what is not in HBM"
    assert of.used_bytes + of.kept_bytes == pytest.approx(cached_bytes(of), rel=1e-9, abs=10.0)
    assert cached_bytes(of) + kv_bytes <= of.budget * (1 + 1e-9) + 10
    sums = sum(
        (
            MODEL.vector(int(of.rows[a]), int(of.ranks[a]), int(of.devices[a]))[:, of.strategies[a]]
            for a in serving.tolist()
        ),
        np.zeros(MODEL.feature_count),
    )
    assert of._sums == pytest.approx(sums, rel=1e-9, abs=1e-6)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.booleans(), st.integers(1, 40)), min_size=1, max_size=40),
    st.sampled_from([0.0, 3e8, 2e9, 6e10]),
    st.integers(1, 3),
    st.sampled_from([0.0, 1e5, 1e9]),
)
def test_whatever_comes_and_goes_hbm_holds_what_is_read_and_no_more(
    events: list[tuple[int, bool, int]], budget: float, every: int, decision_time: float
) -> None:
    online = manager(budget, 12, rerank_every=every, decision_time=decision_time)
    present: list[int] = []
    for adapter, comes, steps in events:
        came, gone = ([adapter], []) if comes or not present else ([], [present.pop(adapter % len(present))])
        present += came
        cost = attention(len(present))
        change = online.step(came, gone, cost, steps=steps)
        check(online, change.kv_share * cost.kv_bytes)
        assert sorted(present) == sorted(np.repeat(np.arange(12), online.rows).tolist())


def test_an_adapter_in_use_keeps_what_it_reads_while_others_crowd_in() -> None:
    online = manager(2.5e9, allowed=NOT_E2)
    crowd = [7] * 200
    online.step(crowd, [], attention(200))
    assert online.strategies[7] == 0, "200 requests of one adapter are worth both matrices"
    for newcomer in range(100, 160):
        online.step([newcomer], [], attention(200 + newcomer - 99))
        assert online.cached[7] == 2 or online.strategies[7] in (2, 3)
        check(online, 0.0)


def test_what_an_adapter_leaves_behind_serves_its_return_without_a_load() -> None:
    online = manager(6e10, allowed=NOT_E2)
    online.step([3] * 200, [], attention(200))
    assert online.strategies[3] == 0
    online.step([], [3] * 200, attention(1))
    assert online.rows[3] == 0
    assert online.cached[3] == 2
    assert online.step([3] * 200, [], attention(200)).loaded_bytes == 0
    assert online.strategies[3] == 0


def test_cold_caches_go_before_hot_ones() -> None:
    online = manager(1e15, allowed=NOT_E2, hot_adapters=0)
    for adapter in (1, 2):
        online.step([adapter] * 200, [], attention(200))
        online.step([], [adapter] * 200, attention(0))
    for _ in range(5):
        online.step([2], [2], attention(0))
    assert online.cached[[1, 2]].tolist() == [2, 2]
    online._evict(1.0)
    assert online.cached[[1, 2]].tolist() == [0, 2]


def test_the_hottest_adapters_outside_the_batch_are_cached_ahead() -> None:
    online = manager(6e10, hot_adapters=5, rerank_every=1)
    for _ in range(4):
        for adapter in range(20, 30):
            online.step([adapter] * (adapter - 18), [adapter] * (adapter - 18), attention(0))
    assert set(np.flatnonzero(online.cached).tolist()) >= {25, 26, 27, 28, 29}


def test_a_batch_that_stays_is_not_touched_again() -> None:
    online = manager(2e10)
    batch = np.random.default_rng(1).integers(0, 1000, 64).tolist()
    online.step(batch, [], attention(64))
    for _ in range(20):
        online.step([], [], attention(64), steps=64)
    settled = online.strategies[online.serving()].tolist()
    changes = [online.step([], [], attention(64, 400 + k), steps=64) for k in range(20)]
    assert sum(change.switched for change in changes) == 0
    assert sum(change.loaded_bytes for change in changes) == 0
    assert online.strategies[online.serving()].tolist() == settled


def test_going_to_and_fro_does_not_thrash() -> None:
    """An adapter whose batch wavers around the break-even point is not reloaded each time."""
    online = manager(2e10)
    online.step([5] * 30 + list(range(100, 140)), [], attention(70))
    loads = 0
    for turn in range(60):
        came, gone = ([5], []) if turn % 2 else ([], [5])
        loads += online.step(came, gone, attention(70)).loaded_bytes > 0
    assert loads <= 2


def test_online_decisions_stay_close_to_those_from_scratch() -> None:
    rng = np.random.default_rng(3)
    online = manager(2e10)
    batch = rng.integers(0, 60, 96).tolist()
    online.step(batch, [], attention(96))
    for _ in range(300):
        position = int(rng.integers(0, 96))
        new = int(rng.integers(0, 60))
        old, batch[position] = batch[position], new
        change = online.step([new], [old], attention(96))
    ids = online.serving()
    best = select(Problem(MODEL, online.rows[ids], RANKS[ids], online.devices[ids], (0, 1, 2, 3), attention(96), 2e10))
    assert change.time < 1.02 * best.time


def test_decisions_wait_until_they_are_worth_their_time() -> None:
    """A step of 5 ms pays for 50 us: a decision of 100 us comes at every second one, for all that have changed."""
    online = manager(6e10, allowed=NOT_E2, decision_time=1e5)
    online.step(list(range(100, 140)), [], attention(40))
    step_ns = online.step([], [], attention(40)).time
    assert 4e6 < step_ns < 6e6
    decided = []
    for turn in range(12):
        # Two hundred requests of one adapter are worth both its matrices, once somebody looks.
        change = online.step([turn] * 200, [], attention(40))
        decided.append(change.switched)
        check(online, change.kv_share * attention(40).kv_bytes)
    looks = [turn for turn, switched in enumerate(decided) if switched]
    assert 1 <= len(looks) <= 6
    assert sum(decided) == looks[-1] + 1, "everybody's turn came at the last look"


def test_requests_that_leave_must_have_been_there() -> None:
    with pytest.raises(UserError, match="1 requests of adapter 4 left, but only 0 were there"):
        manager(1e9).step([], [4], attention(1))


def test_a_manager_needs_a_strategy_and_a_budget() -> None:
    with pytest.raises(UserError, match="no strategy"):
        Manager(MODEL, RANKS, RANKS % 4, (), 1.0)
    with pytest.raises(UserError, match="budget"):
        manager(-1.0)


def test_deciding_takes_microseconds_a_step_with_a_thousand_adapters() -> None:
    """One request comes and one goes at every step; the goal is 100 us, the bound here allows a busy machine."""
    rng = np.random.default_rng(0)
    online = manager(6e10)
    batch = rng.integers(0, 1000, 128).tolist()
    online.step(batch, [], attention(128))

    def block() -> float:
        start = time.process_time()
        for _ in range(60):
            position = int(rng.integers(0, 128))
            new = int(rng.integers(0, 1000))
            old, batch[position] = batch[position], new
            online.step([new], [old], attention(128))
        return (time.process_time() - start) / 60

    block()
    assert min(block() for _ in range(6)) < 300e-6
