"""The whole core, Verilated inside the device, against the functional core: every byte, status and flag.

Memory is poisoned with NaN wherever nothing was written, padding of operands included, so that a value
that should not have been read or should have been written shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from plora.hw.cosim.device import ResponseOrder, RtlDevice
from plora.hw.defs.config import KEPT_MAX_VALUES, NdpConfig, preset
from plora.hw.defs.descriptor import Keep, Op, Source
from plora.hw.defs.status import Status
from tests.hw.rtl.core.rig import SLOT_LOG2, Report, Rig, random_steps
from tests.hw.rtl.core.system import Step, step

TINY, SMALL = preset("tiny"), preset("small")
DRAM_BYTES = 1 << 24


def make_rig(config: NdpConfig = TINY, *, slot_log2: int = SLOT_LOG2, **moods: Any) -> Rig:
    return Rig(RtlDevice(config, dram_bytes=DRAM_BYTES, **moods), slot_log2=slot_log2)


def small_rig(**moods: Any) -> Rig:
    return make_rig(SMALL, slot_log2=16, **moods)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One `tiny` device with a quick memory, used by test after test without a reset."""
    yield make_rig(read_latency_cycles=10)


def statuses(report: Report) -> list[Status]:
    return [Status(completion.status) for completion in report.completions]


