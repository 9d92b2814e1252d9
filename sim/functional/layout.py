"""The layouts of `plora.hw.defs.packing` and `plora.hw.defs.queue` as numpy array operations.

Matrices are numpy arrays of FP16 values (or of their bit patterns, ``uint16``); packed bytes are
little-endian. Nothing here looks at a value: any two-byte type may be moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import DOT_LANES, VALUE_BYTES, WORD_BYTES, NdpConfig
from plora.hw.defs.errors import UserError
from plora.hw.defs.packing import operand_row_stripes, pack_geometry, pack_geometry_transposed, result_row_words
from plora.hw.defs.queue import Anchor

Matrix = npt.NDArray[np.float16]
_BITS = np.dtype("<u2")


def _bits(matrix: npt.NDArray[Any], what: str) -> npt.NDArray[np.uint16]:
    if matrix.ndim != 2 or 0 in matrix.shape or matrix.dtype.itemsize != VALUE_BYTES:
        raise UserError(f"{what} is a {matrix.dtype} array of shape {matrix.shape}; give a matrix of FP16 values")
    return matrix.view(np.uint16)


def pack_operand(matrix: npt.NDArray[Any], config: NdpConfig) -> bytes:
    """Return the device operand ``matrix`` (N x K) as it lies in memory, padding zero.

    Raises:
        UserError: ``matrix`` is not a non-empty matrix of two-byte values.
    """
    bits = _bits(matrix, "device operand")
    rows, columns = bits.shape
    g = pack_geometry(config, rows, columns)
    padded = np.zeros((g.groups * g.group_rows, g.beats * g.split * g.tap_lanes), dtype=_BITS)
    padded[:rows, :columns] = bits
    # Row n = (group, tap, channel of the part), column k = (beat, part, lane).
    axes = padded.reshape(g.groups, g.taps, g.part_channels, g.beats, g.split, g.tap_lanes)
    return axes.transpose(0, 3, 4, 2, 1, 5).tobytes()


def unpack_operand(data: bytes, config: NdpConfig, rows: int, columns: int) -> Matrix:
    """Return the rows x columns matrix that `pack_operand` made into ``data``.

    Raises:
        UserError: ``data`` has not the size of such an operand.
    """
    g = pack_geometry(config, rows, columns)
    if len(data) != g.packed_bytes:
        raise UserError(f"a packed {rows} x {columns} operand has {g.packed_bytes} bytes, not {len(data)}")
    axes = np.frombuffer(data, dtype=_BITS).reshape(g.groups, g.beats, g.split, g.part_channels, g.taps, g.tap_lanes)
    padded = axes.transpose(0, 4, 3, 1, 2, 5).reshape(g.groups * g.group_rows, g.beats * g.split * g.tap_lanes)
    return np.ascontiguousarray(padded[:rows, :columns]).view(np.float16)


def pack_transposed(matrix: npt.NDArray[Any], config: NdpConfig, stride: int | None = None) -> bytes:
    """Return ``matrix`` (tokens x dims) as the operand of a transposed descriptor lies in memory, padding zero.

    ``stride`` is the number of stripes set aside for a group of dims (default: as few as hold the tokens).

    Raises:
        UserError: ``matrix`` is not a non-empty matrix of two-byte values, or has more tokens than the stride holds.
    """
    bits = _bits(matrix, "device operand")
    tokens, dims = bits.shape
    g = pack_geometry_transposed(config, dims, tokens)
    stride = g.beats if stride is None else stride
    if stride < g.beats:
        raise UserError(f"{tokens} tokens take {g.beats} stripes a group, more than the {stride} set aside")
    padded = np.zeros((stride * DOT_LANES, g.groups * g.group_rows), dtype=_BITS)
    padded[:tokens, :dims] = bits
    # Token = (beat, lane group s, channel), dim = (group, lane of the lane group).
    axes = padded.reshape(stride, DOT_LANES // config.channels, config.channels, g.groups, g.group_rows)
    return axes.transpose(3, 0, 2, 1, 4).tobytes()


def unpack_transposed(data: bytes, config: NdpConfig, dims: int, tokens: int) -> Matrix:
    """Return the tokens x dims matrix that `pack_transposed` made into ``data``.

    Raises:
        UserError: ``data`` has not the size of such an operand, with any stride.
    """
    g = pack_geometry_transposed(config, dims, tokens)
    stride = g.stride(len(data))
    if stride is None:
        raise UserError(f"{len(data)} bytes are no packed transposed operand of {tokens} tokens x {dims} dims")
    axes = np.frombuffer(data, dtype=_BITS).reshape(
        g.groups, stride, config.channels, DOT_LANES // config.channels, g.group_rows
    )
    padded = axes.transpose(1, 3, 2, 0, 4).reshape(stride * DOT_LANES, g.groups * g.group_rows)
    return np.ascontiguousarray(padded[:tokens, :dims]).view(np.float16)


def gpu_operand_bytes(matrix: npt.NDArray[Any], config: NdpConfig) -> bytes:
    """Return the GPU operand ``matrix`` (B x K) as it lies in a submission slot: each row on its own stripe.

    Raises:
        UserError: ``matrix`` is not a non-empty matrix of two-byte values.
    """
    bits = _bits(matrix, "GPU operand")
    rows, columns = bits.shape
    padded = np.zeros((rows, operand_row_stripes(config, columns) * config.stripe_values), dtype=_BITS)
    padded[:, :columns] = bits
    return padded.tobytes()


def gpu_operand_from_bytes(data: bytes, config: NdpConfig, rows: int, columns: int) -> Matrix:
    """Return the rows x columns matrix that `gpu_operand_bytes` made into ``data``."""
    padded = np.frombuffer(data, dtype=_BITS).reshape(rows, operand_row_stripes(config, columns) * config.stripe_values)
    return np.ascontiguousarray(padded[:, :columns]).view(np.float16)


def result_bytes(result: npt.NDArray[Any]) -> bytes:
    """Return a result (B x N) as it lies in a result slot: rows of whole words, their tails zero.

    Raises:
        UserError: ``result`` is not a non-empty matrix of two-byte values.
    """
    bits = _bits(result, "result")
    rows, columns = bits.shape
    padded = np.zeros((rows, result_row_words(columns) * (WORD_BYTES // VALUE_BYTES)), dtype=_BITS)
    padded[:, :columns] = bits
    return padded.tobytes()


def anchored_result_bytes(result: npt.NDArray[Any], anchors: Sequence[Anchor]) -> bytes:
    """Return a result (B x N) with the anchors of its rows as it lies in a result slot."""
    rows = np.frombuffer(result_bytes(result), np.uint8).reshape(len(anchors), -1)
    words = np.frombuffer(b"".join(anchor.pack() for anchor in anchors), np.uint8).reshape(len(anchors), -1)
    return np.concatenate([rows, words], axis=1).tobytes()


def anchored_result_from_bytes(data: bytes, rows: int, columns: int) -> tuple[Matrix, tuple[Anchor, ...]]:
    """Return the rows x columns result and the anchors that `anchored_result_bytes` made into ``data``."""
    size = len(data) // rows
    each = [data[row * size : (row + 1) * size] for row in range(rows)]
    values = b"".join(row[:-WORD_BYTES] for row in each)
    return result_from_bytes(values, rows, columns), tuple(Anchor.unpack(row[-WORD_BYTES:]) for row in each)


def result_from_bytes(data: bytes, rows: int, columns: int) -> Matrix:
    """Return the rows x columns result that `result_bytes` made into ``data``."""
    padded = np.frombuffer(data, dtype=_BITS).reshape(rows, result_row_words(columns) * (WORD_BYTES // VALUE_BYTES))
    return np.ascontiguousarray(padded[:, :columns]).view(np.float16)
