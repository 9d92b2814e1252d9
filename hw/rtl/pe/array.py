"""The PE array: two rows of dot units over all channels, and the drains that turn sums into FP16.

The numeric contract is in docs/numerics.md; its executable form is `plora.sim.golden.numerics`.
"""

from __future__ import annotations

from amaranth.hdl import unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import PE_ROWS, WORD_VALUES, NdpConfig
from plora.hw.rtl.interfaces import NUMERIC_BITS, WORD_BITS

RESULT_BITS = 16
TAP_BITS = 2
"""Bits of a tap code and of a tap index: a word holds 1, 2 or 4 output rows."""


def split_bits(config: NdpConfig) -> int:
    """Bits of ``split_log2``; one even where there is a single channel, which never splits."""
    return max(1, (config.channels.bit_length() - 1).bit_length())


def beat_layout(config: NdpConfig, tag_bits: int) -> data.StructLayout:
    """What the array eats in one cycle. In the terms of `plora.hw.defs.packing`:

    ==============  ====================================================================================
    weights         word ``c`` of the stripe, for every channel
    inputs          for both rows: the operand word that channel ``c`` multiplies its weight word with
    mask            lanes with ``k < K``, for every channel; other lanes contribute nothing at all.
                    The pattern repeats from tap to tap
    tap             output rows in a word: 0: 1 (32 lanes), 1: 2 (16 lanes), 2: 4 (8 lanes).
                    More than one row needs ``first`` and ``last``
    split_log2      log2 of the parts over which K is dealt
    first           the beat begins new sums; otherwise it adds to those in the accumulators
    last            the sums are complete with this beat: they leave as results
    second_row      input row 1 is used; returned with the results
    tag             returned with the results
    ==============  ====================================================================================
    """
    words = data.ArrayLayout(WORD_BITS, config.channels)
    return data.StructLayout(
        {
            "weights": words,
            "inputs": data.ArrayLayout(words, PE_ROWS),
            "mask": data.ArrayLayout(WORD_VALUES, config.channels),
            "tap": TAP_BITS,
            "split_log2": split_bits(config),
            "first": 1,
            "last": 1,
            "second_row": 1,
            "tag": tag_bits,
        }
    )


def results_layout(config: NdpConfig, tag_bits: int) -> data.StructLayout:
    """The results of one tap of one row group: up to ``channels`` values of each row.

    ``values[row][q]`` is y[row, n] with ``n = i * group_rows + tap_index * part_channels + q``, for
    ``q < part_channels``; others have no meaning. ``numeric[row][q]`` says of the same value, by the
    bits of `plora.hw.defs.queue`, that it is NaN or that it overflowed.
    """
    return data.StructLayout(
        {
            "values": data.ArrayLayout(data.ArrayLayout(unsigned(RESULT_BITS), config.channels), PE_ROWS),
            "numeric": data.ArrayLayout(data.ArrayLayout(unsigned(NUMERIC_BITS), config.channels), PE_ROWS),
            "tap_index": TAP_BITS,
            "last_tap": 1,
            "second_row": 1,
            "tag": tag_bits,
        }
    )


class PeArray(wiring.Component):
    """``PE_ROWS`` x ``channels`` x ``WORD_VALUES`` multiply-adds.

    Parameters:
        config: sizes.
        tag_bits: width of the beat's tag, at least 1.

    Ports:
        beats: operands, see `beat_layout`.
        results: see `results_layout`; must be taken as they come.
    """

    def __init__(self, config: NdpConfig, *, tag_bits: int) -> None:
        if tag_bits < 1:
            raise ValueError(f"tag_bits must be at least 1, not {tag_bits!r}")
        self._config = config
        self._tag_bits = tag_bits
        super().__init__(
            {
                "beats": In(stream.Signature(beat_layout(config, tag_bits))),
                "results": Out(stream.Signature(results_layout(config, tag_bits), always_ready=True)),
            }
        )
