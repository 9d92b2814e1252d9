"""Keys and values that are integers with a scale a token, bit for bit (`plora.hw.defs.integers`).

The device multiplies FP16, and `dequantize` is exact, so attention over integers is attention over what `dequantize`
gives, in every bit. Only `quantize`, the host's part, rounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plora.hw.defs.integers import INTEGER_BITS, SCALE_NAN, SCALE_SHIFT
from plora.sim.golden.numerics import Fp16Array

Int8Array = npt.NDArray[np.int8]
ScaleArray = npt.NDArray[np.uint8]

_FP16_NAN = 0x7E00
_FP16_MAX = 65504.0


class Quantized(NamedTuple):
    """Integers and the scales of their tokens."""

    values: Int8Array
    """(tokens, columns), those of INT4 too."""
    scales: ScaleArray
    """(tokens,)."""


def scale_values(scales: ScaleArray) -> npt.NDArray[np.float64]:
    """Return the numbers that scales mean; NaN from `SCALE_NAN` on."""
    numbers = (np.asarray(scales, np.uint16) << SCALE_SHIFT).view(np.float16).astype(np.float64)
    return np.where(np.asarray(scales) >= SCALE_NAN, np.nan, numbers)


def dequantize(quantized: Quantized) -> Fp16Array:
    """Return the FP16 values: integer times scale, which is exact; beyond 65504 infinite."""
    integers = np.asarray(quantized.values, np.int8)
    with np.errstate(over="ignore", invalid="ignore"):
        bits = (integers * scale_values(quantized.scales)[:, None]).astype(np.float16).view(np.uint16)
    nan = np.where(integers < 0, 0x8000 | _FP16_NAN, _FP16_NAN).astype(np.uint16)
    return np.where(quantized.scales[:, None] >= SCALE_NAN, nan, bits).view(np.float16)


def quantize(rows: npt.NDArray[Any], dtype: int) -> Quantized:
    """Round the finite values of each row (token) to integers of ``dtype`` times a scale, nearest, ties to even.

    The scale is the least with which the largest magnitude is at most 127 (7) steps. What would be rounded beyond the
    largest FP16 value is a step less. A row with a value that is not finite becomes NaN altogether.
    """
    values = np.asarray(rows, np.float64)
    steps = (1 << INTEGER_BITS[dtype] - 1) - 1
    finite = np.asarray(np.isfinite(values).all(axis=1))
    values = np.where(finite[:, None], values, 0.0)
    numbers = scale_values(np.arange(SCALE_NAN, dtype=np.uint8))
    scales = np.searchsorted(numbers, np.abs(values).max(axis=1, initial=0.0) / steps)
    scales = np.where(finite & (scales < SCALE_NAN), scales, SCALE_NAN).astype(np.uint8)
    step = np.nan_to_num(scale_values(scales), nan=1.0)
    # A scale of zero is that of a row of zeros.
    step = np.where(step == 0, 1.0, step)[:, None]
    most = np.floor(_FP16_MAX / step)
    integers = np.clip(np.rint(values / step), -most, most)
    return Quantized(np.where(scales[:, None] == SCALE_NAN, 0, integers).astype(np.int8), scales)
