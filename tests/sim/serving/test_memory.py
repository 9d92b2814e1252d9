from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.errors import UserError
from plora.sim.serving.memory import AdapterCache, Blocks


def test_blocks_are_counted_and_never_overdrawn() -> None:
    blocks = Blocks(16, 10)
    blocks.take(blocks.of(33))
    assert (blocks.used, blocks.free) == (3, 7)
    with pytest.raises(AssertionError, match="8 KV blocks taken, 7 free"):
        blocks.take(8)
    blocks.give(3)
    assert (blocks.used, blocks.peak) == (0, 3)
    with pytest.raises(AssertionError, match="1 KV blocks returned, 0 in use"):
        blocks.give(1)


@given(st.lists(st.integers(2, 60), min_size=1, max_size=6), st.integers(0, 12), st.integers(1, 40), st.integers(1, 8))
def test_steps_until_full_is_the_last_step_that_fits(contexts: list[int], spare: int, most: int, size: int) -> None:
    held = sum(-(-(c - 1) // size) for c in contexts)
    blocks = Blocks(size, held + spare, used=held)
    able = blocks.steps_until_full(np.array(contexts), most)

    def needed(steps: int) -> int:
        return sum(-(-(c - 1 + steps) // size) for c in contexts) - held

    assert 0 <= able <= most
    assert needed(able) <= spare
    assert able == most or needed(able + 1) > spare


def test_unlimited_blocks_never_run_out() -> None:
    assert Blocks(16, None).steps_until_full(np.array([10**9]), 500) == 500


def cache(capacity: int) -> AdapterCache:
    return AdapterCache(np.array([100.0, 200.0, 300.0]), Blocks(16, capacity), 100.0)


def test_adapters_are_fetched_once_while_they_are_used_or_idle() -> None:
    held = cache(20)
    assert held.acquire(1, 0) == 200
    assert held.acquire(1, 0) == 0
    held.release(1)
    held.release(1)
    assert held.holds(1)
    assert held.acquire(1, 0) == 0
    assert held.blocks.reserved == 2


def test_idle_adapters_leave_in_order_of_last_use_and_used_ones_never() -> None:
    held = cache(6)
    for adapter in (0, 1):
        held.acquire(adapter, 0)
        held.release(adapter)
    assert held.can_hold(2, 3)
    assert held.acquire(2, 2) == 300
    assert (held.holds(0), held.holds(1), held.evictions) == (False, False, 2)
    assert not held.can_hold(1, 2)
    assert held.blocks.free == 3


def test_releasing_what_was_not_acquired_is_refused() -> None:
    with pytest.raises(UserError, match="adapter 1 released without a request"):
        cache(5).release(1)
