"""The NDP core without its time: judges one descriptor, computes it, keeps what its chain needs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np

from plora.hw.defs.config import PE_ROWS, WORD_BYTES, NdpConfig
from plora.hw.defs.descriptor import Descriptor, DType, Keep, Op, Source
from plora.hw.defs.legality import ChainState, QueueWindow, check
from plora.hw.defs.packing import (
    PackGeometry,
    TransposedGeometry,
    ceil_div,
    operand_row_stripes,
    pack_geometry,
    pack_geometry_transposed,
    result_row_words,
)
from plora.hw.defs.queue import (
    ANCHOR_NAN,
    ANCHOR_NONE,
    NO_EXPONENTS,
    NUMERIC_NAN,
    NUMERIC_OVERFLOW,
    RESULT_OFFSET,
    Anchor,
    Exponents,
    operand_offset,
)
from plora.hw.defs.status import Status
from plora.sim.functional.layout import (
    Matrix,
    anchored_result_bytes,
    gpu_operand_from_bytes,
    result_bytes,
    unpack_integers,
    unpack_operand,
    unpack_transposed,
    unpack_transposed_integers,
)
from plora.sim.functional.memory import MemoryFault, SparseMemory
from plora.sim.golden import bf16
from plora.sim.golden.integers import dequantize
from plora.sim.golden.numerics import BoolArray, Grid, IntArray, Results, gemm_grid, grid_to_fp16, grid_to_scores
from plora.sim.golden.softmax import (
    NO_ANCHOR,
    RowState,
    Weights,
    rescale_weights,
    softmax_tile,
)


@dataclass(frozen=True)
class Outcome:
    """What the core reports of one descriptor, and what it cost in memory traffic."""

    status: Status
    numeric: int = 0
    result_bytes: int = 0
    cycles: int = 0
    words_read: int = 0
    words_written: int = 0


@dataclass(frozen=True)
class _Terms:
    """Kept softmax terms, and the state of the softmax unit beside them."""

    weights: Weights
    rows: RowState


@dataclass
class _Chain:
    """What a chain left on the device: the checked state, and the values that go with it."""

    state: ChainState = field(default_factory=ChainState)
    operand: Matrix | None = None
    kept: Matrix | None = None
    terms: _Terms | None = None
    """The newest softmax terms."""
    previous: _Terms | None = None
    """Those before."""
    sums: Grid | None = None
    """What the accumulators hold from one descriptor to the next."""
    summed: int = 0
    """Columns of the GPU operand that are in them."""


def _numeric(nan: BoolArray, overflow: BoolArray) -> int:
    return NUMERIC_NAN * bool(nan.any()) | NUMERIC_OVERFLOW * bool(overflow.any())


def _anchors(rows: RowState) -> list[Anchor]:
    """The words that end the result rows of a transposed descriptor."""
    return [
        Anchor(ANCHOR_NONE if anchor == NO_ANCHOR else int(anchor), int(shift), ANCHOR_NAN * bool(nan), int(total))
        for anchor, shift, nan, total in zip(rows.anchor, rows.shift, rows.nan, rows.total, strict=True)
    ]


def _as_multiplied(values: Matrix, d: Descriptor, exponent: int) -> Matrix:
    """What the array multiplies: FP16 as it is, BF16 (bit patterns) brought into its range."""
    return bf16.to_fp16(values.view(np.uint16), exponent) if d.dtype == DType.BF16 else values


class FunctionalCore:
    """Executes descriptors strictly one after the other on ``memory``.

    A chain's state lives here, as it does in the device: `execute` with ``first`` forgets it.

    Parameters:
        config, memory: sizes of the device, and its memory.
    """

    def __init__(self, config: NdpConfig, memory: SparseMemory) -> None:
        self._config = config
        self._memory = memory
        self._chain = _Chain()
        self._aborted = False

    def execute(
        self,
        d: Descriptor,
        window: QueueWindow,
        submission_slot: int,
        result_slot: int,
        *,
        first: bool,
        softmax_scale: int = 0,
        exponents: Exponents = NO_EXPONENTS,
    ) -> Outcome:
        """Run ``d`` and write its result, but not its completion line.

        Parameters:
            submission_slot, result_slot: DPA of the descriptor's two slots.
            first: ``d`` begins a chain, or is none.
            softmax_scale, exponents: of the submission line; the scale as FP32 bits.
        """
        if first:
            self._chain = _Chain()
        if self._aborted and not first:
            outcome = Outcome(Status.CHAIN_ABORTED)
        else:
            outcome = self._judge(d, window, softmax_scale, exponents)
        if outcome.status is Status.OK:
            try:
                outcome = self._compute(d, submission_slot, result_slot, softmax_scale, exponents)
            except MemoryFault:
                outcome = Outcome(Status.MEMORY_ERROR)
        self._aborted = bool(d.chain) and outcome.status is not Status.OK
        return outcome

    def _judge(self, d: Descriptor, window: QueueWindow, softmax_scale: int, exponents: Exponents) -> Outcome:
        verdict = check(
            d,
            self._config,
            window,
            self._chain.state,
            softmax_scale,
            exponents,
        )
        if verdict.status is Status.OK:
            self._chain.state = verdict.chain
        return Outcome(verdict.status)

    def _operand(self, d: Descriptor, submission_slot: int, exponent: int) -> Matrix:
        chain = self._chain
        if d.source == Source.SLOT:
            size = d.gpu_rows * operand_row_stripes(self._config, d.gpu_columns) * self._config.stripe_bytes
            data = self._memory.read(submission_slot + operand_offset(self._config), size)
            operand = gpu_operand_from_bytes(data, self._config, d.gpu_rows, d.gpu_columns)
            chain.operand = _as_multiplied(operand, d, exponent)
        if d.transpose:
            terms = self._terms(d)
            scaled = rescale_weights(terms.weights.p, terms.weights.anchors, terms.rows.anchor, self._config)
            return scaled[:, chain.summed : chain.summed + d.gpu_columns]
        source = chain.kept if d.source == Source.KEPT else chain.operand
        assert source is not None, "legality.check accepted a source that the chain does not have"
        return source

    def _terms(self, d: Descriptor) -> _Terms:
        """The softmax terms that a transposed operand is weighed with."""
        terms = self._chain.previous if d.source == Source.PREVIOUS else self._chain.terms
        assert terms is not None, "legality.check accepted terms that the chain does not have"
        return terms

    def _weights(self, d: Descriptor) -> tuple[Matrix, PackGeometry | TransposedGeometry]:
        """The device operand, N x K, integers as FP16, and its layout."""
        config, n, k = self._config, d.device_rows, d.device_columns
        if not d.transpose:
            keys = pack_geometry(config, n, k, d.dtype)
            data = self._memory.read(d.device_address, d.device_bytes)
            if keys.expansion_log2:
                return dequantize(unpack_integers(data, config, n, k, d.dtype)), keys
            return unpack_operand(data, config, n, k), keys
        g = pack_geometry_transposed(config, n, k, d.dtype)
        # Of each group only the stripes that hold tokens, or scales of theirs, are read.
        step, size = d.device_bytes // g.groups, g.group_stripes * config.stripe_bytes
        groups = [self._memory.read(d.device_address + group * step, size) for group in range(g.groups)]
        if g.expansion_log2:
            integers = unpack_transposed_integers(groups, config, n, k, d.dtype)
            return np.ascontiguousarray(np.hstack([dequantize(group) for group in integers]).T), g
        return np.ascontiguousarray(unpack_transposed(b"".join(groups), config, n, k).T), g

    def _compute(
        self, d: Descriptor, submission_slot: int, result_slot: int, softmax_scale: int, exponents: Exponents
    ) -> Outcome:
        config, chain = self._config, self._chain
        x = self._operand(d, submission_slot, exponents.operand)
        w, layout = self._weights(d)
        w = _as_multiplied(w, d, exponents.device)
        sums = gemm_grid(x, w, config.accumulator)
        if d.acc_in:
            assert chain.sums is not None
            sums = chain.sums + sums
        chain.sums, chain.summed = (sums, chain.summed + d.gpu_columns) if d.acc_out else (None, 0)
        operand_stripes = d.gpu_rows * operand_row_stripes(config, d.gpu_columns) if d.source == Source.SLOT else 0
        cycles = layout.groups * layout.beats * ceil_div(d.gpu_rows, PE_ROWS)
        words_read = (layout.stripes + operand_stripes) * config.channels
        if d.acc_out:
            return Outcome(Status.OK, cycles=cycles, words_read=words_read)
        if d.op == Op.SOFTMAX:
            numeric = self._keep_softmax(d, sums, softmax_scale)
            return Outcome(Status.OK, numeric, cycles=cycles, words_read=words_read)
        if d.transpose:
            rows = self._terms(d).rows
            y, nan, overflow = self._rounded(d, sums, exponents, rows.shift[:, None])
            data = anchored_result_bytes(y, _anchors(rows))
        else:
            y, nan, overflow = self._rounded(d, sums, exponents)
            data = result_bytes(y)
        numeric = _numeric(nan, overflow)
        if d.keep != Keep.NONE:
            y = _as_multiplied(y, d, exponents.kept)
        if d.keep == Keep.NEW:
            chain.kept = y
        elif d.keep == Keep.APPEND:
            assert chain.kept is not None
            chain.kept = np.concatenate([chain.kept, y], axis=1)
        if d.keep != Keep.NONE:
            return Outcome(Status.OK, numeric, cycles=cycles, words_read=words_read)
        self._write_lines(result_slot + RESULT_OFFSET, data)
        assert len(data) == d.gpu_rows * result_row_words(d.device_rows, transpose=d.transpose) * WORD_BYTES
        return Outcome(Status.OK, numeric, len(data), cycles, words_read, len(data) // WORD_BYTES)

    def _rounded(self, d: Descriptor, sums: Grid, exponents: Exponents, offset: int | IntArray = 0) -> Results:
        accumulator = self._config.accumulator
        if d.dtype != DType.BF16:
            return grid_to_fp16(sums, accumulator, offset)
        y, nan, overflow = bf16.grid_to_bf16(sums, accumulator, exponents.operand + exponents.device, offset)
        return Results(y.view(np.float16), nan, overflow)

    def _keep_softmax(self, d: Descriptor, sums: Grid, softmax_scale: int) -> int:
        """Keep the terms of one tile of scores; return the numeric flags."""
        config, chain = self._config, self._chain
        if d.dtype == DType.BF16:
            sums = bf16.infinite_as_clipped(sums)
        scores = grid_to_scores(sums, config.accumulator)
        scale = float(np.uint32(softmax_scale).view(np.float32))
        if d.keep == Keep.NEW:
            tile, rows = softmax_tile(scores, scale, RowState.start(d.gpu_rows), config)
            chain.previous, chain.terms = chain.terms, _Terms(tile, rows)
        else:
            assert chain.terms is not None
            tile, rows = softmax_tile(scores, scale, chain.terms.rows, config)
            chain.terms = _Terms(chain.terms.weights.append(tile), rows)
        return _numeric(tile.nan, tile.overflow)

    def _write_lines(self, address: int, data: bytes) -> None:
        """Write whole lines; one that faults does not keep the others from being written."""
        try:
            self._memory.write(address, data)
        except MemoryFault:
            for offset in range(0, len(data), WORD_BYTES):
                with contextlib.suppress(MemoryFault):
                    self._memory.write(address + offset, data[offset : offset + WORD_BYTES])
            raise
