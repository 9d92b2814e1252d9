"""Popularity laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.errors import UserError
from plora.sim.workload import Popularity
from plora.sim.workload.popularity import LAWS

EXAMPLES = {
    "distinct": Popularity("distinct", 100),
    "uniform": Popularity("uniform", 100),
    "skewed": Popularity("skewed", 100, alpha=1.2),
    "identical": Popularity("identical", 100),
    "hot-set": Popularity("hot-set", 100, hot_adapters=5, hot_share=0.8),
    "measured": Popularity("measured", 3, shares=(5.0, 3.0, 2.0)),
    "power": Popularity("power", 100, alpha=0.3),
}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_every_law_has_an_example_here() -> None:
    assert set(EXAMPLES) == set(LAWS)


@pytest.mark.parametrize("law", LAWS)
def test_shares_sum_to_one_with_the_most_popular_first(law: str) -> None:
    shares = EXAMPLES[law].probabilities
    assert shares.sum() == pytest.approx(1)
    assert (np.diff(shares) <= 1e-12).all()


@pytest.mark.parametrize("law", sorted(set(LAWS) - {"distinct"}))
def test_draws_follow_the_shares(law: str) -> None:
    example = EXAMPLES[law]
    drawn = np.bincount(example.draw(rng(), 200_000), minlength=example.adapters) / 200_000
    assert np.abs(drawn - example.probabilities).max() < 0.004


def test_distinct_gives_every_request_another_adapter() -> None:
    assert EXAMPLES["distinct"].draw(rng(), 250).tolist() == [*range(100), *range(100), *range(50)]


def test_identical_gives_every_request_the_same_adapter() -> None:
    assert set(EXAMPLES["identical"].draw(rng(), 50).tolist()) == {0}


def test_power_with_alpha_one_is_uniform() -> None:
    assert Popularity("power", 50).probabilities == pytest.approx(np.full(50, 0.02))


def test_power_is_the_law_of_floor_of_a_power_variate() -> None:
    drawn = np.bincount((rng().power(0.3, 200_000) * 100).astype(int), minlength=100) / 200_000
    assert np.abs(drawn - EXAMPLES["power"].probabilities).max() < 0.004


@pytest.mark.parametrize(
    ("example", "batch", "expected"),
    [
        (Popularity("uniform", 1000), 32, 31.51),
        (Popularity("hot-set", 1000, hot_adapters=50, hot_share=0.8), 32, 26.54),
        (Popularity("identical", 1000), 32, 1.0),
        (Popularity("distinct", 1000), 32, 32.0),
    ],
)
def test_distinct_adapters_of_a_batch(example: Popularity, batch: int, expected: float) -> None:
    assert example.expected_distinct(batch) == pytest.approx(expected, abs=0.01)
    found = [len(set(example.draw(rng(seed), batch).tolist())) for seed in range(400)]
    assert np.mean(found) == pytest.approx(expected, abs=0.35)


@given(law=st.sampled_from(LAWS), count=st.integers(0, 200), seed=st.integers(0, 1 << 32))
def test_draws_are_adapters_of_the_set(law: str, count: int, seed: int) -> None:
    example = EXAMPLES[law]
    drawn = example.draw(rng(seed), count)
    assert len(drawn) == count
    assert ((drawn >= 0) & (drawn < example.adapters)).all()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("zipf", 10), "unknown popularity law 'zipf'; known: distinct, uniform, skewed, identical"),
        (("uniform", 0), "at least 1"),
        (("skewed", 10, 0.0), "alpha"),
        (("skewed", 10, float("nan")), "alpha"),
        (("hot-set", 10, 1.0, 10, 0.8), "hot set"),
        (("hot-set", 10, 1.0, 5, 1.5), "hot set"),
        (("measured", 3, 1.0, 0, 0.0, (1.0, 2.0)), "3 shares"),
        (("measured", 2, 1.0, 0, 0.0, (0.0, 0.0)), "shares"),
        (("measured", 2, 1.0, 0, 0.0, (1.0, -1.0)), "shares"),
    ],
)
def test_impossible_laws_are_refused(arguments: tuple[object, ...], word: str) -> None:
    with pytest.raises(UserError, match=word):
        Popularity(*arguments)  # type: ignore[arg-type]
