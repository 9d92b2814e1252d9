"""A module's matrices as the device computes with them: FP16, scaling folded into B."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plora.hw.defs.errors import UserError
from plora.sim.functional.layout import Matrix
from plora.sw.adapters.reader import LoraModule
from plora.sw.adapters.tensors import Float32

FP16_MAX = 65504.0


@dataclass(frozen=True)
class DeviceModule:
    """A module ready for the device: y += (x A^T) B^T."""

    module: LoraModule
    a: Matrix
    """R x K, FP16."""
    b: Matrix
    """N x R, FP16, scaled."""
    a_rounding: float
    """Largest rounding error of A, as a share of A's largest magnitude. FP16 input has none."""
    b_rounding: float
    """The same of scaled B."""
    flushed: int
    """Values other than zero that rounded to zero, in A and B together."""


def to_device(module: LoraModule) -> DeviceModule:
    """Round ``module`` to FP16: A as it is, B times the scaling in float32 and then rounded once.

    Raises:
        UserError: a value leaves the range of FP16 (65504), which would make results infinite.
    """
    with np.errstate(over="ignore"):
        scaled = module.b * np.float32(module.scaling)
    a, a_rounding, a_flushed = _round(module.a, f"{module.label}: lora_A")
    b, b_rounding, b_flushed = _round(scaled, f"{module.label}: lora_B times its scaling {module.scaling:g}")
    return DeviceModule(module, a, b, a_rounding, b_rounding, a_flushed + b_flushed)


def _round(values: Float32, what: str) -> tuple[Matrix, float, int]:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    outside = int(np.count_nonzero(~np.isfinite(rounded)))
    largest = float(np.abs(values).max())
    if outside:
        raise UserError(
            f"{what} has {outside} values beyond FP16's {FP16_MAX:g} (largest {largest:g}): move a power of two from it"
            " to the other matrix and save the adapter again"
        )
    error = float(np.abs(rounded.astype(np.float32) - values).max())
    flushed = int(np.count_nonzero((rounded == 0) & (values != 0)))
    return rounded, error / largest if largest else 0.0, flushed
