"""How hot adapters are: which of them future requests are likely to ask for.

Each new request raises its adapter's temperature by a fixed increment; at every step all
temperatures relax toward their mean by 0.1 of the gap (the paper, section VI-A).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plora.hw.defs.errors import UserError

RELAXATION = 0.1
INCREMENT = 1.0
HOT_ADAPTERS = 50
"""Hottest adapters outside the batch that are cached ahead of their requests."""

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Temperature:
    """Temperatures of `adapters` adapters, all 0 at first.

    The gap to the mean shrinks by the same factor for every adapter, and relaxing does not move the
    mean, so `steps` steps without requests are taken at once.
    """

    def __init__(self, adapters: int, *, relaxation: float = RELAXATION, increment: float = INCREMENT) -> None:
        if not 0 <= relaxation <= 1:
            raise UserError(f"temperature relaxation is {relaxation}; give 0 to 1")
        if not increment > 0:
            raise UserError(f"temperature increment is {increment}; give a number above 0")
        self.values: FloatArray = np.zeros(adapters)
        self._keep = 1.0 - relaxation
        self._increment = increment

    def request(self, adapter: int) -> None:
        """Raise the temperature of `adapter` once."""
        self.values[adapter] += self._increment

    def requests(self, adapters: IntArray) -> None:
        """Raise the temperature of each adapter in `adapters` once for each time it occurs."""
        np.add.at(self.values, adapters, self._increment)

    def relax(self, steps: int = 1) -> None:
        """Let `steps` steps pass."""
        if not len(self.values):
            return
        keep = self._keep**steps
        mean = float(np.add.reduce(self.values)) / len(self.values)
        self.values *= keep
        self.values += mean * (1.0 - keep)

    def hottest(self, count: int, but: IntArray) -> IntArray:
        """Return the `count` hottest adapters that are not in `but`, hottest first, ties by number."""
        outside = np.ones(len(self.values), dtype=bool)
        outside[but] = False
        candidates = np.flatnonzero(outside)
        count = min(count, len(candidates))
        if count == 0:
            return candidates[:0]
        # argpartition first: sorting a thousand temperatures every step would cost more than the choice is worth.
        heat = self.values[candidates]
        if count < len(candidates):
            bar = np.partition(heat, len(heat) - count)[len(heat) - count]
            sure = candidates[heat > bar]
            ties = candidates[heat == bar][: count - len(sure)]
            candidates = np.concatenate([sure, ties])
            heat = self.values[candidates]
        return candidates[np.lexsort((candidates, -heat))]
