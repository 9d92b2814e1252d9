"""Partial attention results and how they join.

A partial result over some of the tokens is O = sum(2**(t - m) v) with m and l = sum(2**(t - m)), t the
scaled scores in base 2. A device returns it with m an integer (`plora.hw.defs.queue.Anchor`), so that moving a
partial result to another m is a multiplication by a power of two, which is exact. The whole is
sum(O) / sum(l) under one m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plora.hw.defs.queue import ANCHOR_NONE, SUM_FRACTION_BITS, Anchor, softmax_scale_value

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Partial:
    """Attention of query rows over a part of the tokens."""

    o: Float64
    """(rows, dims)."""
    m: Float64
    """(rows,); minus infinity where a row has no weight."""
    l: Float64  # noqa: E741 - the name that it has everywhere
    """(rows,)."""

    @classmethod
    def from_device(cls, o: npt.NDArray[Any], anchors: Sequence[Anchor]) -> Partial:
        """What a device returned: O under ``m = anchor + shift``, and its l moved there too."""
        m = [-math.inf if a.anchor == ANCHOR_NONE else float(a.anchor + a.shift) for a in anchors]
        sums = [math.ldexp(a.sum, -SUM_FRACTION_BITS - a.shift) for a in anchors]
        return cls(o.astype(np.float64), np.array(m), np.array(sums))

    @classmethod
    def none(cls, rows: int, dims: int) -> Partial:
        """Attention over no token."""
        return cls(np.zeros((rows, dims)), np.full(rows, -math.inf), np.zeros(rows))

    def placed(self, rows: range, total_rows: int) -> Partial:
        """These as rows ``rows`` of ``total_rows``; the others have no token."""
        whole = Partial.none(total_rows, self.o.shape[1])
        at = slice(rows.start, rows.stop)
        whole.o[at], whole.m[at], whole.l[at] = self.o, self.m, self.l
        return whole


def attend_exactly(q: npt.NDArray[Any], k: npt.NDArray[Any], v: npt.NDArray[Any], scale: int) -> Partial:
    """Attention in float64: what the GPU does with its own tokens, and the reference.

    Parameters:
        q, k, v: (rows, head_dim), (tokens, head_dim), (tokens, dims).
        scale: softmax scale, FP32 bits.
    """
    q, k, v = (np.asarray(each, np.float64) for each in (q, k, v))
    if not len(k):
        return Partial.none(len(q), v.shape[1])
    with np.errstate(invalid="ignore"):
        t = q @ k.T * softmax_scale_value(scale)
        m = t.max(axis=1)
        p = np.exp2(t - np.where(np.isneginf(m), 0.0, m)[:, None])
        return Partial(p @ v, m, p.sum(axis=1))


def merge(parts: Sequence[Partial]) -> Float64:
    """Return softmax(q k^T) v, (rows, dims), from partial results over disjoint tokens, in whatever order.

    A row without weight is 0. The order of ``parts`` does not change a bit: terms are added by size.
    """
    m = np.stack([part.m for part in parts])
    top = m.max(axis=0)
    with np.errstate(invalid="ignore"):
        factors = np.where(np.isneginf(m), 0.0, np.exp2(m - top))
        o = np.stack([part.o for part in parts]) * factors[:, :, None]
        sums = np.stack([part.l for part in parts]) * factors
    total = np.sort(sums, axis=0).sum(axis=0)
    # NaN, which sorts last, stays NaN; a row without weight is 0 / 1.
    return np.asarray(np.sort(o, axis=0).sum(axis=0) / np.where(total == 0, 1.0, total)[:, None])
