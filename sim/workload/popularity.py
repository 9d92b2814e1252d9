"""Which adapter a request asks for: popularity laws.

Names as Punica and SGLang use them, and two more: ``hot-set`` is the paper's skew (80 % of
requests to 50 adapters), ``measured`` takes shares from a trace, ``power`` is S-LoRA's generator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from plora.hw.defs.errors import UserError

LAWS = ("distinct", "uniform", "skewed", "identical", "hot-set", "measured", "power")

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Popularity:
    """A law over `adapters` adapters; adapter 0 is the most popular.

    - ``distinct``: request i asks for adapter i mod adapters.
    - ``uniform``: every adapter alike.
    - ``skewed``: Zipf, share of the i-th in proportion to i**-alpha (SGLang's ``lora-zipf-alpha``).
    - ``identical``: always adapter 0.
    - ``hot-set``: `hot_share` of the requests evenly over the first `hot_adapters`, the rest evenly
      over the others.
    - ``measured``: in proportion to `shares`.
    - ``power``: S-LoRA's ``floor(adapters * u)`` with u of density alpha u**(alpha - 1); alpha 1 is
      uniform. The popular end is moved to adapter 0.
    """

    law: str
    adapters: int
    alpha: float = 1.0
    hot_adapters: int = 0
    hot_share: float = 0.0
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise UserError(f"unknown popularity law {self.law!r}; known: {', '.join(LAWS)}")
        if self.adapters < 1:
            raise UserError(f"popularity over {self.adapters} adapters; give at least 1")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise UserError(f"popularity alpha is {self.alpha!r}; give a positive number")
        if self.law == "hot-set" and not (0 < self.hot_adapters < self.adapters and 0 <= self.hot_share <= 1):
            raise UserError(
                f"hot set of {self.hot_adapters} adapters with share {self.hot_share} among {self.adapters}; "
                "give 1 to adapters - 1 of them and a share of 0 to 1"
            )
        if self.law == "measured" and (
            len(self.shares) != self.adapters
            or not all(math.isfinite(s) and s >= 0 for s in self.shares)
            or sum(self.shares) <= 0
        ):
            raise UserError(f"measured popularity needs {self.adapters} shares of at least 0, not {len(self.shares)}")

    @cached_property
    def probabilities(self) -> FloatArray:
        """Share of each adapter (adapters,), summing to 1."""
        n = self.adapters
        rank = np.arange(1, n + 1, dtype=np.float64)
        if self.law == "skewed":
            weight = rank**-self.alpha
        elif self.law == "identical":
            weight = (rank == 1).astype(np.float64)
        elif self.law == "hot-set":
            cold = n - self.hot_adapters
            weight = np.where(
                rank <= self.hot_adapters, self.hot_share / self.hot_adapters, (1 - self.hot_share) / cold
            )
        elif self.law == "measured":
            weight = np.asarray(self.shares, dtype=np.float64)
        elif self.law == "power":
            # P(floor(n u) = i) = ((i + 1) / n)**alpha - (i / n)**alpha
            weight = np.diff((np.arange(n + 1) / n) ** self.alpha)
            weight = weight if self.alpha <= 1 else weight[::-1]
        else:
            weight = np.ones(n)
        return np.asarray(weight / weight.sum())

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """Adapters of `count` requests (count,)."""
        if self.law == "distinct":
            return (np.arange(count) % self.adapters).astype(np.int32)
        if self.law == "uniform":
            return rng.integers(0, self.adapters, count, dtype=np.int32)
        cumulative = np.cumsum(self.probabilities)
        picked = np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right")
        return np.asarray(np.minimum(picked, self.adapters - 1), dtype=np.int32)

    def expected_distinct(self, batch: int) -> float:
        """Expected number of distinct adapters among `batch` independent requests."""
        if self.law == "distinct":
            return float(min(batch, self.adapters))
        return float(np.sum(1.0 - (1.0 - self.probabilities) ** batch))

    def describe(self) -> str:
        """The law in words, for result metadata."""
        detail = {
            "skewed": f" alpha={self.alpha:g}",
            "power": f" alpha={self.alpha:g}",
            "hot-set": f" {self.hot_share:.0%} of requests to {self.hot_adapters}",
        }.get(self.law, "")
        return f"{self.law}{detail} over {self.adapters} adapters"
