"""Where the keys and values of one KV head lie in a device's memory.

A head's tokens on a device fill *tiles* of `KvLayout.tile_tokens` tokens, one after the other. A tile is one
region of memory: keys first, packed as the device operand N = tokens, K = head_dim, then values, packed as a
transposed operand with room for the whole tile. In both the place of a token does not depend on how
many follow, so a cache grows by writing new tokens only: with 16 channels and head_dim 128 that is four words
of key and four of value.

A tile of INT8 or INT4 has the same order, in frames with the scales of their tokens (`plora.hw.defs.packing`). Keys and
values come as FP16 and are rounded to integers here, token by token. A new token is then parts of words, and
a byte of scale for the key and for every group of the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import DOT_LANES, KEPT_MAX_VALUES, WORD_VALUES, NdpConfig
from plora.hw.defs.descriptor import MAX_OPERAND_BYTES, DType
from plora.hw.defs.errors import UserError
from plora.hw.defs.packing import (
    INTEGER_MIN_COLUMNS,
    PackGeometry,
    TransposedGeometry,
    expansion_log2,
    frame_tokens,
    pack_geometry,
    pack_geometry_transposed,
)
from plora.sim.functional.layout import pack_integers, pack_operand, pack_transposed, pack_transposed_integers
from plora.sim.golden.integers import Quantized, quantize
from plora.sw.matrix import ARRAY_TYPES

_Stored = npt.NDArray[np.uint16] | Quantized

Write = tuple[int, bytes]
"""Offset in the tile, and what lies there."""


def widest_tile(config: NdpConfig, head_dim: int, dtype: DType = DType.FP16) -> int:
    """Most tokens of a tile: a group of the values of so many can be stated by one descriptor."""
    granule = token_granule(config, head_dim, dtype)
    stripes = pack_geometry_transposed(config, 1, granule, dtype).group_stripes
    return MAX_OPERAND_BYTES // config.stripe_bytes // stripes * granule


def token_granule(config: NdpConfig, head_dim: int, dtype: DType = DType.FP16) -> int:
    """Tokens at whose multiples keys and values can be cut.

    Whole row groups, beats, and words of kept terms; of integers whole frames.
    """
    if expansion_log2(dtype):
        return frame_tokens(config)
    return max(WORD_VALUES, pack_geometry(config, 1, head_dim).group_rows)


def host_dtype(dtype: DType) -> DType:
    """Type of the host's keys, values, queries and results beside a cache of ``dtype``: FP16 for integers."""
    return DType.FP16 if expansion_log2(dtype) else dtype


def array_type(dtype: DType) -> np.dtype[Any]:
    """What the host's arrays of `host_dtype` are."""
    return ARRAY_TYPES[host_dtype(dtype)]


