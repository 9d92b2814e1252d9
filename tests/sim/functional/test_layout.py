"""Packing as numpy moves it against the formula of plora.hw.defs.packing, value by value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.config import PRESETS, NdpConfig, preset
from plora.hw.defs.errors import UserError
from plora.hw.defs.packing import operand_row_stripes, pack_geometry, pack_geometry_transposed, result_row_words
from plora.sim.functional.layout import (
    gpu_operand_bytes,
    gpu_operand_from_bytes,
    pack_operand,
    pack_transposed,
    result_bytes,
    result_from_bytes,
    unpack_operand,
    unpack_transposed,
)

CONFIGS = [*PRESETS.values(), NdpConfig("one", 1, 1024, 1024, 1024, 1, 2, 20)]
configs = st.sampled_from(CONFIGS)
rows = st.integers(1, 80)
columns = st.one_of(st.integers(1, 70), st.integers(240, 280), st.integers(500, 1100))


def distinct(n: int, k: int) -> np.ndarray:
    """A matrix without a zero whose values tell their place (modulo 65535)."""
    bits = (np.arange(n * k, dtype=np.uint32) % 65535 + 1).astype(np.uint16)
    return bits.reshape(n, k).view(np.float16)


@given(configs, st.integers(1, 40), st.one_of(st.integers(1, 40), st.integers(250, 300)))
def test_every_value_lies_where_the_formula_says_and_the_rest_is_zero(config: NdpConfig, n: int, k: int) -> None:
    matrix = distinct(n, k)
    packed = np.frombuffer(pack_operand(matrix, config), np.uint16).reshape(-1, config.channels, 32)
    g = pack_geometry(config, n, k)
    expected = np.zeros_like(packed)
    bits = matrix.view(np.uint16)
    for i in range(g.groups):
        for t in range(g.beats):
            for part in range(g.split):
                for q in range(g.part_channels):
                    for j in range(g.taps):
                        for lane in range(g.tap_lanes):
                            row = i * g.group_rows + j * g.part_channels + q
                            column = (t * g.split + part) * g.tap_lanes + lane
                            if row < n and column < k:
                                place = (i * g.beats + t, part * g.part_channels + q, j * g.tap_lanes + lane)
                                expected[place] = bits[row, column]
    assert np.array_equal(packed, expected)


@given(configs, rows, columns)
def test_unpacking_gives_back_what_was_packed(config: NdpConfig, n: int, k: int) -> None:
    matrix = distinct(n, k)
    packed = pack_operand(matrix, config)
    assert len(packed) == pack_geometry(config, n, k).packed_bytes
    assert np.array_equal(unpack_operand(packed, config, n, k).view(np.uint16), matrix.view(np.uint16))
    assert np.count_nonzero(np.frombuffer(packed, np.uint16)) == n * k


@given(configs, st.integers(1, 70), st.integers(1, 50), st.integers(0, 2))
def test_every_value_of_a_transposed_operand_lies_where_the_formula_says(
    config: NdpConfig, tokens: int, dims: int, spare: int
) -> None:
    matrix = distinct(tokens, dims)
    g = pack_geometry_transposed(config, dims, tokens)
    stride = g.beats + spare
    data = pack_transposed(matrix, config, stride)
    assert len(data) == g.packed_bytes(stride)
    packed = np.frombuffer(data, np.uint16).reshape(g.groups * stride, config.channels, 32)
    expected = np.zeros_like(packed)
    for token in range(tokens):
        for dim in range(dims):
            b, (s, c) = token // 16, divmod(token % 16, config.channels)
            i, lane = divmod(dim, 2 * config.channels)
            expected[i * stride + b, c, s * 2 * config.channels + lane] = matrix.view(np.uint16)[token, dim]
    assert np.array_equal(packed, expected)
    assert np.array_equal(unpack_transposed(data, config, dims, tokens).view(np.uint16), matrix.view(np.uint16))


def test_a_token_of_a_transposed_operand_is_whole_words_at_sixteen_channels() -> None:
    config = preset("full")
    before, after = (np.frombuffer(pack_transposed(distinct(n, 96), config, 8), np.uint16) for n in (100, 101))
    words = np.flatnonzero(before != after) // 32
    assert np.array_equal(np.unique(words, return_counts=True)[1], [32, 32, 32])


def test_transposed_packing_refuses_what_does_not_fit() -> None:
    with pytest.raises(UserError, match="33 tokens take 3 stripes a group, more than the 2 set aside"):
        pack_transposed(distinct(33, 8), preset("tiny"), 2)
    with pytest.raises(UserError, match="no packed transposed operand of 33 tokens x 8 dims"):
        unpack_transposed(bytes(2 * 2 * 128), preset("tiny"), 8, 33)


@given(configs, st.integers(1, 9), columns)
def test_gpu_operand_rows_start_on_stripes_and_end_in_zeros(config: NdpConfig, b: int, k: int) -> None:
    matrix = distinct(b, k)
    data = gpu_operand_bytes(matrix, config)
    stride = operand_row_stripes(config, k) * config.stripe_bytes
    assert len(data) == b * stride
    for row in range(b):
        assert data[row * stride :][: 2 * k] == matrix[row].tobytes()
        assert not any(data[row * stride + 2 * k : (row + 1) * stride])
    assert np.array_equal(gpu_operand_from_bytes(data, config, b, k).view(np.uint16), matrix.view(np.uint16))


@given(st.integers(1, 9), columns)
def test_result_rows_start_on_words_and_end_in_zeros(b: int, n: int) -> None:
    matrix = distinct(b, n)
    data = result_bytes(matrix)
    stride = result_row_words(n) * 64
    assert len(data) == b * stride
    for row in range(b):
        assert data[row * stride :][: 2 * n] == matrix[row].tobytes()
        assert not any(data[row * stride + 2 * n : (row + 1) * stride])
    assert np.array_equal(result_from_bytes(data, b, n).view(np.uint16), matrix.view(np.uint16))


def test_a_transposed_view_packs_like_its_copy() -> None:
    matrix = distinct(40, 24).T
    assert pack_operand(matrix, preset("tiny")) == pack_operand(np.ascontiguousarray(matrix), preset("tiny"))


@pytest.mark.parametrize("bad", [np.zeros(4, np.float16), np.zeros((0, 4), np.float16), np.zeros((2, 2), np.float32)])
def test_what_is_no_matrix_of_two_byte_values_is_refused(bad: np.ndarray) -> None:
    for move in (
        lambda m: pack_operand(m, preset("tiny")),
        lambda m: gpu_operand_bytes(m, preset("tiny")),
        result_bytes,
    ):
        with pytest.raises(UserError, match="give a matrix of FP16 values"):
            move(bad)


def test_bytes_of_another_size_are_refused() -> None:
    with pytest.raises(UserError, match="has 256 bytes, not 128"):
        unpack_operand(bytes(128), preset("tiny"), 2, 64)
