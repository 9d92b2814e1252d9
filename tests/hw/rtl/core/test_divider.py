"""Quotients and remainders, and the cycles they take."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plora.hw.rtl.core.divider import SequentialDivider
from tests.hw.rtl.core.bench import refused, simulate

DIVIDEND_BITS, DIVISOR_BITS = 10, 7


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(0, 1023), st.integers(1, 127)), min_size=1, max_size=20))
@example([(1023, 1), (1023, 127), (0, 5), (126, 127), (127, 127), (508, 127)])
def test_quotient_and_remainder_in_a_cycle_a_bit(pairs: list[tuple[int, int]]) -> None:
    dut = SequentialDivider(DIVIDEND_BITS, DIVISOR_BITS)

    async def bench(ctx: Any) -> None:
        for dividend, divisor in pairs:
            ctx.set(dut.dividend, dividend)
            ctx.set(dut.divisor, divisor)
            ctx.set(dut.start, 1)
            await ctx.tick()
            ctx.set(dut.start, 0)
            ctx.set(dut.dividend, 0)
            for _ in range(DIVIDEND_BITS):
                assert not ctx.get(dut.done)
                await ctx.tick()
            assert ctx.get(dut.done)
            assert (ctx.get(dut.quotient), ctx.get(dut.remainder)) == divmod(dividend, divisor)

    simulate(dut, bench)


@pytest.mark.parametrize("bits", [(0, 3), (3, 0)])
def test_widths_are_at_least_one(bits: tuple[int, int]) -> None:
    refused("widths must be at least 1", lambda: SequentialDivider(*bits))
