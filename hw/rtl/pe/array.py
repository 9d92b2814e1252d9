"""The PE array: two rows of dot units over all channels, and the drains that turn sums into FP16.

The numeric contract is in docs/numerics.md; its executable form is `plora.sim.golden.numerics`.
"""

from __future__ import annotations

from collections.abc import Sequence

from amaranth import Module, Signal
from amaranth.hdl import Cat, Mux, ShapeLike, Value, signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import DOT_LANES, DOTS_PER_WORD, PE_ROWS, WORD_VALUES, NdpConfig
from plora.hw.rtl.interfaces import NUMERIC_BITS, WORD_BITS
from plora.hw.rtl.pe.channel import PeChannel
from plora.hw.rtl.pe.dot_unit import grid_name
from plora.hw.rtl.pe.drain import OFFSET_BITS, SCALE_BITS, Drain, score_layout
from plora.hw.rtl.pe.merge import RowMerge, split_steps
from plora.hw.rtl.pe.product import FP16_BITS

TAP_CODES = 3
"""A word holds ``1 << code`` output rows, for codes 0, 1 and 2."""
TAP_BITS = 2
"""Bits of a tap code, and of a tap index."""

MAX_PAUSE = 2
"""Most cycles after a result that can be kept free of others."""


def split_bits(config: NdpConfig) -> int:
    """Bits of ``split_log2``; one even where there is a single channel, which never splits."""
    return max(1, split_steps(config).bit_length())


