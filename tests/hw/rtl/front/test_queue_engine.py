"""The queue engine in the device: rings, valid words, doorbells, chains, full rings, errors, disabling.

A scripted core stands in for the real one. Every test also fails if the device reads anything but
line 0 of a submission slot or writes anything but a completion line, and if an AXI rule is broken.
"""

from __future__ import annotations

import random
from itertools import groupby, pairwise
from typing import Any

import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import Descriptor
from plora.hw.defs.queue import Completion, submission_line, valid_word
from plora.hw.defs.registers import MAX_BACKOFF_LOG2, global_offset
from plora.hw.defs.status import Status
from tests.hw.rtl.front.bench import LINE, CoreModel, DeviceBench, Fetched, Outcome, Ring

TINY = preset("tiny")
NEVER = 0xFFFF_FFFF
PROMPT = 150
"""Cycles in which anything that nothing holds up is done."""


@pytest.fixture(scope="module")
def shared() -> DeviceBench:
    return DeviceBench(TINY)


@pytest.fixture
def bench(shared: DeviceBench) -> DeviceBench:
    shared.start()
    return shared


def numbered(number: int, **fields: int) -> Descriptor:
    return Descriptor(**{"device_rows": number, **fields})


def numbers(core: CoreModel, queue: int | None = None) -> list[int]:
    return [f.descriptor.device_rows for f in core.seen if queue is None or f.queue == queue]


async def idle(ctx: Any, cycles: int) -> None:
    if cycles:
        await ctx.tick().repeat(cycles)


async def set_global(bench: DeviceBench, ctx: Any, name: str, value: int) -> None:
    await bench.mmio.write(ctx, global_offset(name), value)


# ---- the way of one descriptor ----------------------------------------------------------------


def test_descriptor_reaches_the_core_with_what_its_queue_allows(bench: DeviceBench) -> None:
    ring = bench.queue(1, submission_log2=12, result_log2=13, depth=2)
    bench.only_lines_of(ring)
    d = Descriptor(
        type=1, op=5, dtype=6, source=2, keep=1, acc_in=1, acc_out=1, transpose=1, reserved=10,
        device_address=0xFEDC_BA98_7654_3210, device_bytes=0xABCDE, device_rows=0x12345,
        device_columns=0x54321, gpu_bytes=0xFFFFF, gpu_rows=1, gpu_columns=0x80000,
    )  # fmt: skip

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx)
        ring.post(d)
        await ring.ring(ctx)
        await ring.wait(ctx, 0, PROMPT)

    bench.go(host)
    (seen,) = bench.core.seen
    assert seen == Fetched(
        descriptor=d,
        queue=1,
        first=1,
        verdict=0,
        operand_address=(ring.submission_base + TINY.stripe_bytes) // LINE,
        result_address=(ring.result_base + LINE) // LINE,
        base=ring.base,
        limit=ring.limit,
        submission_slot_log2=12,
        result_slot_log2=13,
        cycle=seen.cycle,
    )


def test_completion_line_says_what_the_core_reports(bench: DeviceBench) -> None:
    ring = bench.queue()
    bench.only_lines_of(ring)
    bench.hdm.fill(0xA5)
    outcome = Outcome(status=Status.SLOT_OVERFLOW, numeric=3, result_bytes=0x89ABCDEF, cycles=0xFEDCBA98)
    bench.core.judge = lambda fetched: outcome
    d = numbered(77, device_address=1 << 63)

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx)
        ring.post(d)
        await ring.ring(ctx)
        await ring.wait(ctx, 0, PROMPT)
        await idle(ctx, 20)
        assert await ring.get(ctx, "QERRORS") == 1
        assert await bench.mmio.global_(ctx, "DESCRIPTORS") == 1
        assert await bench.mmio.global_(ctx, "ERRORS") == 1

    bench.go(host)
    expected = Completion(
        status=Status.SLOT_OVERFLOW,
        numeric=3,
        result_bytes=0x89ABCDEF,
        cycles=0xFEDCBA98,
        descriptor=d,
        valid=valid_word(ring.first_pass),
    )
    # Every byte of the line is the device's: what belongs to no field is zero.
    assert bench.hdm.read(ring.result_slot(0), LINE) == expected.pack()
    assert bench.hdm.read(ring.result_slot(0) + LINE, LINE) == b"\xa5" * LINE


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("first_pass", [0, 0xFF_FFFF])
def test_ring_wraps_exactly_at_its_depth_and_the_pass_grows_there(
    bench: DeviceBench, depth: int, first_pass: int
) -> None:
    ring = bench.queue(depth=depth, first_pass=first_pass)
    bench.only_lines_of(ring)
    total = 3 * depth + 1

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx)
        for number in range(total):
            ring.post(numbered(number))
            await ring.ring(ctx)
            completion = await ring.wait(ctx, number, PROMPT)
            assert completion.descriptor.device_rows == number
            await ring.take(ctx)
        assert await ring.get(ctx, "SQ_HEAD") == total
        assert await ring.get(ctx, "CQ_TAIL") == total
        assert await ring.get(ctx, "CQ_HEAD") == total
        assert await ring.get(ctx, "QERRORS") == 0

    bench.go(host)
    assert numbers(bench.core) == list(range(total))
    for number, seen in enumerate(bench.core.seen):
        assert seen.operand_address == (ring.submission_slot(number) + TINY.stripe_bytes) // LINE
        assert seen.result_address == ring.result_slot(number) // LINE + 1


