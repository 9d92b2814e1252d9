"""The output buffer: results on their way to memory, and intermediates of a chain."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import PE_ROWS, WORD_VALUES, NdpConfig
from plora.hw.rtl.core.job import REGION_BITS, RESULT_HALVES, Region, result_address_bits
from plora.hw.rtl.core.sram import Sram
from plora.hw.rtl.interfaces import OPERAND_EXPONENT_BITS, WORD_BITS
from plora.hw.rtl.pe.converter import WordConverter
from plora.hw.rtl.sfu.score_scale import ANCHOR_BITS

VALUE_BITS = WORD_BITS // WORD_VALUES
assert ANCHOR_BITS == VALUE_BITS


def result_write_layout(config: NdpConfig) -> data.StructLayout:
    """Values to store in one word of each PE row: where, which lanes, in which rows, and the words.

    ``anchors`` are those of the values if they are softmax terms. ``bf16`` says that the values are BF16: those
    that are kept are multiplied by 2 to the ``exponent`` and become FP16, what the array multiplies.
    """
    return data.StructLayout(
        {
            "valid": 1,
            "region": REGION_BITS,
            "word": result_address_bits(config),
            "lanes": WORD_VALUES,
            "second_row": 1,
            "data": data.ArrayLayout(WORD_BITS, PE_ROWS),
            "anchors": data.ArrayLayout(ANCHOR_BITS, PE_ROWS),
            "bf16": 1,
            "exponent": signed(OPERAND_EXPONENT_BITS),
        }
    )


def word_anchors_layout(config: NdpConfig) -> data.ArrayLayout:
    """The anchors of a kept word of softmax terms: one for every unit, as many terms as there are channels."""
    return data.ArrayLayout(ANCHOR_BITS, WORD_VALUES // config.channels)


class OutputBuffer(wiring.Component):
    """Three regions for each PE row, each a memory of its own.

    The kept part holds the chain's intermediate: pair p of its rows begins at word ``p * kept_stride``
    (`plora.hw.defs.config.NdpConfig.kept_stride`), of softmax terms from the first word of their bank on. These
    have their anchors beside them, in a memory of the same addresses: what is written at a time has one
    anchor. Of the two result halves one fills
    while the other is written to memory; a half is never read and written at once, nor is a word of the
    kept part.

    Ports:
        write: results, any lanes of one word of one region.
        kept_address, kept_enable: at an edge with ``kept_enable`` that word of both rows comes to
            ``kept``, with its anchors to ``anchors``, and stays until the next.
        result_half, result_row, result_address, result_enable: likewise one row's word of a half, to
            ``result``.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "write": In(result_write_layout(config)),
                "kept_address": In(range(config.kept_words)),
                "kept_enable": In(1),
                "kept": Out(data.ArrayLayout(WORD_BITS, PE_ROWS)),
                "anchors": Out(data.ArrayLayout(word_anchors_layout(config), PE_ROWS)),
                "result_half": In(range(RESULT_HALVES)),
                "result_row": In(range(PE_ROWS)),
                "result_address": In(range(config.result_half_words)),
                "result_enable": In(1),
                "result": Out(WORD_BITS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        config, write = self._config, self.write
        half, row_read = Signal(range(RESULT_HALVES)), Signal(range(PE_ROWS))
        with m.If(self.result_enable):
            m.d.sync += [half.eq(self.result_half), row_read.eq(self.result_row)]

        def memory(name: str, region: Region, row: int, depth: int, lanes: Value, value: Value) -> Sram:
            width, depth = len(lanes) * VALUE_BITS, max(2, depth)
            words = Sram(width=width, depth=depth, lane_bits=VALUE_BITS)
            add_shared(m, platform, f"{name}_row_{row}", f"sram_{width}x{depth}_lanes_{VALUE_BITS}", words)
            here = write.valid & (write.region == region) & (write.second_row if row else 1)
            m.d.comb += [
                words.write_address.eq(write.word),
                words.write_enable.eq(Mux(here, lanes, 0)),
                words.write_data.eq(value),
            ]
            return words

        first_lanes = Cat(write.lanes[lane] for lane in range(0, WORD_VALUES, config.channels))
        for row in range(PE_ROWS):
            converter = WordConverter()
            add_shared(m, platform, f"converter_{row}", "word_converter", converter)
            m.d.comb += [
                converter.data.eq(write.data[row]),
                converter.bf16.eq(write.bf16),
                converter.exponent.eq(write.exponent),
            ]
            kept = memory("kept", Region.KEPT, row, config.kept_words, write.lanes, converter.converted)
            repeated = write.anchors[row].replicate(len(first_lanes))
            anchors = memory("anchors", Region.KEPT, row, config.kept_words, first_lanes, repeated)
            for words in (kept, anchors):
                m.d.comb += [words.read_address.eq(self.kept_address), words.read_enable.eq(self.kept_enable)]
            m.d.comb += [self.kept[row].eq(kept.read_data), self.anchors[row].eq(anchors.read_data)]
            for index, region in enumerate((Region.HALF_0, Region.HALF_1)):
                depth = config.result_half_words
                results = memory(region.name.lower(), region, row, depth, write.lanes, write.data[row])
                m.d.comb += [
                    results.read_address.eq(self.result_address),
                    results.read_enable.eq(self.result_enable & (self.result_half == index) & (self.result_row == row)),
                ]
                with m.If((half == index) & (row_read == row)):
                    m.d.comb += self.result.eq(results.read_data)
        return m
