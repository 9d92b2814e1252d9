"""The beat feeder: from words in buffers to operands of the PE array, spread and masked."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import PE_ROWS, WORD_VALUES, NdpConfig
from plora.hw.rtl.core.dram_buffer import position_bits
from plora.hw.rtl.core.expander import EXPANSION_BITS, WordExpander
from plora.hw.rtl.core.job import channel_bits, result_tag_bits
from plora.hw.rtl.core.output_buffer import word_anchors_layout
from plora.hw.rtl.core.spreader import OperandSpreader, expand_parts, repeat_for_taps
from plora.hw.rtl.interfaces import WORD_BITS
from plora.hw.rtl.pe.array import TAP_BITS, beat_layout, pause_bits, split_bits
from plora.hw.rtl.pe.drain import OFFSET_BITS, SCALE_BITS
from plora.hw.rtl.sfu.p_scaler import PScaler
from plora.hw.rtl.sfu.row_state import state_layout

LANE_BITS = (WORD_VALUES - 1).bit_length()

_PASSED_ON = (
    *("tap", "split_log2", "token_wise", "pause", "bf16", "from_bf16", "exponent"),
    *("first", "last", "second_row", "tag"),
)


def beat_control_layout(config: NdpConfig) -> data.StructLayout:
    """What is known of a beat before its words are read.

    ==================  ================================================================================
    weights_position    stripe of the DRAM buffer
    weights_last_use    no later beat needs that stripe
    weights_read        it is not what the DRAM buffer shows after the beat before
    scales              no beat for the array: the stripe holds scales
    scales_step         the beat is the last that needs its scales
    expansion, sub      see `plora.hw.rtl.core.expander.WordExpander`
    from_kept           the operand words come from the kept intermediate
    part                number of the operand word for part 0 within its stripe; a multiple of the parts
    partial             only ``tail`` values of K remain for this beat
    tail                see `plora.hw.rtl.core.job.work_layout`
    upper_half          a token-wise beat takes the upper half of the kept word
    others              as in `plora.hw.rtl.pe.array.beat_layout`
    ==================  ================================================================================
    """
    return data.StructLayout(
        {
            "weights_position": position_bits(config),
            "weights_last_use": 1,
            "weights_read": 1,
            "scales": 1,
            "scales_step": 1,
            "expansion": EXPANSION_BITS,
            "sub": EXPANSION_BITS,
            "from_kept": 1,
            "part": max(1, channel_bits(config)),
            "partial": 1,
            "tail": (WORD_VALUES * config.channels).bit_length(),
            "upper_half": 1,
            "tap": TAP_BITS,
            "split_log2": split_bits(config),
            "token_wise": 1,
            "pause": pause_bits(config),
            "bf16": 1,
            "from_bf16": 1,
            "exponent": signed(SCALE_BITS),
            "first": 1,
            "last": 1,
            "second_row": 1,
            "tag": result_tag_bits(config),
        }
    )


class BeatFeeder(wiring.Component):
    """Two stages between a beat's issue and the array, a third one for the scaling of softmax terms::

        control --> [control] ------------------------------> [beat: operands, mask, rest] --> array
        operand read ---> stripes, kept ------------------> spread, masked --^
                                    half of kept --> [scaled] --^            |
        weights read -----------> stripe ------------------> [expanded] -----+

    When ``control`` is taken, the beat's operand and weights are read; in the next cycle they stand at the
    buffers' outputs and are spread (`OperandSpreader`) and expanded (`WordExpander`) into registers. The mask covers
    values beyond K: nothing that lies in a buffer or in memory after them is ever multiplied.

    The 16 softmax terms of a token-wise beat are brought from their own anchors to the last ones of their
    rows (`PScaler`) before they are spread: to both dot units of all channels. Such a beat comes to the array
    `PScaler.LATENCY` cycles later, its weights are read so much later, and a beat of another kind waits until none is
    being scaled; then its weights are read as the last of those moves on. Scales of integers take the way of their
    beats, and end in the expanders.

    Ports:
        control: beats in order; when one is taken, its operand must be read at the same edge, and the
            buffers' outputs must stand until the next is taken.
        weights_position, weights_enable: read of the DRAM buffer, whose output must stand until the next.
        weights_freed: a stripe was used for the last time.
        weights: stripe from the DRAM buffer.
        stripes: both rows' stripe from the input buffer.
        kept, anchors: both rows' word from the kept part of the output buffer, and the anchors beside it.
        states: of both rows in the softmax unit; read like the kept words.
        beats: to the array, `LATENCY` cycles after ``control`` was taken unless the array waits.
    """

    LATENCY = 2
    """Cycles from the taking of a beat's control to the beat; more if its terms are scaled."""

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
                "anchors": In(data.ArrayLayout(word_anchors_layout(config), PE_ROWS)),
                "states": In(data.ArrayLayout(state_layout, PE_ROWS)),
                "beats": Out(stream.Signature(beat_layout(config, result_tag_bits(config)))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        channels = range(self._config.channels)
        # The control of the words that stand at the buffers' outputs, and of those that are being scaled.
        shown = Signal(beat_control_layout(self._config), reset_less=True)
        waiting = Signal()
        scaling = [
            Signal(beat_control_layout(self._config), name=f"scaling_{stage}", reset_less=True)
            for stage in range(PScaler.LATENCY)
        ]
        busy = Signal(PScaler.LATENCY)
        beat = self.beats.payload
        advance, scale, direct, leaves, goes = Signal(), Signal(), Signal(), Signal(), Signal()
        control = Signal(beat_control_layout(self._config))
        m.d.comb += [
            advance.eq(~self.beats.valid | self.beats.ready),
            scale.eq(~busy[-1] | advance),
            direct.eq(waiting & ~shown.token_wise & ~busy.any()),
            leaves.eq(Mux(shown.token_wise, scale, advance & ~busy.any())),
            control.eq(Mux(busy[-1], scaling[-1], shown)),
            goes.eq(busy[-1] | direct),
            self.control.ready.eq(~waiting | leaves),
            self.weights_freed.eq(goes & advance & control.weights_last_use),
        ]
        with m.If(self.control.ready):
            m.d.sync += [waiting.eq(self.control.valid), shown.eq(self.control.payload)]
        with m.If(scale):
            m.d.sync += busy.eq(Cat(waiting & shown.token_wise, busy[:-1]))
            for stage, before in zip(scaling, [shown, *scaling], strict=False):
                m.d.sync += stage.eq(before)
        with m.If(advance):
            m.d.sync += self.beats.valid.eq(goes & ~control.scales)

        # The weights of the beat that goes next must stand then: read as it comes to where it goes from.
        before_last = scaling[-2]
        still_scaled = Mux(scale, Cat(waiting & shown.token_wise, busy[:-1]), busy).any()
        taken = self.control.payload
        with m.If(busy[-2] & scale):
            m.d.comb += [
                self.weights_position.eq(before_last.weights_position),
                self.weights_enable.eq(before_last.weights_read),
            ]
        with m.Elif(self.control.ready):
            m.d.comb += [
                self.weights_position.eq(taken.weights_position),
                self.weights_enable.eq(self.control.valid & ~taken.token_wise & ~still_scaled & taken.weights_read),
            ]
        with m.Else():
            m.d.comb += [
                self.weights_position.eq(shown.weights_position),
                self.weights_enable.eq(~shown.token_wise & busy.any() & ~still_scaled & shown.weights_read),
            ]
        for channel in channels:
            expander = WordExpander(self._config)
            add_shared(m, platform, f"expander_{channel}", f"word_expander_{self._config.channels}", expander)
            m.d.comb += [
                expander.data.eq(self.weights[channel]),
                expander.enable.eq(goes & advance),
                expander.scales.eq(control.scales),
                expander.expansion.eq(control.expansion),
                expander.sub.eq(control.sub),
                expander.token_wise.eq(control.token_wise),
                expander.step.eq(control.scales_step),
                beat.weights[channel].eq(expander.expanded),
            ]

        masks = expand_parts(m, self._part_masks(m, control), control.split_log2, "mask")
        for channel in channels:
            mask = Signal(WORD_VALUES, name=f"mask_{channel}", reset_less=True)
            with m.If(advance):
                m.d.sync += mask.eq(masks[channel])
            m.d.comb += beat.mask[channel].eq(mask)
        for row in range(PE_ROWS):
            spreader = OperandSpreader(self._config)
            add_shared(m, platform, f"row_{row}", f"operand_spreader_{self._config.channels}", spreader)
            scaled, shift = self._scaled(m, platform, row, shown.upper_half, scale)
            m.d.comb += [
                spreader.kept.eq(Mux(control.token_wise, scaled, self.kept[row])),
                spreader.from_kept.eq(control.from_kept),
                spreader.part.eq(control.part),
                spreader.split_log2.eq(control.split_log2),
                spreader.tap.eq(_lanes_repeated(control)),
                spreader.enable.eq(advance),
            ]
            for channel in channels:
                m.d.comb += [
                    spreader.stripe[channel].eq(self.stripes[row][channel]),
                    beat.inputs[row][channel].eq(spreader.words[channel]),
                ]
            offset = Signal(OFFSET_BITS, name=f"offset_{row}", reset_less=True)
            with m.If(advance):
                m.d.sync += offset.eq(Mux(control.token_wise, shift, 0))
            m.d.comb += beat.offsets[row].eq(offset)
        for name in _PASSED_ON:
            value = Signal.like(control[name], name=name, reset_less=True)
            with m.If(advance):
                m.d.sync += value.eq(control[name])
            m.d.comb += beat[name].eq(value)
        return m

    def _scaled(self, m: Module, platform: object, row: int, upper_half: Value, enable: Value) -> tuple[Value, Value]:
        """The terms of one PE row under their last anchor, and the shift of its results."""
        scaler = PScaler(self._config)
        add_shared(m, platform, f"row_{row}_scaler", f"p_scaler_{self._config.channels}", scaler)
        state = self.states[row]
        shift: Value = state.shift
        for stage in range(PScaler.LATENCY):
            delayed = Signal(OFFSET_BITS, name=f"shift_{row}_{stage}", reset_less=True)
            with m.If(enable):
                m.d.sync += delayed.eq(shift)
            shift = delayed
        m.d.comb += [
            scaler.enable.eq(enable),
            scaler.p.eq(_half(self.kept[row], upper_half)),
            scaler.anchors.eq(_half(self.anchors[row].as_value(), upper_half)),
            scaler.last.eq(state.anchor),
        ]
        return scaler.scaled.as_value(), shift

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
        m.d.comb += repeated.eq(repeat_for_taps(masks[0], _lanes_repeated(control)))
        return [repeated, *masks[1:]]


def _lanes_repeated(control: data.View) -> Value:
    """The tap code by which operand and mask repeat: both dot units take the same half word token-wise."""
    return Mux(control.token_wise, 1, control.tap)


def _half(word: Value, upper: Value) -> Value:
    return Mux(upper, word[len(word) // 2 :], word[: len(word) // 2])
