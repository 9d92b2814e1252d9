"""A module's matrices as the device computes with them: FP16 or BF16, scaling folded into B."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plora.hw.defs.descriptor import DType
from plora.hw.defs.errors import UserError
from plora.sim.golden import bf16
from plora.sw.adapters.reader import LoraModule
from plora.sw.adapters.tensors import Float32

LARGEST = {DType.FP16: 65504.0, DType.BF16: float(bf16.to_float(np.array(bf16.INFINITY - 1, np.uint16)))}
"""Largest finite value of a type."""

Values = npt.NDArray[Any]


def device_values(values: Float32, dtype: DType) -> Values:
    """Round to FP16 (``float16``) or BF16 (bit patterns): nearest, ties to even."""
    with np.errstate(over="ignore"):
        return bf16.from_float(values) if dtype == DType.BF16 else values.astype(np.float16)


def host_values(values: Values, dtype: DType) -> Float32:
    """Return what `device_values` made as float32; exact."""
    return bf16.to_float(values) if dtype == DType.BF16 else values.astype(np.float32)


@dataclass(frozen=True)
class DeviceModule:
    """A module ready for the device: y += (x A^T) B^T."""

    module: LoraModule
    dtype: DType
    a: Values
    """R x K, as `device_values` gives it."""
    b: Values
    """N x R, likewise, scaled."""
    a_rounding: float
    """Largest rounding error of A, as a share of A's largest magnitude. Input of the same type has none."""
    b_rounding: float
    """The same of scaled B."""
    flushed: int
    """Values other than zero that rounded to zero, in A and B together."""


def to_device(module: LoraModule, dtype: DType = DType.FP16) -> DeviceModule:
    """Round ``module``: A as it is, B times the scaling in float32 and then rounded once.

    Raises:
        UserError: a value leaves the range of the type (FP16: 65504), which would make results infinite.
    """
    with np.errstate(over="ignore"):
        scaled = module.b * np.float32(module.scaling)
    a, a_rounding, a_flushed = _round(module.a, dtype, f"{module.label}: lora_A")
    b, b_rounding, b_flushed = _round(scaled, dtype, f"{module.label}: lora_B times its scaling {module.scaling:g}")
    return DeviceModule(module, dtype, a, b, a_rounding, b_rounding, a_flushed + b_flushed)


def _round(values: Float32, dtype: DType, what: str) -> tuple[Values, float, int]:
    rounded = device_values(values, dtype)
    back = host_values(rounded, dtype)
    outside = int(np.count_nonzero(~np.isfinite(back)))
    largest = float(np.abs(values).max())
    if outside:
        raise UserError(
            f"{what} has {outside} values beyond {dtype.name}'s {LARGEST[dtype]:g} (largest {largest:g}): move a power"
            " of two from it to the other matrix and save the adapter again"
        )
    error = float(np.abs(back - values).max())
    flushed = int(np.count_nonzero((back == 0) & (values != 0)))
    return rounded, error / largest if largest else 0.0, flushed
