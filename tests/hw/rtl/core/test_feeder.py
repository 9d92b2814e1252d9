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
from plora.sim.golden.integers import Quantized, dequantize
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
        "weights_last_use": rng.getrandbits(1), "weights_read": 1,
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
        "weights_read": 1,
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


def with_integers(config: NdpConfig, rng: random.Random, beats: list[tuple[dict[str, int], Any]]) -> list[Any]:
    """``beats``, some of whose weights are integers, and before these the scales that they need."""
    out: list[Any] = []
    waiting = 0
    for control, expect in beats:
        token_wise = control.get("token_wise", 0)
        needed = DOT_LANES // config.channels if token_wise else 1
        if control.get("tap", 0) == 0 and rng.random() < 0.5:
            if waiting < needed:
                scales = {
                    "scales": 1, "token_wise": token_wise, "expansion": rng.randint(1, 2), "weights_read": 1,
                    "weights_last_use": 1, "weights_position": rng.getrandbits(position_bits(config)),
                }  # fmt: skip
                out.append((scales, None))
                waiting = 64
            log2, step = rng.randint(1, 2), rng.getrandbits(1)
            waiting -= step * needed
            control = {**control, "expansion": log2, "sub": rng.randrange(1 << log2), "scales_step": step}
        if out and rng.random() < 0.3:
            control = {**control, "weights_read": 0}
        out.append((control, expect))
    return out


def expanded(config: NdpConfig, control: dict[str, int], words: list[int], scales: list[list[int]]) -> list[int]:
    """The words of FP16 that a beat takes out of ``words``; with the next ``scales`` of each channel."""
    log2, out = control.get("expansion", 0), []
    if not log2:
        return words
    bits = 16 >> log2
    for word, of_channel in zip(words, scales, strict=True):
        fields = [word >> bits * (WORD_VALUES * control["sub"] + lane) & (1 << bits) - 1 for lane in range(WORD_VALUES)]
        values = np.array([field - (field >> bits - 1 << bits) for field in fields], np.int8)
        owner = [lane // (2 * config.channels) if control.get("token_wise") else 0 for lane in range(WORD_VALUES)]
        own = np.array([of_channel[token] for token in owner], np.uint8)
        out.append(packed(dequantize(Quantized(values[:, None], own))[:, 0].view(np.uint16).tolist()))
    return out


@CONFIGS
@pytest.mark.parametrize("stall", [0.0, 0.5])
def test_channels_get_the_words_of_their_part_and_lanes_beyond_k_are_masked(config: NdpConfig, stall: float) -> None:
    dut = BeatFeeder(config)
    rng = random.Random(config.channels)
    beats = with_integers(config, rng, [random_beat(config, rng) for _ in range(90)])
    expected: list[Any] = []
    got: list[Any] = []
    freed_stripes: list[int] = []
    shown: list[tuple[int, list[int]]] = []

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
            expected.append(expect and expect(stripes, kept, anchors, states))

    async def dram_buffer(ctx: Any) -> None:
        async for *_, enable, position, freed in ctx.tick().sample(
            dut.weights_enable, dut.weights_position, dut.weights_freed
        ):
            if freed:
                freed_stripes.append(len(shown) - 1)
            if enable:
                shown.append((position, [rng.getrandbits(512) for _ in range(config.channels)]))
                ctx.set(dut.weights, shown[-1][1])

    async def sink(ctx: Any) -> None:
        count = sum(not control.get("scales") for control, _ in beats)
        await drain(ctx, dut.beats, got, count, random.Random(1), stall)

    simulate(dut, source, sink, background=[dram_buffer])
    reads = [control["weights_position"] for control, _ in beats if control["weights_read"]]
    assert [position for position, _ in shown] == reads, "each stripe is read once, in order"
    remaining, stripe, freed = iter(got), -1, []
    scales: list[list[int]] = []
    for index, ((control, _), wanted) in enumerate(zip(beats, expected, strict=True)):
        where = f"beat {index}: {control}"
        stripe += control["weights_read"]
        words = shown[stripe][1]
        freed += [stripe] * control["weights_last_use"]
        if control.get("scales"):
            scales = [list(word.to_bytes(64, "little")) for word in words]
            continue
        beat, (inputs, masks, offsets) = next(remaining), wanted
        assert list(beat.weights) == expanded(config, control, words, scales), where
        if control.get("scales_step"):
            used = DOT_LANES // config.channels if control.get("token_wise") else 1
            scales = [of_channel[used:] for of_channel in scales]
        assert [list(row) for row in beat.inputs] == inputs, where
        assert list(beat.mask) == masks, where
        assert list(beat.offsets) == offsets, where
        for name in ("tap", "split_log2", "token_wise", "pause", "first", "last", "second_row", "tag"):
            assert beat[name] == control.get(name, 0), (where, name)
    assert freed_stripes == freed


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
