"""What a descriptor and a queue's registers must satisfy, as pure functions: the specification of the RTL.

`check` (the decoder) and `ring_setup_allowed` (the queue engine's answer to an enable) are used by the
functional device as they stand; tests hold the RTL to them bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from plora.hw.defs.config import (
    KEPT_MAX_VALUES,
    KEPT_ROW_WORDS,
    PE_ROWS,
    VALUE_BYTES,
    WORD_BYTES,
    WORD_VALUES,
    NdpConfig,
)
from plora.hw.defs.descriptor import Descriptor, DType, Keep, Op, Source, Type
from plora.hw.defs.packing import ceil_div, operand_row_stripes, pack_geometry, result_row_words
from plora.hw.defs.queue import (
    MAX_DEPTH,
    MAX_SLOT_LOG2,
    MIN_DEPTH,
    MIN_SLOT_LOG2,
    RESULT_OFFSET,
    operand_offset,
)
from plora.hw.defs.status import Status


@dataclass(frozen=True)
class QueueWindow:
    """What a queue may touch and how large its slots are."""

    base: int
    """First DPA of the queue's window."""
    limit: int
    """First DPA beyond it."""
    submission_slot_bytes: int
    result_slot_bytes: int


@dataclass(frozen=True)
class ChainState:
    """What the earlier descriptors of a chain left on the device. The default is that of a chain's first."""

    kept_rows: int = 0
    kept_columns: int = 0
    """Columns of the kept intermediate; 0 if there is none."""
    operand_rows: int = 0
    operand_columns: int = 0
    """Shape of the operand loaded last from a slot; 0 if there is none."""
    acc_rows: int = 0
    """N of the sums left in the accumulators; 0 if there are none."""
    acc_batch: int = 0
    acc_split: int = 0
    """Parts into which K was dealt: sums lie in as many channels, and only sums that lie alike can go on."""
    acc_terms: int = 0
    """Products summed in each of them so far."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of `check`: the status, and the chain's state after the descriptor if that is OK."""

    status: Status
    chain: ChainState = field(default_factory=ChainState)


def in_window(address: int, size_bytes: int, base: int, limit: int, memory_bytes: int) -> bool:
    """True if ``[address, address + size_bytes)`` lies in ``[base, limit)`` and in memory. No sum can wrap."""
    return base <= address < limit <= memory_bytes and size_bytes <= limit - address


@dataclass(frozen=True)
class RingSetup:
    """The registers of one queue that an enable (CTRL bit 0 from 0 to 1) judges."""

    base: int
    limit: int
    depth: int
    submission_base: int
    submission_slot_log2: int
    result_base: int
    result_slot_log2: int


def ring_setup_allowed(config: NdpConfig, setup: RingSetup) -> bool:
    """True if a queue may be enabled with ``setup``: sizes in range, rings aligned and wholly in its window."""
    slots = (setup.submission_slot_log2, setup.result_slot_log2)
    if not (MIN_DEPTH <= setup.depth <= MAX_DEPTH and all(MIN_SLOT_LOG2 <= s <= MAX_SLOT_LOG2 for s in slots)):
        return False
    if setup.submission_base % config.stripe_bytes or setup.result_base % WORD_BYTES:
        return False
    return all(
        in_window(address, setup.depth << slot_log2, setup.base, setup.limit, 1 << config.dpa_bits)
        for address, slot_log2 in zip((setup.submission_base, setup.result_base), slots, strict=True)
    )


