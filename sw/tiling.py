"""Products of any size as legal descriptors.

A matrix W (N x K) is cut once, when it is laid out in device memory (`MatrixLayout`): into row tiles
because a descriptor can state at most 2**20 - 1 bytes, and into column tiles only where a row of x does
not fit the input buffer, or not even one row of W fits those bytes. A product is planned per batch
(`plan_gemm`, `plan_lora`): input rows are cut to the buffers, row tiles further to the output buffer.

Sums are exact and rounded once, so no cut changes a bit of the result: N and B are cut between results,
and K only where the accumulators carry on.

A plan is a sequence of chains of `Step` and never touches a value, so that plans of any size can be made,
checked and priced without memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from plora.hw.defs.config import (
    KEPT_MAX_VALUES,
    KEPT_ROW_WORDS,
    PE_ROWS,
    VALUE_BYTES,
    WORD_BYTES,
    WORD_VALUES,
    NdpConfig,
)
from plora.hw.defs.descriptor import MAX_OPERAND_BYTES, Descriptor, Keep, Op, Source
from plora.hw.defs.errors import UserError
from plora.hw.defs.packing import PackGeometry, ceil_div, operand_row_stripes, pack_geometry, result_row_words
from plora.hw.defs.queue import MAX_SLOT_LOG2, MIN_SLOT_LOG2, RESULT_OFFSET, operand_offset

MAX_DIMENSION = (1 << 20) - 1
"""Largest dimension that a descriptor can state."""


@dataclass(frozen=True)
class SlotSizes:
    """Log2 of the bytes of the slots of a queue."""

    submission_log2: int
    result_log2: int

    @property
    def submission_bytes(self) -> int:
        """Bytes of a submission slot."""
        return 1 << self.submission_log2

    @property
    def result_bytes(self) -> int:
        """Bytes of a result slot."""
        return 1 << self.result_log2


def full_slots(config: NdpConfig) -> SlotSizes:
    """Slots that hold whatever the device's buffers hold: no tile is ever cut because of a slot."""
    operand = operand_offset(config) + PE_ROWS * config.input_half_stripes * config.stripe_bytes
    result = RESULT_OFFSET + PE_ROWS * config.result_half_words * WORD_BYTES

    def log2(size: int) -> int:
        return min(max((size - 1).bit_length(), MIN_SLOT_LOG2), MAX_SLOT_LOG2)

    return SlotSizes(log2(operand), log2(result))


@dataclass(frozen=True)
class Tile:
    """A part of a matrix that is packed by itself. Ranges are half open."""

    rows: range
    columns: range
    offset_bytes: int
    """Where it starts in the matrix's region."""
    geometry: PackGeometry


@dataclass(frozen=True)
class MatrixLayout:
    """How a matrix is cut and where each tile lies, from the start of its region. Made by `lay_out`."""

    config: NdpConfig
    rows: int
    columns: int
    row_step: int
    """Rows of a tile, but for the last."""
    column_cuts: tuple[int, ...]
    """Where column tiles start, and K: ``(0, K)`` if there is one."""

    @property
    def row_tiles(self) -> int:
        """Tiles along N."""
        return ceil_div(self.rows, self.row_step)

    @property
    def column_tiles(self) -> int:
        """Tiles along K; more than one only if the accumulators must carry on from one to the next."""
        return len(self.column_cuts) - 1

    def _offsets(self, rows: int) -> tuple[int, ...]:
        """Offsets of the column tiles of a row tile of ``rows`` rows, and its size."""
        offsets = [0]
        for start, end in itertools.pairwise(self.column_cuts):
            offsets.append(offsets[-1] + pack_geometry(self.config, rows, end - start).packed_bytes)
        return tuple(offsets)

    @cached_property
    def _full_offsets(self) -> tuple[int, ...]:
        return self._offsets(min(self.row_step, self.rows))

    @cached_property
    def _last_offsets(self) -> tuple[int, ...]:
        return self._offsets(self.rows - (self.row_tiles - 1) * self.row_step)

    @property
    def size_bytes(self) -> int:
        """Bytes of the region that the matrix takes."""
        return (self.row_tiles - 1) * self._full_offsets[-1] + self._last_offsets[-1]

    def tile(self, row_tile: int, column_tile: int) -> Tile:
        """Return one tile (IndexError if there is none of that place)."""
        if not (0 <= row_tile < self.row_tiles and 0 <= column_tile < self.column_tiles):
            raise IndexError(f"tile {row_tile}, {column_tile} of {self.row_tiles} x {self.column_tiles}")
        start = row_tile * self.row_step
        rows = range(start, min(start + self.row_step, self.rows))
        columns = range(self.column_cuts[column_tile], self.column_cuts[column_tile + 1])
        offsets = self._last_offsets if row_tile == self.row_tiles - 1 else self._full_offsets
        return Tile(
            rows,
            columns,
            row_tile * self._full_offsets[-1] + offsets[column_tile],
            pack_geometry(self.config, len(rows), len(columns)),
        )

    def tiles(self) -> Iterator[Tile]:
        """All tiles, in the order of their offsets."""
        for row_tile in range(self.row_tiles):
            for column_tile in range(self.column_tiles):
                yield self.tile(row_tile, column_tile)


