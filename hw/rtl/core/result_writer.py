"""The result writer: sends result halves to memory, line by line, and counts the acknowledgements."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import PE_ROWS, VALUE_BYTES, WORD_BYTES, WORD_VALUES, NdpConfig
from plora.hw.rtl.core.job import RESULT_HALVES
from plora.hw.rtl.interfaces import WORD_BITS, LineWritePort, word_address_bits

LANE_BITS = (WORD_VALUES - 1).bit_length()
VALUE_BITS = 8 * VALUE_BYTES

ACCOUNTS = 2
"""Results whose lines may be under way at a time."""


def lines_bits(config: NdpConfig) -> int:
    """Bits of a number of lines of one result."""
    return (PE_ROWS * config.result_half_words).bit_length()


def result_layout(config: NdpConfig) -> data.StructLayout:
    """A result in a half: DPA word of its first line, half, and its shape (``rows`` x ``columns`` values).

    ``anchors``: every row has one word more, which goes out as it is.
    """
    return data.StructLayout(
        {
            "address": word_address_bits(config),
            "half": range(RESULT_HALVES),
            "rows": lines_bits(config),
            "columns": (WORD_VALUES * config.result_half_words).bit_length(),
            "anchors": 1,
        }
    )


class ResultWriter(wiring.Component):
    """Sends one result after the other; rows are whole lines, one after the other, and their tails zero.

    Result row b comes from PE row b mod 2. One line a cycle while memory takes them. Lines carry the
    account of their result, 0 and 1 in turn, so that the acknowledgements of one may still be on their
    way while the lines of the next are sent.

    Ports:
        result: taken with its last line. Whoever offers the next result but one has seen the outcome of this one.
        emptied: the last word of the result is being read; its half may fill again.
        lines, account: with the taking of ``result``: its lines, and its account.
        settled: by account, every line sent for it is acknowledged.
        failed: by account, memory refused a line of the last result.
        half, row, address, enable, word: reads of the output buffer.
        write: lines to memory.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "result": In(stream.Signature(result_layout(config))),
                "emptied": Out(1),
                "lines": Out(lines_bits(config)),
                "account": Out(range(ACCOUNTS)),
                "settled": Out(ACCOUNTS),
                "failed": Out(ACCOUNTS),
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
        result, line = self.result.payload, self.write.line

        # Where the next read is: word ``word`` of row ``rows_done``. Between results that is the first of all.
        start, reading, read = Signal(), Signal(), Signal()
        last_value_word, last_word = Signal.like(self.address), Signal.like(self.address)
        word, pair_address = Signal.like(self.address), Signal.like(self.address)
        rows_done = Signal.like(result.rows)
        end_row, end_result = Signal(), Signal()
        # The word that the buffer shows, and its way to memory.
        shown, shown_tail, shown_last = Signal(), Signal(), Signal()
        line_address = Signal.like(result.address)
        lines_sent = Signal.like(self.lines)
        sent = Signal()

        m.d.comb += [
            last_value_word.eq((result.columns - 1) >> LANE_BITS),
            last_word.eq(last_value_word + result.anchors),
            end_row.eq(word == last_word),
            end_result.eq(end_row & (rows_done + 1 == result.rows)),
            sent.eq(line.valid & line.ready),
            read.eq(start | (reading & (~shown | line.ready))),
            self.half.eq(result.half),
            self.row.eq(rows_done[0]),
            self.address.eq(pair_address + word),
            self.enable.eq(read),
            line.valid.eq(shown),
            line.payload.address.eq(line_address),
            line.payload.strobe.eq(~0),
            line.payload.data.eq(self._without_tail(self.word, shown_tail, result.columns[:LANE_BITS])),
            line.payload.tag.eq(self.account),
            self.emptied.eq(read & end_result),
            self.result.ready.eq(sent & shown_last),
            self.lines.eq(lines_sent + 1),
            start.eq(self.result.valid & ~reading & ~shown),
        ]
        with m.If(start):
            m.d.sync += [
                reading.eq(1),
                lines_sent.eq(0),
                line_address.eq(result.address),
            ]
        with m.If(read):
            m.d.sync += [
                shown.eq(1),
                shown_tail.eq(word == last_value_word),
                shown_last.eq(end_result),
                word.eq(word + 1),
            ]
            with m.If(end_row):
                m.d.sync += [word.eq(0), rows_done.eq(rows_done + 1)]
                with m.If(rows_done[0]):
                    m.d.sync += pair_address.eq(pair_address + last_word + 1)
            with m.If(end_result):
                m.d.sync += [reading.eq(0), rows_done.eq(0), pair_address.eq(0)]
        with m.Elif(sent):
            m.d.sync += shown.eq(0)
        with m.If(sent):
            m.d.sync += [line_address.eq(line_address + 1), lines_sent.eq(lines_sent + 1)]
            with m.If(shown_last):
                m.d.sync += self.account.eq(self.account + 1)

        for account in range(ACCOUNTS):
            unanswered = Signal(lines_bits(self._config), name=f"unanswered_{account}")
            mine = sent & (self.account == account)
            acknowledged = self.write.ack & (self.write.ack_tag == account)
            m.d.sync += unanswered.eq(unanswered + mine - acknowledged)
            m.d.comb += self.settled[account].eq(unanswered == 0)
            with m.If(start & (self.account == account)):
                m.d.sync += self.failed[account].eq(0)
            with m.Elif(acknowledged & self.write.ack_error):
                m.d.sync += self.failed[account].eq(1)
        return m

    def _without_tail(self, word: Signal, partial: Signal, values: Signal) -> Signal:
        """``word``, with zeros after its first ``values`` values if it is ``partial``; 0 means all of them."""
        lanes = [
            Mux(partial & (values != 0) & (values <= lane), 0, word.word_select(lane, VALUE_BITS))
            for lane in range(WORD_VALUES)
        ]
        return Cat(lanes)


assert WORD_BITS == 8 * WORD_BYTES
