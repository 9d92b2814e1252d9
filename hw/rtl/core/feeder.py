"""The beat feeder: from words in buffers to operands of the PE array, spread and masked."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import PE_ROWS, WORD_VALUES, NdpConfig
from plora.hw.rtl.core.dram_buffer import position_bits
from plora.hw.rtl.core.job import channel_bits, result_tag_bits
from plora.hw.rtl.core.spreader import OperandSpreader, expand_parts, repeat_for_taps
from plora.hw.rtl.interfaces import WORD_BITS
from plora.hw.rtl.pe.array import TAP_BITS, beat_layout, split_bits

LANE_BITS = (WORD_VALUES - 1).bit_length()


def beat_control_layout(config: NdpConfig) -> data.StructLayout:
    """What is known of a beat before its words are read.

    ==================  ================================================================================
    weights_position    stripe of the DRAM buffer
    weights_last_use    no later beat needs that stripe
    from_kept           the operand words come from the kept intermediate
    part                number of the operand word for part 0 within its stripe; a multiple of the parts
    partial             only ``tail`` values of K remain for this beat
    tail                see `plora.hw.rtl.core.job.work_layout`
    others              as in `plora.hw.rtl.pe.array.beat_layout`
    ==================  ================================================================================
    """
    return data.StructLayout(
        {
            "weights_position": position_bits(config),
            "weights_last_use": 1,
            "from_kept": 1,
            "part": max(1, channel_bits(config)),
            "partial": 1,
            "tail": (WORD_VALUES * config.channels).bit_length(),
            "tap": TAP_BITS,
            "split_log2": split_bits(config),
            "first": 1,
            "last": 1,
            "second_row": 1,
            "tag": result_tag_bits(config),
        }
    )


class BeatFeeder(wiring.Component):
    """Two stages between a beat's issue and the array::

        control --> [control] -----------> [beat: operands, mask, rest] --> array
                        |                       ^                             ^
                        +--> weights are read --|-----------------------------+
        operand read ---> stripes, kept --> spread, masked

    When ``control`` is taken, the beat's operand is read; in the next cycle its words stand at the
    buffers' outputs and are spread (`OperandSpreader`) into registers. The weights need no such step: they are
    read one cycle later and go to the array as the DRAM buffer shows them. The mask covers values
    beyond K: nothing that lies in a buffer or in memory after them is ever multiplied.

    Ports:
        control: beats in order; when one is taken, its operand must be read at the same edge, and the
            buffers' outputs must stand until the next is taken.
        weights_position, weights_enable: read of the DRAM buffer, whose output must stand until the next.
        weights_freed: that read was the last of its stripe.
        weights: stripe from the DRAM buffer.
        stripes: both rows' stripe from the input buffer.
        kept: both rows' word from the kept part of the output buffer.
        beats: to the array, two cycles after ``control`` was taken unless the array waits.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        words = data.ArrayLayout(WORD_BITS, config.channels)
        super().__init__(
            {
                "control": In(stream.Signature(beat_control_layout(config))),
                "weights_position": Out(position_bits(config)),
                "weights_enable": Out(1),
                "weights_freed": Out(1),
                "weights": In(words),
                "stripes": In(data.ArrayLayout(words, PE_ROWS)),
                "kept": In(data.ArrayLayout(WORD_BITS, PE_ROWS)),
                "beats": Out(stream.Signature(beat_layout(config, result_tag_bits(config)))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        channels = range(self._config.channels)
        # The control of the words that stand at the buffers' outputs.
        control = Signal(beat_control_layout(self._config), reset_less=True)
        waiting = Signal()
        beat = self.beats.payload
        advance = Signal()
        m.d.comb += [
            advance.eq(~self.beats.valid | self.beats.ready),
            self.control.ready.eq(~waiting | advance),
            self.weights_position.eq(control.weights_position),
            self.weights_enable.eq(waiting & advance),
            self.weights_freed.eq(waiting & advance & control.weights_last_use),
            beat.weights.eq(self.weights),
        ]
        with m.If(self.control.ready):
            m.d.sync += [waiting.eq(self.control.valid), control.eq(self.control.payload)]

        with m.If(advance):
            m.d.sync += self.beats.valid.eq(waiting)

        masks = expand_parts(m, self._part_masks(m, control), control.split_log2, "mask")
        for channel in channels:
            mask = Signal(WORD_VALUES, name=f"mask_{channel}", reset_less=True)
            with m.If(advance):
                m.d.sync += mask.eq(masks[channel])
            m.d.comb += beat.mask[channel].eq(mask)
        for row in range(PE_ROWS):
            spreader = OperandSpreader(self._config)
            add_shared(m, platform, f"row_{row}", f"operand_spreader_{self._config.channels}", spreader)
            m.d.comb += [
                spreader.kept.eq(self.kept[row]),
                spreader.from_kept.eq(control.from_kept),
                spreader.part.eq(control.part),
                spreader.split_log2.eq(control.split_log2),
                spreader.tap.eq(control.tap),
                spreader.enable.eq(advance),
            ]
            for channel in channels:
                m.d.comb += [
                    spreader.stripe[channel].eq(self.stripes[row][channel]),
                    beat.inputs[row][channel].eq(spreader.words[channel]),
                ]
        for name in ("tap", "split_log2", "first", "last", "second_row", "tag"):
            value = Signal.like(control[name], name=name, reset_less=True)
            with m.If(advance):
                m.d.sync += value.eq(control[name])
            m.d.comb += beat[name].eq(value)
        return m

    def _part_masks(self, m: Module, control: data.View) -> list[Value]:
        """Lanes of each part that hold values of K. Several taps are all of one part."""
        words_left, lanes_left = control.tail[LANE_BITS:], control.tail[:LANE_BITS]
        masks: list[Value] = []
        for part in range(self._config.channels):
            mask = Signal(WORD_VALUES, name=f"part_mask_{part}")
            m.d.comb += mask.eq(~0)
            with m.If(control.partial & (words_left == part)):
                m.d.comb += mask.eq(Cat(lane < lanes_left for lane in range(WORD_VALUES)))
            with m.Elif(control.partial & (words_left < part)):
                m.d.comb += mask.eq(0)
            masks.append(mask)
        repeated = Signal(WORD_VALUES)
        m.d.comb += repeated.eq(repeat_for_taps(masks[0], control.tap))
        return [repeated, *masks[1:]]