# ---- valid words and doorbells -------------------------------------------------------------------


def stale(kind: str, ring: Ring) -> bytes:
    other_pass = {"previous pass": ring.first_pass - 1, "next pass": ring.first_pass + 1}
    if kind in other_pass:
        return submission_line(numbered(99), other_pass[kind])
    if kind == "pass without tag":
        return submission_line(numbered(99), ring.first_pass)[:63] + b"\0"
    if kind == "right words at the wrong end":
        return submission_line(numbered(99), ring.first_pass)[60:] + bytes(60)
    return bytes([int(kind, 16)]) * LINE


@pytest.mark.parametrize(
    "kind",
    ["0x00", "0xFF", "0xA5", "0x5C", "previous pass", "next pass", "pass without tag", "right words at the wrong end"],
)
def test_stale_contents_are_never_taken_for_a_descriptor(bench: DeviceBench, kind: str) -> None:
    ring = bench.queue()
    bench.only_lines_of(ring)
    for slot in range(ring.depth):
        bench.hdm.write(ring.submission_slot(slot), stale(kind, ring))

    async def host(ctx: Any) -> None:
        await set_global(bench, ctx, "POLL_INTERVAL", 1)
        await ring.set_up(ctx)
        for _ in range(5):
            await ring.ring(ctx)
            await idle(ctx, 30)
        assert not bench.core.seen
        ring.post(numbered(1))
        await ring.wait(ctx, 0, PROMPT)

    bench.go(host)
    assert numbers(bench.core) == [1]
    # It did look, and not only once.
    looked = sum(len(memory.reads) for memory in bench.hdm.channels)
    assert looked > 5


def test_a_pass_that_was_executed_is_not_executed_again(bench: DeviceBench) -> None:
    ring = bench.queue(depth=2)

    async def host(ctx: Any) -> None:
        await set_global(bench, ctx, "POLL_INTERVAL", 1)
        await ring.set_up(ctx)
        for number in range(2):
            ring.post(numbered(number))
        await ring.ring(ctx)
        await ring.wait(ctx, 1, PROMPT)
        await ring.take(ctx, 2)
        for _ in range(5):
            await ring.ring(ctx)
            await idle(ctx, 30)

    bench.go(host)
    assert numbers(bench.core) == [0, 1]


def test_valid_word_that_lands_before_the_doorbell_after_it_or_without_one(bench: DeviceBench) -> None:
    ring = bench.queue(depth=4)

    async def host(ctx: Any) -> None:
        await set_global(bench, ctx, "POLL_INTERVAL", 4)
        await ring.set_up(ctx)
        await ring.ring(ctx)  # early
        await idle(ctx, 40)
        ring.post(numbered(0))
        await ring.wait(ctx, 0, PROMPT)
        ring.post(numbered(1))
        for _ in range(4):  # duplicates
            await ring.ring(ctx)
        await ring.wait(ctx, 1, PROMPT)
        await ring.put(ctx, "DOORBELL", 0xFFFF_FFFF)  # absurd, and late
        await ring.put(ctx, "DOORBELL", 0)
        await idle(ctx, 1000)
        ring.post(numbered(2))  # none at all
        await ring.wait(ctx, 2, (4 << MAX_BACKOFF_LOG2) + PROMPT)

    bench.go(host)
    assert numbers(bench.core) == [0, 1, 2]


