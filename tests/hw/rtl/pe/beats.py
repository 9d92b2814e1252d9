"""Beats of the PE array made from matrices, by the packing formulas, and results taken apart again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from plora.hw.defs.config import DOT_LANES, DOTS_PER_WORD, PE_ROWS, WORD_VALUES, NdpConfig
from plora.hw.rtl.pe.array import beat_layout, results_layout
from plora.hw.rtl.pe.drain import OFFSET_BITS, score_layout
from tests.hw.rtl.pe.bench import TAG_BITS
from tests.hw.rtl.pe.compiled import Array

NAN = 0x7E00


def insert(layout: object, name: str, value: int) -> int:
    """Return ``value`` at the place of the field ``name``."""
    field = layout[name]  # type: ignore[index]
    assert 0 <= value < 1 << field.width, f"{name} = {value} does not fit {field.width} bits"
    return value << int(field.offset)


def extract(layout: object, name: str, word: int) -> int:
    """Return the field ``name`` of ``word``."""
    field = layout[name]  # type: ignore[index]
    return word >> int(field.offset) & (1 << int(field.width)) - 1


def bits_of(values: Array) -> int:
    """Return an array of FP16 patterns, or of booleans, as one integer, first element lowest."""
    data = np.packbits(values, bitorder="little") if values.dtype == bool else values.astype("<u2")
    return int.from_bytes(data.tobytes(), "little")


@dataclass(frozen=True)
class Shape:
    """How a row group lies in the array."""

    config: NdpConfig
    tap: int = 0
    split_log2: int = 0
    token_wise: bool = False
    """Rows are dims, columns tokens, 16 of them in a beat."""

    @property
    def taps(self) -> int:
        """Output rows in a word."""
        return 1 << self.tap

    @property
    def tap_lanes(self) -> int:
        """Lanes of an output row in a word."""
        return WORD_VALUES // self.taps

    @property
    def split(self) -> int:
        """Parts of K."""
        return 1 << self.split_log2

    @property
    def part_channels(self) -> int:
        """Channels of a part."""
        return self.config.channels // self.split

    @property
    def rows(self) -> int:
        """Output rows of a group."""
        return self.part_channels * (DOTS_PER_WORD if self.token_wise else self.taps)

    def beats(self, columns: int) -> int:
        """Beats for ``columns`` values of K."""
        return -(-columns // (DOT_LANES if self.token_wise else self.tap_lanes * self.split))


def token_wise_words(shape: Shape, x: Array, w: Array, t: int) -> tuple[Array, Array, Array]:
    """Return weights, inputs and mask of beat ``t``: token 16 t + s C + c lies in channel c, lanes 2 C s and up."""
    config, columns = shape.config, x.shape[1]
    weights = np.full((config.channels, WORD_VALUES), NAN, np.uint16)
    inputs = np.full((PE_ROWS, config.channels, WORD_VALUES), NAN, np.uint16)
    mask = np.zeros((config.channels, WORD_VALUES), bool)
    for lane, token in enumerate(range(DOT_LANES * t, min(DOT_LANES * (t + 1), columns))):
        s, channel = divmod(lane, config.channels)
        weights[channel, s * shape.rows : (s + 1) * shape.rows] = w[:, token]
        for dot in range(DOTS_PER_WORD):
            inputs[:, :, dot * DOT_LANES + lane] = x[:, token, None]
            mask[:, dot * DOT_LANES + lane] = True
    return weights, inputs, mask


def channel_wise_words(shape: Shape, x: Array, w: Array, t: int) -> tuple[Array, Array, Array]:
    """Return weights, inputs and mask of beat ``t``, as `plora.hw.defs.packing` has it."""
    config, columns = shape.config, x.shape[1]
    weights = np.full((config.channels, WORD_VALUES), NAN, np.uint16)
    inputs = np.full((PE_ROWS, config.channels, WORD_VALUES), NAN, np.uint16)
    mask = np.zeros((config.channels, WORD_VALUES), bool)
    for channel in range(config.channels):
        g, q = divmod(channel, shape.part_channels)
        for tap in range(shape.taps):
            k = (t * shape.split + g) * shape.tap_lanes + np.arange(shape.tap_lanes)
            lanes = tap * shape.tap_lanes + np.flatnonzero(k < columns)
            k = k[k < columns]
            weights[channel, lanes] = w[tap * shape.part_channels + q, k]
            inputs[:, channel, lanes] = x[:, k]
            mask[channel, lanes] = True
    return weights, inputs, mask


def make_beats(
    shape: Shape,
    x: Array,
    w: Array,
    *,
    first: bool = True,
    last: bool = True,
    second_row: bool = True,
    tag: int = 0,
    pause: int = 0,
    offsets: tuple[int, int] = (0, 0),
) -> Iterator[int]:
    """Yield the beats of one row group: x is (2, K), w is (rows, K), both FP16 patterns.

    Lanes beyond K carry NaN in both operands, and are masked.
    """
    layout = beat_layout(shape.config, TAG_BITS)
    count = shape.beats(x.shape[1])
    for t in range(count):
        weights, inputs, mask = (token_wise_words if shape.token_wise else channel_wise_words)(shape, x, w, t)
        yield sum(
            insert(layout, name, value)
            for name, value in {
                "weights": bits_of(weights),
                "inputs": bits_of(inputs),
                "mask": bits_of(mask),
                "tap": shape.tap,
                "split_log2": shape.split_log2,
                "token_wise": int(shape.token_wise),
                "pause": pause,
                "offsets": offsets[0] | offsets[1] << OFFSET_BITS,
                "first": int(first and t == 0),
                "last": int(last and t == count - 1),
                "second_row": int(second_row),
                "tag": tag,
            }.items()
        )


@dataclass(frozen=True)
class Result:
    """One cycle of results."""

    values: Array
    """(rows of the array, channels) FP16 patterns."""
    numeric: Array
    """(rows of the array, channels) numeric flags."""
    scores: Array
    """(rows of the array, channels) bits of a `score_layout`."""
    score_numeric: Array
    tap_index: int
    last_tap: bool
    second_row: bool
    tag: int


def take_result(config: NdpConfig, word: int) -> Result:
    """Return the fields of a `results_layout`."""
    layout = results_layout(config, TAG_BITS)
    places = range(PE_ROWS * config.channels)

    def of_all(name: str, width: int) -> Array:
        bits = extract(layout, name, word)
        return np.array([bits >> width * i & (1 << width) - 1 for i in places]).reshape(PE_ROWS, config.channels)

    return Result(
        values=of_all("values", 16),
        numeric=of_all("numeric", 2),
        scores=of_all("scores", score_layout.size),
        score_numeric=of_all("score_numeric", 2),
        tap_index=extract(layout, "tap_index", word),
        last_tap=bool(extract(layout, "last_tap", word)),
        second_row=bool(extract(layout, "second_row", word)),
        tag=extract(layout, "tag", word),
    )
