"""DRAM buffer, input buffer and output buffer."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.config import PRESETS, WORD_VALUES, NdpConfig
from plora.hw.rtl.core.channel_reader import word_layout
from plora.hw.rtl.core.dram_buffer import DramBuffer
from plora.hw.rtl.core.input_buffer import InputBuffer
from plora.hw.rtl.core.job import Region
from plora.hw.rtl.core.operand_loader import placement_layout
from plora.hw.rtl.core.output_buffer import OutputBuffer, result_write_layout
from plora.hw.rtl.core.rendezvous import Rendezvous
from tests.hw.rtl.core.bench import TINY, simulate

FOUR_CHANNELS = replace(TINY, name="tiny-4", channels=4)
ONE_CHANNEL = replace(TINY, name="tiny-1", channels=1)
CONFIGS = pytest.mark.parametrize("config", [ONE_CHANNEL, TINY, FOUR_CHANNELS], ids=lambda config: config.name)


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(0, 999))
def test_rendezvous_counts_what_the_slowest_channel_has_seen(channels: int, seed: int) -> None:
    dut = Rendezvous(channels=channels, count_bits=3)
    rng = random.Random(seed)

    async def bench(ctx: Any) -> None:
        counts, common = [0] * channels, 0
        for _ in range(100):
            events = [rng.random() < 0.6 and counts[c] - common < 7 for c in range(channels)]
            ctx.set(dut.events, sum(event << c for c, event in enumerate(events)))
            common += min(counts) > common
            await ctx.tick()
            counts = [count + event for count, event in zip(counts, events, strict=True)]
            assert ctx.get(dut.common) == common % 8
            assert [ctx.get(dut.counts[c]) for c in range(channels)] == [count % 8 for count in counts]

    simulate(dut, bench)


@CONFIGS
def test_dram_buffer_gives_every_stripe_as_often_as_asked_once_all_channels_brought_it(config: NdpConfig) -> None:
    depth, stripes = config.dram_buffer_stripes, 3 * config.dram_buffer_stripes
    dut = DramBuffer(config)
    released = 0
    rng = random.Random(config.channels)

    def value(channel: int, stripe: int) -> int:
        return (channel << 32 | stripe << 16 | 0xBEEF) << 400 | stripe

    def channel_process(channel: int) -> Any:
        async def process(ctx: Any) -> None:
            rng, stripe, word = random.Random(channel), 0, dut.words[channel]
            while stripe < stripes:
                mine = rng.random() < 0.8 and stripe - released < depth
                other = not mine and rng.random() < 0.5
                # Words of operands and idle cycles carry data that must not matter.
                ctx.set(
                    word,
                    word_layout.const(
                        {"valid": mine or other, "operand": other, "data": value(channel, stripe) if mine else ~0}
                    ),
                )
                await ctx.tick()
                stripe += mine
            ctx.set(word, word_layout.const({}))

        return process

    async def reader(ctx: Any) -> None:
        nonlocal released
        position = 0
        while position < stripes:
            group = min(rng.randint(1, 6), stripes - position)
            for passes_left in reversed(range(rng.randint(1, 3))):
                for stripe in range(position, position + group):
                    while not (stripe < arrived(ctx)):
                        await ctx.tick()
                    ctx.set(dut.read_position, stripe % (2 * depth))
                    ctx.set(dut.read_enable, 1)
                    await ctx.tick()
                    ctx.set(dut.read_enable, 0)
                    ctx.set(dut.read_position, rng.randrange(2 * depth))
                    for _ in range(rng.choice([0, 0, 1, 3])):
                        await ctx.tick()
                    shown = ctx.get(dut.stripe)
                    assert list(shown) == [value(channel, stripe) for channel in range(config.channels)]
                    if not passes_left:
                        released = stripe + 1
            position += group

    seen = 0

    def arrived(ctx: Any) -> int:
        nonlocal seen
        seen += (int(ctx.get(dut.arrived)) - seen) % (2 * depth)
        return seen

    simulate(dut, reader, background=[channel_process(c) for c in range(config.channels)])
    assert released == stripes


@CONFIGS
def test_input_buffer_deals_operand_rows_to_the_pe_rows_for_channels_at_any_pace(config: NdpConfig) -> None:
    dut = InputBuffer(config)
    capacity = 2 * config.input_half_stripes
    # (job slot, base, stripes of a row, rows): several at a time, one wraps around the end of the ring.
    operands = [(0, 0, 2, 3), (1, 4, 1, 2), (3, 5, 1, 1), (2, capacity - 3, 2, 4)]

    def value(channel: int, operand: int, row: int, stripe: int) -> int:
        return (operand << 24 | row << 16 | stripe << 8 | channel) << 300 | 1

    def channel_process(channel: int) -> Any:
        async def process(ctx: Any) -> None:
            rng, port = random.Random(channel), dut.words[channel]
            for index, (slot, _, row_stripes, rows) in enumerate(operands):
                for k in range(rows * row_stripes):
                    while rng.random() < 0.4:
                        noise = {"valid": rng.getrandbits(1), "slot": slot, "data": ~0, "start": 1, "end": 1}
                        ctx.set(port, word_layout.const(noise))
                        await ctx.tick()
                    word = {
                        "valid": 1, "operand": 1, "slot": slot, "start": k == 0, "end": k == rows * row_stripes - 1,
                        "data": value(channel, index, k // row_stripes, k % row_stripes),
                    }  # fmt: skip
                    ctx.set(port, word_layout.const(word))
                    await ctx.tick()
            ctx.set(port, word_layout.const({}))

        return process

    async def reader(ctx: Any) -> None:
        for slot, base, row_stripes, _ in operands:
            ctx.set(dut.placements[slot], placement_layout(config).const({"base": base, "row_stripes": row_stripes}))
        for index, (_, base, row_stripes, rows) in enumerate(operands):
            while ctx.get(dut.arrivals) <= index:
                await ctx.tick()
            for row in range(rows):
                for stripe in range(row_stripes):
                    ctx.set(dut.read_address, (base + row // 2 * row_stripes + stripe) % capacity)
                    ctx.set(dut.read_enable, 1)
                    await ctx.tick()
                    ctx.set(dut.read_enable, 0)
                    ctx.set(dut.read_address, 0)
                    await ctx.tick()
                    words = list(ctx.get(dut.stripes)[row % 2])
                    assert words == [value(c, index, row, stripe) for c in range(config.channels)]

    simulate(dut, reader, background=[channel_process(c) for c in range(config.channels)])


@CONFIGS
def test_output_buffer_keeps_its_regions_and_rows_apart(config: NdpConfig) -> None:
    dut = OutputBuffer(config)
    rng = random.Random(5)
    depth = {Region.KEPT: config.kept_words, Region.HALF_0: config.result_half_words,
             Region.HALF_1: config.result_half_words}  # fmt: skip
    model: dict[tuple[Region, int, int], list[int | None]] = {}
    kept_anchors: dict[tuple[int, int], list[int | None]] = {}

    async def bench(ctx: Any) -> None:
        for _ in range(150):
            region, lanes, second = rng.choice(list(depth)), rng.getrandbits(WORD_VALUES), rng.getrandbits(1)
            word = rng.choice([0, depth[region] - 1, rng.randrange(depth[region])])
            rows, anchors = [rng.getrandbits(512) for _ in range(2)], [rng.getrandbits(16) for _ in range(2)]
            write = {"valid": 1, "region": region, "word": word, "lanes": lanes, "second_row": second, "data": rows,
                     "anchors": anchors}  # fmt: skip
            ctx.set(dut.write, result_write_layout(config).const(write))
            await ctx.tick()
            ctx.set(dut.write, result_write_layout(config).const({**write, "valid": 0, "lanes": ~0}))
            for row in range(1 + second):
                values = model.setdefault((region, row, word), [None] * WORD_VALUES)
                for lane in range(WORD_VALUES):
                    if lanes >> lane & 1:
                        values[lane] = rows[row] >> 16 * lane & 0xFFFF
                known = kept_anchors.setdefault((row, word), [None] * (WORD_VALUES // config.channels))
                for unit in range(len(known)):
                    if region == Region.KEPT and lanes >> unit * config.channels & 1:
                        known[unit] = anchors[row]
        for (region, row, word), values in model.items():
            if region == Region.KEPT:
                ctx.set(dut.kept_address, word)
                ctx.set(dut.kept_enable, 1)
            else:
                ctx.set(dut.result_half, region)
                ctx.set(dut.result_row, row)
                ctx.set(dut.result_address, word)
                ctx.set(dut.result_enable, 1)
            await ctx.tick()
            ctx.set(dut.kept_enable, 0)
            ctx.set(dut.result_enable, 0)
            ctx.set(dut.result_half, rng.getrandbits(1))
            ctx.set(dut.result_row, rng.getrandbits(1))
            await ctx.tick()
            shown = ctx.get(dut.kept)[row] if region == Region.KEPT else ctx.get(dut.result)
            if region == Region.KEPT:
                for is_anchor, anchor in zip(ctx.get(dut.anchors)[row], kept_anchors[row, word], strict=True):
                    assert anchor in (None, is_anchor), (row, word)
            for lane, value in enumerate(values):
                assert value is None or shown >> 16 * lane & 0xFFFF == value, (region, row, word, lane)

    simulate(dut, bench)


def test_every_preset_has_a_dram_buffer_of_a_power_of_two_stripes() -> None:
    for config in PRESETS.values():
        assert config.dram_buffer_stripes & (config.dram_buffer_stripes - 1) == 0
