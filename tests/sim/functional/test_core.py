"""The functional core's attention against the golden chain: tiles, rows, accumulators, memory that is not read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.config import PRESETS, NdpConfig, preset
from plora.hw.defs.descriptor import Descriptor, Keep, Source
from plora.hw.defs.legality import QueueWindow
from plora.hw.defs.packing import operand_row_stripes, pack_geometry, pack_geometry_transposed, result_row_words
from plora.hw.defs.queue import (
    ANCHOR_NAN,
    ANCHOR_NONE,
    NUMERIC_NAN,
    NUMERIC_OVERFLOW,
    RESULT_OFFSET,
    Anchor,
    operand_offset,
    softmax_scale,
)
from plora.hw.defs.status import Status
from plora.sim.functional.core import FunctionalCore, Outcome
from plora.sim.functional.layout import (
    Matrix,
    anchored_result_bytes,
    anchored_result_from_bytes,
    gpu_operand_bytes,
    pack_operand,
    pack_transposed,
)
from plora.sim.functional.memory import SparseMemory
from plora.sim.golden.softmax import Attention, golden_attention
from tests import descriptors

SUBMISSION, RESULT, KEYS, VALUES, MEMORY = 0x0, 0x1_0000, 0x2_0000, 0x9_0000, 0x10_0000
WINDOW = QueueWindow(0, MEMORY, 1 << 16, 1 << 16)
SCALE = softmax_scale(0.2)
CONFIGS = st.sampled_from([*PRESETS.values(), NdpConfig("one", 1, 1024, 1024, 4096, 1, 2, 24)])


def scale_value(bits: int = SCALE) -> float:
    return float(np.uint32(bits).view(np.float32))


@dataclass
class Bench:
    """A core with a memory, and one head's chain written by hand."""

    config: NdpConfig

    def __post_init__(self) -> None:
        self.memory = SparseMemory(MEMORY, fill=0xFF)  # every value that nobody wrote is NaN
        self.core = FunctionalCore(self.config, self.memory)
        self.keys = KEYS

    def run(self, d: Descriptor, *, first: bool = False, scale: int = 0) -> Outcome:
        return self.core.execute(d, WINDOW, SUBMISSION, RESULT, first=first, softmax_scale=scale)

    def scores(self, q: Matrix, k: Matrix, *, first: bool, new: bool = False, scale: int = SCALE) -> Outcome:
        """Run the softmax descriptor of one tile, which begins a chain, or another head within one (``new``)."""
        b, (n, dims) = len(q), k.shape
        new |= first
        if new:
            self.memory.write(SUBMISSION + operand_offset(self.config), gpu_operand_bytes(q, self.config))
        data = pack_operand(k, self.config)
        self.memory.write(self.keys, data)
        flags = {} if new else {"source": Source.CHAIN, "keep": Keep.APPEND}
        d = descriptors.scores(self.keys, len(data), n, dims, b, **flags)
        self.keys += len(data)
        return self.run(d, first=first, scale=scale)

    def weigh(self, v: Matrix, b: int, *, spare: int = 0, **flags: int) -> Outcome:
        """Run the transposed descriptor of one tile of values."""
        tokens, dims = v.shape
        g = pack_geometry_transposed(self.config, dims, tokens)
        data = bytearray(pack_transposed(v, self.config, g.beats + spare))
        # What lies beyond the tokens is never part of a result.
        bits = np.frombuffer(data, np.uint16)
        beyond = pack_transposed(np.ones(((g.beats + spare) * 16, dims), np.float16), self.config, g.beats + spare)
        beyond_bits = np.frombuffer(beyond, np.uint16).copy()
        beyond_bits[np.frombuffer(pack_transposed(np.ones_like(v), self.config, g.beats + spare), np.uint16) != 0] = 0
        bits[beyond_bits != 0] = 0x7E01
        self.memory.write(VALUES, bytes(data))
        return self.run(descriptors.weigh(VALUES, len(data), tokens, dims, b, **flags))

    def result(self, b: int, dims: int) -> tuple[Matrix, tuple[Anchor, ...]]:
        size = b * result_row_words(dims, transpose=1) * 64
        return anchored_result_from_bytes(self.memory.read(RESULT + RESULT_OFFSET, size), b, dims)


