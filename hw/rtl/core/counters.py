"""The core's counters."""

from __future__ import annotations

from amaranth.hdl import Module, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import NdpConfig
from plora.hw.rtl.core.sequencer import activity_layout
from plora.hw.rtl.core.signature import counters_layout


class Counters(wiring.Component):
    """Adds up what happens; the names are those of the registers.

    While a job is between its first and its last beat, a cycle is a beat or a stall, so
    ``span = beats + stall_weights + stall_drain``; ``stall_input`` counts cycles before a first beat.

    Ports:
        activity: of the beat sequencer.
        waits_for_input: of the job gate.
        words_read: one bit for each channel from which a word arrives.
        word_written: a line leaves.
        clear: zeroes the values.
        values: as of the last cycle but one: what happens is seen late in a cycle, and counted in the next.
    """

    def __init__(self, config: NdpConfig) -> None:
        super().__init__(
            {
                "activity": In(activity_layout),
                "waits_for_input": In(1),
                "words_read": In(config.channels),
                "word_written": In(1),
                "clear": In(1),
                "values": Out(counters_layout),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        values = self.values
        steps = {
            "beats": self.activity.beat,
            "span": self.activity.span,
            "stall_weights": self.activity.stall_weights,
            "stall_input": self.waits_for_input,
            "stall_drain": self.activity.stall_drain,
            "words_read": Value.cast(sum(self.words_read)),
            "words_written": self.word_written,
        }
        for name, step in steps.items():
            happened = Signal(len(step), name=f"{name}_step")
            m.d.sync += [happened.eq(step), values[name].eq(values[name] + happened)]
        with m.If(self.clear):
            m.d.sync += values.eq(0)
        return m
