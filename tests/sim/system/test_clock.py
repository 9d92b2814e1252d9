"""Times in whole picoseconds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.errors import UserError
from plora.sim.system.clock import LONGEST_PS, duration_ps, durations_ps


@given(st.lists(st.floats(0, 1e12), max_size=8), st.floats(1e-3, 1e6))
def test_many_durations_are_the_same_as_one_by_one(amounts: list[float], unit: float) -> None:
    assert durations_ps(amounts, unit).tolist() == [duration_ps(amount, unit) for amount in amounts]


@pytest.mark.parametrize("amount", [LONGEST_PS * 1.001, 1e300, math.inf, math.nan])
def test_a_time_that_64_bits_could_not_add_up_is_refused(amount: float) -> None:
    assert duration_ps(LONGEST_PS, 1.0) == durations_ps([LONGEST_PS], 1.0)[0] == LONGEST_PS
    with pytest.raises(UserError, match="a single transfer or product takes"):
        duration_ps(amount, 1.0)
    with pytest.raises(UserError, match="a single transfer or product takes"):
        durations_ps(np.array([0.0, amount]), 1.0)
