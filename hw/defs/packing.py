"""Where every value of a device operand lies, so that the PE array can eat one stripe a cycle.

The device operand W (N x K) of y = x W^T is static, so the host packs it once, when it is loaded.
The layout is a function of (N, K, channels) alone. Host, models and decoder all use `pack_geometry`.

A channel word of 32 lanes holds ``taps`` output rows of ``tap_lanes`` values each (a rank of 8 fills
the word with four rows). Output rows are dealt over the channels. Where there are fewer rows than
channels and K is long, K is dealt over ``split`` parts of the channels too, word by word, and the parts' sums
are merged at the end. With ``part_channels = channels / split``:

    group i, beat t, channel c = g * part_channels + q, tap j, lane l   holds   W[n, k]
    n = i * group_rows + j * part_channels + q          group_rows = part_channels * taps
    k = (t * split + g) * tap_lanes + l                 (zero where n >= N or k >= K)

and beat t of group i is stripe ``i * beats + t`` of the operand.

An operand of a transposed descriptor (V of attention, tokens x dims) grows token by token, so its layout
does not depend on the number of tokens but for a *stride*, the stripes set aside for a group
(`pack_geometry_transposed`). With ``s`` in ``0 ... 16 / channels - 1``:

    group i, beat b, channel c, lane s * 2 * channels + l   holds   V[token, dim]
    token = 16 * b + s * channels + c
    dim = i * 2 * channels + l                              0 <= l < 2 * channels

and beat b of group i is stripe ``i * stride + b``. What lies at tokens and dims beyond the operand's may be
anything. With 16 channels a word holds 32 values of one token, so a new token is whole words.

Integers (keys and values of INT8, INT4) lie more closely. Their layout in *expanded* stripes, which the array
eats, is that of FP16. In memory 2 (INT8) or 4 (INT4) expanded words that follow each other share a channel
word, the first in its lowest bits. Every token has a scale of a byte (`plora.hw.defs.integers`). Scales come
in front of what they scale: a *frame* is the values of ``64 * channels`` tokens, and before it lies a stripe with

    byte i of channel c's word   holds   the scale of token 64 * channels * frame + i * channels + c

A frame of keys is 64 row groups, which follow each other without gaps, so that a group may begin within a
stripe. Values have frames within every group of dims, each ``4 * channels`` beats; a group begins with a stripe of
its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from plora.hw.defs.config import DOT_LANES, DOTS_PER_WORD, KEPT_MAX_VALUES, WORD_BYTES, WORD_VALUES, NdpConfig
from plora.hw.defs.descriptor import DType

INTEGER_MIN_COLUMNS = WORD_VALUES // 2 + 1
"""Fewest columns of keys that are integers: a row takes all lanes of a word, as the scale of its token does."""

FRAME_SCALES = WORD_BYTES
"""Scales of a channel in front of a frame of integers, a byte each."""


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b, for b > 0."""
    return -(-a // b)


def expansion_log2(dtype: int) -> int:
    """log2 of the expanded words that share a word of memory; 0 of whatever is not INT8 or INT4."""
    return {DType.INT8: 1, DType.INT4: 2}.get(dtype, 0)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True)
