"""What the device computes with: FP16, the scaling in B, and how far that is from what was stored."""

from __future__ import annotations

import numpy as np
import pytest

from plora.hw.defs.errors import UserError
from plora.sw.adapters import LoraModule, to_device


def module(a: np.ndarray, b: np.ndarray, scaling: float = 2.0) -> LoraModule:
    return LoraModule("m", None, a.astype(np.float32), b.astype(np.float32), 16.0, scaling, "F32")


def test_b_is_scaled_in_float32_and_rounded_once() -> None:
    random = np.random.default_rng(1)
    b = random.standard_normal((40, 7)).astype(np.float32)
    form = to_device(module(np.ones((7, 3)), b, scaling=1 / 3))
    assert np.array_equal(form.b, (b * np.float32(1 / 3)).astype(np.float16))
    assert not np.array_equal(form.b, b.astype(np.float16) * np.float16(1 / 3)), "twice rounded is something else"


def test_fp16_values_and_powers_of_two_lose_nothing() -> None:
    values = np.random.default_rng(2).standard_normal((5, 6)).astype(np.float16)
    form = to_device(module(values, values.T, scaling=0.25))
    assert np.array_equal(form.a, values)
    assert (form.a_rounding, form.b_rounding, form.flushed) == (0.0, 0.0, 0)


def test_rounding_and_flushing_are_reported() -> None:
    form = to_device(module(np.array([[1 + 2.0**-12, 0.5, 1e-8, 0.0]]), np.array([[1e-9]]), scaling=1.0))
    assert form.a_rounding == pytest.approx(2.0**-12, rel=1e-3)
    assert form.b_rounding == 1.0
    assert form.flushed == 2
    assert to_device(module(np.zeros((1, 1)), np.zeros((1, 1)))).a_rounding == 0.0


@pytest.mark.parametrize(
    ("a", "b", "scaling", "what"),
    [
        ([[65520.0]], [[1.0]], 1.0, "lora_A has 1 values beyond FP16's 65504"),
        ([[1.0]], [[-40000.0]], 2.0, "lora_B times its scaling 2 has 1 values beyond FP16's 65504 .largest 80000"),
        ([[1.0]], [[3e38]], 1e10, "lora_B times its scaling 1e.10 has 1 values"),
    ],
)
def test_what_fp16_cannot_hold_is_refused(
    a: list[list[float]], b: list[list[float]], scaling: float, what: str
) -> None:
    with pytest.raises(UserError, match=f"m: {what}"):
        to_device(module(np.array(a), np.array(b), scaling))


def test_the_largest_fp16_value_is_no_overflow() -> None:
    assert to_device(module(np.array([[65519.0]]), np.array([[1.0]]))).a[0, 0] == 65504
