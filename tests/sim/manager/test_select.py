from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.sim.manager.cost import AttentionCost, Composition, CostModel, GroupCost, Rates
from plora.sim.manager.select import Decision, Problem, exhaustive, select

D, WIDE = 4096, 11008
# Llama2-7B on an H100 with four devices behind CXL 3.1, in nanoseconds.
RATES = Rates(1 / 3350, 1 / 989.4e3, 1 / 1100, 1 / 2.048e3, 1 / 96, 1 / 108, 0.27 / 128, 0.09 / 128, 128.0, 1000.0)
GROUPS = [
    GroupCost(32, 30_000.0, D, 3 * D, 3 * D, 3, 384.0),
    GroupCost(32, 10_000.0, D, D, D, 1, 128.0),
    GroupCost(32, 54_000.0, D, 2 * D, 2 * WIDE, 2, 256.0),
    GroupCost(32, 27_000.0, WIDE, WIDE, D, 1, 256.0),
]
RANKS = [8, 16, 32, 64, 128]


def problem(
    rng: np.random.Generator,
    count: int,
    composition: Composition = "dependency",
    allowed: tuple[int, ...] = (0, 1, 2, 3),
) -> Problem:
    """A random batch: few or many rows an adapter, short or long contexts, no, little or ample HBM."""
    model = CostModel(GROUPS, RATES, 4, composition)
    rows = rng.integers(1, int(rng.choice([3, 64])), count)
    ranks = rng.choice(RANKS, count)
    requests, context = int(rows.sum()), int(rng.integers(100, 4000))
    layer = requests * context * 4.0 * D
    attention = AttentionCost(
        layers=32,
        near_base=0.0,
        near_slope=layer / 3350,
        far_base=1000.0,
        far_device=layer / 4400,
        far_up=0.0,
        down=requests * 2 * D / 128,
        up=4 * requests * (2 * D + 256) / 128,
        kv_bytes=layer * 32,
        copies=True,
    )
    cached = float((ranks * model.cached_per_rank[0]).sum())
    budget = rng.uniform(0, 1.3) * cached + rng.integers(0, 2) * rng.uniform(0, 1) * attention.kv_bytes
    return Problem(model, rows, ranks, rng.integers(0, 4, count), allowed, attention, float(budget))


def check(asked: Problem, decision: Decision) -> None:
    assert set(decision.strategies.tolist()) <= set(asked.allowed)
    per_rank = np.array(asked.model.cached_per_rank)[decision.strategies]
    held = float((per_rank * asked.ranks).sum())
    assert decision.cached_bytes == pytest.approx(held)
    assert held + decision.kv_share * asked.attention.kv_bytes <= asked.budget_bytes * (1 + 1e-9) + 1


@pytest.mark.parametrize("composition", ["dependency", "overlap", "additive"])
def test_choices_are_within_two_percent_of_the_optimum_on_95_percent_of_small_cases(composition: Composition) -> None:
    rng = np.random.default_rng(1)
    gaps = []
    for _ in range(100):
        asked = problem(rng, int(rng.integers(2, 6)), composition)
        found, best = select(asked), exhaustive(asked)
        check(asked, found)
        gaps.append(found.time / best.time - 1)
    assert min(gaps) > -1e-9, "the exhaustive search is not a lower bound"
    assert np.mean(np.array(gaps) < 0.02) >= 0.95, f"worst gaps: {sorted(gaps)[-5:]}"


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
