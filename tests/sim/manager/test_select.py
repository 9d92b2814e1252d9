from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.sim.manager.cost import AttentionCost, Composition, CostModel
from plora.sim.manager.select import Decision, Problem, Search, _fit, _starts, exhaustive, improve, select
from tests.bench.manager import GROUPS, RATES, problem


def check(asked: Problem, decision: Decision) -> None:
    assert set(decision.strategies.tolist()) <= set(asked.allowed)
    per_rank = np.array(asked.model.cached_per_rank)[decision.strategies]
    held = float((per_rank * asked.ranks).sum())
    assert decision.cached_bytes == pytest.approx(held)
    assert held + decision.kv_share * asked.attention.kv_bytes <= asked.budget_bytes * (1 + 1e-9) + 1


@pytest.mark.parametrize("composition", ["dependency", "overlap", "additive"])
def test_choices_are_within_two_percent_of_the_optimum_on_95_percent_of_small_cases(composition: Composition) -> None:
    rng = np.random.default_rng(1)
    found = []
    for _ in range(100):
        asked = problem(rng, int(rng.integers(2, 6)), composition)
        decision, best = select(asked), exhaustive(asked)
        check(asked, decision)
        found.append(decision.time / best.time - 1)
    assert min(found) > -1e-9, "the exhaustive search is not a lower bound"
    assert np.mean(np.array(found) < 0.02) >= 0.95, f"worst gaps: {sorted(found)[-5:]}"


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_decisions_never_exceed_the_hbm_budget(seed: int, count: int) -> None:
    asked = problem(np.random.default_rng(seed), count)
    decision = select(asked)
    check(asked, decision)
    assert decision.fits


@given(st.integers(0, 10_000))
def test_going_on_from_a_decision_that_does_not_fit_makes_it_fit(seed: int) -> None:
    asked = problem(np.random.default_rng(seed), 12)
    check(asked, select(asked, np.zeros(12, dtype=np.int64)))


@given(st.integers(0, 10_000))
def test_a_decision_is_stable(seed: int) -> None:
    asked = problem(np.random.default_rng(seed), 10)
    first = select(asked)
    second = select(asked, first.strategies, gain=0.001)
    assert second.strategies.tolist() == first.strategies.tolist()
    assert second.rounds == 0


def test_small_gains_do_not_change_a_decision() -> None:
    asked = problem(np.random.default_rng(5), 12)
    start = np.full(12, 2, dtype=np.int64)
    best = select(asked, start)
    assert best.rounds > 0
    assert select(asked, start, gain=0.9).strategies.tolist() == start.tolist()


def test_large_batches_favour_the_gpu_and_small_ones_the_devices() -> None:
    """The paper, section V-A: E1 and E2 move as much for any batch, E3 and E4 in proportion to it."""
    model = CostModel(GROUPS, RATES, 4, "dependency")
    attention = AttentionCost(32, 0, 0, 0, 0, 0, 0, 0, 0, False)
    rows, ranks = np.array([1, 256]), np.array([64, 64])
    decision = select(Problem(model, rows, ranks, np.array([0, 1]), (0, 1, 2, 3), attention, 1e12))
    assert decision.strategies[0] == 2
    assert decision.strategies[1] == 0


def test_without_hbm_only_strategies_that_cache_nothing_remain() -> None:
    rng = np.random.default_rng(2)
    asked = problem(rng, 20)
    none = Problem(asked.model, asked.rows, asked.ranks, asked.devices, (0, 1, 2, 3), asked.attention, 0.0)
    decision = select(none)
    assert set(decision.strategies.tolist()) <= {1, 2}
    assert decision.kv_share == 0.0


def test_a_system_that_only_caches_says_when_that_does_not_fit() -> None:
    asked = problem(np.random.default_rng(3), 8, allowed=(0,))
    tight = Problem(asked.model, asked.rows, asked.ranks, asked.devices, (0,), asked.attention, 1.0)
    decision = select(tight)
    assert decision.strategies.tolist() == [0] * 8
    assert not decision.fits


def test_no_adapters_leave_all_hbm_to_kv_copies() -> None:
    asked = problem(np.random.default_rng(4), 3)
    empty = np.zeros(0, dtype=np.int64)
    decision = select(Problem(asked.model, empty, empty, empty, (0, 1, 2, 3), asked.attention, 1e13))
    assert decision.strategies.tolist() == []
    assert decision.kv_share == pytest.approx(asked.attention.balance()[0])


def test_the_exhaustive_search_refuses_what_would_never_end() -> None:
    with pytest.raises(ValueError, match="too many"):
        exhaustive(problem(np.random.default_rng(0), 20))


@pytest.mark.parametrize("composition", ["dependency", "overlap", "additive"])
def test_large_batches_that_change_many_at_once_stay_within_two_percent_of_one_by_one(composition: Composition) -> None:
    rng = np.random.default_rng(2)
    for _ in range(6):
        asked = problem(rng, int(rng.integers(60, 120)), composition)
        search = Search(asked)
        found = select(asked)
        check(asked, found)
        limit = 2 * search.count + 2
        single = min(improve(search, _fit(search, s), search.index, 0.0, limit)[1] for s in _starts(search, None))
        assert found.time <= 1.02 * single