def pause_bits(config: NdpConfig) -> int:
    """Bits of ``pause``, and of the cycles for which the row merge is taken."""
    return max(MAX_PAUSE.bit_length(), split_bits(config))


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
    token_wise      the weights are a stripe of 16 tokens (rows of V), to be taken apart by dims; ``tap`` and
                    ``split_log2`` are 0. Dot unit d of channel c multiplies, lane j, weight lane
                    ``(j // channels) * 2 * channels + d * channels + c`` of channel ``j % channels``
    pause           cycles without a result after that of this beat, 0 where ``split_log2`` is not; of a
                    token-wise beat at least 1, in which comes the result of dot unit 1
    offsets         for both rows, e: the sums are divided by ``2**e`` before they are rounded
    bf16            the results are rounded to BF16
    from_bf16       the operands were BF16, see `plora.hw.rtl.pe.drain.Drain`
    exponent        BF16 results are divided by 2 to this as well
    first           the beat begins new sums; otherwise it adds to those in the accumulators
    last            the sums are complete with this beat: they leave as results
    second_row      input row 1 is used; returned with the results
    tag             returned with the results
    ==============  ====================================================================================

    Raises:
        ValueError: ``tag_bits`` is below 1.
    """
    if tag_bits < 1:
        raise ValueError(f"tag_bits must be at least 1, not {tag_bits!r}")
    words = data.ArrayLayout(WORD_BITS, config.channels)
    return data.StructLayout(
        {
            "weights": words,
            "inputs": data.ArrayLayout(words, PE_ROWS),
            "mask": data.ArrayLayout(WORD_VALUES, config.channels),
            "tap": TAP_BITS,
            "split_log2": split_bits(config),
            "token_wise": 1,
            "pause": pause_bits(config),
            "offsets": data.ArrayLayout(OFFSET_BITS, PE_ROWS),
            "bf16": 1,
            "from_bf16": 1,
            "exponent": signed(SCALE_BITS),
            "first": 1,
            "last": 1,
            "second_row": 1,
            "tag": tag_bits,
        }
    )


def results_layout(config: NdpConfig, tag_bits: int) -> data.StructLayout:
    """The results of one tap of one row group: up to ``channels`` values of each row.

    ``values[row][q]`` is y[row, n] with ``n = i * group_rows + tap_index * part_channels + q``, for
    ``q < part_channels``; others have no meaning. Of a token-wise beat the dot units are like taps, with
    ``tap_index`` 0 and 1. ``numeric[row][q]`` says of the same value, by the bits of
    `plora.hw.defs.queue`, that it is NaN or that it overflowed. ``scores`` are the same sums for
    the softmax unit, with flags of their own.
    """

    def each(shape: ShapeLike) -> data.ArrayLayout:
        return data.ArrayLayout(data.ArrayLayout(shape, config.channels), PE_ROWS)

    return data.StructLayout(
        {
            "values": each(unsigned(FP16_BITS)),
            "numeric": each(unsigned(NUMERIC_BITS)),
            "scores": each(score_layout),
            "score_numeric": each(unsigned(NUMERIC_BITS)),
            "tap_index": TAP_BITS,
            "last_tap": 1,
            "second_row": 1,
            "tag": tag_bits,
        }
    )


def _control_layout(config: NdpConfig, tag_bits: int) -> data.StructLayout:
    """What travels beside the sums of a group until its results leave."""
    return data.StructLayout(
        {
            "valid": 1,
            "split_log2": split_bits(config),
            "token_wise": 1,
            "offsets": data.ArrayLayout(OFFSET_BITS, PE_ROWS),
            "bf16": 1,
            "from_bf16": 1,
            "exponent": signed(SCALE_BITS),
            "tap_index": TAP_BITS,
            "last_tap": 1,
            "second_row": 1,
            "tag": tag_bits,
        }
    )


def token_wise_words(config: NdpConfig, words: Sequence[Value]) -> list[Value]:
    """Return the weights of every channel's dot units for a token-wise beat: wires alone, see `beat_layout`."""
    channels = config.channels
    return [
        Cat(
            words[j % channels].word_select(j // channels * DOTS_PER_WORD * channels + d * channels + c, FP16_BITS)
            for d in range(DOTS_PER_WORD)
            for j in range(DOT_LANES)
        )
        for c in range(channels)
    ]


class PeArray(wiring.Component):
    """``PE_ROWS`` x ``channels`` x ``WORD_VALUES`` multiply-adds::

        beats -> wiring -> [registers] -> dot units: 3 steps -> row merge -> drains: 3 steps -> results
                                      2 per channel, row    1 adder per  1 per channel, row
                                                            channel, row

    The weights of a beat go to the channels' dot units as they are, one output row to a channel, or,
    token-wise, lane by lane to those of the dims: one 2:1 multiplexer a lane.

    Cycle behaviour. Nothing ever waits inside; beats are admitted so that what they lead to is free
    when they get there. A beat accepted in cycle t with ``last`` gives its result in cycle
    ``t + latency + split_log2``.

    * Beats without ``last`` are accepted every cycle.
    * A channel and row have one drain, one result a cycle. A word with several output rows
      therefore passes the array once for each, with only that tap's lanes enabled, and is accepted
      with the last: 2 or 4 cycles a beat. Results come in the order of ``tap_index``.
    * A token-wise beat gives two results, of dot unit 0 and in the next cycle of dot unit 1, which waits in
      registers: later beats are not held up but for a ``last`` within the pause.
    * Merging the parts of a split takes the adders of the row merge ``split_log2`` cycles more, and
      the next ``last`` is accepted so much later. Beats without ``last`` are not held up.

    Sums stay in the accumulators between beats, however far apart, until a beat with ``first``.

    Parameters:
        config: sizes.
        tag_bits: width of the beat's tag, at least 1.

    Ports:
        beats: operands, see `beat_layout`. ``ready`` depends on ``valid`` and the payload.
        results: see `results_layout`; must be taken as they come.
    """

    def __init__(self, config: NdpConfig, *, tag_bits: int) -> None:
        self._config = config
        self._tag_bits = tag_bits
        super().__init__(
            {
                "beats": In(stream.Signature(beat_layout(config, tag_bits))),
                "results": Out(stream.Signature(results_layout(config, tag_bits), always_ready=True)),
            }
        )

    @property
    def latency(self) -> int:
        """Cycles from the acceptance of a ``last`` beat to its result, without merging."""
        return PeChannel.LATENCY + 1 + Drain.LATENCY

    def elaborate(self, platform: object) -> Module:
        """Build it."""
        m = Module()
        config, beat = self._config, self.beats.payload
        grid = grid_name(config.accumulator)
        steps = split_steps(config)
        control = _control_layout(config, self._tag_bits)

        # Admission: a word of several rows passes once for each, a completed sum waits for the row merge.
        tap_index = Signal(TAP_BITS)
        merge_busy = Signal(pause_bits(config))
        issue, last_tap = Signal(), Signal()
        tap_lanes = Signal(WORD_VALUES)
        with m.Switch(beat.tap):
            for code in range(TAP_CODES):
                taps = 1 << code
                with m.Case(code):
                    m.d.comb += last_tap.eq(tap_index == taps - 1)
                    lanes = WORD_VALUES // taps
                    m.d.comb += tap_lanes.eq(Cat((tap_index == tap).replicate(lanes) for tap in range(taps)))
            with m.Default():
                m.d.comb += last_tap.eq(1)
        m.d.comb += [
            issue.eq(self.beats.valid & ~(beat.last & merge_busy.any())),
            self.beats.ready.eq(~(beat.last & merge_busy.any()) & last_tap),
        ]
        with m.If(issue):
            m.d.sync += tap_index.eq(Mux(last_tap, 0, tap_index + 1))
        with m.If(issue & beat.last):
            m.d.sync += merge_busy.eq(beat.split_log2 | beat.pause)
        with m.Elif(merge_busy.any()):
            m.d.sync += merge_busy.eq(merge_busy - 1)

        # Without a beat no lane is enabled, and the dot units add nothing.
        lanes_on, first = Signal(WORD_VALUES), Signal()
        m.d.comb += [lanes_on.eq(tap_lanes & issue.replicate(WORD_VALUES)), first.eq(issue & beat.first)]
        columns = [PeChannel(config.accumulator) for _ in range(config.channels)]
        by_tokens = token_wise_words(config, list(beat.weights))
        for channel, column in enumerate(columns):
            add_shared(m, platform, f"channel{channel}", f"pe_channel_{grid}", column)
            m.d.comb += [
                column.weights.eq(Mux(beat.token_wise, by_tokens[channel], beat.weights[channel])),
                *(column.inputs[row].eq(beat.inputs[row][channel]) for row in range(PE_ROWS)),
                column.enable.eq(beat.mask[channel] & lanes_on),
                column.first.eq(first),
            ]

        # Control, in step with the operands until the sums are in the accumulators.
        issued = Signal(control)
        m.d.comb += [
            issued.valid.eq(issue & beat.last),
            issued.split_log2.eq(beat.split_log2),
            issued.token_wise.eq(beat.token_wise),
            issued.offsets.eq(beat.offsets),
            issued.bf16.eq(beat.bf16),
            issued.from_bf16.eq(beat.from_bf16),
            issued.exponent.eq(beat.exponent),
            issued.tap_index.eq(tap_index),
            issued.last_tap.eq(last_tap),
            issued.second_row.eq(beat.second_row),
            issued.tag.eq(beat.tag),
        ]
        complete = self._delayed(m, "complete", issued, PeChannel.LATENCY)

        # The row merge: load, then one step for each halving of the parts, or the second load of two.
        held = Signal()
        merging = Signal(max(1, steps))
        remaining = Signal(split_bits(config))
        waiting = Signal(control, reset_less=True)
        merged = Signal(control)
        with m.If(complete.valid):
            m.d.sync += [
                merging.eq(complete.split_log2.any()),
                remaining.eq(complete.split_log2),
                waiting.eq(complete),
                merged.eq(complete),
                merged.valid.eq(~complete.split_log2.any()),
                merged.last_tap.eq(complete.last_tap & ~complete.token_wise),
                held.eq(complete.token_wise),
            ]
        with m.Else():
            finished = remaining == 1
            m.d.sync += [
                merging.eq(Mux(finished, 0, merging << 1)),
                merged.eq(waiting),
                merged.valid.eq((merging.any() & finished) | held),
                merged.tap_index.eq(waiting.tap_index | held),
                held.eq(0),
            ]
            with m.If(merging.any()):
                m.d.sync += remaining.eq(remaining - 1)

        result = self.results.payload
        for row in range(PE_ROWS):
            merge = RowMerge(config)
            add_shared(m, platform, f"row{row}_merge", f"row_merge_{config.channels}_{grid}", merge)
            m.d.comb += [
                merge.load.eq(complete.valid),
                merge.apart.eq(complete.token_wise),
                merge.load_held.eq(held),
                merge.steps.eq(merging),
            ]
            for channel, column in enumerate(columns):
                m.d.comb += merge.sums[channel].eq(column.sums[row])
                drain = Drain(config.accumulator)
                add_shared(m, platform, f"row{row}_channel{channel}_drain", f"drain_{grid}", drain)
                m.d.comb += [
                    drain.sum.eq(merge.merged[channel]),
                    drain.offset.eq(merged.offsets[row]),
                    drain.bf16.eq(merged.bf16),
                    drain.scale.eq(merged.exponent),
                    drain.from_bf16.eq(merged.from_bf16),
                    result.values[row][channel].eq(drain.value),
                    result.numeric[row][channel].eq(drain.numeric),
                    result.scores[row][channel].eq(drain.score),
                    result.score_numeric[row][channel].eq(drain.score_numeric),
                ]

        leaving = self._delayed(m, "leaving", merged, Drain.LATENCY)
        m.d.comb += [
            self.results.valid.eq(leaving.valid),
            result.tap_index.eq(leaving.tap_index),
            result.last_tap.eq(leaving.last_tap),
            result.second_row.eq(leaving.second_row),
            result.tag.eq(leaving.tag),
        ]
        return m

    @staticmethod
    def _delayed(m: Module, name: str, control: data.View, cycles: int) -> data.View:
        for cycle in range(cycles):
            following = Signal(control.shape(), name=f"{name}{cycle}")
            m.d.sync += following.eq(control)
            control = following
        return control
