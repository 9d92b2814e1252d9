"""The sequential multiplier."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.rtl.core.multiplier import SequentialMultiplier, multiply_steps
from tests.hw.rtl.core.bench import refused, simulate

FACTOR = st.one_of(st.integers(0, (1 << 20) - 1), st.sampled_from([0, 1, 2, 3, (1 << 20) - 1, 1 << 19]))


@settings(max_examples=10)
@given(st.lists(st.tuples(FACTOR, FACTOR), min_size=1, max_size=10))
def test_products_are_exact_and_on_time(factors: list[tuple[int, int]]) -> None:
    dut = SequentialMultiplier(20)

    async def bench(ctx: Any) -> None:
        for a, b in factors:
            ctx.set(dut.a, a)
            ctx.set(dut.b, b)
            ctx.set(dut.start, 1)
            await ctx.tick()
            ctx.set(dut.start, 0)
            ctx.set(dut.b, ~b & 0xFFFFF)  # taken at the start
            for _ in range(multiply_steps(20)):
                assert not ctx.get(dut.done)
                await ctx.tick()
            assert ctx.get(dut.done)
            assert ctx.get(dut.product) == a * b

    simulate(dut, bench)


@pytest.mark.parametrize("width", [0, 3])
def test_an_odd_or_empty_width_is_refused(width: int) -> None:
    refused(f"not {width}", lambda: SequentialMultiplier(width))
