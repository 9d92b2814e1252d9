"""What a descriptor asks of the core: reads, beats, drains and writes, as a function of its shape.

An operation is one function from shapes to demands (`OPERATIONS`); everything after it, from bursts to
completion, is the same for all of them. All functions work on arrays, one element a descriptor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import DOT_LANES, DOTS_PER_WORD, KEPT_MAX_VALUES, PE_ROWS, WORD_VALUES, NdpConfig
from plora.hw.defs.descriptor import Descriptor, Keep, Op, Source
from plora.hw.defs.integers import INTEGER_BITS
from plora.hw.defs.packing import FRAME_SCALES, expansion_log2, frame_tokens
from plora.sim.core.constants import load_constants

Ints = npt.NDArray[np.int64]

TO_MEMORY, TO_KEPT, TO_ACCUMULATORS = range(3)
"""Destinations of a job's sums, as `plora.hw.rtl.core.job.Destination`."""


@dataclass(frozen=True)
class Shapes:
    """The fields of descriptors that decide their time, as arrays of equal length.

    ``device_bytes`` says how far apart the groups of a transposed operand lie (0: side by side).
    ``device_stripe``, ``operand_stripe`` and ``result_line`` say where the device operand, the GPU operand and the
    result begin: in stripes and lines from DPA 0. Only their place within a page and their channel matter.
    """

    op: Ints
    device_rows: Ints
    device_columns: Ints
    gpu_rows: Ints
    source: Ints
    keep: Ints
    acc_in: Ints
    acc_out: Ints
    transpose: Ints
    dtype: Ints
    device_bytes: Ints
    device_stripe: Ints
    operand_stripe: Ints
    result_line: Ints

    def __len__(self) -> int:
        return len(self.op)


class Demand(NamedTuple):
    """The demands of one descriptor. See `Demands`."""

    load: int
    from_kept: int
    from_previous: int
    operand_stripes: int
    operand_space: int
    operand_stripe: int
    device_stripe: int
    stripes: int
    beats: int
    groups: int
    pairs: int
    beat_cycles: int
    merge_cycles: int
    destination: int
    lines: int
    result_line: int
    multiply_adds: int
    split_log2: int
    begins_terms: int
    softmax_cycles: int
    settle_cycles: int
    expansion_log2: int
    group_stripes: int
    frame_beats: int
    frames: int
    rescale_cycles: int
    anchor_cycles: int
    skip: int


