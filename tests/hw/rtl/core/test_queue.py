"""The stream queue: order, throughput, full and empty."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.rtl.core.queue import StreamQueue
from tests.hw.rtl.core.bench import drain, feed, refused, simulate

STALLS = st.sampled_from([0.0, 0.3, 0.8])


@settings(max_examples=12)
@given(st.integers(2, 9), STALLS, STALLS, st.integers(0, 999))
def test_entries_leave_in_order_whatever_the_stalls(depth: int, put: float, take: float, seed: int) -> None:
    dut = StreamQueue(8, depth)
    rng = random.Random(seed)
    sent = [rng.randrange(256) for _ in range(60)]
    got: list[int] = []

    async def source(ctx: Any) -> None:
        await feed(ctx, dut.input, sent, random.Random(seed + 1), put)

    async def sink(ctx: Any) -> None:
        await drain(ctx, dut.output, got, len(sent), random.Random(seed + 2), take)
        assert ctx.get(dut.level) == 0

    simulate(dut, source, sink, deadline_cycles=3000)
    assert got == sent


@pytest.mark.parametrize("depth", [2, 3, 8])
def test_it_takes_and_gives_one_entry_in_every_cycle(depth: int) -> None:
    dut = StreamQueue(8, depth)
    got: list[int] = []
    cycles = 0

    async def source(ctx: Any) -> None:
        await feed(ctx, dut.input, range(40), random.Random())

    async def sink(ctx: Any) -> None:
        await drain(ctx, dut.output, got, 40, random.Random())

    async def clock(ctx: Any) -> None:
        nonlocal cycles
        while True:
            await ctx.tick()
            cycles += 1

    simulate(dut, source, sink, background=[clock])
    assert got == list(range(40))
    assert cycles <= 41


@pytest.mark.parametrize("depth", [2, 5])
def test_a_full_queue_takes_nothing_and_an_empty_one_gives_nothing(depth: int) -> None:
    dut = StreamQueue(8, depth)

    async def bench(ctx: Any) -> None:
        assert not ctx.get(dut.output.valid)
        ctx.set(dut.input.valid, 1)
        for value in range(depth):
            ctx.set(dut.input.payload, value)
            assert ctx.get(dut.input.ready)
            await ctx.tick()
        assert not ctx.get(dut.input.ready)
        assert ctx.get(dut.level) == depth
        ctx.set(dut.input.valid, 0)
        ctx.set(dut.output.ready, 1)
        for value in range(depth):
            assert ctx.get(dut.output.payload) == value
            await ctx.tick()
        assert not ctx.get(dut.output.valid)

    simulate(dut, bench)


def test_a_depth_below_two_is_refused() -> None:
    refused("depth must be at least 2, not 1", lambda: StreamQueue(8, 1))