def test_doorbell_in_the_cycle_in_which_the_queue_goes_idle_is_not_lost(bench: DeviceBench) -> None:
    ring = bench.queue(depth=4)
    offsets = range(24)

    async def host(ctx: Any) -> None:
        # No polling: only the doorbell can make the device look.
        await set_global(bench, ctx, "POLL_INTERVAL", NEVER)
        await ring.set_up(ctx)
        for offset in offsets:
            await idle(ctx, 30)
            looks = sum(len(memory.reads) for memory in bench.hdm.channels)
            await ring.ring(ctx)
            # The look that this doorbell starts finds nothing; the second doorbell comes at any moment of it.
            await idle(ctx, offset)
            missed = sum(len(memory.reads) for memory in bench.hdm.channels) > looks
            number = ring.post(numbered(offset))
            await ring.ring(ctx)
            await ring.wait(ctx, number, PROMPT)
            await ring.take(ctx)
            outcomes.add(missed)

    outcomes: set[bool] = set()
    bench.go(host)
    assert numbers(bench.core) == list(offsets)
    assert outcomes == {True, False}, "the offsets cover looks before and after the post"


def test_looks_at_an_empty_slot_grow_rarer_and_a_doorbell_resets_that(bench: DeviceBench) -> None:
    ring = bench.queue()
    looks: list[int] = []

    async def host(ctx: Any) -> None:
        await set_global(bench, ctx, "POLL_INTERVAL", 4)
        await ring.set_up(ctx)
        await idle(ctx, 1600)
        looks.extend(cycle for memory in bench.hdm.channels for cycle, _ in memory.reads)

    bench.go(host)
    gaps = [later - earlier for earlier, later in pairwise(looks)]
    assert gaps[-1] == 4 << MAX_BACKOFF_LOG2
    assert len(looks) < 14


# ---- room in the completion ring ----------------------------------------------------------------


def test_full_completion_ring_holds_the_device_back_and_is_not_overwritten(bench: DeviceBench) -> None:
    ring = bench.queue(depth=2)

    async def host(ctx: Any) -> None:
        await set_global(bench, ctx, "POLL_INTERVAL", 1)
        await ring.set_up(ctx)
        for number in range(2):
            ring.post(numbered(number))
        await ring.ring(ctx)
        await ring.wait(ctx, 1, PROMPT)
        # A hurried host posts over slots whose completions it has not taken.
        for number in range(2, 4):
            ring.post(numbered(number))
        await ring.ring(ctx)
        await idle(ctx, 500)
        assert numbers(bench.core) == [0, 1]
        assert ring.completion(0) is not None and ring.completion(1) is not None
        await ring.take(ctx)
        await ring.wait(ctx, 2, PROMPT)
        await idle(ctx, 500)
        assert numbers(bench.core) == [0, 1, 2]
        assert ring.completion(1) is not None
        await ring.take(ctx)
        await ring.wait(ctx, 3, PROMPT)

    bench.go(host)
    assert numbers(bench.core) == [0, 1, 2, 3]


def test_cq_head_alone_wakes_a_queue_that_waited_for_room(bench: DeviceBench) -> None:
    ring = bench.queue(depth=2)

    async def host(ctx: Any) -> None:
        await set_global(bench, ctx, "POLL_INTERVAL", NEVER)
        await ring.set_up(ctx)
        for number in range(4):
            ring.post(numbered(number))
            if number == 1:
                await ring.ring(ctx)
                await ring.wait(ctx, 1, PROMPT)
        await ring.ring(ctx)
        await idle(ctx, 100)
        await ring.take(ctx, 2)
        await ring.wait(ctx, 3, PROMPT)

    bench.go(host)


def test_absurd_cq_heads_are_ignored_and_counted(bench: DeviceBench) -> None:
    ring = bench.queue(depth=4)

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx)
        for number in range(3):
            ring.post(numbered(number))
        await ring.ring(ctx)
        await ring.wait(ctx, 2, PROMPT)
        await idle(ctx, 20)
        await ring.put(ctx, "CQ_HEAD", 2)
        for errors, absurd in enumerate([1, 0, 4, 5, 0x8000, 0xFFFF, 0x1_0002, 0xFFFF_0003, NEVER], start=1):
            await ring.put(ctx, "CQ_HEAD", absurd)
            assert await ring.get(ctx, "CQ_HEAD") == 2, hex(absurd)
            assert await ring.get(ctx, "QERRORS") == errors
        await ring.put(ctx, "CQ_HEAD", 2)
        await ring.put(ctx, "CQ_HEAD", 3)
        assert await ring.get(ctx, "CQ_HEAD") == 3
        ring.post(numbered(3))
        await ring.ring(ctx)
        await ring.wait(ctx, 3, PROMPT)

    bench.go(host)


