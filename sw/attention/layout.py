"""Where the keys and values of one KV head lie in a device's memory.

A head's tokens on a device fill *tiles* of `KvLayout.tile_tokens` tokens, one after the other. A tile is one
region of memory: keys first, packed as the device operand N = tokens, K = head_dim, then values, packed as a
transposed operand with room for the whole tile. In both the place of a token does not depend on how
many follow, so a cache grows by writing new tokens only: with 16 channels and head_dim 128 that is four words
of key and four of value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import DOT_LANES, KEPT_MAX_VALUES, VALUE_BYTES, WORD_VALUES, NdpConfig
from plora.hw.defs.descriptor import MAX_OPERAND_BYTES
from plora.hw.defs.errors import UserError
from plora.hw.defs.packing import PackGeometry, ceil_div, pack_geometry, pack_geometry_transposed
from plora.sim.functional.layout import pack_operand, pack_transposed

Write = tuple[int, bytes]
"""Offset in the tile, and what lies there."""


def widest_tile(config: NdpConfig, head_dim: int) -> int:
    """Most tokens of a tile: a group of the values of so many can be stated by one descriptor."""
    granule = token_granule(config, head_dim)
    return MAX_OPERAND_BYTES // config.stripe_bytes * DOT_LANES // granule * granule


def token_granule(config: NdpConfig, head_dim: int) -> int:
    """Tokens at whose multiples keys and values can be cut: whole row groups, beats, and words of kept terms."""
    return max(WORD_VALUES, pack_geometry(config, 1, head_dim).group_rows)


@dataclass(frozen=True)
class KvLayout:
    """A tile of one KV head's cache.

    Raises:
        UserError: a head_dim that the device does not take, or tiles that are not whole words or too long.
    """

    config: NdpConfig
    head_dim: int
    tile_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.head_dim <= KEPT_MAX_VALUES:
            raise UserError(f"head_dim is {self.head_dim}: the device takes 1 ... {KEPT_MAX_VALUES}")
        granule, most = token_granule(self.config, self.head_dim), widest_tile(self.config, self.head_dim)
        if self.tile_tokens % granule or not granule <= self.tile_tokens <= most:
            raise UserError(
                f"KV tiles of {self.tile_tokens} tokens: choose a multiple of {granule} from {granule} to {most} for"
                f" head_dim {self.head_dim} on {self.config.name!r}"
            )

    @cached_property
    def keys(self) -> PackGeometry:
        """Geometry of the keys of a full tile."""
        return pack_geometry(self.config, self.tile_tokens, self.head_dim)

    @cached_property
    def value_groups(self) -> int:
        """Groups of dims of the values."""
        return pack_geometry_transposed(self.config, self.head_dim, 1).groups

    @property
    def group_dims(self) -> int:
        """Dims of a group."""
        return pack_geometry_transposed(self.config, 1, 1).group_rows

    @property
    def value_stride(self) -> int:
        """Stripes of a group of values."""
        return self.tile_tokens // DOT_LANES

    @property
    def values_offset(self) -> int:
        """Where the values begin in a tile, in bytes."""
        return self.keys.packed_bytes

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return self.values_offset + self.value_groups * self.value_stride * self.config.stripe_bytes

    def key_offset(self, token: int) -> int:
        """Offset of the row group that begins with ``token``, a multiple of the group's rows."""
        return token // self.keys.group_rows * self.keys.beats * self.config.stripe_bytes

    def value_offset(self, group: int, token: int) -> int:
        """Offset of the stripe of ``group`` that begins with ``token``, a multiple of 16."""
        return self.values_offset + (group * self.value_stride + token // DOT_LANES) * self.config.stripe_bytes

    def extents(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Offsets and sizes in bytes of the whole groups and stripes in which the first ``tokens`` tokens lie."""
        yield 0, self.key_offset(ceil_div(tokens, self.keys.group_rows) * self.keys.group_rows)
        for group in range(self.value_groups):
            yield self.value_offset(group, 0), ceil_div(tokens, DOT_LANES) * self.config.stripe_bytes

    def writes(self, start: int, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> Iterator[Write]:
        """What to store where for ``keys`` and ``values`` (tokens x head_dim) from token ``start`` of the tile.

        Nothing of an earlier token is written. Words that hold nothing but the new tokens are written whole.
        """
        yield from self._key_writes(start, keys)
        yield from self._value_writes(start, values)

    def _key_writes(self, start: int, keys: npt.NDArray[Any]) -> Iterator[Write]:
        g = self.keys
        first = start // g.group_rows * g.group_rows
        rows, new = _aligned(keys, start - first, g.beats * g.tap_lanes)
        base = self.key_offset(first)
        yield from _runs(base, pack_operand(rows, self.config), pack_operand(new, self.config))

    def _value_writes(self, start: int, values: npt.NDArray[Any]) -> Iterator[Write]:
        first = start // DOT_LANES * DOT_LANES
        rows, new = _aligned(values, start - first, self.value_groups * self.group_dims)
        image, touched = pack_transposed(rows, self.config), pack_transposed(new, self.config)
        size = ceil_div(len(rows), DOT_LANES) * self.config.stripe_bytes
        for group in range(self.value_groups):
            part = slice(group * size, (group + 1) * size)
            yield from _runs(self.value_offset(group, first), image[part], touched[part])


def _aligned(rows: npt.NDArray[Any], before: int, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return ``rows`` below ``before`` rows of zeros, filled up to ``width`` columns; and ones where they lie."""
    bits, new = np.zeros((2, before + len(rows), width), np.uint16)
    bits[before:, : rows.shape[1]] = rows.view(np.uint16)
    new[before:] = 1
    return bits, new


def _runs(base: int, image: bytes, touched: bytes) -> Iterator[Write]:
    """The parts of ``image`` where ``touched`` is not zero."""
    marks = np.frombuffer(touched, np.uint16) != 0
    edges = np.flatnonzero(np.diff(marks, prepend=False, append=False)) * VALUE_BYTES
    for start, end in edges.reshape(-1, 2).tolist():
        yield base + start, image[start:end]
