"""The layouts of `plora.hw.defs.packing` and `plora.hw.defs.queue` as numpy array operations.

Matrices are numpy arrays of FP16 values (or of their bit patterns, ``uint16``); packed bytes are
little-endian. Nothing here looks at a value: any two-byte type may be moved. Integers are ``int8``, those of INT4 too,
and come with the scales of their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import DOT_LANES, VALUE_BYTES, WORD_BYTES, WORD_VALUES, NdpConfig
from plora.hw.defs.errors import UserError
from plora.hw.defs.integers import INTEGER_BITS
from plora.hw.defs.packing import (
    FRAME_SCALES,
    INTEGER_MIN_COLUMNS,
    PackGeometry,
    TransposedGeometry,
    ceil_div,
    operand_row_stripes,
    pack_geometry,
    pack_geometry_transposed,
    result_row_words,
)
from plora.hw.defs.queue import Anchor
from plora.sim.golden.integers import Quantized, ScaleArray

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
    return _spread(bits.astype(_BITS), pack_geometry(config, *bits.shape)).tobytes()


def unpack_operand(data: bytes, config: NdpConfig, rows: int, columns: int) -> Matrix:
    """Return the rows x columns matrix that `pack_operand` made into ``data``.

    Raises:
        UserError: ``data`` has not the size of such an operand.
    """
    g = pack_geometry(config, rows, columns)
    if len(data) != g.packed_bytes:
        raise UserError(f"a packed {rows} x {columns} operand has {g.packed_bytes} bytes, not {len(data)}")
    return _gathered(np.frombuffer(data, _BITS), g, rows, columns).view(np.float16)


def _spread(matrix: npt.NDArray[Any], g: PackGeometry) -> npt.NDArray[Any]:
    """``matrix`` in the order of its expanded stripes, padding zero."""
    rows, columns = matrix.shape
    padded = np.zeros((g.groups * g.group_rows, g.beats * g.split * g.tap_lanes), matrix.dtype)
    padded[:rows, :columns] = matrix
    # Row n = (group, tap, channel of the part), column k = (beat, part, lane).
    axes = padded.reshape(g.groups, g.taps, g.part_channels, g.beats, g.split, g.tap_lanes)
    return axes.transpose(0, 3, 4, 2, 1, 5)


def _gathered(values: npt.NDArray[Any], g: PackGeometry, rows: int, columns: int) -> npt.NDArray[Any]:
    """The matrix that `_spread` put into the order of ``values``."""
    axes = values.reshape(g.groups, g.beats, g.split, g.part_channels, g.taps, g.tap_lanes)
    padded = axes.transpose(0, 4, 3, 1, 2, 5).reshape(g.groups * g.group_rows, g.beats * g.split * g.tap_lanes)
    return np.ascontiguousarray(padded[:rows, :columns])


def pack_transposed(matrix: npt.NDArray[Any], config: NdpConfig, stride: int | None = None) -> bytes:
    """Return ``matrix`` (tokens x dims) as the operand of a transposed descriptor lies in memory, padding zero.

    ``stride`` is the number of stripes set aside for a group of dims (default: as few as hold the tokens).

    Raises:
        UserError: ``matrix`` is not a non-empty matrix of two-byte values, or has more tokens than the stride holds.
    """
    bits = _bits(matrix, "device operand")
    g = pack_geometry_transposed(config, bits.shape[1], len(bits))
    stride = _stride(g, len(bits), stride)
    return _spread_transposed(bits.astype(_BITS), g, config, stride).tobytes()


def unpack_transposed(data: bytes, config: NdpConfig, dims: int, tokens: int) -> Matrix:
    """Return the tokens x dims matrix that `pack_transposed` made into ``data``.

    Raises:
        UserError: ``data`` has not the size of such an operand, with any stride.
    """
    g = pack_geometry_transposed(config, dims, tokens)
    stride = g.stride(len(data))
    if stride is None:
        raise UserError(f"{len(data)} bytes are no packed transposed operand of {tokens} tokens x {dims} dims")
    return _gathered_transposed(np.frombuffer(data, _BITS), g, config, stride, dims, tokens).view(np.float16)


def _stride(g: TransposedGeometry, tokens: int, stride: int | None) -> int:
    if stride is not None and stride < g.group_stripes:
        raise UserError(f"{tokens} tokens take {g.group_stripes} stripes a group, more than the {stride} set aside")
    return g.group_stripes if stride is None else stride


def _spread_transposed(
    matrix: npt.NDArray[Any], g: TransposedGeometry, config: NdpConfig, beats: int
) -> npt.NDArray[Any]:
    """``matrix`` in the order of its expanded stripes, ``beats`` of them a group, padding zero."""
    tokens, dims = matrix.shape
    padded = np.zeros((beats * DOT_LANES, g.groups * g.group_rows), matrix.dtype)
    padded[:tokens, :dims] = matrix
    # Token = (beat, lane group s, channel), dim = (group, lane of the lane group).
    axes = padded.reshape(beats, DOT_LANES // config.channels, config.channels, g.groups, g.group_rows)
    return axes.transpose(3, 0, 2, 1, 4)


def _gathered_transposed(
    values: npt.NDArray[Any], g: TransposedGeometry, config: NdpConfig, beats: int, dims: int, tokens: int
) -> npt.NDArray[Any]:
    """The matrix that `_spread_transposed` put into the order of ``values``."""
    axes = values.reshape(g.groups, beats, config.channels, DOT_LANES // config.channels, g.group_rows)
    padded = axes.transpose(1, 3, 2, 0, 4).reshape(beats * DOT_LANES, g.groups * g.group_rows)
    return np.ascontiguousarray(padded[:tokens, :dims])


# --- integers with a scale a token ----------------------------------------------------------------


def pack_integers(quantized: Quantized, config: NdpConfig, dtype: int) -> bytes:
    """Return keys (tokens x columns) of INT8 or INT4 as they lie in memory, padding zero.

    Raises:
        UserError: they are not integers of ``dtype``, or have fewer columns than integers may have.
    """
    _check_integers(quantized, dtype)
    tokens, columns = quantized.values.shape
    if columns < INTEGER_MIN_COLUMNS:
        raise UserError(f"keys of {columns} values cannot be integers; they have at least {INTEGER_MIN_COLUMNS}")
    g = pack_geometry(config, tokens, columns, dtype)
    expanded = _spread(quantized.values, g).reshape(g.groups * g.beats, config.channels, WORD_VALUES)
    return _framed(expanded, quantized.scales, FRAME_SCALES * g.beats, g.expansion_log2)


def unpack_integers(data: bytes, config: NdpConfig, tokens: int, columns: int, dtype: int) -> Quantized:
    """Return what `pack_integers` made into ``data``, which has the size of such keys."""
    g = pack_geometry(config, tokens, columns, dtype)
    assert len(data) == g.packed_bytes, "not the size of these keys"
    expanded, scales = _unframed(data, config, g.groups * g.beats, FRAME_SCALES * g.beats, g.expansion_log2)
    return Quantized(_gathered(expanded, g, tokens, columns), scales[:tokens])


def pack_transposed_integers(quantized: Quantized, config: NdpConfig, dtype: int, stride: int | None = None) -> bytes:
    """Return values (tokens x dims) of INT8 or INT4 as they lie in memory, padding zero; ``stride`` as of others.

    Raises:
        UserError: they are not integers of ``dtype``, or more than the stride holds.
    """
    _check_integers(quantized, dtype)
    tokens, dims = quantized.values.shape
    g = pack_geometry_transposed(config, dims, tokens, dtype)
    size = _stride(g, tokens, stride) * config.stripe_bytes
    expanded = _spread_transposed(quantized.values, g, config, g.beats)
    groups = (
        _framed(group.reshape(g.beats, config.channels, WORD_VALUES), quantized.scales, g.frame_beats, g.expansion_log2)
        for group in expanded
    )
    return b"".join(group.ljust(size, b"\0") for group in groups)


def unpack_transposed_integers(
    data: Sequence[bytes], config: NdpConfig, dims: int, tokens: int, dtype: int
) -> tuple[Quantized, ...]:
    """Return, of each group of dims, what `pack_transposed_integers` made into ``data``, the stripes that are used.

    The groups' scales may differ, as every group has its own copy; their values are (tokens, dims of a group).
    """
    g = pack_geometry_transposed(config, dims, tokens, dtype)
    groups = []
    for group, stripes in enumerate(data):
        expanded, scales = _unframed(stripes, config, g.beats, g.frame_beats, g.expansion_log2)
        axes = expanded.reshape(g.beats, config.channels, DOT_LANES // config.channels, g.group_rows)
        values = axes.transpose(0, 2, 1, 3).reshape(g.beats * DOT_LANES, g.group_rows)
        groups.append(Quantized(values[:tokens, : dims - group * g.group_rows], scales[:tokens]))
    return tuple(groups)


def _check_integers(quantized: Quantized, dtype: int) -> None:
    values, scales = quantized
    reach = 1 << INTEGER_BITS[dtype] - 1
    wrong = values.ndim != 2 or 0 in values.shape or values.dtype != np.int8 or scales.shape != (len(values),)
    if wrong or scales.dtype != np.uint8 or values.min() < -reach or values.max() >= reach:
        raise UserError(
            f"integers are {values.dtype} of shape {values.shape}, scales {scales.dtype} of shape {scales.shape}; give"
            f" a matrix of int8 from {-reach} to {reach - 1} and a uint8 for each row"
        )


def _framed(expanded: npt.NDArray[np.int8], scales: ScaleArray, frame_stripes: int, expansion_log2: int) -> bytes:
    """Expanded stripes (stripes, channels, 32) as they lie in memory, each frame behind the scales of its tokens."""
    stripes, channels, _ = expanded.shape
    frames, shared = ceil_div(stripes, frame_stripes), 1 << expansion_log2
    used = frames + ceil_div(stripes, shared)
    whole = np.zeros((frames * frame_stripes, channels, WORD_VALUES), np.uint8)
    whole[:stripes] = expanded.view(np.uint8)
    words = whole.reshape(frames, frame_stripes // shared, shared, channels, WORD_VALUES).swapaxes(2, 3)
    if expansion_log2 == 2:
        words = words[..., 0::2] & np.uint8(0xF) | words[..., 1::2] << np.uint8(4)
    of_tokens = np.zeros(frames * FRAME_SCALES * channels, np.uint8)
    of_tokens[: len(scales)] = scales
    in_front = of_tokens.reshape(frames, 1, FRAME_SCALES, channels).swapaxes(2, 3)
    image = np.concatenate([in_front, words.reshape(frames, -1, channels, WORD_BYTES)], axis=1)
    return image.reshape(-1, channels, WORD_BYTES)[:used].tobytes()


def _unframed(
    data: bytes, config: NdpConfig, stripes: int, frame_stripes: int, expansion_log2: int
) -> tuple[npt.NDArray[np.int8], ScaleArray]:
    """The expanded stripes that `_framed` put into ``data``, and the scales, those that belong to no token too."""
    channels, frames, shared = config.channels, ceil_div(stripes, frame_stripes), 1 << expansion_log2
    size = frames * (1 + frame_stripes // shared) * config.stripe_bytes
    image = np.frombuffer(data.ljust(size, b"\0"), np.uint8).reshape(frames, -1, channels, WORD_BYTES)
    scales = image[:, 0].swapaxes(1, 2).reshape(-1)
    words = image[:, 1:]
    if expansion_log2 == 2:
        nibbles = np.stack([words & np.uint8(0xF), words >> np.uint8(4)], axis=-1)
        words = (nibbles ^ np.uint8(8)) - np.uint8(8)  # two's complement: bytes wrap
    expanded = words.reshape(-1, channels, shared, WORD_VALUES).swapaxes(1, 2).reshape(-1, channels, WORD_VALUES)
    return expanded[:stripes].view(np.int8), scales


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
