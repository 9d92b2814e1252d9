"""The stream queue: order, throughput, full and empty, and no path through it."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from amaranth.hdl import Module, Signal, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.rtl import queue
from plora.hw.rtl.queue import StreamQueue
from tests.hw.rtl.core.bench import drain, feed, refused, simulate
from tests.hw.rtl.formal import Assert, Assume, Elaborated, Proof, free_inputs, hold

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


@pytest.mark.parametrize("depth", [2, 3])
def test_no_output_follows_an_input_within_the_cycle(depth: int) -> None:
    dut = StreamQueue(8, depth)

    def shown(ctx: Any) -> tuple[int, ...]:
        return (ctx.get(dut.input.ready), ctx.get(dut.output.valid), ctx.get(dut.output.payload))

    async def bench(ctx: Any) -> None:
        for held in range(depth + 1):
            before = shown(ctx)
            for valid, ready in ((0, 0), (0, 1), (1, 0), (1, 1)):
                ctx.set(dut.input.valid, valid)
                ctx.set(dut.input.payload, 7 + held)
                ctx.set(dut.output.ready, ready)
                assert shown(ctx) == before
            ctx.set(dut.output.ready, 0)
            await ctx.tick()

    simulate(dut, bench)


def queue_properties(source: ModuleType, depth: int) -> tuple[Module, list[Any]]:
    """What was put comes out, all of it, in order, and nothing else."""
    m = Module()
    dut = source.StreamQueue(4, depth)
    m.submodules.dut = Elaborated(dut)
    hold(m, Assume, dut.input.valid, dut.input.ready, dut.input.payload)
    hold(m, Assert, dut.output.valid, dut.output.ready, dut.output.payload)
    # What is inside, oldest first.
    entries = [Signal(4, name=f"entry_{place}") for place in range(depth)]
    count, left = Signal(range(depth + 1)), Signal(range(depth + 1))
    put, take = dut.input.valid & dut.input.ready, dut.output.valid & dut.output.ready
    m.d.comb += left.eq(count - take)
    with m.If(take):
        m.d.sync += [entry.eq(after) for entry, after in pairwise(entries)]
    for place, entry in enumerate(entries):
        with m.If(put & (left == place)):
            m.d.sync += entry.eq(dut.input.payload)
    m.d.sync += count.eq(left + put)
    m.d.comb += [
        Assert(count <= depth),
        Assert(dut.level == count),
        Assert(dut.output.valid == (count != 0)),
        Assert((count == 0) | (dut.output.payload == entries[0])),
        Assert(dut.input.ready == (count != depth)),
    ]
    if depth == 2:
        m.d.comb += Assert((count != 2) | (Value.cast(dut._second) == entries[1]))
    return m, free_inputs(dut)


PROOF = Proof(
    partial(queue_properties, depth=2),
    queue,
    {
        "the second entry lost": ("self._first.eq(Mux(behind, following, entry))", "self._first.eq(entry)"),
        "one entry too many": ("self.input.ready.eq(self.level != self._depth)", "self.input.ready.eq(1)"),
        "the second overwritten": ("with m.If(self.input.ready):", "with m.If(1):"),
    },
)


def test_two_entries_are_proved(tmp_path: Path) -> None:
    PROOF.prove(tmp_path)


@pytest.mark.parametrize("bug", PROOF.bugs)
def test_a_seeded_bug_is_found(bug: str, tmp_path: Path) -> None:
    PROOF.notices(bug, tmp_path)


DEEPER = Proof(
    partial(queue_properties, depth=3),
    queue,
    {
        "an entry put behind none": ("put & ~(advances & ~behind)", "put"),
        "none taken from behind": ("take & behind)", "0)"),
    },
    search=8,
)


@pytest.mark.parametrize("bug", DEEPER.bugs)
def test_a_seeded_bug_of_a_deeper_queue_is_found(bug: str, tmp_path: Path) -> None:
    DEEPER.notices(bug, tmp_path)