def _static(d: Descriptor, config: NdpConfig, window: QueueWindow) -> Status:
    n, k, b = d.device_rows, d.device_columns, d.gpu_rows
    if d.type != Type.READ_COMPUTE:
        return Status.BAD_TYPE
    if d.op not in (Op.GEMV, Op.GEMM):
        return Status.BAD_OP
    if d.dtype != DType.FP16:
        return Status.BAD_DTYPE
    held = d.keep != Keep.NONE or d.acc_out
    if (
        d.source > Source.CHAIN
        or d.keep > Keep.APPEND
        or (held and not d.chain)
        or (d.keep and d.acc_out)
        # The new intermediate would overwrite the words that later row groups still read.
        or (d.source == Source.KEPT and d.keep == Keep.NEW)
    ):
        return Status.BAD_FLAGS
    if d.reserved:
        return Status.BAD_RESERVED
    if not (n and k and b and d.gpu_columns):
        return Status.ZERO_DIMENSION
    geometry = pack_geometry(config, n, k)
    pairs = ceil_div(b, PE_ROWS)
    if (
        k != d.gpu_columns
        or (d.op == Op.GEMV and b != 1)
        or k > config.accumulator.max_terms
        or (d.source == Source.KEPT and k > KEPT_MAX_VALUES)
        or ((d.acc_in or d.acc_out) and (pairs > 1 or geometry.groups > 1 or geometry.taps > 1))
    ):
        return Status.SHAPE_MISMATCH
    if d.gpu_bytes != b * k * VALUE_BYTES or d.device_bytes != geometry.packed_bytes:
        return Status.SIZE_MISMATCH
    if d.device_address % config.stripe_bytes:
        return Status.MISALIGNED
    if not in_window(d.device_address, d.device_bytes, window.base, window.limit, 1 << config.dpa_bits):
        return Status.OUT_OF_WINDOW
    row_stripes = operand_row_stripes(config, k)
    if d.source == Source.SLOT and pairs * row_stripes > config.input_half_stripes:
        return Status.INPUT_TOO_LARGE
    if d.keep:
        if n > KEPT_MAX_VALUES or pairs * KEPT_ROW_WORDS > config.kept_words:
            return Status.OUTPUT_TOO_LARGE
    elif not d.acc_out and pairs * result_row_words(n) > config.result_half_words:
        return Status.OUTPUT_TOO_LARGE
    if pairs > 1 and geometry.beats > config.dram_buffer_stripes:
        return Status.WEIGHTS_TOO_LARGE
    operand_end = operand_offset(config) + b * row_stripes * config.stripe_bytes
    result_end = RESULT_OFFSET + b * result_row_words(n) * WORD_BYTES
    if (d.source == Source.SLOT and operand_end > window.submission_slot_bytes) or (
        not held and result_end > window.result_slot_bytes
    ):
        return Status.SLOT_OVERFLOW
    return Status.OK


def _follows(d: Descriptor, config: NdpConfig, chain: ChainState) -> bool:
    n, k, b = d.device_rows, d.device_columns, d.gpu_rows
    if bool(d.acc_in) != bool(chain.acc_rows):
        return False
    split = pack_geometry(config, n, k).split
    if d.acc_in and (
        (n, b, split) != (chain.acc_rows, chain.acc_batch, chain.acc_split)
        or chain.acc_terms + k > config.accumulator.max_terms
    ):
        return False
    if d.source == Source.KEPT and (b, k) != (chain.kept_rows, chain.kept_columns):
        return False
    if d.source == Source.CHAIN and (b, k) != (chain.operand_rows, chain.operand_columns):
        return False
    if d.keep == Keep.APPEND:
        whole_words = chain.kept_columns > 0 and chain.kept_columns % WORD_VALUES == 0
        return whole_words and chain.kept_rows == b and chain.kept_columns + n <= KEPT_MAX_VALUES
    return True


def check(d: Descriptor, config: NdpConfig, window: QueueWindow, chain: ChainState = ChainState()) -> Verdict:
    """Judge descriptor ``d`` of a queue with ``window``, given what its chain left on the device.

    ``chain`` is the default for the first descriptor of a chain (and for one that is no chain).
    """
    status = _static(d, config, window)
    if status is not Status.OK:
        return Verdict(status)
    if not _follows(d, config, chain):
        return Verdict(Status.CHAIN_BROKEN)
    n, k, b = d.device_rows, d.device_columns, d.gpu_rows
    after = chain
    if d.source == Source.SLOT:
        after = replace(after, operand_rows=b, operand_columns=k)
    if d.keep == Keep.NEW:
        after = replace(after, kept_rows=b, kept_columns=n)
    elif d.keep == Keep.APPEND:
        after = replace(after, kept_columns=chain.kept_columns + n)
    if d.acc_out:
        split = pack_geometry(config, n, k).split
        after = replace(after, acc_rows=n, acc_batch=b, acc_split=split, acc_terms=chain.acc_terms + k)
    else:
        after = replace(after, acc_rows=0, acc_batch=0, acc_split=0, acc_terms=0)
    return Verdict(Status.OK, after if d.chain else ChainState())
