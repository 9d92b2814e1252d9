"""The result writer: sends a result half to memory, line by line, and waits for every acknowledgement."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import PE_ROWS, VALUE_BYTES, WORD_BYTES, WORD_VALUES, NdpConfig
from plora.hw.rtl.core.job import RESULT_HALVES
from plora.hw.rtl.interfaces import WORD_BITS, LineWritePort, word_address_bits

LANE_BITS = (WORD_VALUES - 1).bit_length()
VALUE_BITS = 8 * VALUE_BYTES


def lines_bits(config: NdpConfig) -> int:
    """Bits of a number of lines of one result."""
    return (PE_ROWS * config.result_half_words).bit_length()


def result_layout(config: NdpConfig) -> data.StructLayout:
    """A result in a half: DPA word of its first line, half, and its shape (``rows`` x ``columns`` values)."""
    return data.StructLayout(
        {
            "address": word_address_bits(config),
            "half": range(RESULT_HALVES),
            "rows": lines_bits(config),
            "columns": (WORD_VALUES * config.result_half_words).bit_length(),
        }
    )


class ResultWriter(wiring.Component):
    """Writes one result at a time; rows are whole lines, one after the other, and their tails zero.

    Result row b comes from PE row b mod 2. One line a cycle while memory takes them. The next result
    may begin when all lines of the last are acknowledged, since an acknowledgement does not say whose
    it is. The half itself is free as soon as its last line has left.

    Ports:
        result: taken when it has been written and acknowledged.
        failed, lines: with the taking of ``result``: memory refused a line; lines of the result.
        emptied: the last line of the half has left.
        half, row, address, enable, word: reads of the output buffer.
        write: lines to memory.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "result": In(stream.Signature(result_layout(config))),
                "failed": Out(1),
                "lines": Out(lines_bits(config)),
                "emptied": Out(1),
                "half": Out(range(RESULT_HALVES)),
                "row": Out(range(PE_ROWS)),
                "address": Out(range(config.result_half_words)),
                "enable": Out(1),
                "word": In(WORD_BITS),
                "write": Out(LineWritePort(config)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        config = self._config
        result, line = self.result.payload, self.write.line

        # Where the next read is: word ``word`` of row ``rows_done``.
        reading, read = Signal(), Signal()
        last_word = Signal.like(self.address)
        word, pair_address = Signal.like(self.address), Signal.like(self.address)
        rows_done = Signal.like(result.rows)
        end_row, end_result = Signal(), Signal()
        # The word that the buffer shows, and its way to memory.
        shown, shown_tail, shown_last = Signal(), Signal(), Signal()
        line_address = Signal.like(result.address)
        sent = Signal()
        unanswered = Signal(lines_bits(config))
        failed, all_sent = Signal(), Signal()

        m.d.comb += [
            last_word.eq((result.columns - 1) >> LANE_BITS),
            end_row.eq(word == last_word),
            end_result.eq(end_row & (rows_done + 1 == result.rows)),
            sent.eq(line.valid & line.ready),
            read.eq(reading & (~shown | line.ready)),
            self.half.eq(result.half),
            self.row.eq(rows_done[0]),
            self.address.eq(pair_address + word),
            self.enable.eq(read),
            line.valid.eq(shown),
            line.payload.address.eq(line_address),
            line.payload.strobe.eq(~0),
            line.payload.data.eq(self._without_tail(self.word, shown_tail, result.columns[:LANE_BITS])),
            self.emptied.eq(sent & shown_last),
            self.failed.eq(failed),
        ]
        with m.If(read):
            m.d.sync += [shown.eq(1), shown_tail.eq(end_row), shown_last.eq(end_result), word.eq(word + 1)]
            with m.If(end_row):
                m.d.sync += [word.eq(0), rows_done.eq(rows_done + 1)]
                with m.If(rows_done[0]):
                    m.d.sync += pair_address.eq(pair_address + last_word + 1)
            with m.If(end_result):
                m.d.sync += reading.eq(0)
        with m.Elif(sent):
            m.d.sync += shown.eq(0)
        with m.If(sent):
            m.d.sync += [line_address.eq(line_address + 1), self.lines.eq(self.lines + 1)]
        m.d.sync += unanswered.eq(unanswered + sent - self.write.ack)

        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += [
                    word.eq(0),
                    pair_address.eq(0),
                    rows_done.eq(0),
                    line_address.eq(result.address),
                    failed.eq(0),
                    self.lines.eq(0),
                    all_sent.eq(0),
                ]
                with m.If(self.result.valid):
                    m.d.sync += reading.eq(1)
                    m.next = "WRITE"
            with m.State("WRITE"):
                with m.If(self.emptied):
                    m.d.sync += all_sent.eq(1)
                with m.If(self.write.ack & self.write.ack_error):
                    m.d.sync += failed.eq(1)
                with m.If(all_sent & (unanswered == 0)):
                    m.d.comb += self.result.ready.eq(1)
                    m.next = "IDLE"
        return m

    def _without_tail(self, word: Signal, partial: Signal, values: Signal) -> Signal:
        """``word``, with zeros after its first ``values`` values if it is ``partial``; 0 means all of them."""
        lanes = [
            Mux(partial & (values != 0) & (values <= lane), 0, word.word_select(lane, VALUE_BITS))
            for lane in range(WORD_VALUES)
        ]
        return Cat(lanes)


assert WORD_BITS == 8 * WORD_BYTES
