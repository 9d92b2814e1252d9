"""The PE array against the golden GEMM: layouts, sums over descriptors, masks, and every cycle of its timing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from amaranth.sim import Simulator
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.config import PE_ROWS, NdpConfig, preset
from plora.hw.defs.packing import pack_geometry
from plora.hw.defs.queue import NUMERIC_NAN, NUMERIC_OVERFLOW
from plora.hw.rtl.pe.array import MAX_PAUSE, PeArray, beat_layout, results_layout
from plora.hw.rtl.pe.drain import MAX_OFFSET, score_layout
from plora.sim.golden.numerics import Scores, gemm_grid, grid_to_fp16, grid_to_scores
from tests.hw.rtl.pe.beats import Shape, make_beats, take_result
from tests.hw.rtl.pe.bench import ARRAYS, TAG_BITS
from tests.hw.rtl.pe.compiled import ACCUMULATOR, Array, ArrayRun, Units
from tests.hw.rtl.pe.operands import KINDS, operands

LATENCY = PeArray(preset("tiny"), tag_bits=1).latency


@dataclass(frozen=True)
class Group:
    """One row group, and the descriptors whose sums it gathers."""

    tap: int
    split_log2: int
    columns: list[int]
    """K of each descriptor."""
    kind: str
    """Of the operands, see `tests.hw.rtl.pe.operands`."""
    second_row: bool
    complete: bool
    """Otherwise its sums are abandoned."""
    gaps: list[int]
    """Cycles without a beat before the beats, repeated as often as needed."""
    token_wise: bool = False
    pause: int = 0
    offsets: tuple[int, int] = (0, 0)


@dataclass
class Job:
    """Beats of groups, and what must come of them."""

    config: NdpConfig
    beats: list[int]
    gaps: list[int]
    accepted: list[int]
    results: list[tuple[int, int, int, Array, Array, Array, Array]]
    """Cycle, tag, tap index; FP16 patterns and flags, scores and their flags of the meaningful results (both rows)."""


def numeric(nan: Array, overflow: Array) -> Array:
    flags: Array = nan * NUMERIC_NAN | overflow * NUMERIC_OVERFLOW
    return flags


def score_bits(scores: Scores) -> Array:
    """Return scores as bits of a `score_layout`."""
    names = ("mantissa", "exponent", "negative", "infinite", "nan")
    bits: Array = sum(getattr(scores, name).astype(np.int64) << score_layout[name].offset for name in names)
    return bits


def meaning(scores: Array) -> Array:
    """Return bits of a `score_layout` without number where the score is infinite, without sign too where it is NaN."""
    infinite, nan = (1 << score_layout[name].offset for name in ("infinite", "nan"))
    sign = 1 << score_layout["negative"].offset
    return np.where(scores & nan, nan, np.where(scores & infinite, scores & (infinite | sign), scores))


def make_job(config: NdpConfig, groups: list[Group], seed: int) -> Job:
    """Work out beats, the cycle in which each is accepted, and the results with their cycles."""
    rng = np.random.default_rng(seed)
    job = Job(config, [], [], [], [])
    cycle, merge_free = 0, 0
    for tag, group in enumerate(groups):
        shape = Shape(config, group.tap, group.split_log2, group.token_wise)
        operand_pairs = []
        for index, columns in enumerate(group.columns):
            x, w = operands(rng, (PE_ROWS, columns), group.kind), operands(rng, (shape.rows, columns), group.kind)
            operand_pairs.append((x, w))
            ends = group.complete and index == len(group.columns) - 1
            beats = list(
                make_beats(
                    shape, x, w, first=index == 0, last=ends, second_row=group.second_row, tag=tag,
                    pause=group.pause, offsets=group.offsets,
                )
            )  # fmt: skip
            for beat_index, beat in enumerate(beats):
                gap = group.gaps[len(job.beats) % len(group.gaps)]
                last = ends and beat_index == len(beats) - 1
                # Offered after the gap; its passes begin at once, or when the row merge allows it.
                start = max(cycle + gap, merge_free if last else 0)
                if last:
                    for _ in range(shape.taps):
                        start = max(start, merge_free)
                        merge_free = start + 1 + group.split_log2 + group.pause
                        start += 1
                    cycle = start
                else:
                    cycle = start + 1
                job.beats.append(beat)
                job.gaps.append(gap)
                job.accepted.append(cycle - 1)
        if group.complete:
            x, w = (np.concatenate(parts, axis=1).view(np.float16) for parts in zip(*operand_pairs, strict=True))
            sums = gemm_grid(x, w, ACCUMULATOR)
            results = (
                *grid_to_fp16(sums, ACCUMULATOR, np.array(group.offsets)[:, None]),
                grid_to_scores(sums, ACCUMULATOR),
            )
            values, nan, overflow, scores = results
            for tap in range(shape.rows // shape.part_channels):
                part = np.s_[:, tap * shape.part_channels : (tap + 1) * shape.part_channels]
                at = job.accepted[-1] + LATENCY + group.split_log2
                at += tap if group.token_wise else -(shape.taps - 1 - tap) * (1 + group.split_log2 + group.pause)
                job.results.append(
                    (
                        at,
                        tag,
                        tap,
                        values.view(np.uint16)[part],
                        numeric(nan, overflow)[part],
                        score_bits(scores)[part],
                        numeric(scores.nan, scores.overflow)[part],
                    )
                )
    return job


def check(job: Job, run: ArrayRun, groups: list[Group]) -> None:
    assert run.accepted == job.accepted
    assert len(run.results) == len(job.results)
    for word, at, (cycle, tag, tap, values, flags, scores, score_flags) in zip(
        run.results, run.result_cycles, job.results, strict=True
    ):
        result, group = take_result(job.config, word), groups[tag]
        assert (result.tag, result.tap_index, result.second_row) == (tag, tap, group.second_row)
        assert result.last_tap == (tap == (1 if group.token_wise else (1 << group.tap) - 1))
        assert at == cycle, f"result of group {tag}, tap {tap}"
        meaningful = values.shape[1]
        np.testing.assert_array_equal(result.values[:, :meaningful], values, str(group))
        np.testing.assert_array_equal(result.numeric[:, :meaningful], flags, str(group))
        # Scores have no offset.
        rows = np.flatnonzero(np.array(group.offsets) == 0)
        is_flags, is_scores = (array[rows, :meaningful] for array in (result.score_numeric, result.scores))
        np.testing.assert_array_equal(is_flags, score_flags[rows], str(group))
        np.testing.assert_array_equal(meaning(is_scores), meaning(scores[rows]), str(group))


def run_job(units: Units, name: str, groups: list[Group], seed: int = 0) -> Job:
    config = ARRAYS[name]
    job = make_job(config, groups, seed)
    sizes = (beat_layout(config, TAG_BITS).size, results_layout(config, TAG_BITS).size)
    check(job, units.array(name, job.beats, job.gaps, sizes), groups)
    return job


@st.composite
def group_lists(draw: st.DrawFn, channels: int) -> list[Group]:
    def group() -> Group:
        token_wise = draw(st.booleans())
        tap = 0 if token_wise else draw(st.integers(0, 2))
        if token_wise:
            columns, split_log2 = draw(st.lists(st.integers(1, 100), min_size=1, max_size=3)), 0
        elif tap:
            columns, split_log2 = [draw(st.integers(1, 32 >> tap))], 0
        else:
            split_log2 = draw(st.integers(0, channels.bit_length() - 1))
            columns = draw(st.lists(st.integers(1, 200), min_size=1, max_size=3))
        return Group(
            tap=tap,
            split_log2=split_log2,
            columns=columns,
            kind=draw(st.sampled_from(KINDS)),
            second_row=draw(st.booleans()),
            complete=bool(tap) or draw(st.integers(0, 5)) > 0,
            gaps=draw(st.lists(st.integers(0, 3), min_size=1, max_size=5)),
            token_wise=token_wise,
            pause=0 if split_log2 else draw(st.integers(int(token_wise), MAX_PAUSE)),
            offsets=(draw(st.integers(0, MAX_OFFSET)), draw(st.integers(0, MAX_OFFSET))),
        )

    return [group() for _ in range(draw(st.integers(1, 6)))]


@pytest.mark.parametrize("name", ARRAYS)
@settings(max_examples=150)
@given(data=st.data(), seed=st.integers(0, 1 << 32))
def test_any_sequence_of_groups(units: Units, name: str, data: st.DataObject, seed: int) -> None:
    groups = data.draw(group_lists(ARRAYS[name].channels))
    run_job(units, name, groups, seed)


def whole(tap: int = 0, split_log2: int = 0, columns: int = 32, **changes: Any) -> Group:
    group = Group(tap, split_log2, [columns], "moderate", second_row=True, complete=True, gaps=[0])
    return replace(group, **changes)


@pytest.mark.parametrize("name", ARRAYS)
def test_groups_of_one_beat_follow_each_other_every_cycle(units: Units, name: str) -> None:
    job = run_job(units, name, [whole() for _ in range(50)])
    assert job.accepted == list(range(50))
    assert [result[0] for result in job.results] == list(range(LATENCY, LATENCY + 50))


@pytest.mark.parametrize(("tap", "columns"), [(1, 16), (1, 9), (2, 8), (2, 1)])
def test_words_of_several_rows_give_a_result_every_cycle(units: Units, tap: int, columns: int) -> None:
    job = run_job(units, "tiny", [whole(tap, columns=columns) for _ in range(20)])
    assert [result[0] for result in job.results] == list(range(LATENCY, LATENCY + (20 << tap)))


def test_merging_a_split_is_hidden_behind_further_beats(units: Units) -> None:
    # Two parts of 32 lanes: two beats a group, one merge step: no beat ever waits.
    job = run_job(units, "tiny", [whole(split_log2=1, columns=128) for _ in range(20)])
    assert job.accepted == list(range(40))


def test_groups_of_one_beat_wait_for_the_merging_of_the_one_before(units: Units) -> None:
    job = run_job(units, "tiny", [whole(split_log2=1, columns=50) for _ in range(10)])
    assert job.accepted == list(range(0, 20, 2))


def test_an_unsplit_group_may_follow_a_split_one(units: Units) -> None:
    run_job(units, "tiny", [whole(split_log2=i % 2, columns=20 + 13 * i) for i in range(12)])


def test_sums_go_on_across_descriptors_and_pauses(units: Units) -> None:
    run_job(units, "tiny", [whole(columns=1, gaps=[9]), replace(whole(gaps=[7, 0, 21]), columns=[31, 64, 5, 1])])


def token_wise(columns: int, **changes: Any) -> Group:
    return whole(columns=columns, token_wise=True, **{"pause": 1, **changes})


@pytest.mark.parametrize("name", ARRAYS)
def test_token_wise_groups_of_two_beats_follow_each_other_without_a_bubble(units: Units, name: str) -> None:
    job = run_job(units, name, [token_wise(32, offsets=(i % 16, 15 - i % 16)) for i in range(20)])
    assert job.accepted == list(range(40))
    assert [result[0] for result in job.results] == list(range(LATENCY + 1, LATENCY + 41))


@pytest.mark.parametrize("pause", [1, 2])
def test_token_wise_groups_of_one_beat_keep_their_pause(units: Units, pause: int) -> None:
    job = run_job(units, "tiny", [token_wise(columns, pause=pause) for columns in range(1, 17)])
    assert job.accepted == list(range(0, 16 * (pause + 1), pause + 1))


@pytest.mark.parametrize("tap", range(3))
def test_scores_leave_room_for_their_second_row(units: Units, tap: int) -> None:
    job = run_job(units, "tiny", [whole(tap, columns=32 >> tap, pause=1) for _ in range(10)])
    assert [result[0] for result in job.results] == list(range(LATENCY, LATENCY + (20 << tap), 2))


def test_token_wise_sums_go_on_across_descriptors_between_others(units: Units) -> None:
    groups = [token_wise(1), replace(token_wise(1), columns=[64, 32, 7]), whole(), token_wise(40), whole(1, columns=16)]
    run_job(units, "tiny", groups + groups[::-1])


def test_abandoned_sums_leave_no_trace(units: Units) -> None:
    poison = whole(columns=64, kind="special", complete=False)
    run_job(units, "tiny", [poison, whole(), poison, whole(1, columns=16), poison, whole(split_log2=1)])


@pytest.mark.parametrize("rows", range(1, 18))
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 16, 17, 32, 33, 257, 300])
def test_every_geometry_of_small_operands(units: Units, rows: int, columns: int) -> None:
    geometry = pack_geometry(preset("tiny"), rows, columns)
    split_log2, tap = geometry.split.bit_length() - 1, geometry.taps.bit_length() - 1
    assert Shape(preset("tiny"), tap, split_log2).rows == geometry.group_rows
    assert Shape(preset("tiny"), tap, split_log2).beats(columns) == geometry.beats
    run_job(units, "tiny", [whole(tap, split_log2, columns, kind="any") for _ in range(geometry.groups)])


@pytest.mark.parametrize("name", ARRAYS)
def test_amaranth_simulator_agrees(name: str) -> None:
    config = ARRAYS[name]
    groups = [
        whole(columns=40, kind="special"),
        whole(2, columns=5),
        whole(1, columns=16),
        whole(split_log2=config.channels.bit_length() - 1, columns=70),
        whole(columns=1),
        token_wise(40, offsets=(3, 0)),
        token_wise(5, pause=2),
        whole(pause=1),
    ]
    job = make_job(config, groups, 5)
    dut = PeArray(config, tag_bits=TAG_BITS)
    accepted: list[int] = []
    results: list[int] = []
    result_cycles: list[int] = []

    async def drive(ctx: Any) -> None:
        beats, cycle = list(job.beats), 0
        while len(results) < len(job.results) and cycle < 200:
            ctx.set(dut.beats.valid, bool(beats))
            if beats:
                ctx.set(dut.beats.payload.as_value(), beats[0])
            _, _, ready, valid, result = await ctx.tick().sample(
                dut.beats.ready, dut.results.valid, dut.results.payload.as_value()
            )
            if beats and ready:
                accepted.append(cycle)
                beats.pop(0)
            if valid:
                results.append(result)
                result_cycles.append(cycle)
            cycle += 1

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(drive)
    simulator.run()
    check(job, ArrayRun(accepted, results, result_cycles), groups)


def test_a_tag_of_no_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="tag_bits must be at least 1, not 0"):
        beat_layout(preset("tiny"), 0)
