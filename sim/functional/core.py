"""The NDP core without its time: judges one descriptor, computes it, keeps what its chain needs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np

from plora.hw.defs.config import PE_ROWS, WORD_BYTES, NdpConfig
from plora.hw.defs.descriptor import Descriptor, Keep, Source
from plora.hw.defs.legality import ChainState, QueueWindow, check
from plora.hw.defs.packing import ceil_div, operand_row_stripes, pack_geometry, result_row_words
from plora.hw.defs.queue import NUMERIC_NAN, NUMERIC_OVERFLOW, RESULT_OFFSET, operand_offset
from plora.hw.defs.status import Status
from plora.sim.functional.layout import Matrix, gpu_operand_from_bytes, result_bytes, unpack_operand
from plora.sim.functional.memory import MemoryFault, SparseMemory
from plora.sim.golden.numerics import Grid, gemm_grid, grid_to_fp16


@dataclass(frozen=True)
class Outcome:
    """What the core reports of one descriptor, and what it cost in memory traffic."""

    status: Status
    numeric: int = 0
    result_bytes: int = 0
    cycles: int = 0
    words_read: int = 0
    words_written: int = 0


@dataclass
class _Chain:
    """What a chain left on the device: the checked state, and the values that go with it."""

    state: ChainState = field(default_factory=ChainState)
    operand: Matrix | None = None
    kept: Matrix | None = None
    sums: Grid | None = None
    """What the accumulators hold from one descriptor to the next."""


class FunctionalCore:
    """Executes descriptors strictly one after the other on ``memory``.

    A chain's state lives here, as it does in the device: `execute` with ``first`` forgets it.
    """

    def __init__(self, config: NdpConfig, memory: SparseMemory) -> None:
        self._config = config
        self._memory = memory
        self._chain = _Chain()
        self._aborted = False

    def execute(
        self, d: Descriptor, window: QueueWindow, submission_slot: int, result_slot: int, *, first: bool
    ) -> Outcome:
        """Run ``d`` and write its result, but not its completion line.

        Parameters:
            submission_slot, result_slot: DPA of the descriptor's two slots.
            first: ``d`` begins a chain, or is none.
        """
        if first:
            self._chain = _Chain()
        outcome = Outcome(Status.CHAIN_ABORTED) if self._aborted and not first else self._judge(d, window)
        if outcome.status is Status.OK:
            try:
                outcome = self._compute(d, submission_slot, result_slot)
            except MemoryFault:
                outcome = Outcome(Status.MEMORY_ERROR)
        self._aborted = bool(d.chain) and outcome.status is not Status.OK
        return outcome

    def _judge(self, d: Descriptor, window: QueueWindow) -> Outcome:
        verdict = check(d, self._config, window, self._chain.state)
        if verdict.status is Status.OK:
            self._chain.state = verdict.chain
        return Outcome(verdict.status)

    def _operand(self, d: Descriptor, submission_slot: int) -> Matrix:
        chain = self._chain
        if d.source == Source.SLOT:
            size = d.gpu_rows * operand_row_stripes(self._config, d.gpu_columns) * self._config.stripe_bytes
            data = self._memory.read(submission_slot + operand_offset(self._config), size)
            chain.operand = gpu_operand_from_bytes(data, self._config, d.gpu_rows, d.gpu_columns)
        source = chain.kept if d.source == Source.KEPT else chain.operand
        assert source is not None, "legality.check accepted a source that the chain does not have"
        return source

    def _compute(self, d: Descriptor, submission_slot: int, result_slot: int) -> Outcome:
        config, chain = self._config, self._chain
        x = self._operand(d, submission_slot)
        w = unpack_operand(self._memory.read(d.device_address, d.device_bytes), config, d.device_rows, d.device_columns)
        sums = gemm_grid(x, w, config.accumulator)
        if d.acc_in:
            assert chain.sums is not None
            sums = chain.sums + sums
        chain.sums = sums if d.acc_out else None
        stripes = pack_geometry(config, d.device_rows, d.device_columns).stripes
        operand_stripes = d.gpu_rows * operand_row_stripes(config, d.gpu_columns) if d.source == Source.SLOT else 0
        cycles = stripes * ceil_div(d.gpu_rows, PE_ROWS)
        words_read = (stripes + operand_stripes) * config.channels
        if d.acc_out:
            return Outcome(Status.OK, cycles=cycles, words_read=words_read)
        y, nan, overflow = grid_to_fp16(sums, config.accumulator)
        numeric = NUMERIC_NAN * bool(nan.any()) | NUMERIC_OVERFLOW * bool(overflow.any())
        if d.keep == Keep.NEW:
            chain.kept = y
        elif d.keep == Keep.APPEND:
            assert chain.kept is not None
            chain.kept = np.concatenate([chain.kept, y], axis=1)
        if d.keep != Keep.NONE:
            return Outcome(Status.OK, numeric, cycles=cycles, words_read=words_read)
        data = result_bytes(y)
        self._write_lines(result_slot + RESULT_OFFSET, data)
        assert len(data) == d.gpu_rows * result_row_words(d.device_rows) * WORD_BYTES
        return Outcome(Status.OK, numeric, len(data), cycles, words_read, len(data) // WORD_BYTES)

    def _write_lines(self, address: int, data: bytes) -> None:
        """Write whole lines; one that faults does not keep the others from being written."""
        try:
            self._memory.write(address, data)
        except MemoryFault:
            for offset in range(0, len(data), WORD_BYTES):
                with contextlib.suppress(MemoryFault):
                    self._memory.write(address + offset, data[offset : offset + WORD_BYTES])
            raise
