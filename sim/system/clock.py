"""Time as whole picoseconds.

Whole numbers add up to the same sum in any order, so a run that is advanced many steps at a time
gives the same bytes as one that takes them one by one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from plora.hw.defs.errors import UserError

PS_PER_NS = 1_000
PS_PER_US = 1_000_000
PS_PER_MS = 1_000_000_000
PS_PER_S = 1_000_000_000_000


def ps_per_unit(rate_per_s: float, where: str = "rate") -> float:
    """Return picoseconds per byte (or per FLOP) at `rate_per_s`; raises `UserError` for a rate that is not positive."""
    if not rate_per_s > 0 or math.isinf(rate_per_s):
        raise UserError(f"{where} is {rate_per_s:g}; give a finite rate above 0")
    return PS_PER_S / rate_per_s


def duration_ps(amount: float, unit_ps: float) -> int:
    """Return the time of `amount` bytes or FLOP at `unit_ps` picoseconds each, rounded half to even."""
    return round(amount * unit_ps)


def durations_ps(amounts: Any, unit_ps: float) -> Any:
    """Return `duration_ps` of each element as int64: the same double product, the same rounding."""
    return np.rint(np.asarray(amounts, dtype=np.float64) * unit_ps).astype(np.int64)
