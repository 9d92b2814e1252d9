"""Attention on the whole core, Verilated inside the device, against the functional core: every byte and flag."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plora.hw.cosim.device import ResponseOrder
from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import Keep, Source
from plora.hw.defs.status import Status
from tests.hw.rtl.core.rig import Report, Rig
from tests.hw.rtl.core.system import Step, attention_steps, interleaved, step
from tests.hw.rtl.core.test_core_verilated import make_rig, numbers, small_rig, statuses

TINY, SMALL = preset("tiny"), preset("small")


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One `tiny` device with a quick memory, used by test after test without a reset."""
    yield make_rig(read_latency_cycles=10)


@pytest.fixture(scope="module")
def small() -> Iterator[Rig]:
    """The same of `small`."""
    yield small_rig(read_latency_cycles=10)


def all_ok(report: Report) -> bool:
    return set(statuses(report)) == {Status.OK}


def most_tokens(rows: int) -> int:
    return 32 * TINY.kept_stride(-(-rows // 2), softmax=True)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16, 31, 32])
def test_any_number_of_query_rows_over_as_many_tokens_as_fit(rig: Rig, rows: int) -> None:
    assert all_ok(rig.run(attention_steps(TINY, numbers(rows), dims=64, rows=rows, tiles=[most_tokens(rows)])))


@pytest.mark.parametrize("dims", [1, 8, 16, 17, 64, 80, 96, 128, 256])
def test_any_size_of_head(rig: Rig, dims: int) -> None:
    rng = numbers(1, dims)
    steps = [
        one
        for rows, tiles in ((1, [100]), (4, [64, 37]))
        for one in attention_steps(TINY, rng, dims=dims, rows=rows, tiles=tiles)
    ]
    assert all_ok(rig.run(steps))


def test_every_small_number_of_tokens_and_those_around_words_and_beats(rig: Rig) -> None:
    rng = numbers(2)
    steps = [
        one
        for tokens in (*range(1, 36), 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129)
        for one in attention_steps(TINY, rng, dims=20, rows=3, tiles=[tokens], value_dims=1 + tokens % 9)
    ]
    assert all_ok(rig.run(steps))


def test_heads_of_many_tiles_with_v_in_pieces_and_room_to_grow(rig: Rig) -> None:
    rng = numbers(3)
    steps = [
        *attention_steps(TINY, rng, dims=64, rows=2, tiles=[32, 64, 320, 32, 7], spare_stripes=5),
        *attention_steps(TINY, rng, dims=64, rows=7, tiles=[32, 64, 31], spare_stripes=1),
        *attention_steps(TINY, rng, dims=64, rows=2, tiles=[160, 40], v_tiles=[64, 32, 96, 8], value_dims=4),
        *attention_steps(TINY, rng, dims=64, rows=1, tiles=[160, 40], v_tiles=[192, 8], value_dims=1, spare_stripes=3),
    ]
    assert all_ok(rig.run(steps))


@pytest.mark.parametrize("spread", [0.01, 3.0, 40.0, 1400.0])
def test_scores_of_any_spread(rig: Rig, spread: float) -> None:
    rng = numbers(4)
    steps = [
        one for rows in (1, 3) for one in attention_steps(TINY, rng, dims=32, rows=rows, tiles=[96, 50], spread=spread)
    ]
    assert all_ok(rig.run(steps))


def special(rng: np.random.Generator, rows: int, columns: int, share: float) -> Any:
    """Normal values with infinities, NaN, the largest and the smallest ones among them."""
    values = rng.standard_normal((rows, columns)).astype(np.float16)
    others = np.array([np.inf, -np.inf, np.nan, 65504, -65504, 6e-8, 0], np.float16)
    return np.where(rng.random(values.shape) < share, rng.choice(others, values.shape), values)


@pytest.mark.parametrize("share", [0.002, 0.02, 0.3])
def test_special_values_in_any_operand(rig: Rig, share: float) -> None:
    rng = numbers(5)
    steps: list[Step] = []
    for which in ("q", "k", "v", "k", "q", "v"):
        shapes = {"q": (3, 40), "k": (99, 40), "v": (99, 33)}
        given = {which: special(rng, *shapes[which], share)}
        steps += attention_steps(TINY, rng, dims=40, rows=3, tiles=[64, 35], value_dims=33, **given)
    assert all_ok(rig.run(steps))


def test_rows_that_are_masked_and_rows_whose_scores_are_all_equal(rig: Rig) -> None:
    rng = numbers(6)
    q = np.ones((4, 16), np.float16)
    k = np.full((70, 16), -np.inf, np.float16)
    few = k.copy()
    few[[3, 40, 69]] = 1
    steps = [
        *attention_steps(TINY, rng, dims=16, rows=4, tiles=[32, 38], q=q, k=k),
        *attention_steps(TINY, rng, dims=16, rows=4, tiles=[32, 38], q=q, k=few),
        *attention_steps(TINY, rng, dims=16, rows=4, tiles=[32, 38], q=q, k=np.zeros_like(k)),
        *attention_steps(TINY, rng, dims=16, rows=4, tiles=[32, 38], q=q, k=np.sort(rng.standard_normal((70, 16)), 0)
                         .astype(np.float16)),
    ]  # fmt: skip
    assert all_ok(rig.run(steps))


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_heads_that_take_turns_in_a_chain(rig: Rig, rows: int) -> None:
    """V comes after the scores of the next head, in the other bank. Heads so short that it waits, and longer ones."""
    rng, most = numbers(13, rows), most_tokens(rows)
    heads = [
        attention_steps(TINY, rng, dims=dims, rows=rows, tiles=[min(tokens, most)], value_dims=value_dims)
        for dims in (16, 64)
        for value_dims in (3, 4, 40)
        for tokens in (1, 16, 33, 100, most, 7, 130, most)
    ]
    assert all_ok(rig.run(interleaved(heads[:24])))
    assert all_ok(rig.run(interleaved(heads[24:])))


def test_heads_of_many_tiles_that_take_turns(rig: Rig) -> None:
    rng = numbers(14)
    heads = [
        attention_steps(TINY, rng, dims=64, rows=2, tiles=[32, 64, 320, 32, 7], spare_stripes=5),
        attention_steps(TINY, rng, dims=64, rows=1, tiles=[160, 40], v_tiles=[64, 32, 96, 8], value_dims=4),
        attention_steps(TINY, rng, dims=16, rows=7, tiles=[32, 31], spare_stripes=1),
        attention_steps(TINY, rng, dims=64, rows=2, tiles=[160, 40], v_tiles=[192, 8], value_dims=1),
        attention_steps(TINY, rng, dims=8, rows=2, tiles=[3], value_dims=1),
        attention_steps(TINY, rng, dims=64, rows=2, tiles=[32, 64, 320, 32, 7], v_tiles=[416, 39], value_dims=3),
    ]
    chain = interleaved(heads)
    report = rig.run([*chain, *lora(rng, 3, 32), *chain])
    assert all_ok(report)


def lora(rng: np.random.Generator, batch: int, rank: int) -> list[Step]:
    a = step(TINY, rng, rank, 300, batch, chain=1, keep=Keep.NEW)
    return [a, step(TINY, rng, 50, rank, batch, source=Source.KEPT)]


def test_heads_and_adapters_take_turns(rig: Rig) -> None:
    rng = numbers(7)
    steps: list[Step] = []
    for index in range(8):
        rows, rank = (1, 4, 2, 6)[index % 4], (8, 32, 20, 64)[index % 4]
        steps += lora(rng, 1 + index % 6, rank)
        steps += attention_steps(TINY, rng, dims=(64, 128)[index % 2], rows=rows, tiles=[96, 10 + index])
        steps += [step(TINY, rng, 40, 8 + 100 * index, 2)]
        steps += attention_steps(TINY, rng, dims=32, rows=rows, tiles=[1 + 5 * index])
    assert all_ok(rig.run(steps))


def test_one_chain_uses_both_kinds_of_intermediate(rig: Rig) -> None:
    rng = numbers(8)
    head = attention_steps(TINY, rng, dims=64, rows=3, tiles=[64, 20])
    again = attention_steps(TINY, rng, dims=64, rows=5, tiles=[40])
    chained = [
        *head[:-1],
        Step(replace(head[-1].descriptor, chain=1), w=head[-1].w),
        step(TINY, rng, 32, 100, 3, chain=1, keep=Keep.NEW),
        step(TINY, rng, 50, 32, 3, chain=1, source=Source.KEPT),
        *again,
    ]
    assert all_ok(rig.run(chained))


@pytest.mark.parametrize("seed", range(6))
def test_heads_on_a_memory_of_any_mood(seed: int) -> None:
    rng = random.Random(seed)
    moods: dict[str, Any] = {
        "seed": seed,
        "stall": rng.choice([0.1, 0.3, 0.6]),
        "read_latency_cycles": rng.choice([1, 5, 40, 200]),
        "latency_jitter_cycles": rng.choice([0, 10, 60]),
        "response_order": rng.choice(list(ResponseOrder)),
        "max_bursts": rng.choice([1, 4, 64]),
    }
    rig, values = make_rig(**moods), numbers(9, seed)
    steps: list[Step] = []
    for _ in range(6):
        heads = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            rows = rng.choice([1, 2, 3, 8])
            room = most_tokens(rows)
            tiles = [32 * rng.randint(1, 3) for _ in range(rng.randint(0, 1) if room > 200 else 0)]
            tiles += [rng.randint(1, min(100, room))]
            dims = rng.choice([16, 64, 80])
            heads.append(
                attention_steps(TINY, values, dims=dims, rows=rows, tiles=tiles, spare_stripes=rng.randint(0, 3))
            )
        steps += interleaved(heads)
        if rng.random() < 0.5:
            steps += lora(values, rng.randint(1, 5), rng.randint(1, 60))
    assert all_ok(rig.run(steps)), moods


@pytest.mark.parametrize(
    ("index", "place"), [(0, "operand"), (0, "weights"), (1, "weights"), (2, "weights"), (2, "result")]
)
def test_a_memory_error_fails_the_rest_of_its_chain_and_nothing_else(rig: Rig, index: int, place: str) -> None:
    rng = numbers(10)
    head = attention_steps(TINY, rng, dims=64, rows=3, tiles=[64, 20])
    report = rig.run([*head, *attention_steps(TINY, rng, dims=64, rows=3, tiles=[50])], errors=[(index, place, 0)])
    wanted = [Status.OK] * index + [Status.MEMORY_ERROR] + [Status.CHAIN_ABORTED] * (2 - index)
    assert statuses(report) == [*wanted, Status.OK, Status.OK]


def test_k_and_v_stream_at_the_speed_of_memory_and_wait_for_each_other_once(rig: Rig) -> None:
    rng, tokens = numbers(12), 512
    heads = [attention_steps(TINY, rng, dims=64, rows=2, tiles=[tokens]) for _ in range(6)]
    report = rig.run([one for head in heads for one in head], compare=False)
    stripes = tokens * 64 // TINY.stripe_values
    for index, completion in enumerate(report.completions):
        assert stripes / completion.cycles >= 0.97, f"descriptor {index}: {stripes} beats in {completion.cycles} cycles"
    # V begins when the softmax terms of the last scores are complete; the next K right after it.
    few = rig.run([one for head in heads[:2] for one in head], compare=False)
    cycles = (report.busy_cycles - few.busy_cycles) / 4
    assert cycles <= 2 * stripes + 34, f"{cycles} cycles a head for {2 * stripes} beats"


def test_heads_that_take_turns_do_not_wait_for_their_softmax_terms(rig: Rig) -> None:
    rng, tokens = numbers(15), 256
    heads = [attention_steps(TINY, rng, dims=128, rows=2, tiles=[tokens]) for _ in range(8)]
    report = rig.run(interleaved(heads), compare=False)
    few = rig.run(interleaved(heads[:3]), compare=False)
    stripes = tokens * 128 // TINY.stripe_values
    read, lines = 2 * stripes + 2 * 2, 2 * 5
    bound = read + lines / TINY.channels
    cycles = (report.busy_cycles - few.busy_cycles) / 5
    assert cycles <= bound + 4, f"{cycles} cycles a head, of which memory needs {bound}"


def test_four_channels_give_the_same_as_the_functional_core(small: Rig) -> None:
    rng = numbers(11)
    steps: list[Step] = []
    for dims in (64, 80, 96, 128, 256):
        for rows in (1, 2, 4, 8, 16, 5):
            steps += attention_steps(
                SMALL, rng, dims=dims, rows=rows, tiles=[32 * (rows % 3), 77 + rows][rows % 3 == 0 :]
            )
    assert all_ok(small.run(steps[: len(steps) // 2]))
    assert all_ok(small.run(steps[len(steps) // 2 :]))