# ---- completions and interrupts -------------------------------------------------------------------


def test_completion_counts_only_when_memory_has_acknowledged_it(bench: DeviceBench) -> None:
    ring = bench.queue()

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx, interrupt=True)
        for memory in bench.hdm.channels:
            memory.hold_acks = True
        ring.post(numbered(0))
        await ring.ring(ctx)
        await idle(ctx, PROMPT)
        assert bench.core.reported
        assert await ring.get(ctx, "CQ_TAIL") == 0
        assert await ring.get(ctx, "QSTATUS") == 3
        assert await bench.mmio.global_(ctx, "STATUS") == 1
        assert not bench.interrupts.seen
        for memory in bench.hdm.channels:
            memory.hold_acks = False
        await idle(ctx, 20)
        assert await ring.get(ctx, "CQ_TAIL") == 1
        assert await ring.get(ctx, "QSTATUS") == 1
        assert await bench.mmio.global_(ctx, "STATUS") == 0

    bench.go(host)
    assert bench.interrupts.seen == [(0xFEE0_0000_0000, 0x40)]


def test_interrupt_comes_after_its_completion_and_only_where_enabled(bench: DeviceBench) -> None:
    quiet, loud = bench.queue(0), bench.queue(1)

    async def host(ctx: Any) -> None:
        await quiet.set_up(ctx)
        await loud.set_up(ctx, interrupt=True)
        for ring in (quiet, loud):
            ring.post(numbered(ring.queue))
            await ring.ring(ctx)
        while not bench.interrupts.seen:
            await ctx.tick()
        assert loud.completion(0) is not None
        await quiet.wait(ctx, 0, PROMPT)
        await idle(ctx, 50)
        # Switched off and on while the queue runs.
        await loud.control(ctx, enable=True, interrupt=False)
        loud.post(numbered(2))
        await loud.ring(ctx)
        await loud.wait(ctx, 1, PROMPT)
        await idle(ctx, 50)

    bench.go(host)
    assert bench.interrupts.seen == [(0xFEE0_0000_0001, 0x41)]


def test_interrupts_that_nobody_takes_hold_nothing_back_and_fall_together(bench: DeviceBench) -> None:
    ring = bench.queue(depth=4)

    async def host(ctx: Any) -> None:
        bench.interrupts.held = True
        await ring.set_up(ctx, interrupt=True)
        for number in range(8):
            ring.post(numbered(number))
            await ring.ring(ctx)
            await ring.wait(ctx, number, PROMPT)
            await ring.take(ctx)
        bench.interrupts.held = False
        await idle(ctx, 50)

    bench.go(host)
    # One was on offer when the sink stopped, one stands for all that came later.
    assert len(bench.interrupts.seen) == 2


# ---- several queues ---------------------------------------------------------------------------------


def test_queues_take_turns(bench: DeviceBench) -> None:
    first, second = bench.queue(0, depth=16), bench.queue(1, depth=16)
    # Both have posted everything before the core takes more than one.
    bench.core.delay, bench.core.capacity, bench.core.paused = 0, 1, True

    async def host(ctx: Any) -> None:
        for ring in (first, second):
            await ring.set_up(ctx)
            for number in range(16):
                ring.post(numbered(100 * ring.queue + number))
        await first.ring(ctx)
        await second.ring(ctx)
        await idle(ctx, 50)
        bench.core.paused = False
        await first.wait(ctx, 15, 1000)
        await second.wait(ctx, 15, 1000)

    bench.go(host)
    order = [seen.queue for seen in bench.core.seen]
    both = order[order.index(1) : len(order) - order[::-1].index(0)]
    # From the first of the second queue to the last of the first: never more than two of one in a row.
    assert len(both) > 8
    assert all(len(set(both[i : i + 3])) == 2 for i in range(len(both) - 2)), order


