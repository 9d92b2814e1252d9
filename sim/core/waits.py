"""Expected waits where a memory is not ready with some probability in every cycle.

A side of the test bench's memory is not ready in a cycle with probability p, independently. The wait for one
readiness is geometric, that for n of them in a row negative binomial; where all channels must have delivered
(a stripe counts once its last word is there), it is the largest of as many. Expected values of these are exact
up to `TABLE` events, beyond that from the normal limit.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

TABLE = 512
"""Events up to which the distribution is summed."""


def geometric(p: float, others: int = 1) -> float:
    """Expected largest of ``others`` independent geometric waits: cycles not ready, each with probability ``p``."""
    if p <= 0.0:
        return 0.0
    cycles = np.arange(_reach(p, 1))
    return float(np.sum(1.0 - (1.0 - p ** (cycles + 1.0)) ** others))


def _reach(p: float, events: int) -> int:
    """Cycles beyond which the sum of ``events`` waits is not expected: mean and 12 deviations, and the last's tail."""
    q = 1.0 - p
    return int(events * p / q + 12.0 * np.sqrt(events * p) / q + 40.0 / -np.log(p)) + 1


@cache
def largest_normal(count: int) -> float:
    """Expected largest of ``count`` standard normal values."""
    x = np.linspace(-9.0, 9.0, 36_001)
    density = np.exp(-0.5 * x * x) / np.sqrt(2.0 * np.pi)
    cumulative = np.cumsum(density) * (x[1] - x[0])
    return float(np.sum(x * count * np.minimum(cumulative, 1.0) ** (count - 1) * density) * (x[1] - x[0]))


@cache
def stream_waits(p: float, channels: int) -> npt.NDArray[np.float64]:
    """Expected largest over ``channels`` of the waits in ``n`` events, for n = 0 ... `TABLE`."""
    waits = np.zeros(TABLE + 1)
    if p <= 0.0:
        return waits
    q = 1.0 - p
    # Probability of exactly x cycles of waiting in n events: one more event convolves with a geometric wait,
    # f_n(x) = q f_{n-1}(x) + p f_n(x - 1); as a recursion over n on cumulative sums it stays exact.
    density = np.zeros(_reach(p, TABLE))
    density[0] = 1.0
    powers = p ** np.arange(64 if p < 0.55 else 512)
    kernel = q * powers
    for n in range(1, TABLE + 1):
        density = np.convolve(density, kernel)[: len(density)]
        waits[n] = np.sum(1.0 - np.minimum(np.cumsum(density), 1.0) ** channels)
    return waits
