"""A channel's reader: requests as asked, words labelled for the buffer that wants them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from plora.hw.rtl.core.bursts import burst_layout
from plora.hw.rtl.core.channel_reader import BURSTS_IN_FLIGHT, ChannelReader
from plora.hw.rtl.interfaces import read_response_layout
from tests.hw.rtl.core.bench import TINY, drain, feed, simulate


@pytest.mark.parametrize("stall", [0.0, 0.4])
def test_words_carry_the_label_of_their_burst(stall: float) -> None:
    dut = ChannelReader(TINY)
    rng = random.Random(7)
    bursts = [
        {"operand": rng.getrandbits(1), "slot": rng.randrange(4), "start": rng.getrandbits(1),
         "end": rng.getrandbits(1), "address": 64 * i, "length": rng.choice([0, 0, 1, 5, 63])}
        for i in range(25)
    ]  # fmt: skip
    requests: list[Any] = []
    words: list[Any] = []
    total = sum(burst["length"] + 1 for burst in bursts)

    async def source(ctx: Any) -> None:
        await feed(ctx, dut.bursts, [burst_layout(TINY).const(b) for b in bursts], random.Random(1), stall)

    async def sink(ctx: Any) -> None:
        await drain(ctx, dut.request, requests, len(bursts), random.Random(2), stall)

    async def memory(ctx: Any) -> None:
        rng, answered = random.Random(3), 0
        while answered < total:
            outstanding = sum(r.length + 1 for r in requests) - answered
            valid = outstanding > 0 and rng.random() >= stall
            ctx.set(dut.response_valid, valid)
            error = answered % 7 == 0
            ctx.set(dut.response, read_response_layout.const({"data": answered, "error": error}))
            *_, word = await ctx.tick().sample(dut.word)
            assert word.valid == valid
            if valid:
                words.append(word)
                assert (word.data, word.error) == (answered, error)
                answered += 1
        ctx.set(dut.response_valid, 0)

    simulate(dut, source, sink, memory, deadline_cycles=3000)
    assert [(r.address, r.length) for r in requests] == [(b["address"], b["length"]) for b in bursts]
    expected = [
        (b["operand"], b["slot"], b["start"] and i == 0, b["end"] and i == b["length"])
        for b in bursts
        for i in range(b["length"] + 1)
    ]
    assert [(w.operand, w.slot, w.start, w.end) for w in words] == expected


def test_no_more_bursts_are_taken_than_may_be_in_flight() -> None:
    dut = ChannelReader(TINY)

    async def bench(ctx: Any) -> None:
        ctx.set(dut.bursts.valid, 1)
        ctx.set(dut.request.ready, 1)
        taken = 0
        for _ in range(5 * BURSTS_IN_FLIGHT):
            *_, ready = await ctx.tick().sample(dut.bursts.ready)
            taken += ready
        assert taken == BURSTS_IN_FLIGHT
        ctx.set(dut.response_valid, 1)  # one word ends the first burst
        await ctx.tick()
        ctx.set(dut.response_valid, 0)
        assert ctx.get(dut.bursts.ready)

    simulate(dut, bench)
