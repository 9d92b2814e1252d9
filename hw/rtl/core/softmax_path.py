"""The softmax path: results of the array pass it as they are, scores go through the softmax unit."""

from __future__ import annotations

from amaranth.hdl import C, Cat, Module, Mux, ShapeLike, Signal, Value, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from plora.hw.defs.config import PE_ROWS, SOFTMAX_BANKS, SOFTMAX_MAX_ROWS, NdpConfig
from plora.hw.defs.queue import NUMERIC_OVERFLOW
from plora.hw.rtl.core.job import (
    SCALE_IGNORED_BITS,
    channel_bits,
    max_group_rows,
    result_tag_bits,
    result_tag_layout,
)
from plora.hw.rtl.interfaces import NUMERIC_BITS
from plora.hw.rtl.pe.array import TAP_BITS, results_layout
from plora.hw.rtl.pe.product import FP16_BITS
from plora.hw.rtl.sfu.pipeline import delayed
from plora.hw.rtl.sfu.row_state import READERS, StateRead
from plora.hw.rtl.sfu.score_scale import ANCHOR_BITS
from plora.hw.rtl.sfu.sfu import BANK_BITS, Sfu


def values_layout(config: NdpConfig) -> data.StructLayout:
    """Values on their way to the output buffer: as in `plora.hw.rtl.pe.array.results_layout`, with the anchors
    of both rows where they are softmax terms.
    """

    def each(shape: ShapeLike) -> data.ArrayLayout:
        return data.ArrayLayout(data.ArrayLayout(shape, config.channels), PE_ROWS)

    return data.StructLayout(
        {
            "values": each(unsigned(FP16_BITS)),
            "numeric": each(unsigned(NUMERIC_BITS)),
            "anchors": data.ArrayLayout(ANCHOR_BITS, PE_ROWS),
            "tap_index": TAP_BITS,
            "last_tap": 1,
            "second_row": 1,
            "tag": result_tag_bits(config),
        }
    )


def values_here(m: Module, config: NdpConfig, tag: data.View, tap_index: Value) -> tuple[Value, Value]:
    """Return which of a tap's ``channels`` values are of output rows that exist, and the output rows before the tap."""
    channels = config.channels
    before = Signal(range(max_group_rows(config) + 1), name="before")
    # With several taps every channel is its own part.
    m.d.comb += before.eq(tap_index << channel_bits(config))
    # All comparisons side by side, each with a number known here: this lies on a long path.
    exists = Signal(channels, name="exists")
    taps = max_group_rows(config) // channels
    for q in range(channels):
        of_row = Cat(tag.rows > tap * channels + q for tap in range(taps)).bit_select(tap_index, 1)
        m.d.comb += exists[q].eq(of_row & (channels >> tag.split_log2 > q))
    return exists, before


def _bank(tag: data.View) -> Value:
    """The bank of a result's states."""
    return tag.state[-BANK_BITS:]


def _beside_layout(config: NdpConfig) -> data.StructLayout:
    """What passes the softmax unit beside the scores of a row."""
    return data.StructLayout(
        {
            "tap_index": TAP_BITS,
            "last_tap": 1,
            "second_row": 1,
            "of_second": 1,
            "tag": result_tag_bits(config),
        }
    )


