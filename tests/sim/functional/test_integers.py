"""Integer keys and values in memory, by the stated formulas, and the functional core's attention over them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.config import PRESETS, WORD_BYTES, NdpConfig, preset
from plora.hw.defs.descriptor import Descriptor, DType
from plora.hw.defs.errors import UserError
from plora.hw.defs.integers import INTEGER_BITS
from plora.hw.defs.legality import QueueWindow
from plora.hw.defs.packing import pack_geometry, pack_geometry_transposed
from plora.hw.defs.queue import NUMERIC_NAN, RESULT_OFFSET, operand_offset, softmax_scale, softmax_scale_value
from plora.hw.defs.status import Status
from plora.sim.functional.core import FunctionalCore, Outcome
from plora.sim.functional.layout import (
    Matrix,
    anchored_result_from_bytes,
    gpu_operand_bytes,
    pack_integers,
    pack_operand,
    pack_transposed_integers,
    unpack_integers,
    unpack_transposed_integers,
)
from plora.sim.functional.memory import SparseMemory
from plora.sim.golden.integers import Quantized, dequantize
from plora.sim.golden.softmax import golden_attention
from tests import descriptors

CONFIGS = st.sampled_from([*PRESETS.values(), NdpConfig("one", 1, 1024, 1024, 4096, 1, 2, 24)])
DTYPES = st.sampled_from([DType.INT8, DType.INT4])
SUBMISSION, RESULT, KEYS, VALUES, MEMORY = 0x0, 0x2_0000, 0x4_0000, 0x8_0000, 0x10_0000
WINDOW = QueueWindow(0, MEMORY, 1 << 17, 1 << 17)
SCALE = softmax_scale(0.2)


def integers(seed: int, tokens: int, columns: int, dtype: DType, scales: tuple[int, int] = (0, 256)) -> Quantized:
    random = np.random.default_rng(seed)
    reach = 1 << INTEGER_BITS[dtype] - 1
    values = random.integers(-reach, reach, (tokens, columns)).astype(np.int8)
    return Quantized(values, random.integers(*scales, tokens).astype(np.uint8))


class Image:
    """Packed bytes, read by the formulas in the description of `plora.hw.defs.packing`."""

    def __init__(self, data: bytes, config: NdpConfig, dtype: DType, frame_beats: int) -> None:
        self.words = np.frombuffer(data, np.uint8).reshape(-1, config.channels, WORD_BYTES)
        self.bits, self.frame_beats = INTEGER_BITS[dtype], frame_beats
        self.shared = 16 // self.bits

    def stripe(self, beat: int) -> tuple[int, int]:
        """Stripe of an expanded one, and its place among those that share it."""
        frame, rest = divmod(beat, self.frame_beats)
        stripe, sub = divmod(rest, self.shared)
        return frame * (1 + self.frame_beats // self.shared) + 1 + stripe, sub

    def value(self, beat: int, channel: int, lane: int) -> int:
        stripe, sub = self.stripe(beat)
        word = int.from_bytes(self.words[stripe, channel].tobytes(), "little")
        value = word >> (sub * 32 + lane) * self.bits & ((1 << self.bits) - 1)
        return value - (value >> self.bits - 1 << self.bits)

    def scale(self, token: int, channels: int) -> int:
        frame, rest = divmod(token, 64 * channels)
        i, channel = divmod(rest, channels)
        return int(self.words[frame * (1 + self.frame_beats // self.shared), channel, i])


@given(CONFIGS, DTYPES, st.integers(1, 400), st.sampled_from([17, 32, 33, 64, 100]), st.data())
def test_keys_lie_where_the_formulas_say(
    config: NdpConfig, dtype: DType, tokens: int, columns: int, data: st.DataObject
) -> None:
    q = integers(tokens, tokens, columns, dtype)
    packed = pack_integers(q, config, dtype)
    g = pack_geometry(config, tokens, columns, dtype)
    assert len(packed) == g.packed_bytes == g.stripes * config.stripe_bytes
    image = Image(packed, config, dtype, 64 * g.beats)
    for token in {0, tokens - 1, data.draw(st.integers(0, tokens - 1))}:
        group, channel = divmod(token, config.channels)
        assert image.scale(token, config.channels) == q.scales[token]
        for k in {0, columns - 1, data.draw(st.integers(0, columns - 1))}:
            assert image.value(group * g.beats + k // 32, channel, k % 32) == q.values[token, k]
    back = unpack_integers(packed, config, tokens, columns, dtype)
    assert np.array_equal(back.values, q.values) and np.array_equal(back.scales, q.scales)


@given(CONFIGS, DTYPES, st.integers(1, 400), st.integers(1, 100), st.integers(0, 3), st.data())
def test_values_lie_where_the_formulas_say(
    config: NdpConfig, dtype: DType, tokens: int, dims: int, spare: int, data: st.DataObject
) -> None:
    q, channels = integers(tokens, tokens, dims, dtype), config.channels
    g = pack_geometry_transposed(config, dims, tokens, dtype)
    stride = g.group_stripes + spare
    packed = pack_transposed_integers(q, config, dtype, stride)
    assert len(packed) == g.packed_bytes(stride) and g.stride(len(packed)) == stride
    size = stride * config.stripe_bytes
    for dim in {0, dims - 1, data.draw(st.integers(0, dims - 1))}:
        group, lane = divmod(dim, 2 * channels)
        image = Image(packed[group * size : (group + 1) * size], config, dtype, 4 * channels)
        for token in {0, tokens - 1, data.draw(st.integers(0, tokens - 1))}:
            beat, rest = divmod(token, 16)
            s, channel = divmod(rest, channels)
            assert image.value(beat, channel, s * 2 * channels + lane) == q.values[token, dim]
            assert image.scale(token, channels) == q.scales[token]
    used = g.group_stripes * config.stripe_bytes
    groups = [packed[i * size : i * size + used] for i in range(g.groups)]
    back = unpack_transposed_integers(groups, config, dims, tokens, dtype)
    assert np.array_equal(np.hstack([group.values for group in back]), q.values)
    assert all(np.array_equal(group.scales, q.scales) for group in back)


@given(CONFIGS, DTYPES, st.integers(1, 300), st.integers(1, 300))
def test_a_token_stays_where_it_is_as_others_follow(config: NdpConfig, dtype: DType, few: int, more: int) -> None:
    q = integers(few, few + more, 40, dtype)
    short = np.frombuffer(pack_integers(Quantized(q.values[:few], q.scales[:few]), config, dtype), np.uint8)
    long = np.frombuffer(pack_integers(q, config, dtype), np.uint8)
    assert np.array_equal(long[: len(short)][short != 0], short[short != 0])


@pytest.mark.parametrize(
    "bad",
    [
        Quantized(np.zeros((3, 40), np.int16), np.zeros(3, np.uint8)),
        Quantized(np.zeros((3, 40), np.int8), np.zeros(2, np.uint8)),
        Quantized(np.zeros((3, 40), np.int8), np.zeros(3, np.int8)),
        Quantized(np.zeros((0, 40), np.int8), np.zeros(0, np.uint8)),
        Quantized(np.full((3, 40), 8, np.int8), np.zeros(3, np.uint8)),
        Quantized(np.full((3, 40), -9, np.int8), np.zeros(3, np.uint8)),
    ],
)
def test_what_are_no_integers_of_the_type_is_refused(bad: Quantized) -> None:
    for pack in (pack_integers, pack_transposed_integers):
        with pytest.raises(UserError, match="give a matrix of int8 from -8 to 7"):
            pack(bad, preset("tiny"), DType.INT4)


def test_narrow_keys_and_short_strides_are_refused() -> None:
    with pytest.raises(UserError, match="keys of 16 values cannot be integers"):
        pack_integers(integers(0, 3, 16, DType.INT8), preset("tiny"), DType.INT8)
    with pytest.raises(UserError, match="take 5 stripes a group, more than the 4 set aside"):
        pack_transposed_integers(integers(0, 150, 4, DType.INT4), preset("tiny"), DType.INT4, 4)


class Bench:
    """A core with a memory, and one head's chain written by hand."""

    def __init__(self, config: NdpConfig, dtype: DType) -> None:
        self.config, self.dtype = config, dtype
        self.memory = SparseMemory(MEMORY, fill=0xFF)  # every scale that nobody wrote is NaN
        self.core = FunctionalCore(config, self.memory)

    def run(self, d: Descriptor, *, first: bool = False) -> Outcome:
        d = replace(d, dtype=self.dtype)
        return self.core.execute(d, WINDOW, SUBMISSION, RESULT, first=first, softmax_scale=SCALE)

    def scores(self, q: Matrix, k: Quantized) -> Outcome:
        data, (tokens, columns) = pack_integers(k, self.config, self.dtype), k.values.shape
        self.memory.write(KEYS, data)
        self.memory.write(SUBMISSION + operand_offset(self.config), gpu_operand_bytes(q, self.config))
        return self.run(descriptors.scores(KEYS, len(data), tokens, columns, len(q)), first=True)

    def weigh(
        self, v: Quantized, b: int, start: int = 0, stop: int | None = None, spare: int = 0, **flags: int
    ) -> Outcome:
        part = Quantized(v.values[start:stop], v.scales[start:stop])
        tokens, dims = part.values.shape
        stride = pack_geometry_transposed(self.config, dims, tokens, self.dtype).group_stripes + spare
        data = pack_transposed_integers(part, self.config, self.dtype, stride)
        self.memory.write(VALUES, data)
        return self.run(descriptors.weigh(VALUES, len(data), tokens, dims, b, **flags))

    def check(self, q: Matrix, k: Quantized, v: Quantized) -> None:
        golden = golden_attention(q, dequantize(k), dequantize(v), softmax_scale_value(SCALE), self.config).partial
        dims = v.values.shape[1]
        size = len(q) * (-(-dims // 32) + 1) * WORD_BYTES
        o, anchors = anchored_result_from_bytes(self.memory.read(RESULT + RESULT_OFFSET, size), len(q), dims)
        assert np.array_equal(o.view(np.uint16), golden.o.view(np.uint16))
        assert [anchor.sum for anchor in anchors] == golden.total.tolist()


@settings(max_examples=60)
@given(
    st.sampled_from(["tiny", "small", "full"]), DTYPES, st.integers(1, 3), st.integers(1, 300),
    st.sampled_from([17, 64, 80]), st.sampled_from([(40, 120), (0, 256)]), st.integers(0, 2), st.integers(0, 1000),
)  # fmt: skip
def test_attention_over_integers_is_attention_over_their_values(
    name: str, dtype: DType, b: int, tokens: int, dims: int, scales: tuple[int, int], spare: int, seed: int
) -> None:
    config = preset(name)
    bench = Bench(config, dtype)
    q = np.random.default_rng(seed).standard_normal((b, dims)).astype(np.float16)
    k, v = (integers(seed + i, tokens, dims, dtype, scales) for i in (1, 2))
    keys, values = pack_geometry(config, tokens, dims, dtype), pack_geometry_transposed(config, dims, tokens, dtype)
    outcome = bench.scores(q, k)
    assert (outcome.status, outcome.words_read) == (
        Status.OK,
        (keys.stripes + b * -(-dims // config.stripe_values)) * config.channels,
    )
    outcome = bench.weigh(v, b, spare=spare)
    assert (outcome.status, outcome.words_read) == (Status.OK, values.stripes * config.channels)
    assert outcome.cycles == values.groups * values.beats * -(-b // 2)
    bench.check(q, k, v)


@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT4])
def test_values_tile_by_tile_each_with_frames_of_its_own(dtype: DType) -> None:
    config = preset("tiny")
    bench, q = Bench(config, dtype), np.ones((2, 64), np.float16)
    k, v = integers(1, 200, 64, dtype, (40, 90)), integers(2, 200, 4, dtype, (40, 90))
    assert bench.scores(q, k).status is Status.OK
    assert bench.weigh(v, 2, 0, 96, acc_out=1, chain=1).status is Status.OK
    assert bench.weigh(v, 2, 96, 200, acc_in=1).status is Status.OK
    bench.check(q, k, v)


def test_a_scale_that_is_no_number_makes_its_token_nan() -> None:
    bench, q = Bench(preset("tiny"), DType.INT8), np.ones((1, 64), np.float16)
    k, v = (integers(seed, 40, 64, DType.INT8, (40, 90)) for seed in (1, 2))
    v.scales[7] = 0xF9
    bench.scores(q, k)
    assert bench.weigh(v, 1).numeric == NUMERIC_NAN
    k.scales[39] = 0xFF
    assert bench.scores(q, k).numeric & NUMERIC_NAN


def test_types_may_change_between_keys_and_values() -> None:
    config = preset("tiny")
    bench, q = Bench(config, DType.INT4), np.ones((1, 64), np.float16)
    k, v = integers(1, 40, 64, DType.INT4, (40, 90)), integers(2, 40, 64, DType.INT8, (40, 90))
    bench.scores(q, k)
    bench.dtype = DType.INT8
    assert bench.weigh(v, 1).status is Status.OK
    bench.check(q, k, v)


@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT4])
def test_a_plain_product_of_integers_is_refused(dtype: DType) -> None:
    config = preset("tiny")
    bench = Bench(config, dtype)
    data = pack_operand(np.ones((4, 64), np.float16), config)
    assert bench.run(descriptors.product(KEYS, len(data), 4, 64, 1), first=True).status is Status.BAD_DTYPE
