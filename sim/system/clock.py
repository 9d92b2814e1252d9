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


LONGEST_PS = 1 << 60
"""Longest time of a single transfer or product: 13 days, an eighth of what 64 bits hold."""


def duration_ps(amount: float, unit_ps: float) -> int:
    """Return the time of `amount` bytes or FLOP at `unit_ps` picoseconds each, rounded half to even.

    Raises:
        UserError: longer than `LONGEST_PS`.
    """
    time = amount * unit_ps
    if not time <= LONGEST_PS:
        raise _too_long(time)
    return round(time)


def durations_ps(amounts: Any, unit_ps: float) -> Any:
    """Return `duration_ps` of each element as int64: the same double product, the same rounding, the same errors."""
    times = np.asarray(amounts, dtype=np.float64) * unit_ps
    longest = float(np.maximum.reduce(times, None, initial=0.0))
    if not longest <= LONGEST_PS:
        raise _too_long(longest)
    return np.rint(times).astype(np.int64)


def _too_long(time_ps: float) -> UserError:
    return UserError(
        f"a single transfer or product takes {time_ps / PS_PER_S:.3g} s, beyond the {LONGEST_PS / PS_PER_S:.3g} s that "
        "are covered; give a higher rate, or less to move"
    )
