"""Runs are cut into bursts that AXI and the DRAM buffer can stand, and every channel gets each of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plora.hw.rtl.core.bursts import PAGE_WORDS, BurstBroadcast, BurstCutter, burst_layout, run_layout
from tests.hw.rtl.core.bench import TINY, drain, feed, fields, refused, simulate

COUNT_BITS = 12


@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(1, 130), st.integers(1, 4), st.integers(0, 150)), min_size=1, max_size=4),
       st.sampled_from([8, 64]), st.integers(0, 999))  # fmt: skip
def test_words_between_groups_are_left_out(runs: list[tuple[int, int, int]], max_words: int, seed: int) -> None:
    dut = BurstCutter(TINY, count_bits=COUNT_BITS, max_words=max_words, operand=False)
    rng = random.Random(seed)
    addresses = [rng.randrange(1000) for _ in runs]
    wanted = [
        address + group * (size + skip) + word
        for address, (size, groups, skip) in zip(addresses, runs, strict=True)
        for group in range(groups)
        for word in range(size)
    ]
    got: list[int] = []

    async def source(ctx: Any) -> None:
        payloads = [
            run_layout(TINY, COUNT_BITS).const(
                {"address": address, "words": size * groups, "group": size, "skip": skip, "slot": 0}
            )
            for address, (size, groups, skip) in zip(addresses, runs, strict=True)
        ]
        await feed(ctx, dut.run, payloads, rng)

    async def sink(ctx: Any) -> None:
        ctx.set(dut.room, 1 << COUNT_BITS - 1)
        while len(got) < len(wanted):
            ctx.set(dut.bursts.ready, rng.random() < 0.7)
            *_, valid, ready, burst = await ctx.tick().sample(dut.bursts.valid, dut.bursts.ready, dut.bursts.payload)
            if valid and ready:
                assert burst.address % PAGE_WORDS + burst.length < PAGE_WORDS
                got.extend(burst.address + word for word in range(burst.length + 1))

    simulate(dut, source, sink)
    assert got == wanted


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.integers(1, 300), st.sampled_from([0, 0, 8, 9, 50, 64])),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([8, 64]),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 999),
)
# A first word that is the last of its page, a run that ends with a page, and one that goes one word beyond.
@example([(63, 2, 0), (64, 64, 0), (0, 65, 0), (1, 63, 0), (1, 64, 0)], 64, 0.0, 0)
def test_bursts_cover_the_runs_within_pages_groups_and_room(
    runs: list[tuple[int, int, int]], max_words: int, stall: float, seed: int
) -> None:
    runs = [(address, words, group if group >= max_words else 0) for address, words, group in runs]
    dut = BurstCutter(TINY, count_bits=COUNT_BITS, max_words=max_words, operand=False)
    layout = run_layout(TINY, COUNT_BITS)
    got: list[Any] = []
    rng = random.Random(seed)
    expected_words = sum(words for _, words, _ in runs)

    async def source(ctx: Any) -> None:
        payloads = [
            layout.const({"address": a, "words": w, "group": g, "slot": i % 4}) for i, (a, w, g) in enumerate(runs)
        ]
        await feed(ctx, dut.run, payloads, random.Random(seed), stall)

    async def sink(ctx: Any) -> None:
        room, taken = 0, 0
        while taken < expected_words:
            room += rng.choice([0, 1, 2, 30]) if room < 2 * PAGE_WORDS else 0
            ready = rng.random() >= stall
            ctx.set(dut.room, room)
            ctx.set(dut.bursts.ready, ready)
            *_, valid, burst = await ctx.tick().sample(dut.bursts.valid, dut.bursts.payload)
            if valid and ready:
                got.append(fields(burst, burst_layout(TINY)))
                room -= burst.length + 1
                taken += burst.length + 1
                assert room >= 0, "more was asked for than there was room"

    simulate(dut, source, sink)
    position = 0
    for index, (address, words, group) in enumerate(runs):
        done = 0
        while done < words:
            burst = got[position]
            position += 1
            length = burst["length"] + 1
            assert burst["address"] == address + done
            assert burst["slot"] == index % 4
            assert burst["start"] == (done == 0)
            assert burst["end"] == (done + length == words)
            assert length <= max_words or (group and length <= PAGE_WORDS)
            assert (address + done) // PAGE_WORDS == (address + done + length - 1) // PAGE_WORDS, "crosses 4 KiB"
            if group:
                assert done // group == (done + length - 1) // group, "spans the end of a group"
            done += length
        assert done == words
    assert position == len(got)


@pytest.mark.parametrize("stall", [0.0, 0.5])
def test_every_channel_gets_every_burst_in_order_and_operands_first(stall: float) -> None:
    dut = BurstBroadcast(TINY)
    layout = burst_layout(TINY)
    operands = [layout.const({"operand": 1, "address": i, "length": i % 5}) for i in range(20)]
    weights = [layout.const({"operand": 0, "address": i, "length": 7}) for i in range(20)]
    got: list[list[Any]] = [[] for _ in range(TINY.channels)]

    def source(stream: Any, payloads: list[Any], seed: int) -> Any:
        async def process(ctx: Any) -> None:
            await feed(ctx, stream, payloads, random.Random(seed), stall)

        return process

    def sink(channel: int) -> Any:
        async def process(ctx: Any) -> None:
            await drain(ctx, dut.channels[channel], got[channel], 40, random.Random(channel), stall)

        return process

    simulate(
        dut,
        source(dut.operands, operands, 1),
        source(dut.weights, weights, 2),
        *(sink(channel) for channel in range(TINY.channels)),
    )
    order = [(burst.operand, burst.address) for burst in got[0]]
    assert all([(burst.operand, burst.address) for burst in channel] == order for channel in got)
    for operand in (0, 1):
        assert [address for kind, address in order if kind == operand] == list(range(20))
    if not stall:
        assert order[:20] == [(1, i) for i in range(20)], "an operand had to wait for weights"


def test_a_burst_beyond_a_page_is_refused() -> None:
    refused(
        "max_words must be 1 ... 64, not 65",
        lambda: BurstCutter(TINY, count_bits=8, max_words=65, operand=True),
    )