@dataclass(frozen=True)
class KvLayout:
    """A tile of one KV head's cache.

    Raises:
        UserError: a head_dim that the device does not take, or tiles that are not whole words or too long.
    """

    config: NdpConfig
    head_dim: int
    tile_tokens: int
    dtype: DType = DType.FP16

    def __post_init__(self) -> None:
        if not 1 <= self.head_dim <= KEPT_MAX_VALUES:
            raise UserError(f"head_dim is {self.head_dim}: the device takes 1 ... {KEPT_MAX_VALUES}")
        if expansion_log2(self.dtype) and self.head_dim < INTEGER_MIN_COLUMNS:
            raise UserError(
                f"head_dim is {self.head_dim}: a cache of {self.dtype.name} takes {INTEGER_MIN_COLUMNS} ..."
                f" {KEPT_MAX_VALUES}"
            )
        granule = token_granule(self.config, self.head_dim, self.dtype)
        most = widest_tile(self.config, self.head_dim, self.dtype)
        if self.tile_tokens % granule or not granule <= self.tile_tokens <= most:
            raise UserError(
                f"KV tiles of {self.tile_tokens} tokens: choose a multiple of {granule} from {granule} to {most} for"
                f" head_dim {self.head_dim} on {self.config.name!r}"
            )

    @cached_property
    def keys(self) -> PackGeometry:
        """Geometry of the keys of a full tile."""
        return self.keys_of(self.tile_tokens)

    def keys_of(self, tokens: int) -> PackGeometry:
        """Geometry of the keys of so many tokens: the beginning of that of a full tile."""
        return pack_geometry(self.config, tokens, self.head_dim, self.dtype)

    def values_of(self, tokens: int) -> TransposedGeometry:
        """Geometry of the values of so many tokens: of each group the beginning."""
        return pack_geometry_transposed(self.config, self.head_dim, tokens, self.dtype)

    @cached_property
    def value_groups(self) -> int:
        """Groups of dims of the values."""
        return self.values_of(1).groups

    @property
    def group_dims(self) -> int:
        """Dims of a group."""
        return self.values_of(1).group_rows

    @cached_property
    def value_stride(self) -> int:
        """Stripes of a group of values."""
        return self.values_of(self.tile_tokens).group_stripes

    @property
    def values_offset(self) -> int:
        """Where the values begin in a tile, in bytes."""
        return self.keys.packed_bytes

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return self.values_offset + self.value_groups * self.value_stride * self.config.stripe_bytes

    @property
    def granule(self) -> int:
        """`token_granule` of the tile."""
        return token_granule(self.config, self.head_dim, self.dtype)

    @property
    def most_keys(self) -> int:
        """Tokens whose keys one descriptor can state."""
        return MAX_OPERAND_BYTES // self.keys_of(self.granule).packed_bytes * self.granule

    def most_values(self, stripes: int) -> int:
        """Tokens of which a group of values takes at most so many stripes, a multiple of 16."""
        frame = self.values_of(self.granule)
        whole, rest = divmod(stripes, frame.group_stripes)
        scales = frame.group_stripes - (frame.beats >> frame.expansion_log2)
        return whole * self.granule + (max(rest - scales, 0) << frame.expansion_log2) * DOT_LANES

    def key_offset(self, token: int) -> int:
        """Offset of the keys from ``token`` on, of integers a multiple of a frame, else of the group's rows."""
        return self.keys_of(token).packed_bytes if token else 0

    def value_offset(self, group: int, token: int) -> int:
        """Offset of the values of ``group`` from ``token`` on, of integers a multiple of a frame, else of 16."""
        stripes = self.values_of(token).group_stripes if token else 0
        return self.values_offset + (group * self.value_stride + stripes) * self.config.stripe_bytes

    def extents(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Offsets and sizes in bytes of the whole groups and stripes in which the first ``tokens`` tokens lie."""
        yield 0, self.keys_of(tokens).packed_bytes
        for group in range(self.value_groups):
            yield self.value_offset(group, 0), self.values_of(tokens).group_stripes * self.config.stripe_bytes

    def writes(self, start: int, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> Iterator[Write]:
        """What to store where for ``keys`` and ``values`` (tokens x head_dim) from token ``start`` of the tile.

        Nothing of an earlier token is written. Words that hold nothing but the new tokens are written whole.
        """
        yield from self._key_writes(start, keys)
        yield from self._value_writes(start, values)

    def _key_writes(self, start: int, keys: npt.NDArray[Any]) -> Iterator[Write]:
        first = start // self.granule * self.granule
        image, touched = (
            pack_integers(rows, self.config, self.dtype)
            if isinstance(rows, Quantized)
            else pack_operand(rows, self.config)
            for rows in self._aligned(keys, start - first, self.keys.beats * self.keys.tap_lanes)
        )
        yield from _runs(self.key_offset(first), image, touched)

    def _value_writes(self, start: int, values: npt.NDArray[Any]) -> Iterator[Write]:
        first = start // self.granule * self.granule
        image, touched = (
            pack_transposed_integers(rows, self.config, self.dtype)
            if isinstance(rows, Quantized)
            else pack_transposed(rows, self.config)
            for rows in self._aligned(values, start - first, self.value_groups * self.group_dims)
        )
        size = len(image) // self.value_groups
        for group in range(self.value_groups):
            part = slice(group * size, (group + 1) * size)
            yield from _runs(self.value_offset(group, first), image[part], touched[part])

    def _aligned(self, rows: npt.NDArray[Any], before: int, width: int) -> tuple[_Stored, _Stored]:
        """Return ``rows``, perhaps as integers, below ``before`` rows of zeros, filled up to ``width`` columns.

        And the same with all bits set where they lie.
        """
        if expansion_log2(self.dtype):
            values, scales = quantize(rows, self.dtype)
            marks = np.full_like(values, -1), np.full_like(scales, 0xFF)
            return (
                Quantized(_below(values, before, width), np.pad(scales, (before, 0))),
                Quantized(_below(marks[0], before, width, -1), np.pad(marks[1], (before, 0))),
            )
        bits = rows.view(np.uint16)
        return _below(bits, before, width), _below(np.full_like(bits, 0xFFFF), before, width, 0xFFFF)


def _below(rows: npt.NDArray[Any], before: int, width: int, fill: int = 0) -> npt.NDArray[Any]:
    """``rows`` below ``before`` rows of zeros, filled up to ``width`` columns with ``fill``."""
    out = np.zeros((before + len(rows), width), rows.dtype)
    out[before:] = fill
    out[before:, : rows.shape[1]] = rows
    return out


def _runs(base: int, image: bytes, touched: bytes) -> Iterator[Write]:
    """The parts of ``image`` where ``touched`` is not zero."""
    marks = np.frombuffer(touched, np.uint8) != 0
    edges = np.flatnonzero(np.diff(marks, prepend=False, append=False))
    for start, end in edges.reshape(-1, 2).tolist():
        yield base + start, image[start:end]