class PackGeometry:
    """Layout of one packed operand; see the module's description."""

    tap_lanes: int
    """Lanes of one output row in a word: 8, 16 or 32."""
    split: int
    """Parts into which K is dealt over the channels, a power of two."""
    group_rows: int
    """Output rows whose sums complete together."""
    groups: int
    """Row groups."""
    beats: int
    """Expanded stripes of one row group: beats of one pass over it."""
    stripe_bytes: int
    expansion_log2: int = 0
    """`expansion_log2` of the type."""

    @property
    def taps(self) -> int:
        """Output rows in one word."""
        return WORD_VALUES // self.tap_lanes

    @property
    def part_channels(self) -> int:
        """Channels of one part."""
        return self.group_rows // self.taps

    @property
    def frames(self) -> int:
        """Frames of integers, each with a stripe of scales."""
        return ceil_div(self.groups, FRAME_SCALES) if self.expansion_log2 else 0

    @property
    def stripes(self) -> int:
        """Stripes of the whole operand in memory."""
        return self.frames + ceil_div(self.groups * self.beats, 1 << self.expansion_log2)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the whole operand."""
        return self.stripes * self.stripe_bytes


def pack_geometry(config: NdpConfig, rows: int, columns: int, dtype: int = DType.FP16) -> PackGeometry:
    """Return the layout of a rows x columns device operand (both >= 1).

    One of integers has a layout, and is legal, from `INTEGER_MIN_COLUMNS` columns on.

    A row takes 8, 16 or 32 lanes of a word: the fewest that hold K in one beat, or else 32. K is
    split only where an operand is too wide to be a kept intermediate's partner, so that a kept
    operand is always read one word at a time.
    """
    tap_lanes = 8 if columns <= 8 else 16 if columns <= 16 else WORD_VALUES
    split = 1
    if columns > KEPT_MAX_VALUES:
        while split < config.channels and rows <= config.channels // (2 * split):
            split *= 2
    group_rows = config.channels // split * (WORD_VALUES // tap_lanes)
    return PackGeometry(
        tap_lanes=tap_lanes,
        split=split,
        group_rows=group_rows,
        groups=ceil_div(rows, group_rows),
        beats=ceil_div(columns, tap_lanes * split),
        stripe_bytes=config.stripe_bytes,
        expansion_log2=expansion_log2(dtype),
    )


@dataclass(frozen=True)
class TransposedGeometry:
    """Layout of one transposed operand; see the module's description."""

    group_rows: int
    """Dims of a group."""
    groups: int
    beats: int
    """Expanded stripes of one group that hold tokens: beats of one pass over it."""
    stripe_bytes: int
    frame_beats: int
    """Beats of a frame of integers."""
    expansion_log2: int = 0
    """`expansion_log2` of the type."""

    @property
    def group_stripes(self) -> int:
        """Stripes of one group in memory that hold tokens or their scales."""
        frames = ceil_div(self.beats, self.frame_beats) if self.expansion_log2 else 0
        return frames + ceil_div(self.beats, 1 << self.expansion_log2)

    @property
    def stripes(self) -> int:
        """Stripes that one pass over the operand reads."""
        return self.groups * self.group_stripes

    def packed_bytes(self, stride: int | None = None) -> int:
        """Bytes of the whole operand with ``stride`` stripes a group (default: as few as hold the tokens)."""
        return self.groups * (self.group_stripes if stride is None else stride) * self.stripe_bytes

    def stride(self, packed_bytes: int) -> int | None:
        """Stripes from one group to the next of an operand of ``packed_bytes``; None if it is none of this layout."""
        stride, rest = divmod(packed_bytes, self.groups * self.stripe_bytes)
        return None if rest or stride < self.group_stripes else stride


def pack_geometry_transposed(config: NdpConfig, dims: int, tokens: int, dtype: int = DType.FP16) -> TransposedGeometry:
    """Return the layout of a transposed device operand of ``tokens`` x ``dims`` values (both >= 1)."""
    group_rows = DOTS_PER_WORD * config.channels
    return TransposedGeometry(
        group_rows=group_rows,
        groups=ceil_div(dims, group_rows),
        beats=ceil_div(tokens, DOT_LANES),
        stripe_bytes=config.stripe_bytes,
        frame_beats=frame_tokens(config) // DOT_LANES,
        expansion_log2=expansion_log2(dtype),
    )


def frame_tokens(config: NdpConfig) -> int:
    """Tokens of a frame of integers."""
    return FRAME_SCALES * config.channels


def operand_row_stripes(config: NdpConfig, columns: int) -> int:
    """Stripes from one row of the GPU operand to the next: every row starts on a stripe of its own."""
    return ceil_div(columns, config.stripe_values)


def result_row_words(rows: int, *, transpose: int | bool = False) -> int:
    """Words from one row of a result (N = ``rows`` values) to the next.

    A row of a transposed descriptor ends with a word that holds its anchor (`plora.hw.defs.queue.Anchor`).
    """
    return ceil_div(rows, WORD_VALUES) + bool(transpose)