def numbers(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("kind", ["integers", "bits"])
def test_every_small_number_of_rows_on_either_side(rig: Rig, kind: str) -> None:
    rng = numbers(1)
    rows = range(1, 2 * TINY.channels * 2 + 1)
    steps = [step(TINY, rng, n, 40, b, kind=kind) for n in (*rows, 31, 32, 33) for b in (1, 2, 3, 4, 5)]
    assert set(statuses(rig.run(steps))) == {Status.OK}


@pytest.mark.parametrize("kind", ["integers", "bits"])
def test_every_small_number_of_columns_and_those_around_every_limit(rig: Rig, kind: str) -> None:
    rng = numbers(2)
    columns = [*range(1, 35), *range(62, 67), *range(126, 131), *range(254, 260), 511, 512, 513, 1000, 1024]
    steps = [step(TINY, rng, n, k, b, kind=kind) for k in columns for n, b in ((1, 1), (3, 2))]
    assert set(statuses(rig.run(steps))) == {Status.OK}


@pytest.mark.parametrize("rank", [1, 8, 12, 16, 24, 32, 64])
def test_an_adapter_of_any_rank_runs_as_a_chain_that_keeps_the_middle(rig: Rig, rank: int) -> None:
    rng = numbers(3, rank)
    for batch in (1, 2, 3):
        a = step(TINY, rng, rank, 512, batch, chain=1, keep=Keep.NEW)
        b = step(TINY, rng, 100, rank, batch, source=Source.KEPT)
        assert statuses(rig.run([a, b])) == [Status.OK, Status.OK]


def test_an_intermediate_made_of_several_tiles_feeds_several_products(rig: Rig) -> None:
    rng = numbers(4)
    tiles = [step(TINY, rng, n, 300, 5, chain=1, keep=keep, source=source)
             for n, keep, source in ((32, Keep.NEW, Source.SLOT), (64, Keep.APPEND, Source.CHAIN),
                                     (17, Keep.APPEND, Source.CHAIN))]  # fmt: skip
    products = [step(TINY, rng, n, 113, 5, chain=chain, source=Source.KEPT) for n, chain in ((50, 1), (7, 1), (1, 0))]
    assert set(statuses(rig.run([*tiles, *products]))) == {Status.OK}


def test_the_largest_intermediate_is_kept_whole(rig: Rig) -> None:
    rng = numbers(5)
    batch = 2 * TINY.kept_words // (KEPT_MAX_VALUES // 32)
    first = step(TINY, rng, KEPT_MAX_VALUES, 60, batch, chain=1, keep=Keep.NEW)
    second = step(TINY, rng, 5, KEPT_MAX_VALUES, batch, source=Source.KEPT)
    assert statuses(rig.run([first, second])) == [Status.OK, Status.OK]


def test_columns_appended_to_an_intermediate_may_come_from_itself(rig: Rig) -> None:
    rng = numbers(6)
    steps = [
        step(TINY, rng, 64, 100, 3, chain=1, keep=Keep.NEW),
        step(TINY, rng, 40, 64, 3, chain=1, keep=Keep.APPEND, source=Source.KEPT),
        step(TINY, rng, 9, 104, 3, source=Source.KEPT),
    ]
    assert set(statuses(rig.run(steps))) == {Status.OK}


def test_one_loaded_operand_serves_many_matrices_also_after_others_used_the_intermediate(rig: Rig) -> None:
    rng = numbers(7)
    steps = []
    for _ in range(4):  # q, k and v of one layer share x
        steps += [step(TINY, rng, 40, 500, 3, chain=1, keep=Keep.NEW)]
        steps += [step(TINY, rng, 60, 40, 3, chain=1, source=Source.KEPT)]
        steps += [step(TINY, rng, 16, 500, 3, chain=1, source=Source.CHAIN, keep=Keep.NEW)]
        steps += [step(TINY, rng, 60, 16, 3, chain=1, source=Source.KEPT)]
        steps += [step(TINY, rng, 21, 500, 3, source=Source.CHAIN)]
    assert set(statuses(rig.run(steps))) == {Status.OK}


@pytest.mark.parametrize("kind", ["normal", "bits"])
def test_sums_go_on_over_descriptors_as_if_k_had_been_one_piece(rig: Rig, kind: str) -> None:
    rng = numbers(8)
    steps = []
    for n, b, ks in ((2, 2, (1024, 1000, 40)), (1, 1, (700, 300, 1024)), (2, 1, (17, 33, 64, 100))):
        for index, k in enumerate(ks):
            last = index == len(ks) - 1
            steps.append(step(TINY, rng, n, k, b, kind=kind, chain=int(not last), acc_out=int(not last),
                              acc_in=int(index > 0)))  # fmt: skip
    assert set(statuses(rig.run(steps))) == {Status.OK}


@pytest.mark.parametrize("seed", range(12))
def test_random_chains_on_a_memory_of_any_mood(seed: int) -> None:
    rng = random.Random(seed)
    moods: dict[str, Any] = {
        "seed": seed,
        "stall": rng.choice([0, 0.1, 0.3, 0.6]),
        "read_latency_cycles": rng.choice([1, 5, 40, 200]),
        "write_latency_cycles": rng.choice([1, 20, 100]),
        "latency_jitter_cycles": rng.choice([0, 10, 60]),
        "response_order": rng.choice(list(ResponseOrder)),
        "max_bursts": rng.choice([1, 4, 64]),
    }
    rig = make_rig(**moods)
    report = rig.run(random_steps(TINY, rng, 40, mutations=rng.choice([0, 0.1, 0.3])))
    counters = report.counters
    assert counters["SPAN"] == counters["BEATS"] + counters["STALL_WEIGHTS"] + counters["STALL_DRAIN"], moods
    assert counters["DESCRIPTORS"] == 40, moods
    assert counters["ERRORS"] == sum(status is not Status.OK for status in statuses(report)), moods


def test_random_chains_on_four_channels() -> None:
    rig = make_rig(SMALL, stall=0.2, read_latency_cycles=30)
    rig.run(random_steps(SMALL, random.Random(99), 60, mutations=0.1))


def test_illegal_descriptors_leave_their_legal_neighbours_alone(rig: Rig) -> None:
    rng = numbers(9)
    steps: list[Step] = []
    wanted = []
    faults: list[tuple[dict[str, Any], Status]] = [
        ({"type": 1}, Status.BAD_TYPE),
        ({"op": 5}, Status.BAD_OP),
        ({"op": Op.SOFTMAX}, Status.BAD_FLAGS),
        ({"transpose": 1}, Status.BAD_FLAGS),
        ({"dtype": 2}, Status.BAD_DTYPE),
        ({"keep": Keep.NEW}, Status.BAD_FLAGS),
        ({"reserved": 1}, Status.BAD_RESERVED),
        ({"gpu_rows": 0}, Status.ZERO_DIMENSION),
        ({"gpu_columns": 69}, Status.SHAPE_MISMATCH),
        ({"device_bytes": 64}, Status.SIZE_MISMATCH),
        ({"source": Source.KEPT}, Status.CHAIN_BROKEN),
        ({"acc_in": 1}, Status.CHAIN_BROKEN),
    ]
    for flags, status in faults:
        steps += [step(TINY, rng, 2, 70, 2), step(TINY, rng, 2, 70, 2, **flags)]
        wanted += [Status.OK, status]
    steps.append(step(TINY, rng, 3, 70, 3))
    assert statuses(rig.run(steps)) == [*wanted, Status.OK]


@pytest.mark.parametrize("place", ["operand", "weights", "result"])
def test_a_memory_error_fails_its_chain_and_nothing_else(rig: Rig, place: str) -> None:
    rng = numbers(10)
    for offset in (0, 1000):
        steps = [
            step(TINY, rng, 40, 500, 3),
            step(TINY, rng, 40, 200, 7, chain=1),
            step(TINY, rng, 40, 200, 7, chain=1, source=Source.CHAIN, keep=Keep.NEW),
            step(TINY, rng, 40, 40, 7, source=Source.KEPT),
            step(TINY, rng, 40, 500, 3, chain=1),
            step(TINY, rng, 40, 500, 3, source=Source.CHAIN),
        ]
        report = rig.run(steps, errors=[(1, place, offset if place != "result" else offset // 2)])
        assert statuses(report) == [
            Status.OK, Status.MEMORY_ERROR, Status.CHAIN_ABORTED, Status.CHAIN_ABORTED, Status.OK, Status.OK,
        ]  # fmt: skip


def test_a_failed_read_of_a_prefetched_job_is_not_blamed_on_the_job_before(rig: Rig) -> None:
    rng = numbers(11)
    steps = [step(TINY, rng, 2, 1000, 2) for _ in range(8)]
    report = rig.run(steps, errors=[(3, "weights", 0), (6, "operand", 0)])
    assert [index for index, status in enumerate(statuses(report)) if status is not Status.OK] == [3, 6]


def test_a_reset_with_work_in_flight_leaves_nothing_behind() -> None:
    rig = make_rig(read_latency_cycles=60, stall=0.2)
    steps = random_steps(TINY, random.Random(5), 12)
    for cycles in (90, 150, 260, 410):
        rig.start(steps, compare=False)
        rig.device.wait(cycles)
        rig.device.reset()
        rig.run(random_steps(TINY, random.Random(cycles), 12))
