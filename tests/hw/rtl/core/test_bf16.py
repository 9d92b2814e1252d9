"""BF16 in the Verilated core: the functional core's bits, flags, and the cycles of FP16."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from plora.hw.cosim.device import RtlDevice
from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import DType, Keep, Source
from plora.hw.defs.queue import MAX_OPERAND_EXPONENT, MIN_OPERAND_EXPONENT, NUMERIC_OVERFLOW, Exponents, softmax_scale
from plora.hw.defs.status import Status
from tests.hw.rtl.core.rig import Report, Rig
from tests.hw.rtl.core.system import Step, attention_steps, in_bf16, step

TINY = preset("tiny")


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One device, used by test after test without a reset."""
    yield Rig(RtlDevice(TINY, dram_bytes=1 << 24, read_latency_cycles=10))


def run(rig: Rig, steps: list[Step]) -> Report:
    report = rig.run(steps)
    assert {Status(completion.status) for completion in report.completions} == {Status.OK}
    return report


def test_every_small_number_of_rows_at_many_exponents(rig: Rig) -> None:
    rng = np.random.default_rng(1)
    steps = [
        in_bf16(step(TINY, rng, n, k, b), Exponents(b - 3, 4 - n % 7, 17))
        for n in (*range(1, 9), 31, 33)
        for k, b in ((7, 1), (13, 2), (40, 3), (300, 5))
    ]
    run(rig, steps)


@pytest.mark.parametrize("operand", [MIN_OPERAND_EXPONENT, -100, -20, 20, MAX_OPERAND_EXPONENT])
def test_exponents_at_both_ends(rig: Rig, operand: int) -> None:
    rng = np.random.default_rng(2)
    steps = []
    for device in (MIN_OPERAND_EXPONENT, -7, MAX_OPERAND_EXPONENT):
        one = step(TINY, rng, 6, 50, 2)
        # Values that the exponents bring into the range of FP16, as far as float32 has them.
        scaled = replace(
            one,
            x=np.ldexp(one.x.astype(np.float32), -max(-120, min(120, operand))),
            w=np.ldexp(one.w.astype(np.float32), -max(-110, min(110, device))),
        )
        steps.append(in_bf16(scaled, Exponents(operand, device)))
    run(rig, steps)


@pytest.mark.parametrize("rank", [1, 8, 16, 24, 64])
def test_an_adapter_keeps_a_bf16_intermediate(rig: Rig, rank: int) -> None:
    rng = np.random.default_rng(rank)
    steps = []
    for b in (1, 2, 5):
        first = step(TINY, rng, rank, 250, b, keep=Keep.NEW, chain=1)
        second = step(TINY, rng, 70, rank, b, first=False, source=Source.KEPT)
        steps += [in_bf16(first, Exponents(3, -2, -5)), in_bf16(second, Exponents(-5, 4))]
    run(rig, steps)


def test_appended_columns_a_shared_operand_and_sums_that_go_on(rig: Rig) -> None:
    rng = np.random.default_rng(4)
    steps = [
        in_bf16(step(TINY, rng, 32, 64, 2, keep=Keep.NEW, chain=1), Exponents(1, 2, 3)),
        in_bf16(
            step(TINY, rng, 9, 64, 2, first=False, source=Source.CHAIN, keep=Keep.APPEND, chain=1), Exponents(1, 0, 3)
        ),
        in_bf16(step(TINY, rng, 20, 41, 2, first=False, source=Source.KEPT), Exponents(3, 1)),
        in_bf16(step(TINY, rng, 2, 64, 2, acc_out=1, chain=1), Exponents(2, 5)),
        in_bf16(step(TINY, rng, 2, 96, 2, first=False, acc_in=1), Exponents(2, 5)),
    ]
    run(rig, steps)


def test_types_take_turns_without_a_trace(rig: Rig) -> None:
    # Short jobs, so that words of several are under way, with other exponents each.
    rng, choose = np.random.default_rng(5), random.Random(5)
    steps = []
    for _ in range(120):
        one = step(TINY, rng, choose.randint(1, 12), choose.choice([5, 40, 130]), choose.randint(1, 4))
        if choose.random() < 0.5:
            one = in_bf16(one, Exponents(choose.randint(-9, 9), choose.randint(-9, 9)))
        steps.append(one)
    run(rig, steps)


@pytest.mark.parametrize("value_exponent", [-6, 0, 5])
def test_attention(rig: Rig, value_exponent: int) -> None:
    rng = np.random.default_rng(6)
    steps: list[Step] = []
    for rows in (1, 2, 7):
        for one in attention_steps(TINY, rng, dims=64, rows=rows, tiles=[64, 30]):
            exponents = Exponents(0, value_exponent) if one.descriptor.transpose else Exponents(2, -1)
            scale = softmax_scale(0.1) if one.scale else 0
            steps.append(replace(in_bf16(one, exponents), scale=scale))
    run(rig, steps)


def test_values_out_of_range_and_special_ones(rig: Rig) -> None:
    rng = np.random.default_rng(7)
    large = in_bf16(step(TINY, rng, 5, 40, 2), Exponents(20, 0))
    assert run(rig, [large]).completions[0].numeric & NUMERIC_OVERFLOW
    specials = np.array([0, 0x8000, 1, 0x7F80, 0xFF80, 0x7FC1, 0x7F7F, 0x0080, 0x3F80, 0xBF80], np.uint16)
    steps = []
    for _ in range(20):
        one = in_bf16(step(TINY, rng, 5, 40, 2), Exponents())
        for values in (one.x, one.w):
            chosen = rng.random(values.shape) < 0.03
            values.view(np.uint16)[chosen] = rng.choice(specials, int(chosen.sum()))
        steps.append(one)
    run(rig, steps)


def test_it_takes_the_cycles_of_fp16(rig: Rig) -> None:
    rng = np.random.default_rng(8)
    kept = [
        step(TINY, rng, 16, 250, 3, keep=Keep.NEW, chain=1),
        step(TINY, rng, 90, 16, 3, first=False, source=Source.KEPT),
    ]
    steps = [
        *(step(TINY, rng, n, k, b) for n, k, b in ((4, 9, 1), (64, 300, 2), (40, 64, 8), (3, 900, 1))),
        *kept,
        *attention_steps(TINY, rng, dims=64, rows=4, tiles=[96, 40]),
    ]
    in_fp16 = run(rig, steps)
    assert all(one.descriptor.dtype == DType.FP16 for one in steps)
    bf16 = run(rig, [in_bf16(one, Exponents()) for one in steps])
    assert [c.cycles for c in bf16.completions] == [c.cycles for c in in_fp16.completions]
    assert bf16.busy_cycles == in_fp16.busy_cycles
