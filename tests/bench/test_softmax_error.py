"""The error study of the softmax unit on few cases: what docs/numerics.md says of it holds."""

from __future__ import annotations

import pytest

from tests.bench.softmax_error import attention_error, exp2_error


def test_exp2_errs_as_little_as_documented() -> None:
    error = exp2_error()
    assert error.largest < 1.31e-5
    assert error.fp16_ulp < 0.52


@pytest.mark.parametrize("spread", [0.1, 1.0, 16.0])
def test_attention_errs_like_fp16_rounding(spread: float) -> None:
    error = attention_error(500, spread, rows=4)
    assert error.p <= 1.0
    assert error.probability <= 2.0
    assert error.output_rms < 2 * error.float16
