"""The packed layout is a bijection: every value of W has one place, inside the operand, and no two share one."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plora.hw.defs.config import KEPT_MAX_VALUES, PRESETS, WORD_VALUES, NdpConfig
from plora.hw.defs.descriptor import DType
from plora.hw.defs.packing import (
    ceil_div,
    expansion_log2,
    frame_tokens,
    pack_geometry,
    pack_geometry_transposed,
    result_row_words,
)

configs = st.sampled_from(list(PRESETS.values()))


def place(config: NdpConfig, rows: int, columns: int, n: int, k: int) -> tuple[int, int, int]:
    """Stripe, channel and lane of W[n, k], by the inverse of the formulas in the module's description."""
    g = pack_geometry(config, rows, columns)
    i, in_group = divmod(n, g.group_rows)
    j, q = divmod(in_group, g.part_channels)
    word, lane = divmod(k, g.tap_lanes)
    t, part = divmod(word, g.split)
    return i * g.beats + t, part * g.part_channels + q, j * g.tap_lanes + lane


@given(configs, st.integers(1, 40), st.integers(1, 700))
def test_no_two_values_share_a_place_and_none_lies_outside(config: NdpConfig, rows: int, columns: int) -> None:
    assume(rows * columns <= 12_000)
    g = pack_geometry(config, rows, columns)
    places = {place(config, rows, columns, n, k) for n in range(rows) for k in range(columns)}
    assert len(places) == rows * columns
    assert all(s < g.stripes and c < config.channels and lane < WORD_VALUES for s, c, lane in places)
    assert g.packed_bytes == g.stripes * config.stripe_bytes


@given(configs, st.integers(1, 40), st.integers(1, 700), st.data())
def test_place_agrees_with_the_stated_formula(config: NdpConfig, rows: int, columns: int, data: st.DataObject) -> None:
    g = pack_geometry(config, rows, columns)
    n = data.draw(st.integers(0, rows - 1))
    k = data.draw(st.integers(0, columns - 1))
    stripe, channel, lane = place(config, rows, columns, n, k)
    i, t = divmod(stripe, g.beats)
    part, q = divmod(channel, g.part_channels)
    j, low = divmod(lane, g.tap_lanes)
    assert n == i * g.group_rows + j * g.part_channels + q
    assert k == (t * g.split + part) * g.tap_lanes + low


@given(configs, st.integers(1, (1 << 20) - 1), st.integers(1, (1 << 20) - 1))
def test_geometry_keeps_its_promises_for_every_shape(config: NdpConfig, rows: int, columns: int) -> None:
    g = pack_geometry(config, rows, columns)
    assert g.tap_lanes in (8, 16, 32)
    assert g.tap_lanes == 32 or (columns <= g.tap_lanes and g.beats == 1 and g.split == 1)
    assert config.channels % g.split == 0
    assert g.split == 1 or (columns > KEPT_MAX_VALUES and rows <= g.part_channels)
    assert g.groups * g.group_rows >= rows > (g.groups - 1) * g.group_rows
    assert g.beats * g.tap_lanes * g.split >= columns > (g.beats - 1) * g.tap_lanes * g.split


@pytest.mark.parametrize("config", PRESETS.values(), ids=lambda c: c.name)
@pytest.mark.parametrize(("rank", "lanes"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32), (33, 32)])
def test_short_rows_share_words(config: NdpConfig, rank: int, lanes: int) -> None:
    g = pack_geometry(config, 4096, rank)
    assert g.tap_lanes == lanes
    assert g.stripes == ceil_div(4096, config.channels * 32 // lanes) * ceil_div(rank, 32)


@given(configs, st.integers(1, 256), st.integers(1, 1 << 15))
def test_transposed_geometry_holds_every_token_and_dim(config: NdpConfig, dims: int, tokens: int) -> None:
    g = pack_geometry_transposed(config, dims, tokens)
    assert g.group_rows == 2 * config.channels
    assert g.groups * g.group_rows >= dims > (g.groups - 1) * g.group_rows
    assert g.beats * 16 >= tokens > (g.beats - 1) * 16
    assert g.packed_bytes() == g.stripes * config.stripe_bytes
    # Half a beat of values a beat and channel word: nothing is wasted where dims and tokens are whole.
    if dims % g.group_rows == 0 and tokens % 16 == 0:
        assert g.packed_bytes() == 2 * dims * tokens


@given(configs, st.integers(1, 256), st.integers(1, 2000), st.integers(0, 500))
def test_a_stride_is_found_again_and_no_other_size_has_one(
    config: NdpConfig, dims: int, tokens: int, spare: int
) -> None:
    g = pack_geometry_transposed(config, dims, tokens)
    stride = g.beats + spare
    assert g.stride(g.packed_bytes(stride)) == stride
    assert g.stride(g.packed_bytes(stride) + 64) is None or config.channels * g.groups == 1
    assert g.stride(g.packed_bytes(g.beats - 1)) is None


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 4096])
def test_result_rows_are_whole_words(rows: int) -> None:
    assert result_row_words(rows) * WORD_VALUES >= rows > (result_row_words(rows) - 1) * WORD_VALUES
    assert result_row_words(rows, transpose=1) == result_row_words(rows) + 1


@given(configs, st.integers(1, 5000), st.integers(17, 256), st.sampled_from([DType.INT8, DType.INT4]))
def test_integers_take_their_share_of_fp16_and_a_byte_a_token(
    config: NdpConfig, tokens: int, dims: int, dtype: DType
) -> None:
    shared = 1 << expansion_log2(dtype)
    plain, keys = pack_geometry(config, tokens, dims), pack_geometry(config, tokens, dims, dtype)
    assert (keys.beats, keys.groups, keys.group_rows) == (plain.beats, plain.groups, plain.group_rows)
    assert keys.stripes == ceil_div(plain.stripes, shared) + ceil_div(tokens, frame_tokens(config))
    values = pack_geometry_transposed(config, dims, tokens, dtype)
    plain_values = pack_geometry_transposed(config, dims, tokens)
    assert (values.beats, values.groups) == (plain_values.beats, plain_values.groups)
    assert values.group_stripes == ceil_div(values.beats, shared) + ceil_div(tokens, frame_tokens(config))
    assert values.stride(values.packed_bytes(values.group_stripes + 2)) == values.group_stripes + 2
    assert values.stride(values.groups * (values.group_stripes - 1) * config.stripe_bytes) is None


@pytest.mark.parametrize("config", PRESETS.values(), ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT4])
def test_a_whole_frame_is_whole_stripes(config: NdpConfig, dtype: DType) -> None:
    tokens = frame_tokens(config)
    for dims in (17, 33, 65, 97, 256):
        one, two = (pack_geometry(config, frames * tokens, dims, dtype).stripes for frames in (1, 2))
        assert two == 2 * one
    one, two = (pack_geometry_transposed(config, 4, frames * tokens, dtype).group_stripes for frames in (1, 2))
    assert two == 2 * one
