"""The word converter: BF16 into the range of FP16."""

from __future__ import annotations

import numpy as np
import pytest

from plora.hw.defs.queue import MAX_OPERAND_EXPONENT, MIN_OPERAND_EXPONENT
from plora.sim.golden.bf16 import to_fp16
from tests.hw.rtl.pe.compiled import Units

ALL = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize("first", range(MIN_OPERAND_EXPONENT, MAX_OPERAND_EXPONENT + 1, 24))
def test_every_value_at_every_exponent(units: Units, first: int) -> None:
    for exponent in range(first, min(first + 24, MAX_OPERAND_EXPONENT + 1)):
        got, expected = units.convert(ALL, exponent), to_fp16(ALL, exponent).view(np.uint16)
        wrong = np.flatnonzero(got != expected)
        if len(wrong):
            value = wrong[0]
            pytest.fail(
                f"{value:#06x} times 2**{exponent}: {got[value]:#06x}, not {expected[value]:#06x} ({len(wrong)} wrong)"
            )


def test_lanes_do_not_mix(units: Units) -> None:
    values = np.random.default_rng(1).permutation(ALL)
    np.testing.assert_array_equal(units.convert(values, 3), to_fp16(values, 3).view(np.uint16))


@pytest.mark.parametrize("exponent", [0, -128, 39])
def test_fp16_passes_as_it_is(units: Units, exponent: int) -> None:
    np.testing.assert_array_equal(units.convert(ALL, exponent, bf16=False), ALL)
