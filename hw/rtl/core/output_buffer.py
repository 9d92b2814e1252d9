"""The output buffer: results on their way to memory, and intermediates of a chain."""

from __future__ import annotations

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import PE_ROWS, WORD_VALUES, NdpConfig
from plora.hw.rtl.core.job import REGION_BITS, RESULT_HALVES, Region, result_address_bits
from plora.hw.rtl.core.sram import Sram
from plora.hw.rtl.interfaces import WORD_BITS

VALUE_BITS = WORD_BITS // WORD_VALUES


def result_write_layout(config: NdpConfig) -> data.StructLayout:
    """Values to store in one word of each PE row: where, which lanes, in which rows, and the words."""
    return data.StructLayout(
        {
            "valid": 1,
            "region": REGION_BITS,
            "word": result_address_bits(config),
            "lanes": WORD_VALUES,
            "second_row": 1,
            "data": data.ArrayLayout(WORD_BITS, PE_ROWS),
        }
    )


class OutputBuffer(wiring.Component):
    """Three regions for each PE row, each a memory of its own.

    The kept part holds the chain's intermediate: pair p of its rows begins at word
    ``p * KEPT_ROW_WORDS``. Of the two result halves one fills while the other is written to memory; a
    half is never read and written at once, nor is a word of the kept part.

    Ports:
        write: results, any lanes of one word of one region.
        kept_address, kept_enable: at an edge with ``kept_enable`` that word of both rows comes to
            ``kept`` and stays until the next.
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

        def memory(region: Region, row: int, depth: int) -> Sram:
            depth = max(2, depth)
            words = Sram(width=WORD_BITS, depth=depth, lane_bits=VALUE_BITS)
            module = f"sram_{WORD_BITS}x{depth}_lanes_{VALUE_BITS}"
            add_shared(m, platform, f"{region.name.lower()}_row_{row}", module, words)
            here = write.valid & (write.region == region) & (write.second_row if row else 1)
            m.d.comb += [
                words.write_address.eq(write.word),
                words.write_enable.eq(Mux(here, write.lanes, 0)),
                words.write_data.eq(write.data[row]),
            ]
            return words

        for row in range(PE_ROWS):
            kept = memory(Region.KEPT, row, config.kept_words)
            m.d.comb += [
                kept.read_address.eq(self.kept_address),
                kept.read_enable.eq(self.kept_enable),
                self.kept[row].eq(kept.read_data),
            ]
            for index, region in enumerate((Region.HALF_0, Region.HALF_1)):
                results = memory(region, row, config.result_half_words)
                m.d.comb += [
                    results.read_address.eq(self.result_address),
                    results.read_enable.eq(self.result_enable & (self.result_half == index) & (self.result_row == row)),
                ]
                with m.If((half == index) & (row_read == row)):
                    m.d.comb += self.result.eq(results.read_data)
        return m