@pytest.mark.parametrize("weights", [(3, 1), (1, 4), (2, 3), (0, 0)])
def test_a_turn_is_as_long_as_the_weight_of_its_queue(bench: DeviceBench, weights: tuple[int, int]) -> None:
    """While both have descriptors, each is served its weight, then the other."""
    rings = [bench.queue(q, depth=16, weight=weight) for q, weight in enumerate(weights)]
    bench.core.paused = True

    async def host(ctx: Any) -> None:
        for ring in rings:
            await ring.set_up(ctx)
            for number in range(16):
                ring.post(numbered(number))
        for ring in rings:
            await ring.ring(ctx)
        await idle(ctx, 50)
        bench.core.paused = False
        for ring in rings:
            await ring.wait(ctx, 15, 2000)

    bench.go(host)
    order = [seen.queue for seen in bench.core.seen]
    assert sorted(order) == [0] * 16 + [1] * 16
    runs = [(queue, len(list(run))) for queue, run in groupby(order)]
    # Not the first turns, while the other queue had not been rung yet, nor what is left when one has ended.
    middle = runs[2 : next(i for i in range(len(runs)) if runs[i][0] == runs[-1][0] and i >= len(runs) - 3)]
    assert len(middle) >= 3, runs
    assert all(length == max(1, weights[queue]) for queue, length in middle), runs


@pytest.mark.parametrize(("latency", "per_descriptor"), [(1, 12), (60, 22)])
def test_posted_descriptors_are_read_ahead(bench: DeviceBench, latency: int, per_descriptor: int) -> None:
    """The rates of docs/architecture.md: four reads share one latency."""
    bench.start(latency=(latency, latency))
    ring = bench.queue(depth=16)
    bench.core.delay, bench.core.capacity = 0, 16
    bench.only_lines_of(ring)

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx)
        for number in range(16):
            ring.post(numbered(number))
        await ring.ring(ctx)
        await ring.wait(ctx, 15, 3000)

    bench.go(host)
    cycles = [seen.cycle for seen in bench.core.seen]
    assert numbers(bench.core) == list(range(16))
    # The first three turns of four reads each.
    assert (cycles[12] - cycles[0]) / 12 < per_descriptor + 1


# ---- chains -----------------------------------------------------------------------------------------


def test_a_chain_is_not_interleaved_with_other_queues(bench: DeviceBench) -> None:
    chained, other = bench.queue(0, depth=8), bench.queue(1, depth=8)

    async def host(ctx: Any) -> None:
        for ring in (chained, other):
            await ring.set_up(ctx)
        for number in range(8):
            other.post(numbered(100 + number))
            chained.post(numbered(number, chain=int(number % 4 != 3)))
        await other.ring(ctx)
        await chained.ring(ctx)
        await chained.wait(ctx, 7, 1000)
        await other.wait(ctx, 7, 1000)

    bench.go(host)
    order = numbers(bench.core)
    assert sorted(order) == [*range(8), *range(100, 108)]
    for start in (0, 4):
        place = order.index(start)
        assert order[place : place + 4] == list(range(start, start + 4)), order
    firsts = {seen.descriptor.device_rows: seen.first for seen in bench.core.seen}
    assert [firsts[n] for n in range(8)] == [1, 0, 0, 0, 1, 0, 0, 0]
    assert all(firsts[n] for n in range(100, 108))
    assert all(seen.verdict == Status.OK for seen in bench.core.seen)


def test_other_queues_wait_for_an_open_chain_until_its_time_is_over(bench: DeviceBench) -> None:
    chained, other = bench.queue(0, depth=8), bench.queue(1)
    timeout = 300

    async def host(ctx: Any) -> None:
        await set_global(bench, ctx, "CHAIN_TIMEOUT", timeout)
        for ring in (chained, other):
            await ring.set_up(ctx)
        chained.post(numbered(0, chain=1))
        await chained.ring(ctx)
        await chained.wait(ctx, 0, PROMPT)
        opened = bench.core.cycle
        other.post(numbered(100))
        await other.ring(ctx)
        await other.wait(ctx, 0, timeout + PROMPT)
        assert bench.core.seen[-1].cycle > opened + timeout / 2
        # The rest of the chain comes too late, and other queues are served in between.
        chained.post(numbered(1, chain=1))
        await chained.ring(ctx)
        await chained.wait(ctx, 1, PROMPT)
        other.post(numbered(101))
        await other.ring(ctx)
        await other.wait(ctx, 1, PROMPT)
        for number in (2, 3):
            chained.post(numbered(number, chain=int(number == 2)))
        # A new chain is a new beginning.
        chained.post(numbered(4, chain=1))
        chained.post(numbered(5))
        await chained.ring(ctx)
        await chained.wait(ctx, 5, PROMPT)

    bench.go(host)
    verdicts = {seen.descriptor.device_rows: Status(seen.verdict) for seen in bench.core.seen}
    assert verdicts == {
        0: Status.OK,
        100: Status.OK,
        1: Status.CHAIN_BROKEN,
        101: Status.OK,
        2: Status.CHAIN_ABORTED,
        3: Status.CHAIN_ABORTED,
        4: Status.OK,
        5: Status.OK,
    }
    firsts = {seen.descriptor.device_rows: seen.first for seen in bench.core.seen}
    assert firsts[4] == 1 and firsts[5] == 0


