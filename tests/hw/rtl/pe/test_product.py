"""FP16 products on the grid: the compiled RTL against the golden functions, and against double arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from plora.sim.golden.numerics import fp16_product_grid
from tests.hw.rtl.pe.compiled import ACCUMULATOR, Array, Product
from tests.hw.rtl.pe.operands import SPECIAL, SPECIAL_BITS


def check(product: Product, a: Array, b: Array, enable: Array) -> None:
    steps, negative, nan, infinite, clipped = product.some(a, b, enable)
    golden = fp16_product_grid(a.view(np.float16), b.view(np.float16), ACCUMULATOR)
    assert (nan == (golden.nan & enable)).all()
    assert (clipped == (golden.clipped & enable)).all()
    # Infinities are of no account beside NaN; here the golden function has none and the RTL may.
    beyond = (infinite | clipped) & ~nan
    assert (beyond & ~negative == (golden.positive_infinity & enable)).all()
    assert (beyond & negative == (golden.negative_infinity & enable)).all()
    expected = np.where(enable, (golden.high << 40) + golden.low, 0)
    wrong = (steps != expected) & ~(nan | infinite | clipped)
    assert not wrong.any(), f"{a[wrong][0]:#06x} * {b[wrong][0]:#06x}: {steps[wrong][0]}, not {expected[wrong][0]}"


@pytest.mark.parametrize("enabled", [True, False])
def test_products_of_all_pairs_of_special_values(product: Product, enabled: bool) -> None:
    a, b = (np.ascontiguousarray(axis).ravel() for axis in np.meshgrid(SPECIAL_BITS, SPECIAL_BITS))
    check(product, a, b, np.full(a.size, enabled))


@pytest.mark.parametrize("name", SPECIAL)
def test_products_of_a_special_value_with_everything(product: Product, name: str) -> None:
    b = np.arange(1 << 16, dtype=np.uint16)
    for sign in (0, 0x8000):
        check(product, np.full_like(b, SPECIAL[name] | sign), b, np.ones(b.size, bool))


def test_random_products_with_lanes_off_and_on(product: Product) -> None:
    rng = np.random.default_rng(11)
    a, b = rng.integers(0, 1 << 16, (2, 500_000), dtype=np.uint16)
    check(product, a, b, rng.random(a.size) < 0.9)


@pytest.mark.parametrize("first", [0x0000, 0x03FF, 0x0400, 0x1ABC, 0x3C00, 0x5FFF, 0x7BFF, 0x7C00, 0xFFFF])
def test_products_agree_with_double_arithmetic(product: Product, first: int) -> None:
    # All 2**32 of them: tests/bench/all_products.py.
    wrong, example = product.all(first, first + 1)
    assert wrong == 0, f"{wrong} wrong products, one of {example >> 16:#06x} and {example & 0xFFFF:#06x}"
