"""What follows from a descriptor's dimensions and window without a product: `plora.hw.defs.packing` in hardware."""

from __future__ import annotations

from amaranth.hdl import Module, Mux, Signal, unsigned
from amaranth.lib import data

from plora.hw.defs.config import (
    DOT_LANES,
    DOTS_PER_WORD,
    KEPT_MAX_TOKENS,
    KEPT_MAX_VALUES,
    KEPT_ROW_WORDS,
    PE_ROWS,
    SOFTMAX_BANKS,
    WORD_VALUES,
    NdpConfig,
)
from plora.hw.defs.descriptor import Op, field
from plora.hw.defs.integers import INTEGER_BITS
from plora.hw.defs.packing import FRAME_SCALES, expansion_log2
from plora.hw.rtl.core.expander import EXPANSION_BITS
from plora.hw.rtl.core.job import channel_bits, max_group_rows
from plora.hw.rtl.pe.array import TAP_BITS, split_bits

DIMENSION_BITS = field("device_rows").width
ADDRESS_BITS = field("device_address").width
WORD_VALUES_LOG2 = WORD_VALUES.bit_length() - 1
MAX_TAPS_LOG2 = 2


def log2(power: int) -> int:
    """Return log2 of ``power``, which must be a power of two."""
    if power < 1 or power & (power - 1):
        raise ValueError(f"{power!r} is not a power of two")
    return power.bit_length() - 1


def geometry_layout(config: NdpConfig) -> data.StructLayout:
    """What follows from the dimensions and the window without a product. Terms of `plora.hw.defs.packing`.

    ``group_stripes`` are those of a group in memory, 0 for keys that are integers, whose groups may begin within a
    stripe; ``key_frames`` are the frames of such keys, 0 for all else. ``room`` is the signed distance from the
    operand's address to the end of the window, ``kept_limit`` the most columns that the result may have as a kept
    intermediate.
    """
    rows = unsigned(max_group_rows(config).bit_length())
    return data.StructLayout(
        {
            "taps_log2": TAP_BITS,
            "split_log2": split_bits(config),
            "groups": DIMENSION_BITS,
            "beats": DIMENSION_BITS,
            "expansion": EXPANSION_BITS,
            "group_stripes": DIMENSION_BITS,
            "key_frames": DIMENSION_BITS,
            "tail": (WORD_VALUES * config.channels).bit_length(),
            "group_rows": rows,
            "last_rows": rows,
            "row_stripes": DIMENSION_BITS,
            "row_words": DIMENSION_BITS,
            "pairs": DIMENSION_BITS,
            "kept_stride": config.kept_words.bit_length(),
            "kept_limit": max(KEPT_MAX_TOKENS, KEPT_MAX_VALUES).bit_length(),
            "room": ADDRESS_BITS + 1,
            "above_base": 1,
            "limit_exists": 1,
        }
    )


def geometry(m: Module, config: NdpConfig, fetched: data.View) -> data.View:
    """Return a `geometry_layout` of a fetched descriptor: `plora.hw.defs.packing.pack_geometry`,
    ``pack_geometry_transposed`` and their companions.
    """
    d = fetched.descriptor
    n, k = d.device_rows, d.device_columns
    channels_log2 = channel_bits(config)
    g = Signal(geometry_layout(config))
    kept_stride = Signal.like(g.kept_stride)
    last_row, last_column = Signal(DIMENSION_BITS), Signal(DIMENSION_BITS)
    rows_log2 = Signal(range(channels_log2 + MAX_TAPS_LOG2 + 1))
    columns_log2 = Signal(range(WORD_VALUES_LOG2 + channels_log2 + 1))
    # Apart from ``g``, which tools would take for feeding itself.
    expansion, frames = Signal(EXPANSION_BITS), Signal(DIMENSION_BITS)
    integers = expansion.any()
    m.d.comb += [
        last_row.eq(n - 1),
        last_column.eq(k - 1),
        g.taps_log2.eq(Mux(d.transpose | (k > DOT_LANES), 0, Mux(k > DOT_LANES // 2, 1, 2))),
        rows_log2.eq(channels_log2 + Mux(d.transpose, log2(DOTS_PER_WORD), g.taps_log2 - g.split_log2)),
        columns_log2.eq(WORD_VALUES_LOG2 - Mux(d.transpose, log2(DOTS_PER_WORD), g.taps_log2 - g.split_log2)),
        g.groups.eq((last_row >> rows_log2) + 1),
        g.beats.eq((last_column >> columns_log2) + 1),
        # Frames lie in front of as many tokens as a word of every channel has scales of.
        frames.eq((Mux(d.transpose, last_column, last_row) >> log2(FRAME_SCALES) + channels_log2) + 1),
        g.expansion.eq(expansion),
        g.key_frames.eq(Mux(integers & ~d.transpose, frames, 0)),
        g.tail.eq((last_column & ((1 << columns_log2) - 1)) + 1),
        g.group_rows.eq(1 << rows_log2),
        g.last_rows.eq((last_row & ((1 << rows_log2) - 1)) + 1),
        g.row_stripes.eq(last_column[WORD_VALUES_LOG2 + channels_log2 :] + 1),
        g.row_words.eq(last_row[WORD_VALUES_LOG2:] + 1 + d.transpose),
        g.pairs.eq((d.gpu_rows + PE_ROWS - 1) >> log2(PE_ROWS)),
        # The pairs share the kept part, or a bank of it, in equal powers of two.
        *(
            kept_stride[bit].eq((g.pairs <= config.kept_words >> bit) & (g.pairs > config.kept_words >> bit + 1))
            for bit in range(log2(config.kept_words) + 1)
        ),
        g.kept_stride.eq(Mux((d.op == Op.SOFTMAX) | d.transpose, kept_stride >> log2(SOFTMAX_BANKS), kept_stride)),
        g.room.eq(fetched.limit - d.device_address),
        g.above_base.eq(d.device_address >= fetched.base),
        g.limit_exists.eq(fetched.limit <= 1 << config.dpa_bits),
    ]
    for dtype in INTEGER_BITS:
        with m.If(d.dtype == dtype):
            m.d.comb += expansion.eq(expansion_log2(dtype))
    with m.If(~integers):
        m.d.comb += g.group_stripes.eq((last_column >> columns_log2) + 1)
    with m.Elif(d.transpose):
        m.d.comb += g.group_stripes.eq((last_column >> log2(DOT_LANES) + expansion) + 1 + frames)
    if not channels_log2:
        # Said, or the Verilog has a block without inputs, which Verilator refuses.
        m.d.comb += g.split_log2.eq(k[:1] & 0)
    for parts_log2 in range(1, channels_log2 + 1):
        with m.If((k > KEPT_MAX_VALUES) & (n <= config.channels >> parts_log2) & ~d.transpose):
            m.d.comb += g.split_log2.eq(parts_log2)
    with m.If(d.op != Op.SOFTMAX):
        m.d.comb += g.kept_limit.eq(Mux(g.kept_stride >= KEPT_ROW_WORDS, KEPT_MAX_VALUES, 0))
    with m.Elif(g.kept_stride > KEPT_MAX_TOKENS // WORD_VALUES):
        m.d.comb += g.kept_limit.eq(KEPT_MAX_TOKENS)
    with m.Else():
        m.d.comb += g.kept_limit.eq(g.kept_stride << WORD_VALUES_LOG2)
    return g
