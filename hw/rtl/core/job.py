"""What the decoder makes of a descriptor, as records for the units behind it.

A *job* is a legal descriptor on its way through the core. The decoder splits it: the *work* says what
the buffers and the array have to do, in their own units (stripes, beats, channel-local addresses); the
*record* waits until the work is done and then becomes the completion.
"""

from __future__ import annotations

from enum import IntEnum

from amaranth.hdl import Shape, unsigned
from amaranth.lib import data

from plora.hw.defs.config import (
    KEPT_MAX_VALUES,
    KEPT_ROW_WORDS,
    PE_ROWS,
    SOFTMAX_BANKS,
    SOFTMAX_MAX_ROWS,
    WORD_VALUES,
    NdpConfig,
)
from plora.hw.defs.descriptor import MAX_OPERAND_BYTES
from plora.hw.defs.packing import ceil_div
from plora.hw.rtl.core.expander import EXPANSION_BITS, MAX_EXPANSION
from plora.hw.rtl.interfaces import (
    QUEUE_BITS,
    SCALE_BITS,
    STATUS_BITS,
    descriptor_layout,
    exponents_layout,
    word_address_bits,
)
from plora.hw.rtl.pe.array import TAP_BITS, split_bits
from plora.hw.rtl.sfu.sfu import BANK_BITS

JOB_SLOTS = 4
"""Jobs between the start of their reads and their last beat. Short jobs need several, or the latency
of memory shows between them; the identity of a job in flight is its slot."""

JOB_SLOT_BITS = (JOB_SLOTS - 1).bit_length()

RECORDS = 8
"""Jobs, and refused descriptors, between decoder and completion."""

FINISHED = 4
"""Jobs that were let into the array and are not completed."""

RESULT_HALVES = 2

SOFTMAX_PAIRS = SOFTMAX_MAX_ROWS // PE_ROWS
"""Most pairs of query rows of a job that makes or takes softmax terms."""

SOFTMAX_STATES = SOFTMAX_BANKS * SOFTMAX_PAIRS
"""Pairs of states of the softmax unit: that of pair p in bank b is ``b * SOFTMAX_PAIRS + p``."""

SCALE_IGNORED_BITS = 7
"""Lowest bits of the softmax scale, which do not count."""

SCALE_USED_BITS = SCALE_BITS - SCALE_IGNORED_BITS

REGION_BITS = 2


class Region(IntEnum):
    """Where in the output buffer results go. The numbers of the halves are theirs."""

    HALF_0 = 0
    HALF_1 = 1
    KEPT = 2


DESTINATION_BITS = 2


class Destination(IntEnum):
    """What becomes of a job's sums."""

    MEMORY = 0
    """Results in a result half, then in memory."""
    KEPT = 1
    """Results in the kept part."""
    ACCUMULATORS = 2
    """They stay where they are."""


def channel_bits(config: NdpConfig) -> int:
    """log2 of the number of channels."""
    return config.channels.bit_length() - 1


def local_address_bits(config: NdpConfig) -> int:
    """Bits of a channel-local word address."""
    return word_address_bits(config) - channel_bits(config)


