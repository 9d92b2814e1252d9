"""What a descriptor and a queue's registers must satisfy, as pure functions: the specification of the RTL.

`check` (the decoder) and `ring_setup_allowed` (the queue engine's answer to an enable) are used by the
functional device as they stand; tests hold the RTL to them bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from plora.hw.defs.config import (
    KEPT_MAX_TOKENS,
    KEPT_MAX_VALUES,
    KEPT_ROW_WORDS,
    PE_ROWS,
    SOFTMAX_MAX_ROWS,
    VALUE_BYTES,
    WORD_BYTES,
    WORD_VALUES,
    NdpConfig,
)
from plora.hw.defs.descriptor import Descriptor, DType, Keep, Op, Source, Type
from plora.hw.defs.packing import (
    INTEGER_MIN_COLUMNS,
    ceil_div,
    expansion_log2,
    operand_row_stripes,
    pack_geometry,
    pack_geometry_transposed,
    result_row_words,
)
from plora.hw.defs.queue import (
    MAX_DEPTH,
    MAX_SLOT_LOG2,
    MIN_DEPTH,
    MIN_SLOT_LOG2,
    NO_EXPONENTS,
    RESULT_OFFSET,
    Exponents,
    operand_offset,
    softmax_scale_allowed,
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
    kept_softmax: bool = False
    """It passed the softmax unit."""
    previous_rows: int = 0
    previous_columns: int = 0
    """Columns of the softmax terms kept before those; 0 if there are none."""
    operand_rows: int = 0
    operand_columns: int = 0
    """Shape of the operand loaded last from a slot; 0 if there is none."""
    acc_rows: int = 0
    """N of the sums left in the accumulators; 0 if there are none."""
    acc_batch: int = 0
    acc_split: int = 0
    """Parts into which K was dealt: sums lie in as many channels, and only sums that lie alike can go on."""
    acc_terms: int = 0
    """Columns of the GPU operand whose products were summed so far."""
    acc_transpose: bool = False
    """The sums are those of a transposed operand."""
    acc_previous: bool = False
    """The sums are those of the previous softmax terms."""


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

    @property
    def window(self) -> QueueWindow:
        """What the queue may touch, and the sizes of its slots."""
        return QueueWindow(self.base, self.limit, 1 << self.submission_slot_log2, 1 << self.result_slot_log2)


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


def kept_column_limit(config: NdpConfig, pairs: int, *, softmax: bool) -> int:
    """Most columns of a kept intermediate of ``pairs`` pairs of rows; 0 if there is no room for so many rows."""
    stride = config.kept_stride(pairs, softmax=softmax)
    if softmax:
        return min(stride * WORD_VALUES, KEPT_MAX_TOKENS)
    return KEPT_MAX_VALUES if stride >= KEPT_ROW_WORDS else 0


def _flags_agree(d: Descriptor) -> bool:
    softmax = d.op == Op.SOFTMAX
    held = d.keep != Keep.NONE or d.acc_out
    if d.keep > Keep.APPEND or (held and not d.chain) or (d.keep and d.acc_out):
        return False
    # The new intermediate would overwrite the words that later row groups still read.
    if d.source == Source.KEPT and d.keep == Keep.NEW:
        return False
    if softmax and (d.keep == Keep.NONE or d.source == Source.KEPT or d.acc_in or d.transpose):
        return False
    if d.source == Source.PREVIOUS and not d.transpose:
        return False
    return not d.transpose or (d.source in (Source.KEPT, Source.PREVIOUS) and d.keep == Keep.NONE)


def _static(d: Descriptor, config: NdpConfig, window: QueueWindow) -> Status:
    n, k, b = d.device_rows, d.device_columns, d.gpu_rows
    softmax = d.op == Op.SOFTMAX
    if d.type != Type.READ_COMPUTE:
        return Status.BAD_TYPE
    if d.op not in (Op.GEMV, Op.GEMM, Op.SOFTMAX):
        return Status.BAD_OP
    if d.dtype not in tuple(DType) or (expansion_log2(d.dtype) and not (softmax or d.transpose)):
        return Status.BAD_DTYPE
    if not _flags_agree(d):
        return Status.BAD_FLAGS
    if d.reserved:
        return Status.BAD_RESERVED
    if not (n and k and b and d.gpu_columns):
        return Status.ZERO_DIMENSION
    pairs = ceil_div(b, PE_ROWS)
    narrow = not d.transpose and (d.source == Source.KEPT or softmax)
    taps, groups, held_stripes = _geometry(d, config)
    if (
        k != d.gpu_columns
        or (d.op == Op.GEMV and b != 1)
        or (softmax and b > SOFTMAX_MAX_ROWS)
        or k > config.accumulator.max_terms
        or (narrow and k > KEPT_MAX_VALUES)
        or (d.transpose and n > KEPT_MAX_VALUES)
        or (expansion_log2(d.dtype) and not d.transpose and k < INTEGER_MIN_COLUMNS)
        or ((d.acc_in or d.acc_out) and (pairs > 1 or groups > 1 or taps > 1))
    ):
        return Status.SHAPE_MISMATCH
    if d.gpu_bytes != b * k * VALUE_BYTES or not _device_bytes_fit(d, config):
        return Status.SIZE_MISMATCH
    if d.device_address % config.stripe_bytes:
        return Status.MISALIGNED
    if not in_window(d.device_address, d.device_bytes, window.base, window.limit, 1 << config.dpa_bits):
        return Status.OUT_OF_WINDOW
    row_stripes = operand_row_stripes(config, k)
    row_words = result_row_words(n, transpose=d.transpose)
    if d.source == Source.SLOT and pairs * row_stripes > config.input_half_stripes:
        return Status.INPUT_TOO_LARGE
    if d.keep:
        if n > kept_column_limit(config, pairs, softmax=softmax):
            return Status.OUTPUT_TOO_LARGE
    elif not d.acc_out and pairs * row_words > config.result_half_words:
        return Status.OUTPUT_TOO_LARGE
    if pairs > 1 and held_stripes > config.dram_buffer_stripes:
        return Status.WEIGHTS_TOO_LARGE
    operand_end = operand_offset(config) + b * row_stripes * config.stripe_bytes
    result_end = RESULT_OFFSET + b * row_words * WORD_BYTES
    if (d.source == Source.SLOT and operand_end > window.submission_slot_bytes) or (
        not (d.keep or d.acc_out) and result_end > window.result_slot_bytes
    ):
        return Status.SLOT_OVERFLOW
    return Status.OK


def _scales_allowed(d: Descriptor, scale: int, exponents: Exponents) -> bool:
    if d.op == Op.SOFTMAX and not softmax_scale_allowed(scale):
        return False
    return d.dtype != DType.BF16 or exponents.allowed()


def _geometry(d: Descriptor, config: NdpConfig) -> tuple[int, int, int]:
    """Taps and groups of the device operand, and the stripes of a group that stay while pairs of rows pass.

    Keys that are integers have few beats a group: at most 4 stripes, which every DRAM buffer holds.
    """
    if d.transpose:
        v = pack_geometry_transposed(config, d.device_rows, d.device_columns, d.dtype)
        return 1, v.groups, v.group_stripes
    w = pack_geometry(config, d.device_rows, d.device_columns)
    return w.taps, w.groups, 0 if expansion_log2(d.dtype) else w.beats


def _device_bytes_fit(d: Descriptor, config: NdpConfig) -> bool:
    n, k = d.device_rows, d.device_columns
    if d.transpose:
        return pack_geometry_transposed(config, n, k, d.dtype).stride(d.device_bytes) is not None
    return d.device_bytes == pack_geometry(config, n, k, d.dtype).packed_bytes


def _split(d: Descriptor, config: NdpConfig) -> int:
    return 1 if d.transpose else pack_geometry(config, d.device_rows, d.device_columns).split


def _follows(d: Descriptor, config: NdpConfig, chain: ChainState) -> bool:
    n, k, b = d.device_rows, d.device_columns, d.gpu_rows
    softmax = d.op == Op.SOFTMAX
    if bool(d.acc_in) != bool(chain.acc_rows):
        return False
    if d.acc_in and (
        (n, b, _split(d, config)) != (chain.acc_rows, chain.acc_batch, chain.acc_split)
        or chain.acc_terms + k > config.accumulator.max_terms
        or (bool(d.transpose), d.source == Source.PREVIOUS) != (chain.acc_transpose, chain.acc_previous)
    ):
        return False
    if d.transpose and not _takes_kept_tokens(d, chain):
        return False
    if d.source == Source.KEPT and (b, bool(d.transpose)) != (chain.kept_rows, chain.kept_softmax):
        return False
    if d.source == Source.PREVIOUS and b != chain.previous_rows:
        return False
    if d.source == Source.KEPT and not d.transpose and k != chain.kept_columns:
        return False
    if d.source == Source.CHAIN and (b, k) != (chain.operand_rows, chain.operand_columns):
        return False
    if d.keep == Keep.APPEND:
        limit = kept_column_limit(config, ceil_div(b, PE_ROWS), softmax=softmax)
        whole_words = chain.kept_columns > 0 and chain.kept_columns % WORD_VALUES == 0
        alike = (chain.kept_rows, chain.kept_softmax) == (b, softmax)
        return whole_words and alike and chain.kept_columns + n <= limit
    return True


def _takes_kept_tokens(d: Descriptor, chain: ChainState) -> bool:
    """True if the tokens from the last summed one on are there, and none is left out of a result."""
    end = chain.acc_terms + d.device_columns
    there = chain.previous_columns if d.source == Source.PREVIOUS else chain.kept_columns
    whole_words = chain.acc_terms % WORD_VALUES == 0
    return whole_words and (end <= there if d.acc_out else end == there)


def check(
    d: Descriptor,
    config: NdpConfig,
    window: QueueWindow,
    chain: ChainState = ChainState(),
    scale: int = 0,
    exponents: Exponents = NO_EXPONENTS,
) -> Verdict:
    """Judge descriptor ``d`` of a queue with ``window``, given what its chain left on the device.

    ``chain`` is the default for the first descriptor of a chain (and for one that is no chain); ``scale`` is the
    softmax scale of the submission line, FP32 bits, and ``exponents`` are those beside it.
    """
    status = _static(d, config, window)
    if status is not Status.OK:
        return Verdict(status)
    if not _scales_allowed(d, scale, exponents):
        return Verdict(Status.BAD_SCALE)
    if not _follows(d, config, chain):
        return Verdict(Status.CHAIN_BROKEN)
    n, k, b = d.device_rows, d.device_columns, d.gpu_rows
    after = chain
    if d.source == Source.SLOT:
        after = replace(after, operand_rows=b, operand_columns=k)
    if d.keep == Keep.NEW:
        softmax = d.op == Op.SOFTMAX
        # Softmax terms go to the other bank; any other intermediate may overwrite both.
        stays = softmax and chain.kept_softmax
        after = replace(
            after,
            kept_rows=b,
            kept_columns=n,
            kept_softmax=softmax,
            previous_rows=chain.kept_rows if stays else 0,
            previous_columns=chain.kept_columns if stays else 0,
        )
    elif d.keep == Keep.APPEND:
        after = replace(after, kept_columns=chain.kept_columns + n)
    if d.acc_out:
        after = replace(
            after,
            acc_rows=n,
            acc_batch=b,
            acc_split=_split(d, config),
            acc_terms=chain.acc_terms + k,
            acc_transpose=bool(d.transpose),
            acc_previous=d.source == Source.PREVIOUS,
        )
    else:
        after = replace(
            after, acc_rows=0, acc_batch=0, acc_split=0, acc_terms=0, acc_transpose=False, acc_previous=False
        )
    return Verdict(Status.OK, after if d.chain else ChainState())
