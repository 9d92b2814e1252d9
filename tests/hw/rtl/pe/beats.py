"""Beats of the PE array made from matrices, by the packing formulas, and results taken apart again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from plora.hw.defs.config import PE_ROWS, WORD_VALUES, NdpConfig
from plora.hw.rtl.pe.array import beat_layout, results_layout
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
        return self.part_channels * self.taps

    def beats(self, columns: int) -> int:
        """Beats for ``columns`` values of K."""
        return -(-columns // (self.tap_lanes * self.split))


def make_beats(
    shape: Shape, x: Array, w: Array, *, first: bool = True, last: bool = True, second_row: bool = True, tag: int = 0
) -> Iterator[int]:
    """Yield the beats of one row group: x is (2, K), w is (rows, K), both FP16 patterns.

    Lanes beyond K carry NaN in both operands, and are masked.
    """
    config, layout = shape.config, beat_layout(shape.config, TAG_BITS)
    columns = x.shape[1]
    count = shape.beats(columns)
    for t in range(count):
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
        yield sum(
            insert(layout, name, value)
            for name, value in {
                "weights": bits_of(weights),
                "inputs": bits_of(inputs),
                "mask": bits_of(mask),
                "tap": shape.tap,
                "split_log2": shape.split_log2,
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
    tap_index: int
    last_tap: bool
    second_row: bool
    tag: int


def take_result(config: NdpConfig, word: int) -> Result:
    """Return the fields of a `results_layout`."""
    layout = results_layout(config, TAG_BITS)
    values, numeric = extract(layout, "values", word), extract(layout, "numeric", word)
    places = np.arange(PE_ROWS * config.channels).reshape(PE_ROWS, config.channels)
    return Result(
        values=np.vectorize(lambda i: values >> 16 * int(i) & 0xFFFF)(places),
        numeric=np.vectorize(lambda i: numeric >> 2 * int(i) & 3)(places),
        tap_index=extract(layout, "tap_index", word),
        last_tap=bool(extract(layout, "last_tap", word)),
        second_row=bool(extract(layout, "second_row", word)),
        tag=extract(layout, "tag", word),
    )