def stripe_count_bits(config: NdpConfig) -> int:
    """Bits of a number of stripes of one device operand, which the 20-bit byte size limits."""
    return (MAX_OPERAND_BYTES // config.stripe_bytes).bit_length()


def input_capacity(config: NdpConfig) -> int:
    """Stripes that the input buffer holds for each PE row; a power of two."""
    return 2 * config.input_half_stripes


def max_pairs(config: NdpConfig) -> int:
    """Most pairs of operand rows of one job: those of one-stripe rows, or of kept rows."""
    return max(config.input_half_stripes, config.kept_words // KEPT_ROW_WORDS)


def max_group_rows(config: NdpConfig) -> int:
    """Most output rows of a group: four taps in every channel."""
    return 4 * config.channels


def kept_word_bits(config: NdpConfig) -> int:
    """Bits of a word's number in the kept part."""
    return (config.kept_words - 1).bit_length()


def work_layout(config: NdpConfig) -> data.StructLayout:
    """The work of one job.

    ====================  ==============================================================================
    load                  1: the operand comes from the submission slot and is loaded first
    from_kept             1: the operand is the kept intermediate
    operand_address       channel-local word of the operand's first stripe
    operand_stripes       stripes of the operand, all rows
    row_stripes           stripes of one operand row
    pairs                 pairs of operand rows, the last perhaps with one row
    single                1: the last pair has one row
    weights_address       channel-local word of the device operand's first stripe
    stripes               stripes of the device operand
    groups, beats         row groups, and beats of each
    expansion             log2 of the beats that share a stripe, not 0: integers, with stripes of scales
    group_stripes         stripes of a group; 0: groups may begin within a stripe
    skip                  stripes between one group and the next
    tap, split_log2       see `plora.hw.rtl.pe.array.beat_layout`
    tail                  values of K in a group's last beat, 1 ... lanes of a tap x parts
    group_rows            output rows of a group but the last
    last_rows             output rows of the last group
    continues             1: go on with the sums in the accumulators
    destination           what becomes of the sums
    kept_stride           words from one pair of kept rows to the next
    bank                  bank of the softmax terms that it makes or takes; 0 of other jobs
    kept_word             first word of the kept part for the columns that it appends; token-wise, that it takes
    row_words             words of a result row
    token_wise            1: the weights are a transposed operand, the kept intermediate softmax terms
    softmax               1: the results are scores, and pass the softmax unit
    begins                1: they begin the rows of that unit anew
    scale                 highest bits of the softmax scale
    bf16                  1: operands are BF16, and results that are no scores too
    exponents             powers of two of its operands and of a kept result
    ====================  ==============================================================================
    """
    stripes = unsigned(stripe_count_bits(config))
    beats = unsigned(stripe_count_bits(config) + MAX_EXPANSION)
    rows = unsigned(max_group_rows(config).bit_length())
    return data.StructLayout(
        {
            "load": 1,
            "from_kept": 1,
            "operand_address": local_address_bits(config),
            "operand_stripes": (PE_ROWS * config.input_half_stripes).bit_length(),
            "row_stripes": config.input_half_stripes.bit_length(),
            "pairs": max_pairs(config).bit_length(),
            "single": 1,
            "weights_address": local_address_bits(config),
            "stripes": stripes,
            "groups": beats,
            "beats": beats,
            "expansion": EXPANSION_BITS,
            "group_stripes": stripes,
            "skip": stripes,
            "tap": TAP_BITS,
            "split_log2": split_bits(config),
            "tail": (WORD_VALUES * config.channels).bit_length(),
            "group_rows": rows,
            "last_rows": rows,
            "continues": 1,
            "destination": DESTINATION_BITS,
            "kept_stride": config.kept_words.bit_length(),
            "bank": BANK_BITS,
            "kept_word": kept_word_bits(config),
            "row_words": config.result_half_words.bit_length(),
            "token_wise": 1,
            "softmax": 1,
            "begins": 1,
            "scale": SCALE_USED_BITS,
            "bf16": 1,
            "exponents": exponents_layout,
        }
    )


def record_layout(config: NdpConfig) -> data.StructLayout:
    """What is known of a descriptor before it runs.

    ==============  ====================================================================================
    descriptor      as it came
    queue           whose it is
    first           1: begins a chain, or is none
    verdict         1: ``status`` is the queue engine's
    status          OK: there is work of this job
    result_address  DPA word of the first result line
    ==============  ====================================================================================
    """
    return data.StructLayout(
        {
            "descriptor": descriptor_layout,
            "queue": QUEUE_BITS,
            "first": 1,
            "verdict": 1,
            "status": STATUS_BITS,
            "result_address": word_address_bits(config),
        }
    )


def decoded_layout(config: NdpConfig) -> data.StructLayout:
    """What the decoder gives for every descriptor; the work has a meaning only where the status is OK."""
    return data.StructLayout({"record": record_layout(config), "work": work_layout(config)})


def result_address_bits(config: NdpConfig) -> int:
    """Bits of a word's address in a region of the output buffer."""
    return (max(config.result_half_words, config.kept_words) - 1).bit_length()


def result_tag_layout(config: NdpConfig) -> data.StructLayout:
    """What travels through the array with a group's sums to say where its results belong.

    ==========  ========================================================================================
    region      `Region`
    word        word of the region with the group's first value, for both rows
    lane        its place in that word
    rows        output rows of the group that exist
    split_log2  as in the beat
    state       pair of states of the softmax unit
    softmax     1: the results are scores, and pass the softmax unit
    begins      1: they begin the two rows of that unit anew
    scale       of the scores
    bf16        1: the results are BF16
    exponent    of the power of two by which they are multiplied where they are kept
    anchor      1: the last group of a token-wise job: the rows' anchors follow in the next word
    end         1: the job's last results
    ==========  ========================================================================================
    """
    return data.StructLayout(
        {
            "region": REGION_BITS,
            "word": result_address_bits(config),
            "lane": (WORD_VALUES - 1).bit_length(),
            "rows": max_group_rows(config).bit_length(),
            "split_log2": split_bits(config),
            "state": range(SOFTMAX_STATES),
            "softmax": 1,
            "begins": 1,
            "scale": SCALE_USED_BITS,
            "bf16": 1,
            "exponent": exponents_layout["kept"].shape,
            "anchor": 1,
            "end": 1,
        }
    )


def result_tag_bits(config: NdpConfig) -> int:
    """Bits of `result_tag_layout`."""
    width: int = Shape.cast(result_tag_layout(config)).width
    return width


assert ceil_div(KEPT_MAX_VALUES, WORD_VALUES) == KEPT_ROW_WORDS


__all__ = [
    "FINISHED",
    "JOB_SLOTS",
    "JOB_SLOT_BITS",
    "RECORDS",
    "REGION_BITS",
    "RESULT_HALVES",
    "SCALE_IGNORED_BITS",
    "SCALE_USED_BITS",
    "SOFTMAX_PAIRS",
    "SOFTMAX_STATES",
    "Destination",
    "Region",
    "channel_bits",
    "decoded_layout",
    "input_capacity",
    "kept_word_bits",
    "local_address_bits",
    "max_group_rows",
    "max_pairs",
    "record_layout",
    "result_address_bits",
    "result_tag_bits",
    "result_tag_layout",
    "stripe_count_bits",
    "work_layout",
]