def check_result(bench: Bench, golden: Attention, what: str = "") -> None:
    o, anchors = bench.result(*golden.output.values.shape)
    partial = golden.partial
    assert np.array_equal(o.view(np.uint16), partial.o.view(np.uint16)), what
    none = partial.anchor == -32768
    assert [a.anchor for a in anchors] == np.where(none, ANCHOR_NONE, partial.anchor).tolist(), what
    assert [a.shift for a in anchors] == partial.shift.tolist(), what
    assert [a.sum for a in anchors] == partial.total.tolist(), what
    assert [a.flags for a in anchors] == [ANCHOR_NAN * bool(n) for n in partial.nan], what


def normal(seed: int, *shape: int, size: float = 1.0) -> Matrix:
    return (size * np.random.default_rng(seed).standard_normal(shape)).astype(np.float16)


@given(
    CONFIGS,
    st.integers(1, 4),
    st.sampled_from([1, 8, 16, 17, 32, 64, 80]),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 100),
    st.integers(0, 3),
    st.sampled_from([0.1, 1.0, 8.0]),
)
def test_a_chain_of_tiles_gives_the_golden_bits(
    config: NdpConfig, rows: int, dims: int, full_tiles: list[int], last: int, spare: int, size: float
) -> None:
    tiles = [32 * count for count in full_tiles] + [last]
    tokens = sum(tiles)
    if tokens > 32 * config.kept_stride((rows + 1) // 2, softmax=True) or operand_row_stripes(config, dims) > 1:
        return
    q, k, v = normal(1, rows, dims, size=size), normal(2, tokens, dims), normal(3, tokens, dims)
    bench = Bench(config)
    start = 0
    for tile in tiles:
        outcome = bench.scores(q, k[start : start + tile], first=start == 0)
        g = pack_geometry(config, tile, dims)
        assert (outcome.status, outcome.result_bytes) == (Status.OK, 0)
        assert outcome.cycles == g.stripes * ((rows + 1) // 2)
        start += tile
    outcome = bench.weigh(v, rows, spare=spare)
    golden = golden_attention(q, k, v, scale_value(), config, tiles)
    assert outcome.status is Status.OK
    nan, overflow = (bool(flags.any()) for flags in (golden.output.nan, golden.output.overflow))
    assert outcome.numeric == NUMERIC_NAN * nan | NUMERIC_OVERFLOW * overflow
    assert outcome.result_bytes == rows * result_row_words(dims, transpose=1) * 64
    assert outcome.words_read == pack_geometry_transposed(config, dims, tokens).stripes * config.channels
    check_result(bench, golden)


@pytest.mark.parametrize("parts", [(100,), (64, 36), (32, 32, 32, 4), (96, 4)])
def test_accumulators_carry_the_sums_from_tile_to_tile(parts: tuple[int, ...]) -> None:
    config, tokens = preset("small"), sum(parts)
    q, k, v = normal(4, 2, 64, size=3), normal(5, tokens, 64), normal(6, tokens, 8)
    bench = Bench(config)
    bench.scores(q, k[:64], first=True)
    bench.scores(q, k[64:], first=False)
    start = 0
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        flags = {"acc_in": int(number > 0), "acc_out": int(not last), "chain": int(not last)}
        assert bench.weigh(v[start : start + part], 2, **flags).status is Status.OK
        start += part
    check_result(bench, golden_attention(q, k, v, scale_value(), config))


@pytest.mark.parametrize("config", [preset("tiny"), preset("small")], ids=["tiny", "small"])
@pytest.mark.parametrize("parts", [1, 2])
def test_heads_may_take_turns_in_a_chain(config: NdpConfig, parts: int) -> None:
    """Each head's values come after the scores of the next: every result is that of the head alone."""
    tokens, rows = [70, 33, 128, 96, 1], [2, 1, 2, 2, 1]
    heads = [
        (normal(20 + i, b, 16, size=3), normal(40 + i, t, 16), normal(60 + i, t, 4))
        for i, (t, b) in enumerate(zip(tokens, rows, strict=True))
    ]
    bench = Bench(config)
    first = True

    def scores(head: int) -> None:
        nonlocal first
        bench.keys = KEYS
        q, k, _ = heads[head]
        for start, stop in ((0, 32), (32, len(k))):
            if start < stop:
                tile = k[start : min(stop, len(k))]
                assert bench.scores(q, tile, first=first, new=start == 0).status is Status.OK
                first = False

    def values(head: int, source: Source) -> None:
        q, k, v = heads[head]
        cut = 32 if parts == 2 and len(v) > 32 else len(v)
        if cut < len(v):
            flags = {"chain": 1, "acc_out": 1, "source": source}
            assert bench.weigh(v[:cut], len(q), **flags).status is Status.OK
            assert bench.weigh(v[cut:], len(q), chain=1, acc_in=1, source=source).status is Status.OK
        else:
            assert bench.weigh(v, len(q), chain=1, source=source).status is Status.OK
        check_result(bench, golden_attention(q, k, v, scale_value(), config), f"head {head}")

    scores(0)
    for head in range(1, len(heads)):
        scores(head)
        values(head - 1, Source.PREVIOUS)
    values(len(heads) - 1, Source.KEPT)


def test_slices_of_the_values_have_the_same_anchors() -> None:
    config = preset("small")
    q, k, v = normal(7, 4, 64), normal(8, 90, 64), normal(9, 90, 64)
    bench = Bench(config)
    bench.scores(q, k, first=True)
    for start in range(0, 64, 16):
        assert bench.weigh(v[:, start : start + 16], 4, chain=int(start < 48)).status is Status.OK
        check_result(bench, golden_attention(q, k, v[:, start : start + 16], scale_value(), config))


def test_special_scores_have_their_flags_and_anchors() -> None:
    config = preset("tiny")
    q = np.ones((6, 1), np.float16)
    q[1], q[2], q[3], q[4], q[5] = -1, np.inf, np.nan, 0, 65504
    k = np.array([[1.0], [65504], [3]], np.float16)
    v = normal(10, 3, 5)
    bench = Bench(config)
    outcome = bench.scores(q, k, first=True, scale=softmax_scale(1.0))
    assert outcome.numeric == NUMERIC_NAN | NUMERIC_OVERFLOW
    bench.weigh(v, 6)
    check_result(bench, golden_attention(q, k, v, 1.0, config))
    _, anchors = bench.result(6, 5)
    assert anchors[2].anchor == anchors[3].anchor == ANCHOR_NONE and anchors[2].flags == ANCHOR_NAN


def test_a_row_of_minus_infinity_is_zero_without_an_anchor() -> None:
    config = preset("tiny")
    q, k, v = np.full((1, 1), -np.inf, np.float16), np.ones((5, 1), np.float16), normal(11, 5, 3)
    bench = Bench(config)
    assert bench.scores(q, k, first=True).numeric == 0
    bench.weigh(v, 1)
    o, anchors = bench.result(1, 3)
    assert not o.view(np.uint16).any()
    assert anchors == (Anchor(ANCHOR_NONE, 0, 0, 0),)


def test_only_the_stripes_that_hold_tokens_are_read() -> None:
    config = preset("small")
    q, k, v = normal(12, 2, 32), normal(13, 40, 32), normal(14, 40, 32)
    g = pack_geometry_transposed(config, 32, 40)
    for group, beat in [(0, g.beats), (g.groups - 1, g.beats), (0, g.beats - 1)]:
        bench = Bench(config)
        bench.scores(q, k, first=True)
        stride = g.beats + 2
        at = VALUES + (group * stride + beat) * config.stripe_bytes
        assert bench.weigh(v, 2, spare=2, chain=1).status is Status.OK
        bench.memory.add_error_range(at, 1)
        d = descriptors.weigh(VALUES, g.packed_bytes(stride), 40, 32, 2)
        expected = Status.OK if beat == g.beats else Status.MEMORY_ERROR
        assert bench.run(d).status is expected, f"group {group}, stripe {beat} of {g.beats}"


def test_a_new_intermediate_forgets_the_old_rows() -> None:
    config = preset("tiny")
    bench = Bench(config)
    bench.scores(normal(15, 2, 32, size=50), normal(16, 40, 32), first=True)
    q, k, v = normal(17, 3, 32), normal(18, 33, 32), normal(19, 33, 4)
    bench.keys = KEYS
    bench.scores(q, k, first=True)
    bench.weigh(v, 3)
    check_result(bench, golden_attention(q, k, v, scale_value(), config))


def test_anchored_results_are_read_as_they_were_written() -> None:
    o = normal(20, 3, 70)
    anchors = [Anchor(-5 + row, row, 0, 1 << 40) for row in range(3)]
    data = anchored_result_bytes(o, anchors)
    assert len(data) == 3 * 4 * 64
    values, read = anchored_result_from_bytes(data, 3, 70)
    assert np.array_equal(values, o) and list(read) == anchors
