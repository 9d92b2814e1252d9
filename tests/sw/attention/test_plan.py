"""Plans of attention are legal, cover every row and token once, and write a cache without touching what is there."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plora.hw.defs.config import PRESETS, NdpConfig, preset
from plora.hw.defs.descriptor import Descriptor, DType, Keep, Op, Source
from plora.hw.defs.errors import UserError
from plora.hw.defs.legality import ChainState, QueueWindow, check, kept_column_limit
from plora.hw.defs.packing import (
    INTEGER_MIN_COLUMNS,
    ceil_div,
    expansion_log2,
    operand_row_stripes,
    pack_geometry_transposed,
)
from plora.hw.defs.queue import ordinary_softmax_scale
from plora.hw.defs.registers import RESET_CHAIN_LIMIT
from plora.hw.defs.status import Status
from plora.sim.functional.layout import pack_operand, pack_transposed
from plora.sw.attention.layout import KvLayout, token_granule, widest_tile
from plora.sw.attention.plan import AttentionChain, joined, plan_attention
from plora.sw.tiling import SlotSizes, full_slots

SMALLEST = {c: NdpConfig(f"least{c}", c, 512 * c, 512 * c, max(1024, 512 * c), 1, 2, 40) for c in (1, 2, 16)}
CONFIGS = [replace(config, dpa_bits=48) for config in (*PRESETS.values(), *SMALLEST.values())]
configs = st.sampled_from(CONFIGS)
head_dims = st.sampled_from([1, 5, 8, 9, 16, 17, 32, 64, 80, 96, 128, 256])
FIRST_TILE = 1 << 20


def check_chain(layout: KvLayout, chain: AttentionChain, slots: SlotSizes, tiles: list[int]) -> None:
    """Hold every descriptor against the decoder, and against the tiles."""
    config = layout.config
    window = QueueWindow(tiles[0], tiles[-1] + layout.tile_bytes, slots.submission_bytes, slots.result_bytes)
    state, scale = ChainState(), ordinary_softmax_scale(layout.head_dim)
    key_tokens, dims = 0, []
    for index, step in enumerate(chain.steps):
        d = step.descriptor
        d.pack()
        verdict = check(d, config, window, state, scale)
        assert verdict.status is Status.OK, f"{verdict.status.name}: {d.describe()} of {config}"
        tile = (d.device_address - FIRST_TILE) // layout.tile_bytes
        within = d.device_address - tiles[tile]
        if d.op == Op.SOFTMAX:
            assert within + d.device_bytes <= layout.values_offset, "keys reach into the values"
            token = chain.tokens.start + key_tokens
            assert (tile, within) == (
                token // layout.tile_tokens,
                layout.key_offset(token % layout.tile_tokens),
            )
            key_tokens += d.device_rows
        else:
            assert layout.values_offset <= within
            assert within + d.device_bytes <= layout.tile_bytes, "values reach into the next tile"
            token = chain.tokens.start + state.acc_terms
            group = (within - layout.values_offset) // (layout.value_stride * config.stripe_bytes)
            assert within == layout.value_offset(group, token % layout.tile_tokens)
            assert tile == token // layout.tile_tokens
        state = verdict.chain
        assert d.chain == (index < len(chain.steps) - 1)
        assert step.takes_queries == (d.source == Source.SLOT)
        assert (step.dims is not None) == (d.keep == Keep.NONE and not d.acc_out)
        if step.dims is not None:
            assert len(step.dims) == d.device_rows
            dims += list(step.dims)
    assert len(chain.steps) <= RESET_CHAIN_LIMIT
    assert key_tokens == len(chain.tokens)
    assert dims == list(range(layout.head_dim))


@given(configs, head_dims, st.integers(1, 33), st.sampled_from(DType), st.data())
def test_every_row_meets_every_token_once(
    config: NdpConfig, head_dim: int, rows: int, dtype: DType, data: st.DataObject
) -> None:
    assume(not expansion_log2(dtype) or head_dim >= INTEGER_MIN_COLUMNS)
    granule, widest = token_granule(config, head_dim, dtype), widest_tile(config, head_dim, dtype)
    assume(not expansion_log2(dtype) or granule <= kept_column_limit(config, 1, softmax=True))  # else not even a frame
    assume(operand_row_stripes(config, head_dim) <= config.input_half_stripes)  # else not even a row of q fits
    sizes = st.integers(1, widest // granule) | st.integers(1, min(widest // granule, 8))
    layout = KvLayout(config, head_dim, data.draw(sizes) * granule, dtype)
    tokens = data.draw(st.integers(1, 40) | st.integers(1, 40_000).map(lambda n: min(n, 6 * layout.tile_tokens)))
    tiles = [FIRST_TILE + i * layout.tile_bytes for i in range(ceil_div(tokens, layout.tile_tokens))]
    slots = full_slots(config)
    if data.draw(st.booleans()):
        slots = SlotSizes(max(11, slots.submission_log2 - 3), max(11, slots.result_log2 - 3))
    met: dict[int, list[range]] = {row: [] for row in range(rows)}
    for chain in plan_attention(layout, tiles, tokens, rows, slots):
        check_chain(layout, chain, slots, tiles)
        for row in chain.rows:
            met[row].append(chain.tokens)
    for row, spans in met.items():
        assert spans[0].start == 0 and spans[-1].stop == tokens, f"row {row}: {spans}"
        assert all(a.stop == b.start for a, b in itertools.pairwise(spans)), f"row {row}: {spans}"


def test_a_chain_serves_as_many_rows_as_one_tile_allows_and_two_across_tiles() -> None:
    config, slots = preset("full"), full_slots(preset("full"))
    layout = KvLayout(config, 128, 4064)
    one = list(plan_attention(layout, [0], 4000, 8, slots))
    assert [(chain.rows, len(chain.steps)) for chain in one] == [(range(8), 2)]
    two = list(plan_attention(layout, [0, 1 << 22], 5000, 8, slots))
    assert [chain.rows for chain in two] == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert len(two[0].steps) == 2 + 2 * 4
    wide = KvLayout(config, 128, 16352)
    assert [chain.rows for chain in plan_attention(wide, [0], 16352, 4, slots)] == [range(4)]
    spans = [chain.tokens for chain in plan_attention(wide, [0, 1 << 24, 1 << 25, 1 << 26], 65000, 1, slots)]
    assert spans == [range(0, 32512), range(32512, 65000)]


def test_a_chain_is_not_longer_than_the_device_lets_it_be() -> None:
    config = replace(preset("full"), dpa_bits=48)
    for head_dim, tokens in ((128, 32768), (256, 20000)):
        layout = KvLayout(config, head_dim, 32)
        tiles = [FIRST_TILE + i * layout.tile_bytes for i in range(ceil_div(tokens, 32))]
        chains = list(plan_attention(layout, tiles, tokens, 1, full_slots(config)))
        assert len(chains) > 1, "without a limit one chain would do"
        for chain in chains:
            check_chain(layout, chain, full_slots(config), tiles)


@given(configs, st.lists(st.tuples(st.integers(1, 200), st.integers(1, 5)), min_size=1, max_size=6), st.integers(2, 30))
def test_joined_chains_are_legal_and_take_turns(config: NdpConfig, heads: list[tuple[int, int]], longest: int) -> None:
    layout, slots = KvLayout(config, 16, 2 * token_granule(config, 16)), full_slots(config)
    chains: list[AttentionChain] = []
    for tokens, rows in heads:
        tiles = [FIRST_TILE + i * layout.tile_bytes for i in range(ceil_div(tokens, layout.tile_tokens))]
        chains += plan_attention(layout, tiles, tokens, rows, slots)
    window = QueueWindow(0, 1 << config.dpa_bits, slots.submission_bytes, slots.result_bytes)
    found: list[list[Descriptor]] = [[] for _ in chains]
    for steps in joined(chains, longest):
        numbers = sorted({number for number, _ in steps})
        assert len(steps) <= longest or len(numbers) == 1
        state, newest = ChainState(), -1
        for index, (number, step) in enumerate(steps):
            d = step.descriptor
            verdict = check(d, config, window, state, ordinary_softmax_scale(16))
            assert verdict.status is Status.OK, f"{verdict.status.name}: {d.describe()}"
            state = verdict.chain
            newest = number if d.op == Op.SOFTMAX else newest
            # Values come once the scores of the next are under way, if there is one.
            assert newest == (number if d.op == Op.SOFTMAX else min(number + 1, numbers[-1]))
            assert d.chain == (index < len(steps) - 1)
            found[number].append(replace(d, chain=1, source=Source.KEPT if d.transpose else d.source))
    for chain, own in zip(chains, found, strict=True):
        assert own == [replace(step.descriptor, chain=1) for step in chain.steps], "a step is lost or out of order"
    for before, after in itertools.pairwise(joined(chains, longest)):
        together = len(before) + sum(1 for number, _ in after if number == after[0][0])
        assert together > longest, "these could be one chain"


def test_a_device_without_room_for_a_row_and_its_anchor_is_refused() -> None:
    config = NdpConfig("least", 1, 512, 512, 512, 1, 2, 40)
    with pytest.raises(UserError, match=r"does not fit slots of .* or the buffers of 'least'"):
        list(plan_attention(KvLayout(config, 1, 32), [0], 1, 1, full_slots(config)))


def test_no_token_is_no_chain() -> None:
    layout = KvLayout(preset("tiny"), 64, 32)
    assert list(plan_attention(layout, [], 0, 2, full_slots(preset("tiny")))) == []


@pytest.mark.parametrize(("tokens", "rows"), [(33, 1), (-1, 1), (5, 0)])
def test_more_tokens_than_stored_and_no_rows_are_refused(tokens: int, rows: int) -> None:
    layout = KvLayout(preset("tiny"), 64, 32)
    with pytest.raises(UserError, match="query rows over"):
        list(plan_attention(layout, [0], tokens, rows, full_slots(preset("tiny"))))


@pytest.mark.parametrize("tokens", [0, 16, 33, 1 << 20])
def test_tiles_are_whole_words_and_not_longer_than_a_descriptor_can_say(tokens: int) -> None:
    with pytest.raises(UserError, match=f"KV tiles of {tokens} tokens: choose a multiple of 32 from 32 to 16352"):
        KvLayout(preset("full"), 128, tokens)


@pytest.mark.parametrize("head_dim", [0, 257])
def test_a_head_dim_that_the_device_does_not_take_is_refused(head_dim: int) -> None:
    with pytest.raises(UserError, match=f"head_dim is {head_dim}"):
        KvLayout(preset("full"), head_dim, 32)


@given(configs, head_dims, st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_writes_build_the_packed_tile_and_leave_what_is_there(
    config: NdpConfig, head_dim: int, appends: list[int]
) -> None:
    granule = token_granule(config, head_dim)
    tokens = sum(appends)
    layout = KvLayout(config, head_dim, ceil_div(tokens, granule) * granule)
    if layout.tile_tokens > widest_tile(config, head_dim):
        return
    rng = np.random.default_rng(tokens)
    keys, values = rng.integers(1, 0x7BFF, (2, tokens, head_dim), np.uint16).view(np.float16)
    tile = np.full(layout.tile_bytes, 0xA5, np.uint8)
    start = 0
    for count in appends:
        before, touched = tile.copy(), np.zeros(len(tile), bool)
        for offset, data in layout.writes(start, keys[start : start + count], values[start : start + count]):
            at = slice(offset, offset + len(data))
            assert not touched[at].any(), "a byte is written twice"
            touched[at] = True
            tile[at] = np.frombuffer(data, np.uint8)
        if start:
            kept = layout_mask(layout, start)
            assert np.array_equal(tile[kept], before[kept]), f"tokens before {start} changed"
        start += count
    key_bytes = np.frombuffer(pack_operand(keys, config), np.uint8)
    value_bytes = np.frombuffer(pack_transposed(values, config, layout.value_stride), np.uint8)
    mask = layout_mask(layout, tokens)
    packed = np.zeros(layout.tile_bytes, np.uint8)
    packed[: len(key_bytes)] = key_bytes
    packed[layout.values_offset :] = value_bytes
    assert np.array_equal(tile[mask], packed[mask])


def layout_mask(layout: KvLayout, tokens: int) -> np.ndarray:
    """Where the bytes of the first ``tokens`` tokens lie in a tile."""
    ones = np.full((tokens, layout.head_dim), 0xFFFF, np.uint16)
    mask = np.zeros(layout.tile_bytes, np.uint8)
    keys = pack_operand(ones, layout.config)
    mask[: len(keys)] = np.frombuffer(keys, np.uint8)
    mask[layout.values_offset :] = np.frombuffer(pack_transposed(ones, layout.config, layout.value_stride), np.uint8)
    return np.asarray(mask != 0)


def test_a_token_of_the_full_device_is_four_words_of_key_and_four_of_value() -> None:
    layout = KvLayout(preset("full"), 128, 64)
    row = np.ones((1, 128), np.float16)
    for token in (0, 1, 17, 63):
        writes = list(layout.writes(token, row, row))
        assert [len(data) for _, data in writes] == [64] * 8
        assert all(offset % 64 == 0 for offset, _ in writes)
    assert pack_geometry_transposed(preset("full"), 128, 64).groups == 4