@dataclass(frozen=True)
class Demands:
    """Demands of descriptors, as arrays of equal length.

    ================  ====================================================================================
    load              1: the GPU operand is read from the submission slot
    from_kept         1: it is a kept intermediate
    from_previous     1: that before the newest softmax terms
    operand_stripes   stripes of the GPU operand to be read
    operand_space     stripes of the input buffer, per PE row, that it takes
    operand_stripe    its first stripe
    device_stripe     first stripe of the device operand
    stripes           stripes of the device operand in memory: ``groups * beats`` unless it is integers
    beats             beats of a row group: stripes that the array eats
    groups            row groups
    pairs             passes of the array over a group: pairs of GPU rows
    beat_cycles       cycles of the array for one beat: output rows in a word
    merge_cycles      cycles between last beats beyond one: halvings of a split sum, or one for what leaves by halves
    destination       `TO_MEMORY`, `TO_KEPT` or `TO_ACCUMULATORS`
    lines             64-byte lines of the result that are written
    result_line       the first of them
    multiply_adds     products that count, B * N * K
    split_log2        halvings of a split sum
    begins_terms      1: the results are new softmax terms
    softmax_cycles    cycles of the softmax unit between array and buffer; 0 for other results
    settle_cycles     cycles after which what was kept may be used
    expansion_log2    integers: log2 of the beats that share a stripe; 0 of other types
    group_stripes     stripes of a row group in memory; 0: keys that are integers, whose groups have no gaps between
    frame_beats       integers: beats between one stripe of scales and the next; 0 of other types
    frames            stripes of scales, of values those of a group; each takes a cycle, of values in every pass
    rescale_cycles     cycles between a beat's operand and its weights, in which softmax terms are scaled
    anchor_cycles     cycles between last beats that the last row group adds: its rows' anchors leave then
    skip              stripes left out after each row group
    ================  ====================================================================================
    """

    load: Ints
    from_kept: Ints
    from_previous: Ints
    operand_stripes: Ints
    operand_space: Ints
    operand_stripe: Ints
    device_stripe: Ints
    stripes: Ints
    beats: Ints
    groups: Ints
    pairs: Ints
    beat_cycles: Ints
    merge_cycles: Ints
    destination: Ints
    lines: Ints
    result_line: Ints
    multiply_adds: Ints
    split_log2: Ints
    begins_terms: Ints
    softmax_cycles: Ints
    settle_cycles: Ints
    expansion_log2: Ints
    group_stripes: Ints
    frame_beats: Ints
    frames: Ints
    rescale_cycles: Ints
    anchor_cycles: Ints
    skip: Ints

    def __len__(self) -> int:
        return len(self.load)

    @property
    def total_beats(self) -> Ints:
        """Beats of all passes: stripes that the array eats."""
        return self.groups * self.beats * self.pairs

    @property
    def group_cycles(self) -> Ints:
        """Cycles that a pass over a group takes of the array: its beats, of integer values with their scales."""
        return self.beats + np.where(self.group_stripes > 0, self.frames, 0)

    @property
    def scale_cycles(self) -> Ints:
        """Cycles of the array in which it waits for the scales of integers."""
        return self.frames * np.where(self.group_stripes > 0, self.groups * self.pairs, 1)

    def rows(self) -> Iterable[Demand]:
        """One `Demand` a descriptor."""
        return map(Demand._make, zip(*(getattr(self, name).tolist() for name in Demand._fields), strict=True))


assert Demand._fields == tuple(f.name for f in fields(Demands))


