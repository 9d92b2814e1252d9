"""Interrupts: masks and pending bits of the vectors, and completions gathered for one message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import Descriptor
from plora.hw.defs.registers import COALESCE_TICK, PENDING_BASE, global_offset, queue_offset, vector_offset
from tests.hw.rtl.front.bench import DeviceBench, Ring

PROMPT = 200
"""Cycles in which one descriptor is completed with ease."""
MESSAGE = [(0xFEE0_0000_0000 + vector, 0x40 + vector) for vector in range(3)]


@pytest.fixture(scope="module")
def shared() -> DeviceBench:
    return DeviceBench(replace(preset("tiny"), queues=3))


@pytest.fixture
def bench(shared: DeviceBench) -> DeviceBench:
    shared.start()
    return shared


async def complete(ctx: Any, ring: Ring, count: int = 1) -> None:
    numbers = [ring.post(Descriptor()) for _ in range(count)]
    await ring.ring(ctx)
    for number in numbers:
        await ring.wait(ctx, number, PROMPT)
    await ctx.tick().repeat(40)


async def mask(ctx: Any, bench: DeviceBench, vector: int, masked: int) -> None:
    await bench.mmio.write(ctx, vector_offset(vector, "MASK"), masked)


async def pending(ctx: Any, bench: DeviceBench) -> int:
    return await bench.mmio.read(ctx, PENDING_BASE)


def test_a_masked_vector_stays_pending_and_is_sent_once_when_the_mask_falls(bench: DeviceBench) -> None:
    masked, open_ = bench.queue(0), bench.queue(1)

    async def host(ctx: Any) -> None:
        for ring in (masked, open_):
            await ring.set_up(ctx, interrupt=True)
        await mask(ctx, bench, 0, 1)
        await complete(ctx, masked, 2)
        await complete(ctx, open_)
        assert bench.interrupts.seen == [MESSAGE[1]]
        assert await pending(ctx, bench) == 1
        await mask(ctx, bench, 0, 0)
        await ctx.tick().repeat(20)
        assert bench.interrupts.seen == [MESSAGE[1], MESSAGE[0]]
        assert await pending(ctx, bench) == 0

    bench.go(host)


@pytest.mark.parametrize("setting", [0, 2, 3], ids=["not enabled", "not enabled and masked", "all masked"])
def test_nothing_is_sent_while_messages_are_off_and_nothing_is_lost(bench: DeviceBench, setting: int) -> None:
    rings = [bench.queue(q) for q in range(3)]

    async def host(ctx: Any) -> None:
        for ring in rings:
            await ring.set_up(ctx, interrupt=True)
        await bench.mmio.write(ctx, global_offset("MSIX"), setting)
        for ring in rings[:2]:
            await complete(ctx, ring)
        assert not bench.interrupts.seen
        assert await pending(ctx, bench) == 3
        await bench.mmio.write(ctx, global_offset("MSIX"), 1)
        await ctx.tick().repeat(30)
        assert sorted(bench.interrupts.seen) == MESSAGE[:2]
        assert await pending(ctx, bench) == 0

    bench.go(host)


@pytest.mark.parametrize("delay", range(1, 13))
def test_a_vector_masked_while_its_message_is_being_chosen_is_sent_or_pending_never_both(
    bench: DeviceBench, delay: int
) -> None:
    ring = bench.queue(0)

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx, interrupt=True)
        number = ring.post(Descriptor())
        await ring.ring(ctx)
        await ring.wait(ctx, number, PROMPT)
        await ctx.tick().repeat(delay)
        await mask(ctx, bench, 0, 1)
        await ctx.tick().repeat(30)
        assert len(bench.interrupts.seen) + await pending(ctx, bench) == 1

    bench.go(host)


def test_queues_may_share_a_vector_and_one_that_the_device_lacks_sends_nothing(bench: DeviceBench) -> None:
    rings = [bench.queue(q) for q in range(3)]

    async def host(ctx: Any) -> None:
        for ring, vector in zip(rings, (2, 2, 200), strict=True):
            await ring.set_up(ctx, enable=False)
            await ring.put(ctx, "VECTOR", vector)
            await ring.control(ctx, enable=True, interrupt=True)
        await rings[2].set_up_vector(ctx)
        for ring in rings:
            await complete(ctx, ring)
        assert await pending(ctx, bench) == 0

    bench.go(host)
    assert bench.interrupts.seen == [MESSAGE[2], MESSAGE[2]]


def test_completions_are_gathered_by_count(bench: DeviceBench) -> None:
    ring = bench.queue(0, depth=16, coalesce=3, coalesce_cycles=1 << 20)
    other = bench.queue(1)

    async def host(ctx: Any) -> None:
        for one in (ring, other):
            await one.set_up(ctx, interrupt=True)
        await complete(ctx, ring, 2)
        await complete(ctx, other)
        assert bench.interrupts.seen == [MESSAGE[1]]
        await complete(ctx, ring, 1)
        assert bench.interrupts.seen[1:] == [MESSAGE[0]]
        await complete(ctx, ring, 7)
        assert bench.interrupts.seen[1:] == [MESSAGE[0]] * 3

    bench.go(host)


def test_the_first_completion_waits_no_longer_than_its_time(bench: DeviceBench) -> None:
    wait = 5 * COALESCE_TICK
    ring = bench.queue(0, depth=8, coalesce=8, coalesce_cycles=wait)
    gap: list[int] = []

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx, interrupt=True)
        for _ in range(2):
            seen = len(bench.interrupts.seen)
            number = ring.post(Descriptor())
            await ring.ring(ctx)
            await ring.wait(ctx, number, PROMPT)
            begun = bench.core.cycle
            # A second one does not begin the time anew.
            await ctx.tick().repeat(wait // 2)
            ring.post(Descriptor())
            await ring.ring(ctx)
            while len(bench.interrupts.seen) == seen:
                await ctx.tick()
            gap.append(bench.core.cycle - begun)
            await ctx.tick().repeat(2 * wait)
            assert len(bench.interrupts.seen) == seen + 1

    bench.go(host)
    assert all(wait - 10 <= cycles <= wait + COALESCE_TICK + 30 for cycles in gap), gap


def test_completions_that_the_host_took_itself_need_no_message(bench: DeviceBench) -> None:
    ring = bench.queue(0, depth=8, coalesce=3, coalesce_cycles=3 * COALESCE_TICK)

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx, interrupt=True)
        await complete(ctx, ring, 2)
        await ring.take(ctx, 2)
        await ctx.tick().repeat(8 * COALESCE_TICK)
        assert not bench.interrupts.seen
        # Two taken, one left: that one is still announced.
        await complete(ctx, ring, 2)
        await ring.take(ctx, 1)
        await ctx.tick().repeat(8 * COALESCE_TICK)
        assert bench.interrupts.seen == [MESSAGE[0]]

    bench.go(host)


def test_disabling_forgets_what_was_gathered(bench: DeviceBench) -> None:
    ring = bench.queue(0, depth=8, coalesce=2, coalesce_cycles=3 * COALESCE_TICK)

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx, interrupt=True)
        await complete(ctx, ring)
        await ring.control(ctx, enable=False, interrupt=True)
        await ctx.tick().repeat(8 * COALESCE_TICK)
        assert not bench.interrupts.seen
        ring.first_pass += 1
        await bench.mmio.write(ctx, queue_offset(0, "PASS"), ring.first_pass)
        ring.posted = 0
        await ring.control(ctx, enable=True, interrupt=True)
        await complete(ctx, ring)
        assert not bench.interrupts.seen
        await complete(ctx, ring)
        assert bench.interrupts.seen == [MESSAGE[0]]

    bench.go(host)