def test_a_chain_that_is_only_slow_is_kept(bench: DeviceBench) -> None:
    ring = bench.queue(depth=4)

    async def host(ctx: Any) -> None:
        await set_global(bench, ctx, "CHAIN_TIMEOUT", 400)
        await set_global(bench, ctx, "POLL_INTERVAL", 16)
        await ring.set_up(ctx)
        for number in range(6):
            ring.post(numbered(number, chain=int(number < 5)))
            await ring.wait(ctx, number, 1 << 11)
            await ring.take(ctx)
            await idle(ctx, 200)

    bench.go(host)
    assert [seen.verdict for seen in bench.core.seen] == [Status.OK] * 6


@pytest.mark.parametrize("poll_interval", [1, NEVER])
def test_the_last_look_at_a_chain_is_made_after_its_time(bench: DeviceBench, poll_interval: int) -> None:
    # Without doorbell and without polls the member is found, because it is there when time is up.
    ring = bench.queue(depth=4)

    async def host(ctx: Any) -> None:
        await set_global(bench, ctx, "CHAIN_TIMEOUT", 200)
        await set_global(bench, ctx, "POLL_INTERVAL", poll_interval)
        await ring.set_up(ctx)
        ring.post(numbered(0, chain=1))
        await ring.ring(ctx)
        await ring.wait(ctx, 0, PROMPT)
        await idle(ctx, 100)
        ring.post(numbered(1))
        await ring.wait(ctx, 1, 200 + PROMPT)

    bench.go(host)
    assert [seen.verdict for seen in bench.core.seen] == [Status.OK] * 2


def test_a_chain_without_room_in_its_ring_does_not_block_others(bench: DeviceBench) -> None:
    chained, other = bench.queue(0, depth=2), bench.queue(1)

    async def host(ctx: Any) -> None:
        await set_global(bench, ctx, "CHAIN_TIMEOUT", 100)
        for ring in (chained, other):
            await ring.set_up(ctx)
        for number in range(2):
            chained.post(numbered(number, chain=1))
        await chained.ring(ctx)
        await chained.wait(ctx, 1, PROMPT)
        other.post(numbered(100))
        await other.ring(ctx)
        await other.wait(ctx, 0, 100 + PROMPT)
        await chained.take(ctx, 2)
        chained.post(numbered(2))
        await chained.ring(ctx)
        await chained.wait(ctx, 2, PROMPT)

    bench.go(host)
    assert [seen.verdict for seen in bench.core.seen] == [0, 0, 0, Status.CHAIN_BROKEN]


def test_an_endless_chain_is_closed_at_its_limit_and_others_are_served(bench: DeviceBench) -> None:
    chained, other = bench.queue(0, depth=16), bench.queue(1)
    limit = 5

    async def host(ctx: Any) -> None:
        await set_global(bench, ctx, "CHAIN_LIMIT", limit)
        for ring in (chained, other):
            await ring.set_up(ctx)
        for number in range(12):
            chained.post(numbered(number, chain=int(number != 9)))
        other.post(numbered(100))
        await chained.ring(ctx)
        await other.ring(ctx)
        await chained.wait(ctx, 11, 1000)
        await other.wait(ctx, 0, 1000)

    bench.go(host)
    verdicts = [Status(seen.verdict).name for seen in bench.core.seen if seen.queue == 0]
    # Five run, the sixth is refused, the rest is dropped to the end of the chain; then a new one begins.
    assert verdicts == ["OK"] * 5 + ["CHAIN_BROKEN"] + ["CHAIN_ABORTED"] * 4 + ["OK"] * 2
    order = numbers(bench.core)
    assert order.index(100) < order.index(9)