def lay_out(config: NdpConfig, rows: int, columns: int) -> MatrixLayout:
    """Return the layout of a rows x columns device operand.

    Row tiles are multiples of 32 rows where they can be, so that they also serve as the parts of a kept
    intermediate, and of like size.

    Raises:
        UserError: a dimension is not positive, or more than a descriptor or the accumulator takes.
    """
    if not (1 <= rows <= MAX_DIMENSION and 1 <= columns <= min(MAX_DIMENSION, config.accumulator.max_terms)):
        raise UserError(
            f"a {rows} x {columns} matrix: {config.name!r} takes 1 ... {MAX_DIMENSION} rows and"
            f" 1 ... {min(MAX_DIMENSION, config.accumulator.max_terms)} columns"
        )
    if operand_row_stripes(config, columns) <= config.input_half_stripes:
        step = _row_step(config, rows, columns)
        if step:
            return MatrixLayout(config, rows, columns, step, (0, columns))
    # Accumulators carry on only within one row group: one output row per channel.
    step = min(rows, config.channels)
    return MatrixLayout(config, rows, columns, step, _column_cuts(config, step, columns))


def _row_step(config: NdpConfig, rows: int, columns: int) -> int:
    """Rows per tile with K uncut, or 0 if not even one row fits the bytes that a descriptor can state."""

    def fits(count: int) -> bool:
        return pack_geometry(config, count, columns).packed_bytes <= MAX_OPERAND_BYTES

    if fits(rows):
        return rows
    geometry = pack_geometry(config, config.stripe_values, columns)  # many rows: never split
    most = MAX_OPERAND_BYTES // (geometry.beats * geometry.stripe_bytes) * geometry.group_rows
    granule = max(WORD_VALUES, geometry.group_rows)
    if most >= granule:
        most -= most % granule
        return ceil_div(ceil_div(rows, ceil_div(rows, most)), granule) * granule
    if most:
        return most
    parts = [config.channels // split for split in (2, 4, 8, 16) if split <= config.channels]
    return next((count for count in parts if count <= rows and fits(count)), 0)


def _column_cuts(config: NdpConfig, rows: int, columns: int) -> tuple[int, ...]:
    """Cut K into the fewest tiles that fit the input buffer and a descriptor and share their sums' place.

    Tiles start at whole words where that fits. All of them are split over the channels alike.
    """

    def legal(width: int) -> bool:
        geometry = pack_geometry(config, rows, width)
        stripes = operand_row_stripes(config, width)
        return geometry.packed_bytes <= MAX_OPERAND_BYTES and stripes <= config.input_half_stripes

    # Tiles are of like size, so none is narrower than half of this: wide enough not to use the taps.
    widest = min(config.input_half_stripes * config.stripe_values, columns)
    for count in range(ceil_div(columns, widest), columns + 1):
        for granule in (WORD_VALUES, 1):
            cuts = [tile * columns // count // granule * granule for tile in range(count)] + [columns]
            widths = {end - start for start, end in itertools.pairwise(cuts)}
            # Equal for one row means equal for any number: also for the last, lower row tile.
            if all(map(legal, widths)) and len({pack_geometry(config, 1, width).split for width in widths}) == 1:
                return tuple(cuts)
    raise UserError(f"a row of {columns} columns cannot be cut for {config.name!r}: enlarge its input buffer")


@dataclass(frozen=True)
class Step:
    """One descriptor of a plan, and which parts of x and y it takes and gives."""

    descriptor: Descriptor
    operand: tuple[range, range] | None
    """Rows and columns of x that go into the slot; None if the operand comes from the chain."""
    result: tuple[range, range] | None
    """Rows and columns of y that come back; None if the result stays on the device."""


Chain = tuple[Step, ...]
"""Descriptors that run as one chain, or a single one that is none."""


def product_descriptor(config: NdpConfig, address: int, rows: int, columns: int, batch: int) -> Descriptor:
    """The GEMM of ``batch`` input rows from the slot with a whole packed rows x columns operand at ``address``."""
    return Descriptor(
        op=Op.GEMM,
        device_address=address,
        device_bytes=pack_geometry(config, rows, columns).packed_bytes,
        device_rows=rows,
        device_columns=columns,
        gpu_bytes=batch * columns * VALUE_BYTES,
        gpu_rows=batch,
        gpu_columns=columns,
    )


def _descriptor(tile: Tile, address: int, rows: range, batch: int, **flags: int) -> Descriptor:
    """The descriptor of the rows ``rows`` (of the tile, from 0, whole row groups) and ``batch`` input rows."""
    g, columns = tile.geometry, len(tile.columns)
    first_stripe = rows.start // g.group_rows * g.beats
    return Descriptor(
        op=Op.GEMV if batch == 1 else Op.GEMM,
        device_address=address + tile.offset_bytes + first_stripe * g.stripe_bytes,
        device_bytes=ceil_div(len(rows), g.group_rows) * g.beats * g.stripe_bytes,
        device_rows=len(rows),
        device_columns=columns,
        gpu_bytes=batch * columns * VALUE_BYTES,
        gpu_rows=batch,
        gpu_columns=columns,
        **flags,
    )


def _result_ranges(tile: Tile, batch: int, config: NdpConfig, slots: SlotSizes) -> list[range] | None:
    """Cut the rows of ``tile`` to what the output buffer and a result slot hold, or None if they hold too little."""
    g = tile.geometry
    words = min(
        config.result_half_words // ceil_div(batch, PE_ROWS),
        (slots.result_bytes - RESULT_OFFSET) // (WORD_BYTES * batch),
    )
    most = min(words * WORD_VALUES // g.group_rows, g.groups)
    if most == 0:
        return None if result_row_words(len(tile.rows)) > words else [range(len(tile.rows))]
    # At least two groups each where K is long enough to be split (a group is then no more than 16 rows), the
    # last with the most: so the rows of a part alone are packed as they are in the tile.
    parts = ceil_div(g.groups, most)
    cuts = [part * g.groups // parts * g.group_rows for part in range(parts)] + [len(tile.rows)]
    return [range(start, end) for start, end in itertools.pairwise(cuts)]


def _operand_rows(layout: MatrixLayout, slots: SlotSizes) -> int:
    """Most input rows of one descriptor, by input buffer, DRAM buffer and submission slot; UserError if none."""
    config = layout.config
    widest = max(end - start for start, end in itertools.pairwise(layout.column_cuts))
    stripes = operand_row_stripes(config, widest)
    rows = (slots.submission_bytes - operand_offset(config)) // (stripes * config.stripe_bytes)
    if rows < 1:
        raise UserError(
            f"one input row of {widest} values does not fit a submission slot of {slots.submission_bytes} bytes; use"
            f" slots of {full_slots(config).submission_bytes}"
        )
    pairs = config.input_half_stripes // stripes
    if layout.column_tiles > 1 or _held_beats(layout) > config.dram_buffer_stripes:
        pairs = 1
    return min(rows, PE_ROWS * pairs)


def _held_beats(layout: MatrixLayout) -> int:
    """Stripes of the longest row group: what the DRAM buffer holds while several pairs of input rows pass."""
    ends = (layout.tile(0, 0), layout.tile(layout.row_tiles - 1, 0))
    return max(tile.geometry.beats for tile in ends)


def _fitting_rows(layout: MatrixLayout, most: int, slots: SlotSizes) -> int:
    """Most input rows, up to ``most``, whose results fit the output buffer for every tile."""
    ends = (layout.tile(0, 0), layout.tile(layout.row_tiles - 1, 0))
    while any(_result_ranges(tile, most, layout.config, slots) is None for tile in ends):
        if most == 1:
            raise UserError(
                f"not even one result row fits a result slot of {slots.result_bytes} bytes; use larger slots"
            )
        most = max(1, most // 2)
    return most


def _ranges(total: int, step: int) -> Iterator[range]:
    """Cut ``total`` rows into the fewest ranges of at most ``step``: whole pairs, and of like size."""
    if step >= total:
        step = total
    elif step > 1:
        step -= step % PE_ROWS
        step = min(step, ceil_div(ceil_div(total, ceil_div(total, step)), PE_ROWS) * PE_ROWS)
    for start in range(0, total, step):
        yield range(start, min(start + step, total))


def _check_batch(batch: int) -> None:
    if not 1 <= batch <= MAX_DIMENSION:
        raise UserError(f"a batch of {batch} rows: choose 1 ... {MAX_DIMENSION}")


def plan_gemm(layout: MatrixLayout, address: int, batch: int, slots: SlotSizes) -> Iterator[Chain]:
    """Plan y = x W^T for ``batch`` rows of x; W lies at ``address`` as ``layout`` says.

    One chain per range of input rows: x is sent once and shared by all row tiles. Where K is cut, one
    chain per pair of input rows and row tile: the parts of x follow each other through the slots.

    Raises:
        UserError: a negative or empty batch, or slots too small for one row.
    """
    _check_batch(batch)
    most = _fitting_rows(layout, min(batch, _operand_rows(layout, slots)), slots)
    for rows in _ranges(batch, most):
        if layout.column_tiles > 1:
            yield from _accumulating_chains(layout, address, rows)
            continue
        yield _link(
            [
                Step(
                    _descriptor(tile, address, part, len(rows), source=Source.SLOT if index == 0 else Source.CHAIN),
                    (rows, tile.columns) if index == 0 else None,
                    (rows, range(tile.rows.start + part.start, tile.rows.start + part.stop)),
                )
                for index, (tile, part) in enumerate(_result_tiles(layout, len(rows), slots))
            ]
        )


def _result_tiles(layout: MatrixLayout, batch: int, slots: SlotSizes) -> Iterator[tuple[Tile, range]]:
    for tile in layout.tiles():
        parts = _result_ranges(tile, batch, layout.config, slots)
        assert parts is not None, "_fitting_rows chose a batch for which every tile fits"
        for part in parts:
            yield tile, part


def _accumulating_chains(layout: MatrixLayout, address: int, rows: range) -> Iterator[Chain]:
    last = layout.column_tiles - 1
    for row_tile in range(layout.row_tiles):
        steps = []
        for index in range(layout.column_tiles):
            tile = layout.tile(row_tile, index)
            flags = {"acc_in": int(index > 0), "acc_out": int(index < last)}
            steps.append(
                Step(
                    _descriptor(tile, address, range(len(tile.rows)), len(rows), **flags),
                    (rows, tile.columns),
                    (rows, tile.rows) if index == last else None,
                )
            )
        yield _link(steps)


def _link(steps: list[Step]) -> Chain:
    """Set the chain flag on all steps but the last."""
    return (*(replace(step, descriptor=replace(step.descriptor, chain=1)) for step in steps[:-1]), steps[-1])


def can_chain(a: MatrixLayout, b: MatrixLayout) -> bool:
    """True if y = (x A^T) B^T can run as one chain whose intermediate stays on the device.

    It must be kept whole: A in one column tile, at most 256 rows, in row tiles of whole words; and B must take it
    as one operand.
    """
    whole_words = a.row_tiles == 1 or a.row_step % WORD_VALUES == 0
    room = a.rows <= KEPT_MAX_VALUES and a.config.kept_words >= KEPT_ROW_WORDS
    return a.column_tiles == 1 and b.column_tiles == 1 and whole_words and room


def plan_lora(
    a: MatrixLayout, a_address: int, b: MatrixLayout, b_address: int, batch: int, slots: SlotSizes
) -> Iterator[Chain]:
    """Plan y = (x A^T) B^T as chains that keep the intermediate on the device: one chain per range of input rows.

    A is R x K and B is N x R, as PEFT stores them.

    Raises:
        UserError: the shapes do not fit each other, `can_chain` is false, or as `plan_gemm`.
    """
    _check_batch(batch)
    if b.columns != a.rows:
        raise UserError(f"A is {a.rows} x {a.columns} and B is {b.rows} x {b.columns}: B must have {a.rows} columns")
    if not can_chain(a, b):
        raise UserError(
            f"A of {a.rows} x {a.columns} in {a.row_tiles} x {a.column_tiles} tiles cannot be chained on"
            f" {a.config.name!r}: run two products"
        )
    kept = PE_ROWS * (a.config.kept_words // KEPT_ROW_WORDS)
    # The DRAM buffer needs no look for B: a row group of 256 columns fits the smallest.
    most = min(batch, kept, _operand_rows(a, slots))
    most = _fitting_rows(b, most, slots)
    for rows in _ranges(batch, most):
        steps = []
        for index, tile in enumerate(a.tiles()):
            first = index == 0
            flags = {
                "source": Source.SLOT if first else Source.CHAIN,
                "keep": Keep.NEW if first else Keep.APPEND,
            }
            d = _descriptor(tile, a_address, range(len(tile.rows)), len(rows), **flags)
            steps.append(Step(d, (rows, tile.columns) if first else None, None))
        for tile, part in _result_tiles(b, len(rows), slots):
            d = _descriptor(tile, b_address, part, len(rows), source=Source.KEPT)
            columns = range(tile.rows.start + part.start, tile.rows.start + part.stop)
            steps.append(Step(d, None, (rows, columns)))
        yield _link(steps)
