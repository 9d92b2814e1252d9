from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.errors import UserError
from plora.sim.manager.temperature import Temperature


def test_a_request_heats_its_adapter_and_temperatures_relax_by_a_tenth_of_the_gap() -> None:
    heat = Temperature(4)
    heat.requests(np.array([2, 2]))
    assert heat.values.tolist() == [0, 0, 2, 0]
    heat.relax()
    assert heat.values.tolist() == pytest.approx([0.05, 0.05, 1.85, 0.05])


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 30))
def test_many_steps_at_once_are_the_same_as_one_by_one_and_keep_the_mean(requests: list[int], steps: int) -> None:
    one, many = Temperature(10), Temperature(10)
    for heat in (one, many):
        heat.requests(np.array(requests, dtype=np.int64))
    mean = one.values.mean()
    for _ in range(steps):
        one.relax()
    many.relax(steps)
    assert one.values.tolist() == pytest.approx(many.values.tolist())
    assert one.values.mean() == pytest.approx(mean)


@given(st.lists(st.integers(0, 29), max_size=60), st.integers(0, 40), st.sets(st.integers(0, 29)))
def test_the_hottest_are_those_that_a_full_sort_finds(requests: list[int], count: int, serving: set[int]) -> None:
    heat = Temperature(30)
    heat.requests(np.array(requests, dtype=np.int64))
    found = heat.hottest(count, np.array(sorted(serving), dtype=np.int64)).tolist()
    expected = sorted((a for a in range(30) if a not in serving), key=lambda a: (-heat.values[a], a))[:count]
    assert found == expected


def test_impossible_constants_are_refused() -> None:
    with pytest.raises(UserError, match="relaxation is 2"):
        Temperature(3, relaxation=2)
    with pytest.raises(UserError, match="increment is 0"):
        Temperature(3, increment=0)