def test_a_busy_core_does_not_use_up_the_time_of_a_chain(bench: DeviceBench) -> None:
    ring = bench.queue(depth=8)
    bench.core.capacity, bench.core.paused = 2, True

    async def host(ctx: Any) -> None:
        await set_global(bench, ctx, "CHAIN_TIMEOUT", 100)
        await ring.set_up(ctx)
        for number in range(6):
            ring.post(numbered(number, chain=int(number < 5)))
        await ring.ring(ctx)
        await idle(ctx, 1000)
        assert len(bench.core.seen) == 2
        bench.core.paused = False
        await ring.wait(ctx, 5, 500)

    bench.go(host)
    assert [seen.verdict for seen in bench.core.seen] == [Status.OK] * 6


# ---- errors of memory -------------------------------------------------------------------------------


def test_a_slot_that_cannot_be_read_completes_with_memory_error_and_the_next_runs(bench: DeviceBench) -> None:
    ring = bench.queue(depth=4)
    memory, local = bench.hdm.channel_line(ring.submission_slot(1))
    memory.read_errors.add(local)

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx)
        for number in range(3):
            ring.post(numbered(number, chain=int(number == 1)))
        await ring.ring(ctx)
        await ring.wait(ctx, 2, PROMPT)
        await idle(ctx, 20)
        assert await ring.get(ctx, "QERRORS") == 1

    bench.go(host)
    statuses = [ring.completion(number) for number in range(3)]
    assert [c.status if c else None for c in statuses] == [Status.OK, Status.MEMORY_ERROR, Status.OK]
    failed = bench.core.seen[1]
    assert failed.descriptor == Descriptor.unpack(bytes(26))
    assert failed.verdict == Status.MEMORY_ERROR
    # Its chain bit is unknown, so the next descriptor begins anew.
    assert bench.core.seen[2].first == 1


def test_a_completion_line_that_memory_refuses_is_counted(bench: DeviceBench) -> None:
    ring = bench.queue(depth=4)
    memory, local = bench.hdm.channel_line(ring.result_slot(0))
    memory.write_errors.add(local)

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx)
        for number in range(2):
            ring.post(numbered(number))
        await ring.ring(ctx)
        await ring.wait(ctx, 1, PROMPT)
        await idle(ctx, 20)
        assert await ring.get(ctx, "QERRORS") == 1
        assert await ring.get(ctx, "CQ_TAIL") == 2

    bench.go(host)


# ---- disabling --------------------------------------------------------------------------------------


def test_disabling_drops_the_work_under_way_and_waits_for_its_end(bench: DeviceBench) -> None:
    ring, other = bench.queue(0, depth=8), bench.queue(1)
    bench.core.capacity, bench.core.paused = 3, True

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx)
        await other.set_up(ctx)
        for number in range(6):
            ring.post(numbered(number))
        await ring.ring(ctx)
        await idle(ctx, PROMPT)
        fetched = await ring.get(ctx, "SQ_HEAD")
        await ring.control(ctx, enable=False)
        assert await ring.get(ctx, "QSTATUS") == 2, "disabled, work under way"
        await ring.control(ctx, enable=True)
        assert await ring.get(ctx, "QSTATUS") == 2, "enabled while work was under way"
        assert await ring.get(ctx, "QERRORS") == 1
        bench.core.paused = False
        await idle(ctx, 200)
        assert await ring.get(ctx, "QSTATUS") == 0
        assert len(bench.core.seen) == fetched < 6
        assert not any(memory.writes for memory in bench.hdm.channels), "a completion was written"
        other.post(numbered(100))
        await other.ring(ctx)
        await other.wait(ctx, 0, PROMPT)
        # Enabled again, it starts at slot 0 with the pass that its register says.
        ring.first_pass = 31
        await ring.put(ctx, "PASS", 31)
        await ring.control(ctx, enable=True)
        assert await ring.get(ctx, "QSTATUS") & 1
        assert [await ring.get(ctx, name) for name in ("SQ_HEAD", "CQ_TAIL", "CQ_HEAD")] == [0, 0, 0]
        ring.posted = 0
        ring.post(numbered(50))
        await ring.ring(ctx)
        await ring.wait(ctx, 0, PROMPT)
        await idle(ctx, 100)

    bench.go(host)
    assert numbers(bench.core, 0)[-1] == 50
    assert bench.core.seen[-1].result_address == ring.result_slot(0) // LINE + 1


