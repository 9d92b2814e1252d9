"""Operand loader and weight reader: what is asked for, where it goes, and never more than there is room for."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.rtl.core.bursts import burst_layout
from plora.hw.rtl.core.job import input_capacity, work_layout
from plora.hw.rtl.core.operand_loader import OperandLoader, issued_layout
from plora.hw.rtl.core.weight_reader import WeightReader, longest_burst, weights_layout
from tests.hw.rtl.core.bench import TINY, fields, simulate


@settings(max_examples=12)
@given(st.sampled_from([0.0, 0.5]), st.integers(0, 999))
def test_operands_get_successive_places_in_the_ring_and_sharers_that_of_the_last(stall: float, seed: int) -> None:
    dut = OperandLoader(TINY)
    rng = random.Random(seed)
    capacity = input_capacity(TINY)
    jobs = []
    for index in range(12):
        rows, row_stripes = rng.randint(1, 4), rng.randint(1, 4)
        while (rows + 1) // 2 * row_stripes > TINY.input_half_stripes:
            rows -= 1
        load = int(index == 0 or rng.random() < 0.7)
        jobs.append(
            {"load": load, "operand_address": 1000 * index + 60, "operand_stripes": rows * row_stripes,
             "row_stripes": row_stripes, "single": rows % 2, "pairs": (rows + 1) // 2}
        )  # fmt: skip
    placed: list[Any] = []
    bursts: list[Any] = []
    in_use: deque[int] = deque()  # stripes of each operand in the ring, as the gate frees them

    async def source(ctx: Any) -> None:
        for index, job in enumerate(jobs):
            while rng.random() < stall:
                await ctx.tick()
            ctx.set(dut.input.payload.work, work_layout(TINY).const(job))
            ctx.set(dut.input.payload.slot, index % 4)
            ctx.set(dut.input.valid, 1)
            await ctx.tick().until(dut.input.ready)
            ctx.set(dut.input.valid, 0)

    async def gate(ctx: Any) -> None:
        # Takes jobs and, some cycles later, starts them: that frees the operand before.
        random_gate = random.Random(seed + 1)
        waiting: deque[int] = deque()
        head = 0
        while len(placed) < len(jobs) or waiting:
            freed = 0
            if waiting and random_gate.random() < 0.2:
                waiting.popleft()
                if len(in_use) > 1:
                    freed = in_use.popleft()
            ready = random_gate.random() >= stall
            ctx.set(dut.freed, freed)
            ctx.set(dut.output.ready, ready)
            *_, valid, payload = await ctx.tick().sample(dut.output.valid, dut.output.payload)
            if valid and ready:
                job = jobs[len(placed)]
                placed.append(fields(payload, issued_layout(TINY)))
                if job["load"]:
                    space = job["pairs"] * job["row_stripes"]
                    in_use.append(space)
                    waiting.append(space)
                    assert sum(in_use) <= capacity, "the ring is overbooked"
                    assert payload.operand_base == head
                    assert payload.operand_space == space
                    placement = ctx.get(dut.placements[(len(placed) - 1) % 4])
                    assert (placement.base, placement.row_stripes) == (head, job["row_stripes"])
                    base, head = head, (head + space) % capacity
                else:
                    assert payload.operand_base == base
        ctx.set(dut.freed, 0)
        ctx.set(dut.output.ready, 0)

    async def sink(ctx: Any) -> None:
        random_sink = random.Random(seed + 2)
        while True:
            ready = random_sink.random() >= stall
            ctx.set(dut.bursts.ready, ready)
            *_, valid, burst = await ctx.tick().sample(dut.bursts.valid, dut.bursts.payload)
            if valid and ready:
                bursts.append(fields(burst, burst_layout(TINY)))

    async def settle(ctx: Any) -> None:
        while len(placed) < len(jobs):
            await ctx.tick()
        await ctx.tick().repeat(100)

    simulate(dut, source, gate, settle, background=[sink], deadline_cycles=2000)
    wanted = [
        (index % 4, job["operand_address"] + k)
        for index, job in enumerate(jobs)
        if job["load"]
        for k in range(job["operand_stripes"])
    ]
    got = [(b["slot"], b["address"] + k) for b in bursts for k in range(b["length"] + 1)]
    assert got == wanted
    assert all(burst["operand"] for burst in bursts)


@settings(max_examples=12)
@given(st.integers(0, 999))
def test_weights_are_asked_for_in_order_and_never_beyond_the_dram_buffer(seed: int) -> None:
    dut = WeightReader(TINY)
    rng = random.Random(seed)
    depth, longest = TINY.dram_buffer_stripes, longest_burst(TINY)
    jobs = []
    for index in range(6):
        held = rng.getrandbits(1)
        beats = rng.choice([1, 2, longest - 1, longest, longest + 3, depth])
        beats = beats if held else rng.choice([beats, 2 * depth + 5])
        groups = rng.randint(1, 3)
        jobs.append({"address": 500 * index + rng.randrange(64), "stripes": beats * groups, "group": beats,
                     "skip": rng.choice([0, 0, 1, 70]), "held": held, "slot": index % 4})  # fmt: skip
    asked: list[int] = []

    async def source(ctx: Any) -> None:
        for job in jobs:
            ctx.set(dut.input.payload, weights_layout(TINY).const(job))
            ctx.set(dut.input.valid, 1)
            await ctx.tick().until(dut.input.ready)
            ctx.set(dut.input.valid, 0)

    async def consumer(ctx: Any) -> None:
        # Frees a group only when it was asked for whole, if it is held: it has to arrive before.
        steps = []
        for job in jobs:
            for _ in range(job["stripes"] // job["group"]):
                steps += [job["group"]] + [0] * (job["group"] - 1) if job["held"] else [1] * job["group"]
        freed = 0
        idle = 0
        while freed < len(steps):
            free = freed + max(steps[freed], 1) <= len(asked) and rng.random() < 0.7
            ready = rng.random() < 0.8
            ctx.set(dut.freed, free)
            ctx.set(dut.bursts.ready, ready)
            *_, valid, burst = await ctx.tick().sample(dut.bursts.valid, dut.bursts.payload)
            idle = 0 if free or valid else idle + 1
            assert idle < 200, f"hangs with {len(asked)} stripes asked for, {freed} freed: {jobs}"
            if valid and ready:
                assert not burst.operand
                asked.extend(burst.address + k for k in range(burst.length + 1))
            freed += free
            assert len(asked) - freed <= depth, "the DRAM buffer is overbooked"

    simulate(dut, source, consumer, deadline_cycles=5000)
    assert asked == [
        job["address"] + k + k // job["group"] * job["skip"] for job in jobs for k in range(job["stripes"])
    ]


def test_a_held_group_as_large_as_the_buffer_is_asked_for_whole() -> None:
    dut = WeightReader(TINY)
    depth = TINY.dram_buffer_stripes

    async def bench(ctx: Any) -> None:
        job = {"address": 3, "stripes": 2 * depth, "group": depth, "held": 1}
        ctx.set(dut.input.payload, weights_layout(TINY).const(job))
        ctx.set(dut.input.valid, 1)
        ctx.set(dut.bursts.ready, 1)
        asked = 0
        for _ in range(200):
            *_, valid, burst = await ctx.tick().sample(dut.bursts.valid, dut.bursts.payload)
            asked += valid and burst.length + 1
        assert asked == depth

    simulate(dut, bench)
