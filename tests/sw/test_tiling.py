"""No plan holds an illegal descriptor, and every plan covers its product exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plora.hw.defs.config import PRESETS, NdpConfig, preset
from plora.hw.defs.descriptor import MAX_OPERAND_BYTES, Keep, Source
from plora.hw.defs.errors import UserError
from plora.hw.defs.legality import ChainState, QueueWindow, check
from plora.hw.defs.packing import pack_geometry
from plora.hw.defs.status import Status
from plora.sw.tiling import (
    Chain,
    MatrixLayout,
    SlotSizes,
    can_chain,
    full_slots,
    lay_out,
    plan_gemm,
    plan_lora,
)

# Every structure as narrow as a configuration may be.
SMALLEST = {c: NdpConfig(f"least{c}", c, 512 * c, 512 * c, 512 * c, 1, 2, 40) for c in (1, 2, 16)}
WIDE_INPUT = NdpConfig("wide", 16, 1 << 20, 8192, 8192, 1, 2, 40)
# A row of 513 values is cut next to 256, where splitting over the channels begins.
NARROW_INPUT = NdpConfig("narrow", 2, 4096, 4096, 4096, 1, 2, 40)
# The longest row fits the input buffer in two parts, of which neither fits a descriptor.
LONG_ROWS = NdpConfig("long", 16, 1 << 18, 1 << 20, 1 << 20, 1, 2, 40)
CONFIGS = [*PRESETS.values(), *SMALLEST.values(), WIDE_INPUT, NARROW_INPUT, LONG_ROWS]

configs = st.sampled_from(CONFIGS)
columns = st.one_of(
    st.integers(1, 600), st.integers(1, 9000), st.sampled_from([4096, 8192, 11008, 16384, 28672, 53248, 65536])
)
rows = st.one_of(st.integers(1, 70), st.integers(1, 3000), st.sampled_from([4096, 11008, 53248]))
batches = st.one_of(st.integers(1, 8), st.integers(1, 256))
ranks = st.integers(1, 270)
ADDRESS = 1 << 20
MANY = 3000
"""Descriptors of a plan that are looked at: plans for small devices run to millions."""


def slots_for(config: NdpConfig, tight: bool) -> SlotSizes:
    slots = full_slots(config)
    return SlotSizes(max(11, slots.submission_log2 - 1), max(11, slots.result_log2 - 1)) if tight else slots


def check_chain(config: NdpConfig, chain: Chain, slots: SlotSizes, end: int) -> None:
    """Hold every descriptor of a chain against the specification of the decoder."""
    window = QueueWindow(ADDRESS, end, slots.submission_bytes, slots.result_bytes)
    state = ChainState()
    for index, step in enumerate(chain):
        d = step.descriptor
        d.pack()  # every value fits its field
        verdict = check(d, config, window, state)
        assert verdict.status is Status.OK, f"{verdict.status.name}: {d.describe()} of {config}"
        state = verdict.chain
        assert d.chain == (index < len(chain) - 1)
        assert (step.operand is not None) == (d.source == Source.SLOT)
        assert (step.result is not None) == (d.keep == Keep.NONE and not d.acc_out)
        if step.operand is not None:
            assert (len(step.operand[0]), len(step.operand[1])) == (d.gpu_rows, d.gpu_columns)
        if step.result is not None:
            assert (len(step.result[0]), len(step.result[1])) == (d.gpu_rows, d.device_rows)


class Cover:
    """Checks that results tile a B x N array: in whole, or as far as a cut-off plan goes."""

    def __init__(self, batch: int, rows: int) -> None:
        self.times = np.zeros((batch, rows), np.uint8)

    def add(self, chain: Chain) -> None:
        for step in chain:
            if step.result is not None:
                b, n = step.result
                self.times[b.start : b.stop, n.start : n.stop] += 1

    def finish(self, *, whole: bool) -> None:
        assert self.times.max() == 1, "a result is computed twice"
        assert not whole or self.times.min() == 1, "a result is missing"


def check_plan(config: NdpConfig, plan: Iterable[Chain], slots: SlotSizes, cover: Cover, end: int) -> int:
    seen = 0
    for chain in plan:
        check_chain(config, chain, slots, end)
        cover.add(chain)
        seen += len(chain)
        if seen > MANY:
            cover.finish(whole=False)
            return seen
    cover.finish(whole=True)
    return seen


@given(configs, rows, columns, st.integers(0, 2**32 - 1))
def test_tiles_lie_side_by_side_and_cover_the_matrix(config: NdpConfig, n: int, k: int, pick: int) -> None:
    layout = lay_out(config, n, k)
    assert layout.column_cuts[0] == 0
    assert layout.column_cuts[-1] == k
    end = 0
    for tile in itertools.islice(layout.tiles(), 200):
        assert tile.offset_bytes == end
        assert tile.geometry == pack_geometry(config, len(tile.rows), len(tile.columns))
        assert tile.geometry.packed_bytes <= MAX_OPERAND_BYTES
        end += tile.geometry.packed_bytes
    last = layout.tile(layout.row_tiles - 1, layout.column_tiles - 1)
    assert (last.rows.stop, last.columns.stop) == (n, k)
    assert last.offset_bytes + last.geometry.packed_bytes == layout.size_bytes
    # Any tile lies where its neighbour ends.
    row, column = divmod(pick % (layout.row_tiles * layout.column_tiles), layout.column_tiles)
    tile = layout.tile(row, column)
    if column + 1 < layout.column_tiles:
        assert layout.tile(row, column + 1).offset_bytes == tile.offset_bytes + tile.geometry.packed_bytes
    elif row + 1 < layout.row_tiles:
        assert layout.tile(row + 1, 0).offset_bytes == tile.offset_bytes + tile.geometry.packed_bytes


@given(configs, rows, columns, batches, st.booleans())
@example(preset("full"), 128, 4096, 8, False)  # one byte more than a descriptor can state
@example(preset("full"), 256, 53248, 256, False)
@example(preset("full"), 53248, 256, 256, False)
@example(preset("tiny"), 1, 2049, 2, False)
@example(SMALLEST[16], 3, 2048 + 257, 1, True)
@example(SMALLEST[1], 1, 65, 2, True)
@example(WIDE_INPUT, 17, 300, 48, False)
@example(NARROW_INPUT, 1, 513, 1, False)
@example(LONG_ROWS, 16, 65536, 1, False)
def test_no_product_needs_an_illegal_descriptor(config: NdpConfig, n: int, k: int, batch: int, tight: bool) -> None:
    layout, slots = lay_out(config, n, k), slots_for(config, tight)
    try:
        plan = list(itertools.islice(plan_gemm(layout, ADDRESS, batch, slots), 1))
    except UserError as error:
        assert tight, "slots as large as the buffers are always enough"
        assert "slot" in str(error)
        return
    assert plan
    end = ADDRESS + layout.size_bytes
    check_plan(config, plan_gemm(layout, ADDRESS, batch, slots), slots, Cover(batch, n), end)


@given(configs, ranks, columns, rows, batches)
@example(preset("full"), 128, 8192, 53248, 256)
@example(preset("full"), 256, 4096, 4096, 32)
@example(preset("tiny"), 256, 1024, 300, 9)
@example(preset("full"), 40, 16384, 64, 1)  # tiles of 16 rows: no whole words to append to
@example(preset("full"), 257, 64, 64, 1)
def test_no_adapter_needs_an_illegal_descriptor(config: NdpConfig, rank: int, k: int, n: int, batch: int) -> None:
    a, b, slots = lay_out(config, rank, k), lay_out(config, n, rank), full_slots(config)
    if not can_chain(a, b):
        with pytest.raises(UserError, match="run two products"):
            next(plan_lora(a, ADDRESS, b, ADDRESS, batch, slots))
        return
    b_address = ADDRESS + a.size_bytes
    plan = plan_lora(a, ADDRESS, b, b_address, batch, slots)
    check_plan(config, plan, slots, Cover(batch, n), b_address + b.size_bytes)


@pytest.mark.parametrize("k", [4096, 5120, 8192, 11008, 14336])
@pytest.mark.parametrize("rank", [1, 2, 8, 16, 32, 40, 64, 128, 256])
def test_at_the_full_size_an_adapter_is_one_chain_per_range_of_input_rows(rank: int, k: int) -> None:
    config = preset("full")
    a, b = lay_out(config, rank, k), lay_out(config, 4096, rank)
    assert can_chain(a, b)
    for batch in (1, 2, 8, 32):
        chains = list(plan_lora(a, ADDRESS, b, ADDRESS, batch, full_slots(config)))
        assert sum(len(step.operand[0]) for chain in chains for step in chain if step.operand) == batch, (
            "x is sent once"
        )
        if batch <= 2:
            assert len(chains) == 1


@pytest.mark.parametrize(
    ("name", "rank", "longest"),
    [("tiny", 16, 1024), ("tiny", 256, 1024), ("small", 16, 8192), ("small", 256, 8192)]
    + [
        ("full", rank, longest)
        for rank, longest in ((8, 65_472), (16, 32_736), (32, 16_352), (40, 16_352), (256, 16_352))
    ],
)
def test_the_longest_row_of_a_chain_is_what_the_documentation_says(name: str, rank: int, longest: int) -> None:
    config = preset(name)
    b = lay_out(config, 64, rank)
    assert can_chain(lay_out(config, rank, longest), b)
    assert longest == config.accumulator.max_terms or not can_chain(lay_out(config, rank, longest + 1), b)


@pytest.mark.parametrize(
    ("name", "k", "rows"),
    [
        ("tiny", 1024, 2),
        ("small", 1024, 16),
        ("small", 4096, 4),
        ("small", 8192, 2),
        ("full", 1024, 256),
        ("full", 4096, 64),
        ("full", 8192, 32),
    ],
)
def test_the_input_rows_of_a_chain_are_what_the_documentation_says(name: str, k: int, rows: int) -> None:
    config = preset(name)
    plan = plan_lora(lay_out(config, 16, k), 0, lay_out(config, 64, 16), 0, 256, full_slots(config))
    assert next(plan)[0].descriptor.gpu_rows == rows


def test_rows_are_cut_only_where_they_must_be() -> None:
    config = preset("full")
    assert lay_out(config, 96, 4096).row_tiles == 1
    assert [len(lay_out(config, 128, 4096).tile(i, 0).rows) for i in range(2)] == [64, 64]
    assert lay_out(config, 256, 53248).column_tiles == 1, "eight rows of it, dealt over two parts, fit a descriptor"
    # A row of x is longer than the input buffer of the small device: K is cut.
    assert lay_out(preset("small"), 8, 8192).column_tiles == 1
    assert lay_out(preset("small"), 8, 8193).column_tiles == 2


def test_weights_pass_once_for_all_input_rows_that_fit() -> None:
    config = preset("full")
    layout = lay_out(config, 16, 4096)
    (chain,) = plan_gemm(layout, ADDRESS, 32, full_slots(config))
    assert [step.descriptor.gpu_rows for step in chain] == [32]


def test_input_rows_are_cut_into_like_ranges_of_whole_pairs() -> None:
    config = preset("tiny")
    layout = lay_out(config, 4, 1000)  # 16 stripes a row: one pair at a time
    sizes = [chain[0].descriptor.gpu_rows for chain in plan_gemm(layout, ADDRESS, 7, full_slots(config))]
    assert sizes == [2, 2, 2, 1]
    layout = lay_out(config, 4, 250)  # 4 stripes a row: up to 8 rows
    sizes = [chain[0].descriptor.gpu_rows for chain in plan_gemm(layout, ADDRESS, 10, full_slots(config))]
    assert sizes == [6, 4]


def test_a_range_that_a_slot_bounds_is_of_whole_pairs_too() -> None:
    config = preset("tiny")
    layout = lay_out(config, 4, 900)  # 15 stripes a row: a slot of 8 KiB would hold four of them
    slots = SlotSizes(13, 13)
    sizes = [chain[0].descriptor.gpu_rows for chain in plan_gemm(layout, ADDRESS, 5, slots)]
    assert sizes == [2, 2, 1]
    layout = lay_out(config, 4, 250)  # 4 stripes a row: a slot of 2 KiB holds three
    sizes = [chain[0].descriptor.gpu_rows for chain in plan_gemm(layout, ADDRESS, 6, SlotSizes(11, 13))]
    assert sizes == [2, 2, 2]


@pytest.mark.parametrize(("n", "k"), [(0, 8), (8, 0), (-1, 8), (1 << 20, 8), (8, 65537)])
def test_a_matrix_that_no_descriptor_can_state_is_refused(n: int, k: int) -> None:
    with pytest.raises(UserError, match="takes 1 "):
        lay_out(preset("full"), n, k)


@pytest.mark.parametrize("batch", [0, -1, 1 << 20])
def test_a_batch_that_makes_no_sense_is_refused(batch: int) -> None:
    layout = lay_out(preset("tiny"), 8, 8)
    with pytest.raises(UserError, match=f"a batch of {batch} rows"):
        next(plan_gemm(layout, 0, batch, full_slots(preset("tiny"))))
    with pytest.raises(UserError, match=f"a batch of {batch} rows"):
        next(plan_lora(layout, 0, layout, 0, batch, full_slots(preset("tiny"))))


def test_matrices_that_do_not_fit_each_other_are_refused() -> None:
    a, b = lay_out(preset("tiny"), 8, 64), lay_out(preset("tiny"), 64, 16)
    with pytest.raises(UserError, match="A is 8 x 64 and B is 64 x 16: B must have 8 columns"):
        next(plan_lora(a, 0, b, 0, 1, full_slots(preset("tiny"))))


def test_slots_too_small_for_one_row_are_refused() -> None:
    layout = lay_out(preset("full"), 8, 53248)
    with pytest.raises(UserError, match="one input row of 53248 values does not fit a submission slot of 65536 bytes"):
        next(plan_gemm(layout, 0, 1, SlotSizes(16, 16)))


def test_there_is_no_tile_beyond_the_last() -> None:
    layout: MatrixLayout = lay_out(preset("tiny"), 8, 8)
    for place in ((1, 0), (0, 1), (-1, 0)):
        with pytest.raises(IndexError):
            layout.tile(*place)
