"""The result collector: places what the array drains in the output buffer."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import PE_ROWS, WORD_VALUES, NdpConfig
from plora.hw.rtl.core.job import channel_bits, max_group_rows, result_tag_bits, result_tag_layout
from plora.hw.rtl.core.output_buffer import result_write_layout
from plora.hw.rtl.interfaces import NUMERIC_BITS
from plora.hw.rtl.pe.array import results_layout

LANE_BITS = (WORD_VALUES - 1).bit_length()

collected_layout = data.StructLayout({"valid": 1, "numeric": NUMERIC_BITS})
"""The last result of a job is being stored; the numeric flags of all its results."""


class ResultCollector(wiring.Component):
    """Turns each drained tap into one write of lanes, and gathers the numeric flags of each job.

    A tap brings the values of ``part_channels`` consecutive output rows, a power of two, and their
    first is a multiple of that: within a word, every lane can take the value whose number agrees with
    its own in the low bits. Values beyond N are dropped, flags with them.

    Ports:
        results: from the array.
        write: to the output buffer, one cycle later.
        collected: with the last write of a job.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "results": In(stream.Signature(results_layout(config, result_tag_bits(config)), always_ready=True)),
                "write": Out(result_write_layout(config)),
                "collected": Out(collected_layout),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        config, results = self._config, self.results.payload
        channels = config.channels
        tag = data.View(result_tag_layout(config), results.tag)

        # Output rows before this tap, and of this tap: with several taps every channel is its own part.
        before = Signal(range(max_group_rows(config) + 1))
        here = Signal(range(channels + 1))
        left = Signal(range(max_group_rows(config) + 1))
        place = Signal(LANE_BITS + 2)
        m.d.comb += [
            before.eq(results.tap_index << channel_bits(config)),
            left.eq(Mux(before < tag.rows, tag.rows - before, 0)),
            here.eq(Mux(left < channels >> tag.split_log2, left, channels >> tag.split_log2)),
            place.eq(tag.lane + before),
        ]
        exists = Cat(q < here for q in range(channels))
        lane = place[:LANE_BITS]
        write = self.write
        m.d.sync += [
            write.valid.eq(self.results.valid & (here != 0)),
            write.region.eq(tag.region),
            write.word.eq(tag.word + place[LANE_BITS:]),
            write.lanes.eq((exists << lane)[:WORD_VALUES]),
            write.second_row.eq(results.second_row),
        ]
        for row in range(PE_ROWS):
            m.d.sync += write.data[row].eq(self._lanes(results.values[row], tag.split_log2))

        flags = Signal(NUMERIC_BITS)
        numeric = Signal(NUMERIC_BITS)
        ends = Signal()
        m.d.comb += flags.eq(0)
        for bit in range(NUMERIC_BITS):
            first, second = (Cat(results.numeric[row][q][bit] for q in range(channels)) for row in range(PE_ROWS))
            m.d.comb += flags[bit].eq(((first | Mux(results.second_row, second, 0)) & exists).any())
        m.d.comb += ends.eq(self.results.valid & tag.end & results.last_tap)
        with m.If(self.results.valid):
            m.d.sync += numeric.eq(Mux(ends, 0, numeric | flags))
        m.d.sync += [self.collected.valid.eq(ends), self.collected.numeric.eq(numeric | flags)]
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
