"""Which powers of two bring BF16 operands into the range in which the array multiplies.

The array multiplies in FP16, puts products below 2**18 on a grid of step 2**-32, and takes sums below
2**31 (`plora.sim.golden.bf16`). So the largest magnitude of either operand is brought just below 2**9, that of
a device operand of more than 2**13 columns lower by what their number exceeds that: no product is clipped and no
sum too large, whatever the signs. What lies more than 2**26 below the largest magnitude loses bits, and is lost
from 2**34 on.

A device operand's exponent is chosen when it is stored, from all its values; that of a GPU operand for each
product. An intermediate that stays on the device has to be scaled before it is known: by its bound, the largest
magnitude of the GPU operand times the largest row sum of magnitudes of the device operand.

Attention: scores of 2**16 are infinite, so queries and keys end where no score can get there, as far as the range
of the softmax scale goes, which takes their exponents off again. Values end below 2**15, as 2**15 terms of
at most 1 are summed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plora.hw.defs.config import AccumulatorConfig
from plora.hw.defs.queue import (
    MAX_OPERAND_EXPONENT,
    MIN_OPERAND_EXPONENT,
    SCALE_MAX_EXPONENT,
    SCALE_MIN_EXPONENT,
    Exponents,
)
from plora.sim.golden.bf16 import SUM_LIMIT_LOG2, Bf16Array, exponent_for, to_float

OPERAND_LOG2 = AccumulatorConfig().msb_exponent // 2
"""Magnitudes of operands end below 2**9: products below 2**18, where the grid ends."""


def largest_magnitude(values: Bf16Array) -> float:
    """Return the largest finite magnitude, 0 if there is none."""
    magnitudes = np.abs(to_float(values))
    return float(magnitudes[np.isfinite(magnitudes)].max(initial=0.0))


def largest_row_sum(values: Bf16Array) -> float:
    """Return the largest sum of finite magnitudes of a row of a matrix: a bound of its products with ones."""
    magnitudes = np.abs(to_float(values).astype(np.float64))
    return float(np.where(np.isfinite(magnitudes), magnitudes, 0.0).sum(axis=1).max(initial=0.0))


def device_exponent(values: Bf16Array) -> int:
    """Return the exponent for a device operand (N x K)."""
    columns_log2 = (values.shape[1] - 1).bit_length()
    room = SUM_LIMIT_LOG2 - 2 * OPERAND_LOG2
    return exponent_for(largest_magnitude(values), OPERAND_LOG2 - max(0, columns_log2 - room))


def operand_exponent(values: Bf16Array) -> int:
    """Return the exponent for a GPU operand."""
    return exponent_for(largest_magnitude(values), OPERAND_LOG2)


def kept_exponent(values: Bf16Array, row_sum: float) -> int:
    """Return the exponent for the product of a GPU operand with a device operand of this `largest_row_sum`."""
    return exponent_for(largest_magnitude(values) * row_sum, OPERAND_LOG2)


SCORE_LOG2 = 16
VALUE_LOG2 = 15
_FP32_FRACTION_BITS, _FP32_BIAS = 23, 127


@dataclass(frozen=True)
class AttentionScaling:
    """How BF16 attention is told to a device."""

    scores: Exponents
    values: Exponents
    scale: int
    """Softmax scale of the scaled scores, FP32 bits."""


def attention_scaling(queries: Bf16Array, largest_key: float, largest_value: float, scale: int) -> AttentionScaling:
    """Return the exponents for queries (rows, head_dim) over keys and values of those largest magnitudes.

    ``scale`` is the softmax scale of the scores as they are, FP32 bits.
    """
    room = SCORE_LOG2 - (queries.shape[1] - 1).bit_length()
    query = exponent_for(largest_magnitude(queries), room // 2)
    key = exponent_for(largest_key, room - room // 2)
    # The scale less both exponents has to stay a legal one.
    factor = (scale >> _FP32_FRACTION_BITS) - _FP32_BIAS
    both = int(np.clip(query + key, factor - SCALE_MAX_EXPONENT, factor - SCALE_MIN_EXPONENT))
    key = int(np.clip(both - query, MIN_OPERAND_EXPONENT, MAX_OPERAND_EXPONENT))
    query = both - key
    return AttentionScaling(
        Exponents(query, key),
        Exponents(0, exponent_for(largest_value, VALUE_LOG2)),
        scale - (both << _FP32_FRACTION_BITS),
    )
