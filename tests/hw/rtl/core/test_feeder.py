"""The beat feeder against the formulas of `plora.hw.defs.packing`: which word, which lanes, in which cycle."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plora.hw.defs.config import DOT_LANES, WORD_VALUES, NdpConfig
from plora.hw.rtl.core.dram_buffer import position_bits
from plora.hw.rtl.core.feeder import BeatFeeder, beat_control_layout
from plora.hw.rtl.core.job import channel_bits
from plora.hw.rtl.sfu.p_scaler import PScaler
from plora.sim.golden.softmax import rescale_weights
from tests.hw.rtl.core.bench import TINY, drain, simulate

CONFIGS = pytest.mark.parametrize(
    "config", [replace(TINY, name=f"tiny-{c}", channels=c) for c in (1, 2, 8)], ids=lambda config: config.name
)


def word_of(rng: random.Random) -> list[int]:
    return [rng.getrandbits(16) for _ in range(WORD_VALUES)]


def packed(values: list[int]) -> int:
    return sum(value << 16 * lane for lane, value in enumerate(values))


def random_beat(config: NdpConfig, rng: random.Random) -> tuple[dict[str, int], Any]:
    """A beat's control, and for its words (stripes of both rows, kept words) the inputs and masks it must give."""
    channels, levels = config.channels, channel_bits(config)
    if rng.random() < 0.3:
        return token_wise_beat(config, rng)
    from_kept, tap = int(rng.random() < 0.3), rng.choice([0, 0, 1, 2])
    split_log2 = 0 if from_kept or tap else rng.randint(0, levels)
    parts, tap_lanes = 1 << split_log2, WORD_VALUES >> tap
    part = rng.randrange(channels // parts) * parts
    tail = rng.randint(1, tap_lanes * parts)
    partial = int(tap > 0 or rng.random() < 0.5)
    control = {
        "from_kept": from_kept, "part": part, "partial": partial, "tail": tail, "tap": tap, "split_log2": split_log2,
        "first": rng.getrandbits(1), "last": rng.getrandbits(1), "second_row": rng.getrandbits(1),
        "tag": rng.getrandbits(8), "weights_position": rng.getrandbits(position_bits(config)),
        "weights_last_use": rng.getrandbits(1),
    }  # fmt: skip

    def expected(
        stripes: list[list[list[int]]], kept: list[list[int]], anchors: Any, states: Any
    ) -> tuple[list[list[int]], list[int], list[int]]:
        inputs = []
        for row in range(2):
            words = []
            for channel in range(channels):
                word = kept[row] if from_kept else stripes[row][part + channel * parts // channels]
                words.append(packed(word[:tap_lanes] * (1 << tap)))
            inputs.append(words)
        masks = []
        for channel in range(channels):
            valid = tail - channel * parts // channels * tap_lanes if partial else tap_lanes
            lanes = [lane < valid for lane in range(tap_lanes)] * (1 << tap)
            masks.append(sum(on << lane for lane, on in enumerate(lanes)))
        return inputs, masks, [0, 0]

    return control, expected


def token_wise_beat(config: NdpConfig, rng: random.Random) -> tuple[dict[str, int], Any]:
    """The same for a beat that weighs 16 tokens with half a kept word of softmax terms."""
    upper, tail, partial = rng.getrandbits(1), rng.randint(1, DOT_LANES), rng.getrandbits(1)
    control = {
        "from_kept": 1, "token_wise": 1, "upper_half": upper, "partial": partial, "tail": tail,
        "pause": rng.randint(1, 2), "first": rng.getrandbits(1), "last": rng.getrandbits(1),
        "second_row": rng.getrandbits(1), "tag": rng.getrandbits(8),
        "weights_position": rng.getrandbits(position_bits(config)), "weights_last_use": rng.getrandbits(1),
    }  # fmt: skip
    half = slice(DOT_LANES * upper, DOT_LANES * (upper + 1))

    def expected(
        stripes: Any, kept: list[list[int]], anchors: list[list[int]], states: list[dict[str, int]]
    ) -> tuple[list[list[int]], list[int], list[int]]:
        inputs = []
        for row in range(2):
            terms = np.array(kept[row], np.uint16).view(np.float16)[None]
            known, last = np.array(anchors[row])[None], np.array([states[row]["anchor"]])
            scaled = rescale_weights(terms, known, last, config).view(np.uint16)[0, half].tolist()
            inputs.append([packed(scaled * 2)] * config.channels)
        lanes = (1 << (tail if partial else DOT_LANES)) - 1
        return inputs, [lanes << DOT_LANES | lanes] * config.channels, [state["shift"] for state in states]

    return control, expected


@CONFIGS
@pytest.mark.parametrize("stall", [0.0, 0.5])
def test_channels_get_the_words_of_their_part_and_lanes_beyond_k_are_masked(config: NdpConfig, stall: float) -> None:
    dut = BeatFeeder(config)
    rng = random.Random(config.channels)
    beats = [random_beat(config, rng) for _ in range(60)]
    expected: list[Any] = []
    got: list[Any] = []
    freed_stripes: list[int] = []

    async def source(ctx: Any) -> None:
        for control, expect in beats:
            while rng.random() < stall:
                await ctx.tick()
            ctx.set(dut.control.payload, beat_control_layout(config).const(control))
            ctx.set(dut.control.valid, 1)
            await ctx.tick().until(dut.control.ready)
            ctx.set(dut.control.valid, 0)
            # The buffers show the beat's words from now until the next beat is taken.
            stripes = [[word_of(rng) for _ in range(config.channels)] for _ in range(2)]
            kept = [[rng.randint(0, 0x3C00) for _ in range(WORD_VALUES)] for _ in range(2)]
            anchors = [[rng.randint(-40, 0) for _ in range(WORD_VALUES // config.channels)] for _ in range(2)]
            states = [{"anchor": rng.randint(0, 3), "shift": rng.getrandbits(4)} for _ in range(2)]
            ctx.set(dut.anchors, anchors)
            ctx.set(dut.states, states)
            ctx.set(dut.stripes, [[packed(word) for word in row] for row in stripes])
            ctx.set(dut.kept, [packed(word) for word in kept])
            expected.append(expect(stripes, kept, anchors, states))

    async def dram_buffer(ctx: Any) -> None:
        async for *_, enable, position, freed in ctx.tick().sample(
            dut.weights_enable, dut.weights_position, dut.weights_freed
        ):
            if enable:
                ctx.set(dut.weights, [position << channel for channel in range(config.channels)])
            if freed:
                freed_stripes.append(position)

    async def sink(ctx: Any) -> None:
        await drain(ctx, dut.beats, got, len(beats), random.Random(1), stall)

    simulate(dut, source, sink, background=[dram_buffer])
    assert freed_stripes == [c["weights_position"] for c, _ in beats if c["weights_last_use"]]
    for index, (beat, (control, _), (inputs, masks, offsets)) in enumerate(zip(got, beats, expected, strict=True)):
        where = f"beat {index}: {control}"
        assert list(beat.weights) == [control["weights_position"] << c for c in range(config.channels)], where
        assert [list(row) for row in beat.inputs] == inputs, where
        assert list(beat.mask) == masks, where
        assert list(beat.offsets) == offsets, where
        for name in ("tap", "split_log2", "token_wise", "pause", "first", "last", "second_row", "tag"):
            assert beat[name] == control.get(name, 0), (where, name)


@pytest.mark.parametrize("token_wise", [0, 1])
def test_it_passes_a_beat_in_every_cycle(token_wise: int) -> None:
    dut = BeatFeeder(TINY)

    async def bench(ctx: Any) -> None:
        ctx.set(dut.control.payload.token_wise, token_wise)
        ctx.set(dut.control.valid, 1)
        ctx.set(dut.beats.ready, 1)
        for cycle in range(20):
            *_, taken, given = await ctx.tick().sample(dut.control.ready, dut.beats.valid)
            assert taken
            assert given == (cycle >= 2 + token_wise * PScaler.LATENCY)

    simulate(dut, bench)