class SoftmaxPath(wiring.Component):
    """::

        results --+---------------------------------------------------------> values
                  +-- scores of row 0 --------> Sfu --+--> [row 0] --+--> values
                  +-- scores of row 1 --> [ ] --^     +-- row 1 -----+

    The softmax unit takes a row of scores a cycle, so the second row of a result waits in registers while the
    first goes in: scores come at most every second cycle. They are put together again behind it. Whoever lets
    results into the array sees to it, by ``ahead``, that none without scores comes while some are inside.

    Parameters:
        config: sizes.
        approach: cycles that a beat needs at least from its issue until its result is here.

    Ports:
        results: of the array.
        values: results as they came, in the same cycle; of scores, the softmax terms `LATENCY` cycles later.
        ahead: for the last values of a group of scores, once: a beat that is issued from the next cycle on
            has its result here after they are gone.
        busy: by bank: scores are inside, or the states of their rows are not complete.
        reads: of the rows' states.
    """

    LATENCY = Sfu.LATENCY + 1

    def __init__(self, config: NdpConfig, *, approach: int) -> None:
        self._config = config
        self._approach = approach
        super().__init__(
            {
                "results": In(stream.Signature(results_layout(config, result_tag_bits(config)), always_ready=True)),
                "values": Out(stream.Signature(values_layout(config), always_ready=True)),
                "ahead": Out(1),
                "busy": Out(SOFTMAX_BANKS),
                "reads": In(StateRead(SOFTMAX_BANKS * SOFTMAX_MAX_ROWS)).array(READERS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        config, results, values = self._config, self.results.payload, self.values.payload
        tag = data.View(result_tag_layout(config), results.tag)
        beside_layout = _beside_layout(config)
        m.submodules.sfu = sfu = Sfu(config, tag_bits=beside_layout.size)
        for inner, own in zip(sfu.reads, self.reads, strict=True):
            connect(m, flipped(own), inner)

        # In: row 0 at once, row 1 in the next cycle.
        exists, _ = values_here(m, config, tag, results.tap_index)
        unit = [Signal(sfu.unit.shape(), name=f"unit_{row}") for row in range(PE_ROWS)]
        beside = [data.View(beside_layout, row.tag) for row in unit]
        waiting, second = Signal(), Signal(sfu.unit.shape(), reset_less=True)
        scores = Signal()
        m.d.comb += scores.eq(self.results.valid & tag.softmax)
        for row in range(PE_ROWS):
            m.d.comb += [
                *(unit[row].scores[q].eq(results.scores[row][q]) for q in range(config.channels)),
                unit[row].overflow.eq(Cat((flags & NUMERIC_OVERFLOW).any() for flags in results.score_numeric[row])),
                unit[row].exists.eq(exists),
                unit[row].row.eq(Cat(C(row, 1), tag.state)),
                unit[row].begin.eq(tag.begins & (results.tap_index == 0)),
                unit[row].scale.eq(tag.scale << SCALE_IGNORED_BITS),
                beside[row].tap_index.eq(results.tap_index),
                beside[row].last_tap.eq(results.last_tap),
                beside[row].second_row.eq(results.second_row),
                beside[row].of_second.eq(row),
                beside[row].tag.eq(results.tag),
            ]
        m.d.sync += [waiting.eq(scores & results.second_row), second.eq(unit[1])]
        m.d.comb += [sfu.valid.eq(scores | waiting), sfu.unit.eq(Mux(waiting, second, unit[0]))]

        # Out: row 0 waits a cycle for row 1, also where there is none.
        weights, passed = sfu.weights, data.View(beside_layout, sfu.weights.tag)
        first, first_there = Signal(weights.shape(), reset_less=True), Signal()
        first_passed = data.View(beside_layout, first.tag)
        wait = max(0, self.LATENCY - self._approach)
        m.d.sync += [first_there.eq(sfu.weights_valid & ~passed.of_second), first.eq(weights)]
        m.d.comb += [
            self.values.valid.eq(first_there | (self.results.valid & ~tag.softmax)),
            self.ahead.eq(delayed(m, "ahead", scores & results.last_tap, wait, reset_less=False)),
            *(
                self.busy[bank].eq(
                    sfu.busy[bank]
                    | (scores & (_bank(tag) == bank))
                    | (first_there & (_bank(data.View(result_tag_layout(config), first_passed.tag)) == bank))
                )
                for bank in range(SOFTMAX_BANKS)
            ),
            *(values[name].eq(results[name]) for name in ("values", "numeric", *_SIDE_BAND)),
        ]
        with m.If(first_there):
            m.d.comb += [values[name].eq(first_passed[name]) for name in _SIDE_BAND]
            for row, own in enumerate((first, weights)):
                m.d.comb += [
                    *(values.values[row][q].eq(own.p[q]) for q in range(config.channels)),
                    values.anchors[row].eq(own.anchor),
                    # The flags are of all lanes together, so one of them carries them: the first, which always exists.
                    values.numeric[row].as_value().eq(own.numeric),
                ]
        return m


_SIDE_BAND = ("tap_index", "last_tap", "second_row", "tag")