@pytest.mark.parametrize("delay", range(0, 14, 2))
def test_reads_on_their_way_when_a_queue_is_disabled_come_to_nothing(bench: DeviceBench, delay: int) -> None:
    bench.start(latency=(30, 30))
    ring = bench.queue(depth=4)

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx)
        await idle(ctx, 60)
        for number in range(4):
            ring.post(numbered(number))
        await ring.ring(ctx)
        await idle(ctx, delay)
        await ring.control(ctx, enable=False)
        seen = len(bench.core.seen)
        for _ in range(100):
            if await ring.get(ctx, "QSTATUS") == 0:
                break
        else:
            raise AssertionError("never quiet")
        await idle(ctx, 100)
        # At most what was on its way into the core at that moment.
        assert len(bench.core.seen) <= seen + 1
        # The same memory with the same pass: a new start executes everything once.
        before = len(bench.core.seen)
        await ring.control(ctx, enable=True)
        await ring.wait(ctx, 3, 500)
        assert numbers(bench.core)[before:] == [0, 1, 2, 3]

    bench.go(host)


def test_disabling_a_queue_with_an_open_chain_frees_the_others(bench: DeviceBench) -> None:
    chained, other = bench.queue(0), bench.queue(1)

    async def host(ctx: Any) -> None:
        for ring in (chained, other):
            await ring.set_up(ctx)
        chained.post(numbered(0, chain=1))
        await chained.ring(ctx)
        await chained.wait(ctx, 0, PROMPT)
        other.post(numbered(100))
        await other.ring(ctx)
        await idle(ctx, 100)
        assert other.completion(0) is None
        await chained.control(ctx, enable=False)
        await other.wait(ctx, 0, PROMPT)
        assert bench.core.seen[-1].first == 1

    bench.go(host)


def test_doorbells_of_a_disabled_queue_do_nothing(bench: DeviceBench) -> None:
    ring = bench.queue()

    async def host(ctx: Any) -> None:
        await set_global(bench, ctx, "POLL_INTERVAL", 1)
        await ring.set_up(ctx, enable=False)
        ring.post(numbered(0))
        await ring.ring(ctx)
        await idle(ctx, 200)

    bench.go(host)
    assert not bench.core.seen
    assert not any(memory.reads for memory in bench.hdm.channels)


# ---- everything at once -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_order_of_events_each_descriptor_runs_once_in_ring_order(bench: DeviceBench, seed: int) -> None:
    rng = random.Random(seed)
    bench.start(
        seed=seed,
        stall=rng.choice([0.0, 0.3, 0.6]),
        latency=(1, rng.choice([1, 10, 60])),
        data_first=seed % 3 == 1,
        address_first=seed % 3 == 2,
    )
    rings = [
        bench.queue(q, depth=rng.randint(2, 5), submission_log2=rng.choice([11, 12]), first_pass=rng.getrandbits(24))
        for q in range(TINY.queues)
    ]
    bench.only_lines_of(*rings)
    bench.hdm.fill(rng.choice([0x00, 0xFF, 0xA5]))
    bench.core.delay, bench.core.capacity = rng.choice([0, 5, 40]), rng.choice([1, 2, 8])
    total = 20

    def host(ring: Ring) -> Any:
        own = random.Random(seed * 100 + ring.queue)

        async def run(ctx: Any) -> None:
            await set_global(bench, ctx, "POLL_INTERVAL", 4)
            await ring.set_up(ctx)
            completed = taken = 0
            while completed < total:
                if ring.posted < total and ring.posted - taken < ring.depth and own.random() < 0.2:
                    last = ring.posted == total - 1
                    ring.post(numbered(ring.posted, chain=int(not last and own.random() < 0.4)))
                completion = ring.completion(completed)
                if completion is not None and completed < ring.posted:
                    assert completion.descriptor.device_rows == completed
                    completed += 1
                dice = own.random()
                if dice < 0.05:
                    await ring.ring(ctx)
                elif dice < 0.1 and taken < completed and await ring.get(ctx, "CQ_TAIL") >= completed:
                    taken = completed
                    await ring.put(ctx, "CQ_HEAD", taken)
                await ctx.tick()

        return run

    bench.go(*(host(ring) for ring in rings), max_cycles=20_000)
    for ring in rings:
        assert numbers(bench.core, ring.queue) == list(range(total))
    assert all(seen.verdict == Status.OK for seen in bench.core.seen)
    # Chains were never interleaved.
    inside: int | None = None
    for seen in bench.core.seen:
        assert inside is None or seen.queue == inside
        assert seen.first == (inside is None)
        inside = seen.queue if seen.descriptor.chain else None
