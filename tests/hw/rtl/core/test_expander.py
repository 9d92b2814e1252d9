"""The word expander: every integer at every scale, each in its lane, and scales in their order."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plora.hw.defs.config import NdpConfig, preset
from plora.hw.defs.descriptor import DType
from plora.hw.defs.integers import INTEGER_BITS
from plora.hw.defs.packing import expansion_log2
from plora.hw.rtl.core.expander import WordExpander
from plora.sim.golden.integers import Quantized, dequantize
from tests.hw.rtl.core.bench import simulate

WIDE = preset("full")


def word_of(values: np.ndarray, bits: int) -> int:
    """Integers side by side, the first in the lowest bits."""
    return sum((int(value) & (1 << bits) - 1) << bits * index for index, value in enumerate(values))


def lanes_of(word: int) -> np.ndarray:
    return np.frombuffer(word.to_bytes(64, "little"), np.uint16)


def give(ctx: Any, dut: WordExpander, word: int, **flags: int) -> None:
    ctx.set(dut.data, word)
    for name in ("scales", "expansion", "sub", "token_wise", "step"):
        ctx.set(getattr(dut, name), flags.get(name, 0))
    ctx.set(dut.enable, 1)


@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT4])
def test_every_integer_at_every_scale(dtype: DType) -> None:
    dut, bits = WordExpander(WIDE), INTEGER_BITS[dtype]
    scales = np.arange(256, dtype=np.uint8)
    integers = np.arange(-(1 << bits - 1), 1 << bits - 1).astype(np.int8)
    # Words of memory that hold them all, from a place that is another one for every scale.
    words = -(-len(integers) * bits // 512)
    log2 = expansion_log2(dtype)

    async def bench(ctx: Any) -> None:
        for scale in scales.tolist():
            if scale % 64 == 0:
                give(ctx, dut, word_of(scales[scale : scale + 64], 8), scales=1)
                await ctx.tick()
            rolled = np.resize(np.roll(integers, 5 * scale), words * 512 // bits)
            expected = dequantize(Quantized(rolled[None], np.array([scale], np.uint8)))[0].view(np.uint16)
            for index in range(words << log2):
                memory = rolled.reshape(words, -1)[index >> log2]
                last = index == (words << log2) - 1
                give(ctx, dut, word_of(memory, bits), expansion=log2, sub=index % (1 << log2), step=last)
                await ctx.tick()
                got, wanted = lanes_of(ctx.get(dut.expanded)), expected[32 * index : 32 * index + 32]
                assert np.array_equal(got, wanted), f"scale {scale:#04x}, integers {rolled[32 * index :][:32]}"

    simulate(dut, bench)


@pytest.mark.parametrize("channels", [1, 2, 4, 16])
def test_random_words_of_keys_and_values(channels: int) -> None:
    config: NdpConfig = replace(WIDE, name=f"of-{channels}", channels=channels)
    dut, rng, tokens = WordExpander(config), random.Random(channels), 16 // channels

    async def bench(ctx: Any) -> None:
        waiting: list[int] = []
        shown: np.ndarray | None = None
        for _ in range(400):
            if len(waiting) < tokens or rng.random() < 0.05:
                waiting = [rng.randrange(256) for _ in range(64)]
                give(ctx, dut, word_of(np.array(waiting), 8), scales=1, expansion=rng.randint(1, 2))
                await ctx.tick()
                shown = None
                continue
            if shown is not None and rng.random() < 0.2:
                # Nothing is taken, whatever stands there.
                give(ctx, dut, rng.getrandbits(512), scales=rng.getrandbits(1), step=rng.getrandbits(1), expansion=1)
                ctx.set(dut.enable, 0)
                await ctx.tick()
                assert np.array_equal(lanes_of(ctx.get(dut.expanded)), shown)
                continue
            log2, token_wise, step = rng.randint(0, 2), rng.getrandbits(1), rng.getrandbits(1)
            word, sub = rng.getrandbits(512), rng.randrange(1 << log2)
            give(ctx, dut, word, expansion=log2, sub=sub, token_wise=token_wise, step=step)
            await ctx.tick()
            shown = lanes_of(word)
            if log2:
                bits = 16 >> log2
                fields = [word >> bits * (32 * sub + lane) & (1 << bits) - 1 for lane in range(32)]
                values = np.array([field - (field >> bits - 1 << bits) for field in fields], np.int8)
                owners = [waiting[lane // (2 * channels)] if token_wise else waiting[0] for lane in range(32)]
                shown = dequantize(Quantized(values[:, None], np.array(owners, np.uint8)))[:, 0].view(np.uint16)
            assert np.array_equal(lanes_of(ctx.get(dut.expanded)), shown)
            if step:
                waiting = waiting[tokens if token_wise else 1 :]

    simulate(dut, bench)