def _ceil_div(a: Ints, b: Ints | int) -> Ints:
    return -(-a // b)


def gemm_demands(config: NdpConfig, shapes: Shapes) -> Demands:
    """Demands of GEMV, GEMM and SOFTMAX; geometry as in `plora.hw.defs.packing`."""
    n, k, b = shapes.device_rows, shapes.device_columns, shapes.gpu_rows
    constants = load_constants()
    transposed, softmax = shapes.transpose != 0, shapes.op == Op.SOFTMAX
    taps = np.where(transposed | (k > WORD_VALUES // 2), 1, np.where(k <= WORD_VALUES // 4, 4, 2))
    split_log2 = np.zeros_like(n)
    for log2 in range(1, config.channels.bit_length()):
        split_log2 += (k > KEPT_MAX_VALUES) & (n <= config.channels >> log2) & ~transposed
    group_rows = np.where(transposed, DOTS_PER_WORD * config.channels, (config.channels >> split_log2) * taps)
    groups = _ceil_div(n, group_rows)
    beats = _ceil_div(k, np.where(transposed, DOT_LANES, (WORD_VALUES // taps) << split_log2))
    pairs = _ceil_div(b, PE_ROWS)
    row_stripes = _ceil_div(k, config.stripe_values)
    expansion = sum(((shapes.dtype == dtype) * expansion_log2(dtype) for dtype in INTEGER_BITS), np.zeros_like(n))
    integers = expansion > 0
    frame_beats = integers.astype(np.int64) * np.where(
        transposed, frame_tokens(config) // DOT_LANES, FRAME_SCALES * beats
    )
    frames = integers * _ceil_div(np.where(transposed, beats, groups * beats), np.maximum(frame_beats, 1))
    of_group = frames + _ceil_div(beats, 1 << expansion)
    stripes = np.where(transposed, groups * of_group, frames + _ceil_div(groups * beats, 1 << expansion))
    load = (shapes.source == Source.SLOT).astype(np.int64)
    destination = np.where(shapes.acc_out != 0, TO_ACCUMULATORS, np.where(shapes.keep != Keep.NONE, TO_KEPT, TO_MEMORY))
    return Demands(
        load=load,
        from_kept=np.isin(shapes.source, (Source.KEPT, Source.PREVIOUS)).astype(np.int64),
        from_previous=(shapes.source == Source.PREVIOUS).astype(np.int64),
        operand_stripes=load * b * row_stripes,
        operand_space=load * pairs * row_stripes,
        operand_stripe=shapes.operand_stripe,
        device_stripe=shapes.device_stripe,
        stripes=stripes,
        beats=beats,
        groups=groups,
        pairs=pairs,
        # Of a word that holds several rows of softmax terms, each takes as long as it does alone.
        beat_cycles=np.where(softmax & (taps > 1), PE_ROWS * taps, taps),
        # The two sums of a column, and the two rows of softmax terms, leave one after the other.
        merge_cycles=np.where(transposed | softmax, 1, split_log2),
        destination=destination,
        lines=(destination == TO_MEMORY) * b * (_ceil_div(n, WORD_VALUES) + transposed),
        result_line=shapes.result_line,
        multiply_adds=b * n * k,
        split_log2=split_log2,
        begins_terms=(softmax & (shapes.keep == Keep.NEW)).astype(np.int64),
        softmax_cycles=softmax * constants.softmax,
        # The second row of the last pair goes through the softmax unit a cycle behind the first.
        settle_cycles=transposed * (constants.softmax_settle - constants.softmax_stored + (b % PE_ROWS == 0)),
        expansion_log2=expansion,
        group_stripes=np.where(transposed, of_group, ~integers * beats),
        frame_beats=frame_beats,
        frames=frames,
        rescale_cycles=transposed * constants.p_scaler,
        anchor_cycles=transposed.astype(np.int64),
        skip=transposed * np.maximum(shapes.device_bytes // (groups * config.stripe_bytes) - of_group, 0),
    )


OPERATIONS: dict[int, Callable[[NdpConfig, Shapes], Demands]] = dict.fromkeys(
    (Op.GEMV, Op.GEMM, Op.SOFTMAX), gemm_demands
)
"""What each operation asks for."""


def _select(shapes: Shapes, chosen: npt.NDArray[np.bool_]) -> Shapes:
    return Shapes(**{f.name: getattr(shapes, f.name)[chosen] for f in fields(Shapes)})


def demands(config: NdpConfig, shapes: Shapes) -> Demands:
    """Demands of legal descriptors, whatever their operations.

    Raises:
        KeyError: an operation that no function describes.
    """
    functions = {OPERATIONS[op] for op in np.unique(shapes.op).tolist()}
    if len(functions) == 1:
        return functions.pop()(config, shapes)
    columns = {name: np.zeros(len(shapes), np.int64) for name in Demand._fields}
    for function in functions:
        chosen = np.isin(shapes.op, [op for op, own in OPERATIONS.items() if own is function])
        part = function(config, _select(shapes, chosen))
        for name, column in columns.items():
            column[chosen] = getattr(part, name)
    return Demands(**columns)


def shapes_of(
    config: NdpConfig,
    descriptors: Iterable[Descriptor],
    operand_addresses: Iterable[int] | None = None,
    result_addresses: Iterable[int] | None = None,
) -> Shapes:
    """Shapes of descriptors, with the DPA of their GPU operands and results (default: 0 for all)."""
    names = (*(f.name for f in fields(Shapes)[:11]), "device_address")
    table = np.array([[getattr(d, name) for name in names] for d in descriptors], np.int64).reshape(-1, len(names))
    columns = dict(zip(names, table.T, strict=True))
    address = columns.pop("device_address")
    zeros = np.zeros_like(address)
    operand = zeros if operand_addresses is None else np.array(list(operand_addresses), np.int64)
    result = zeros if result_addresses is None else np.array(list(result_addresses), np.int64)
    return Shapes(
        **columns,
        device_stripe=address // config.stripe_bytes,
        operand_stripe=operand // config.stripe_bytes,
        result_line=result // (config.stripe_bytes // config.channels),
    )
