"""What the SFU and the V pass compute, bit for bit: attention of one KV head without its 1 / l.

For query row q over tokens j, with scores in base 2 (``scale`` holds log2(e) / sqrt(head_dim))::

    t_j = scale * q . k_j      p_j = 2**(t_j - m)      l = sum p_j      O = sum p_j v_j

The device returns O and the pair (m, l); softmax(q K^T) V is O / l. Tokens come in *units*: what one
drain step gives, ``channels`` consecutive tokens. After every unit the row's *anchor* M is the largest ceil(t) so
far, an integer, so that moving from one anchor to the next is a shift. A unit's p are made and kept
under the anchor of their own time; the V pass scales them to the last one. The steps:

1. *Score.* The exact sum of q . k, cut toward zero to 22 significant bits (to steps of 2**-35 below 2**-14).
   From 2**16 on it is infinite. `plora.sim.golden.numerics.grid_to_scores`
2. *Scale.* Times the scale's 17 significant bits, cut toward zero to steps of 2**-18. From 32767 on
   it is infinite. `scale_scores`
3. *Anchor.* M = max(M, ceil(t) of the unit's finite t). l = (l >> growth of M) + p, in steps of 2**-24.
4. *Exponential.* p = 2**f * 2**n with n + f = t - M, 2**f as in `plora.hw.defs.exp2`, rounded once to
   FP16: nearest, ties to even, subnormals kept. `exp2_fp16`
5. *V pass.* p' = p * 2**(M - last M), rounded the same way (`rescale_weights`). O is the exact sum of p' v on
   the grid, times ``2**-e`` with the least e >= 0 for which l <= 2**(24 + e), rounded once.

=================================  =============================================================
scores of a row                    result
=================================  =============================================================
one token                          p in 0.5 ... 1, O / l within rounding of v
all equal                          equal p, l = T p: O is the mean of v
all -infinity, or no token         no anchor, every p 0, l 0, O 0
some -infinity                     p 0, as if masked (but 0 * infinity in v is NaN)
a +infinity                        its p is NaN, so O is NaN; numeric NaN
NaN                                its p is NaN, so O is NaN; numeric NaN
spread of more than 25             p 0 below 2**-25
an infinity from finite operands   as an infinity; numeric overflow
=================================  =============================================================

A NaN p adds nothing to l and has no part in the anchor.

Results do not depend on how tokens are tiled over descriptors, as long as tiles are whole units.
They do depend on the unit's size: a later anchor rounds subnormal p a second time and cuts l.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.exp2 import FRACTION_BITS, LINES, OFFSET_BITS, VALUE_BITS
from plora.hw.defs.queue import (
    SCALE_FRACTION_BITS,
    SCALE_MAX_EXPONENT,
    SCALE_MIN_EXPONENT,
    SUM_FRACTION_BITS,
    Exponents,
)
from plora.sim.golden.bf16 import Bf16Array, Bf16Results, grid_to_bf16, to_fp16
from plora.sim.golden.numerics import (
    FP16_FRACTION_BITS,
    FP16_MIN_EXPONENT,
    FP16_NAN,
    SCORE_BITS,
    SCORE_MIN_EXPONENT,
    BoolArray,
    Fp16Array,
    Grid,
    IntArray,
    Results,
    Scores,
    gemm_grid,
    grid_to_fp16,
    grid_to_scores,
)

T_LIMIT = 32767
"""|t| from which on t is infinite: its ceiling and the value that says *none* fit in 16 bits."""
NO_ANCHOR = -32768
"""Anchor of a row without any finite t."""
assert SUM_FRACTION_BITS == -FP16_MIN_EXPONENT, "l is a whole number of FP16's finest steps"


class ScaledScores(NamedTuple):
    """t of every token; all arrays of one shape. At most one of the three flags of kind is set."""

    steps: IntArray
    """t in steps of ``2**-FRACTION_BITS``; 0 where it is not finite."""
    positive_infinity: BoolArray
    negative_infinity: BoolArray
    nan: BoolArray
    overflow: BoolArray

    @property
    def finite(self) -> BoolArray:
        """Where t is a number."""
        return ~(self.positive_infinity | self.negative_infinity | self.nan)


@dataclass(frozen=True)
class RowState:
    """What the SFU knows of every query row, arrays of shape (rows,)."""

    anchor: IntArray
    """M, or `NO_ANCHOR`."""
    total: IntArray
    """l in steps of ``2**-SUM_FRACTION_BITS``."""
    nan: BoolArray
    """Some p of the row is NaN."""

    @classmethod
    def start(cls, rows: int) -> RowState:
        """Return the state of rows without a token."""
        return cls(np.full(rows, NO_ANCHOR, np.int64), np.zeros(rows, np.int64), np.zeros(rows, bool))

    @property
    def shift(self) -> IntArray:
        """The least e >= 0 for which ``l <= 2**e``."""
        # frexp of an integer below 2**53 gives its bit length, 0 for 0.
        bits = np.frexp(np.maximum(self.total - 1, 0).astype(np.float64))[1]
        return np.maximum(bits.astype(np.int64) - SUM_FRACTION_BITS, 0)


class Weights(NamedTuple):
    """p of rows and tokens with their numeric flags, and the anchors under which they were made."""

    p: Fp16Array
    """(rows, tokens)."""
    anchors: IntArray
    """(rows, units)."""
    nan: BoolArray
    overflow: BoolArray

    def append(self, tile: Weights) -> Weights:
        """Return these and the next tile's."""
        before: Iterable[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = zip(self, tile, strict=True)
        return Weights(*(np.concatenate(parts, axis=1) for parts in before))


class Partial(NamedTuple):
    """Attention over a part of the tokens, as a device returns it: (rows, dims) and (rows,) arrays."""

    o: Fp16Array | Bf16Array
    """O * 2**-shift."""
    anchor: IntArray
    shift: IntArray
    total: IntArray
    nan: BoolArray


def split_scale(scale: float) -> tuple[int, int]:
    """Return the 17-bit significand and the exponent x of an FP32 scale, ``significand * 2**(x - 16)``.

    Raises:
        ValueError: the scale is not positive or not in ``2**-24 <= scale < 2**8``.
    """
    bits = int(np.float32(scale).view(np.uint32))
    exponent = (bits >> 23) - 127
    if not np.float32(scale) > 0 or not SCALE_MIN_EXPONENT <= exponent <= SCALE_MAX_EXPONENT:
        raise ValueError(f"softmax scale {scale!r} is not in 2**-24 ... 2**8")
    return 1 << SCALE_FRACTION_BITS | (bits >> 23 - SCALE_FRACTION_BITS & (1 << SCALE_FRACTION_BITS) - 1), exponent


def scale_scores(scores: Scores, scale: float) -> ScaledScores:
    """Return t of every score.

    Raises:
        ValueError: see `split_scale`.
    """
    significand, exponent = split_scale(scale)
    product_exponent = scores.exponent + SCORE_MIN_EXPONENT - (SCORE_BITS - 1) + exponent - SCALE_FRACTION_BITS
    left = product_exponent + FRACTION_BITS
    magnitude = scores.mantissa * significand << np.maximum(left, 0) >> np.maximum(-left, 0)
    number = ~(scores.infinite | scores.nan)
    beyond = number & (magnitude >= T_LIMIT << FRACTION_BITS)
    infinite = scores.infinite | beyond
    return ScaledScores(
        np.where(number & ~beyond, np.where(scores.negative, -magnitude, magnitude), 0),
        infinite & ~scores.negative,
        infinite & scores.negative,
        scores.nan,
        scores.overflow | beyond,
    )


_LINES = np.array(LINES, np.int64)


def exp2_fraction(f: IntArray) -> IntArray:
    """Return 2**f in steps of ``2**-VALUE_BITS``, for f in steps of ``2**-FRACTION_BITS``, 0 <= f < 1."""
    base, slope = np.moveaxis(_LINES[f >> OFFSET_BITS], -1, 0)
    return np.asarray(base + (slope * (f & (1 << OFFSET_BITS) - 1) >> OFFSET_BITS))


def _round_off(value: IntArray, bits: IntArray) -> IntArray:
    """Return ``value / 2**bits`` rounded to nearest, ties to even; ``value >= 0`` and ``bits >= 1``."""
    kept = value >> bits
    rest, half = value - (kept << bits), np.int64(1) << bits - 1
    return np.asarray(kept + ((rest > half) | ((rest == half) & (kept & 1 == 1))))


def exp2_fp16(d: IntArray) -> npt.NDArray[np.uint16]:
    """Return the FP16 bits of 2**d, for d <= 0 in steps of ``2**-FRACTION_BITS``."""
    d = np.asarray(d, np.int64)
    n, value = d >> FRACTION_BITS, exp2_fraction(d & (1 << FRACTION_BITS) - 1)
    # Beyond so many places nothing but zero is left, whatever the value.
    subnormal = np.clip(SCORE_MIN_EXPONENT - n, 0, FP16_FRACTION_BITS + 2)
    kept = _round_off(value, VALUE_BITS - FP16_FRACTION_BITS + subnormal)
    # The hidden bit counts as one exponent step, and so does a carry out of the rounding.
    return np.asarray((np.maximum(n - SCORE_MIN_EXPONENT, 0) << FP16_FRACTION_BITS) + kept, np.uint16)


def fp16_steps(bits: npt.NDArray[np.uint16]) -> IntArray:
    """Return finite, not negative FP16 values in steps of ``2**-SUM_FRACTION_BITS``."""
    exponent, fraction = (bits >> FP16_FRACTION_BITS).astype(np.int64), (bits & 0x3FF).astype(np.int64)
    return np.where(exponent > 0, fraction + 0x400 << np.maximum(exponent - 1, 0), fraction)


def _in_units(values: npt.NDArray[np.generic], size: int, fill: int) -> npt.NDArray[np.generic]:
    """Return (rows, tokens) as (rows, units, size), the last unit filled up with ``fill``."""
    rows, tokens = values.shape
    padded = np.pad(values, ((0, 0), (0, -tokens % size)), constant_values=fill)
    return padded.reshape(rows, -1, size)


def softmax_tile(scores: Scores, scale: float, state: RowState, config: NdpConfig) -> tuple[Weights, RowState]:
    """Return what the SFU makes of the scores (rows, tokens) of one tile, and the state after it.

    Args:
        scores: of whole units from the first token on; only the last tile may end within one.
        scale: factor of the scores, in base 2.
        state: after the tile before; `RowState.start` for the first.
        config: its ``channels`` are the tokens of a unit.

    Raises:
        ValueError: see `split_scale`.
    """
    t = scale_scores(scores, scale)
    size = config.channels
    tops = np.where(t.finite, -(-t.steps >> FRACTION_BITS), NO_ANCHOR)
    unit_tops = _in_units(tops, size, NO_ANCHOR).max(axis=2)
    history = np.maximum.accumulate(np.column_stack([state.anchor, unit_tops]), axis=1)
    anchors = history[:, 1:]

    token_anchors = np.repeat(anchors, size, axis=1)[:, : t.steps.shape[1]]
    exponents = np.where(t.finite, t.steps - (token_anchors << FRACTION_BITS), 0)
    no_number = t.nan | t.positive_infinity
    bits = np.where(no_number, FP16_NAN, np.where(t.negative_infinity, 0, exp2_fp16(exponents))).astype(np.uint16)

    sums = _in_units(np.where(no_number, 0, fp16_steps(bits)), size, 0).sum(axis=2)
    growth = np.minimum(np.diff(history, axis=1), 63)
    total = state.total
    for unit in range(anchors.shape[1]):
        total = (total >> growth[:, unit]) + sums[:, unit]
    after = RowState(history[:, -1], total, state.nan | no_number.any(axis=1))
    return Weights(bits.view(np.float16), anchors, no_number, t.overflow), after


def rescale_weights(p: Fp16Array, anchors: IntArray, last: IntArray, config: NdpConfig) -> Fp16Array:
    """Return p (rows, tokens), made under ``anchors`` (rows, units), under the row's anchor ``last`` (rows,)."""
    delta = np.repeat(last[:, None] - anchors, config.channels, axis=1)[:, : p.shape[1]]
    bits = np.asarray(p, np.float16).view(np.uint16)
    # p in 1.10 form; the hidden bit of a subnormal is missing, and its exponent is that of 2**-14.
    exponent = np.maximum(bits >> FP16_FRACTION_BITS, 1).astype(np.int64)
    significand = (bits & 0x3FF).astype(np.int64) + (bits >= 0x400) * 0x400
    drop = np.clip(delta - (exponent - 1), 0, FP16_FRACTION_BITS + 2)
    kept = np.where(drop > 0, _round_off(significand, np.maximum(drop, 1)), significand)
    scaled = (np.maximum(exponent - 1 - delta, 0) << FP16_FRACTION_BITS) + kept
    return np.where(np.isnan(p), FP16_NAN, scaled).astype(np.uint16).view(np.float16)


def attention_output(sums: Grid, state: RowState, config: NdpConfig) -> Results:
    """Round the sums of p' v, (rows, dims), to the O that the device returns."""
    return grid_to_fp16(sums, config.accumulator, state.shift[:, None])


class Attention(NamedTuple):
    """All that the chain of one KV head makes."""

    weights: Weights
    scaled: Fp16Array
    """p', (rows, tokens)."""
    sums: Grid
    """Of p' v, (rows, dims)."""
    output: Results | Bf16Results
    state: RowState

    @property
    def partial(self) -> Partial:
        """What the device returns."""
        state = self.state
        return Partial(self.output.values, state.anchor, state.shift, state.total, state.nan)


def golden_attention(
    q: Fp16Array, k: Fp16Array, v: Fp16Array, scale: float, config: NdpConfig, tiles: Sequence[int] | None = None
) -> Attention:
    """Return what the device makes of one KV head.

    Args:
        q: (rows, head_dim) query rows.
        k: (tokens, head_dim).
        v: (tokens, dims).
        scale: factor of the scores in base 2; ordinary attention has log2(e) / sqrt(head_dim). Only its
            17 highest significant bits count.
        config: device; results depend on ``channels`` and ``accumulator`` only.
        tiles: tokens of every tile of k; by default one tile.

    Raises:
        ValueError: the tiles are not whole units, or not all tokens; the scale is out of range; shapes
            do not fit.
    """
    tiles = [len(k)] if tiles is None else list(tiles)
    if sum(tiles) != len(k) or min(tiles) < 1 or any(tile % config.channels for tile in tiles[:-1]):
        raise ValueError(f"tiles {tiles} must be whole units of {config.channels} tokens, {len(k)} in all")
    if len(v) != len(k):
        raise ValueError(f"{len(k)} tokens of k and {len(v)} of v")
    state, parts, start = RowState.start(len(q)), [], 0
    for tile in tiles:
        scores = grid_to_scores(gemm_grid(q, k[start : start + tile], config.accumulator), config.accumulator)
        part, state = softmax_tile(scores, scale, state, config)
        parts.append(part)
        start += tile
    weights = Weights(*(np.concatenate(members, axis=1) for members in zip(*parts, strict=True)))
    scaled = rescale_weights(weights.p, weights.anchors, state.anchor, config)
    sums = gemm_grid(scaled, np.asarray(v, np.float16).T, config.accumulator)
    return Attention(weights, scaled, sums, attention_output(sums, state, config), state)


def golden_attention_bf16(
    q: Bf16Array,
    k: Bf16Array,
    v: Bf16Array,
    scale: float,
    scores: Exponents,
    values: Exponents,
    config: NdpConfig,
    tiles: Sequence[int] | None = None,
) -> Attention:
    """Return what the device makes of one KV head in BF16, as bit patterns; see `golden_attention`.

    Args:
        scale: factor of the scores of the scaled operands.
        scores: exponents of q and k.
        values: that of v, as the exponent of the device operand.
    """
    found = golden_attention(
        to_fp16(q, scores.operand),
        to_fp16(k, scores.device),
        to_fp16(v, values.device),
        scale,
        config,
        tiles,
    )
    output = grid_to_bf16(found.sums, config.accumulator, values.device, found.state.shift[:, None])
    return found._replace(output=output)


def merge_partials(partials: Sequence[Partial]) -> npt.NDArray[np.float64]:
    """Return softmax(q k^T) v, (rows, dims), from its parts over disjoint tokens, in float64.

    With ``m = anchor + shift`` and ``l' = total * 2**-(24 + shift)``, in 0.5 ... 1, it is
    ``sum o_i 2**(m_i - m) / sum l'_i 2**(m_i - m)``, m the largest m_i: the usual merge by a row's largest score,
    with powers of two. A row without any weight is 0.
    """
    anchors = np.stack([part.anchor for part in partials])
    weighty = anchors != NO_ANCHOR
    m = np.where(weighty, anchors + np.stack([part.shift for part in partials]), NO_ANCHOR)
    factors = np.where(weighty, np.exp2((m - m.max(axis=0)).astype(np.float64)), 0.0)
    o = np.stack([part.o for part in partials]).astype(np.float64)
    l_prime = [part.total * np.exp2(-(SUM_FRACTION_BITS + part.shift.astype(np.float64))) for part in partials]
    top, bottom = (o * factors[:, :, None]).sum(axis=0), (np.stack(l_prime) * factors).sum(axis=0)
    return np.asarray(top / np.where(bottom > 0, bottom, 1.0)[:, None])
