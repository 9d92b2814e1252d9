"""The result collector: places what the array drains in the output buffer."""

from __future__ import annotations

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import PE_ROWS, WORD_VALUES, NdpConfig
from plora.hw.defs.queue import ANCHOR_FIELDS, ANCHOR_NAN, ANCHOR_NONE
from plora.hw.rtl.core.job import SOFTMAX_STATES, channel_bits, result_tag_layout
from plora.hw.rtl.core.output_buffer import result_write_layout
from plora.hw.rtl.core.softmax_path import values_here, values_layout
from plora.hw.rtl.interfaces import NUMERIC_BITS
from plora.hw.rtl.sfu.row_state import NO_ANCHOR, state_layout

LANE_BITS = (WORD_VALUES - 1).bit_length()

collected_layout = data.StructLayout({"valid": 1, "numeric": NUMERIC_BITS})
"""The last result of a job is being stored; the numeric flags of all its results."""


class ResultCollector(wiring.Component):
    """Turns each drained tap into one write of lanes, and gathers the numeric flags of each job.

    A tap brings the values of ``part_channels`` consecutive output rows, a power of two, and their
    first is a multiple of that: within a word, every lane can take the value whose number agrees with
    its own in the low bits. Values beyond N are dropped, flags with them.

    After the last values of a row of a token-wise job comes a word with the row's anchor
    (`plora.hw.defs.queue.ANCHOR_FIELDS`); the array pauses for it.

    Ports:
        results: from the softmax path.
        state_pair, state_enable: at an edge with ``state_enable`` that pair of states comes to ``states``.
        states: of both rows in the softmax unit.
        write: to the output buffer, one cycle later.
        collected: with the last write of a job.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "results": In(stream.Signature(values_layout(config), always_ready=True)),
                "state_pair": Out(range(SOFTMAX_STATES)),
                "state_enable": Out(1),
                "states": In(data.ArrayLayout(state_layout, PE_ROWS)),
                "write": Out(result_write_layout(config)),
                "collected": Out(collected_layout),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        config, results = self._config, self.results.payload
        channels = config.channels
        tag = data.View(result_tag_layout(config), results.tag)

        exists, before = values_here(m, config, tag, results.tap_index)
        place = Signal(LANE_BITS + 2)
        m.d.comb += place.eq(tag.lane + before)
        lane = place[:LANE_BITS]
        write = self.write
        m.d.sync += [
            write.valid.eq(self.results.valid & exists.any()),
            write.region.eq(tag.region),
            write.word.eq(tag.word + place[LANE_BITS:]),
            write.lanes.eq((exists << lane)[:WORD_VALUES]),
            write.second_row.eq(results.second_row),
            write.anchors.eq(results.anchors),
            write.bf16.eq(tag.bf16),
            write.exponent.eq(tag.exponent),
        ]
        for row in range(PE_ROWS):
            m.d.sync += write.data[row].eq(self._lanes(results.values[row], tag.split_log2))

        flags = Signal(NUMERIC_BITS)
        numeric = Signal(NUMERIC_BITS)
        last, ends = Signal(), Signal()
        m.d.comb += flags.eq(0)
        for bit in range(NUMERIC_BITS):
            first, second = (Cat(results.numeric[row][q][bit] for q in range(channels)) for row in range(PE_ROWS))
            m.d.comb += flags[bit].eq(((first | Mux(results.second_row, second, 0)) & exists).any())
        m.d.comb += last.eq(self.results.valid & results.last_tap)

        # The anchors of the two rows, in the word after that of the last values.
        anchors_next, ends_next = Signal(), Signal()
        m.d.comb += [
            self.state_pair.eq(tag.state),
            self.state_enable.eq(last & tag.anchor),
            ends.eq(Mux(anchors_next, ends_next, last & tag.end & ~tag.anchor)),
        ]
        m.d.sync += [anchors_next.eq(last & tag.anchor), ends_next.eq(tag.end)]
        with m.If(anchors_next):
            m.d.sync += [
                write.valid.eq(1),
                write.region.eq(write.region),
                write.word.eq(write.word + 1),
                write.lanes.eq(~0),
                write.second_row.eq(write.second_row),
                *(write.data[row].eq(_anchor_word(self.states[row])) for row in range(PE_ROWS)),
            ]

        with m.If(ends):
            m.d.sync += numeric.eq(0)
        with m.Elif(self.results.valid):
            m.d.sync += numeric.eq(numeric | flags)
        m.d.sync += [
            self.collected.valid.eq(ends),
            self.collected.numeric.eq(numeric | Mux(self.results.valid, flags, 0)),
        ]
        return m

    def _lanes(self, values: data.View, split_log2: Value) -> Value:
        """A word whose lane l holds value ``l mod part_channels``."""
        channels = self._config.channels
        lanes = []
        for lane in range(WORD_VALUES):
            choice = values[lane % channels]
            for parts_log2 in range(1, channel_bits(self._config) + 1):
                choice = Mux(split_log2 >= parts_log2, values[lane % (channels >> parts_log2)], choice)
            lanes.append(choice)
        return Cat(lanes)


def _anchor_word(state: data.View) -> Value:
    """The fields of `ANCHOR_FIELDS` of one row, in a word."""
    anchor = state.anchor.as_signed()
    values: dict[str, Value] = {
        "anchor": Mux(anchor == NO_ANCHOR, C(ANCHOR_NONE, signed(32)), anchor),
        "shift": state.shift,
        "flags": Mux(state.nan, ANCHOR_NAN, 0),
        "sum": state.total,
    }
    word: Value = C(0, 0)
    for field in ANCHOR_FIELDS:
        gap = C(0, 8 * field.offset - len(word))
        value = values[field.name]
        # Extended by its own sign, or by zeros.
        word = Cat(word, gap, (value + C(0, signed(8 * field.size + 1)))[: 8 * field.size])
    return word
