"""INT8 and INT4 keys and values in the Verilated core: the functional core's bits, flags and beats."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from plora.hw.cosim.device import RtlDevice
from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import DType, Keep, Op, Source
from plora.hw.defs.legality import kept_column_limit
from plora.hw.defs.packing import pack_geometry, pack_geometry_transposed
from plora.hw.defs.queue import NUMERIC_NAN, softmax_scale
from plora.hw.defs.status import Status
from tests.hw.rtl.core.bench import describe
from tests.hw.rtl.core.rig import Report, Rig
from tests.hw.rtl.core.system import Step, attention_steps, random_integers, random_values, step

TINY = preset("tiny")
DTYPES = [DType.INT8, DType.INT4]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One device, used by test after test without a reset."""
    yield Rig(RtlDevice(TINY, dram_bytes=1 << 24, read_latency_cycles=10))


@pytest.fixture(scope="module")
def rough() -> Iterator[Rig]:
    """One whose memory stalls."""
    yield Rig(RtlDevice(TINY, dram_bytes=1 << 24, read_latency_cycles=10, stall=0.4, latency_jitter_cycles=20))


def run(rig: Rig, steps: list[Step]) -> Report:
    report = rig.run(steps)
    assert {Status(completion.status) for completion in report.completions} == {Status.OK}
    return report


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
@pytest.mark.parametrize("dims", [17, 32, 40, 64, 96, 100, 256])
def test_every_number_of_beats_a_group_and_frames_to_their_ends(rig: Rig, dtype: DType, rows: int, dims: int) -> None:
    rng, steps = np.random.default_rng(dims + rows), []
    for tokens in (1, 2, 31, 127, 128, 129, 130, 256, 257, 300):
        if tokens <= kept_column_limit(TINY, -(-rows // 2), softmax=True):
            steps += attention_steps(TINY, rng, dims=dims, rows=rows, tiles=[tokens], value_dims=70, dtype=dtype)
    run(rig, steps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_of_keys_and_of_values_and_room_between_groups(rig: Rig, dtype: DType) -> None:
    rng = np.random.default_rng(2)
    steps = [
        *attention_steps(TINY, rng, dims=64, rows=2, tiles=[32, 160, 32, 7], spare_stripes=5, dtype=dtype),
        *attention_steps(TINY, rng, dims=64, rows=3, tiles=[96, 32, 96, 31], spare_stripes=1, dtype=dtype),
        *attention_steps(
            TINY, rng, dims=64, rows=2, tiles=[160, 140], v_tiles=[64, 32, 160, 44], value_dims=4, dtype=dtype
        ),
        *attention_steps(TINY, rng, dims=40, rows=1, tiles=[160, 40], v_tiles=[192, 8], value_dims=1, dtype=dtype),
    ]
    run(rig, steps)


@pytest.mark.parametrize("seed", range(4))
def test_heads_of_all_types_in_a_row_on_a_memory_that_stalls(rough: Rig, seed: int) -> None:
    rng, choose = np.random.default_rng(seed), random.Random(seed)
    steps: list[Step] = []
    for _ in range(14):
        dtype = choose.choice([*DTYPES, *DTYPES, DType.FP16])
        dims, rows = choose.choice([33, 64, 128]), choose.choice([1, 2, 2, 3])
        tiles = [32 * choose.randint(1, 5) for _ in range(choose.randint(0, 1))] + [choose.randint(1, 90)]
        steps += attention_steps(
            TINY, rng, dims=dims, rows=rows, tiles=tiles, spare_stripes=choose.randint(0, 3), dtype=dtype
        )
        if choose.random() < 0.5:
            steps.append(step(TINY, rng, choose.randint(1, 9), choose.choice([5, 40, 130]), choose.randint(1, 4)))
    run(rough, steps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_integers_and_any_scales(rig: Rig, dtype: DType) -> None:
    rng, steps = np.random.default_rng(4), []
    for rows in (1, 3):
        for _ in range(8):
            keys, values = attention_steps(TINY, rng, dims=40, rows=rows, tiles=[150], value_dims=33, dtype=dtype)
            keys.w = random_integers(rng, 150, 40, dtype, "bits")
            values.w = random_integers(rng, 150, 33, dtype, "bits")
            steps += [replace(keys, scale=softmax_scale(2.0**-20)), values]
    report = run(rig, steps)
    assert any(completion.numeric & NUMERIC_NAN for completion in report.completions)


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_may_change_between_keys_and_values(rig: Rig, dtype: DType) -> None:
    rng, steps = np.random.default_rng(5), []
    for of_keys, of_values in ((dtype, DType.FP16), (DType.FP16, dtype), (DType.INT8, DType.INT4)):
        steps.append(attention_steps(TINY, rng, dims=64, rows=2, tiles=[90], dtype=of_keys)[0])
        steps.append(attention_steps(TINY, rng, dims=64, rows=2, tiles=[90], dtype=of_values)[1])
    run(rig, steps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_counters_have_the_beats_of_fp16_and_the_words_of_the_integers(rig: Rig, dtype: DType, rows: int) -> None:
    rng, tokens, dims = np.random.default_rng(6), 200, 64
    counters = {}
    for each in (DType.FP16, dtype):
        counters[each] = run(rig, attention_steps(TINY, rng, dims=dims, rows=rows, tiles=[tokens], dtype=each)).counters
    plain, integers = counters.values()
    assert integers["BEATS"] == plain["BEATS"]
    keys, values = pack_geometry(TINY, tokens, dims, dtype), pack_geometry_transposed(TINY, dims, tokens, dtype)
    queries = rows * -(-dims // TINY.stripe_values)
    assert integers["WORDS_READ"] == (keys.stripes + values.stripes + queries) * TINY.channels
    # A cycle for each stripe of scales, of values in every pass; else an ideal memory keeps up.
    scales = keys.frames + values.groups * -(-values.beats // values.frame_beats) * -(-rows // 2)
    waits = integers["SPAN"] - integers["BEATS"] - (plain["SPAN"] - plain["BEATS"])
    assert scales - 2 <= waits <= scales


def test_bad_memory_in_scales_and_integers_and_beyond(rig: Rig) -> None:
    rng = np.random.default_rng(7)
    stripe = TINY.stripe_bytes
    for index, offset, first in ((0, 0, Status.MEMORY_ERROR), (0, 3 * stripe, Status.MEMORY_ERROR), (1, 0, Status.OK)):
        head = attention_steps(TINY, rng, dims=64, rows=2, tiles=[60], dtype=DType.INT8)
        after = attention_steps(TINY, rng, dims=64, rows=2, tiles=[60], dtype=DType.INT8)
        report = rig.run([*head, *after], errors=[(index, "weights", offset)])
        assert report.completions[0].status == first
        assert [c.status for c in report.completions[2:]] == [Status.OK, Status.OK]
    # Room that is set aside for more tokens is not read.
    head = attention_steps(TINY, rng, dims=64, rows=2, tiles=[60], dtype=DType.INT8, spare_stripes=2)
    beyond = pack_geometry_transposed(TINY, 64, 60, DType.INT8).group_stripes * stripe
    assert [c.status for c in rig.run(head, errors=[(1, "weights", beyond)]).completions] == [Status.OK, Status.OK]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_attention_is_refused(rig: Rig, dtype: DType) -> None:
    rng = np.random.default_rng(8)
    plain = replace(step(TINY, rng, 6, 40, 2), descriptor=describe(TINY, 6, 40, 2, dtype=dtype), w=None)
    narrow = Step(
        describe(TINY, 8, 16, 1, op=Op.SOFTMAX, keep=Keep.NEW, chain=1, dtype=dtype), x=random_values(rng, 1, 16),
        scale=softmax_scale(1.0),
    )  # fmt: skip
    end = Step(describe(TINY, 8, 16, 1, source=Source.CHAIN), False)
    statuses = [completion.status for completion in rig.run([plain, narrow, end]).completions]
    assert statuses == [Status.BAD_DTYPE, Status.SHAPE_MISMATCH, Status.CHAIN_ABORTED]
