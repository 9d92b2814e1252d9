"""Channels answer when they like; a stripe counts only once all of them have."""

from __future__ import annotations

from amaranth.hdl import Cat, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out


class Rendezvous(wiring.Component):
    """Counts the events of each channel, and the events that all channels have seen.

    Parameters:
        channels: number of channels.
        count_bits: bits of the counts, which wrap. No channel may be 2**count_bits events ahead.

    Ports:
        events: one bit a channel.
        counts: events of each channel.
        common: events seen by all, at most one more each cycle. It follows the slowest channel's
            count one cycle behind.
    """

    def __init__(self, *, channels: int, count_bits: int) -> None:
        self._channels = channels
        self._count_bits = count_bits
        super().__init__(
            {
                "events": In(channels),
                "counts": Out(count_bits).array(channels),
                "common": Out(count_bits),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        for event, count in zip(self.events, self.counts, strict=True):
            m.d.sync += count.eq(count + event)
        with m.If(Cat(count != self.common for count in self.counts).all()):
            m.d.sync += self.common.eq(self.common + 1)
        return m
