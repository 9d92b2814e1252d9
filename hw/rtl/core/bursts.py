"""Cutting a run of stripes into bursts, and handing each burst to all channels."""

from __future__ import annotations

from amaranth.hdl import C, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.rtl.core.job import JOB_SLOT_BITS, local_address_bits

PAGE_WORDS = 4096 // WORD_BYTES
"""AXI bursts stay within 4 KiB: in words of one channel."""

LENGTH_BITS = (PAGE_WORDS - 1).bit_length()


def burst_layout(config: NdpConfig) -> data.StructLayout:
    """A burst that every channel reads at the same channel-local address: a run of stripes.

    ==========  ========================================================================================
    operand     1: GPU operand, for the input buffer; 0: device operand, for the DRAM buffer
    slot        job slot of the job that wants it
    start, end  first and last burst of the operand
    address     channel-local word
    length      words less one
    ==========  ========================================================================================
    """
    return data.StructLayout(
        {
            "operand": 1,
            "slot": JOB_SLOT_BITS,
            "start": 1,
            "end": 1,
            "address": local_address_bits(config),
            "length": LENGTH_BITS,
        }
    )


def run_layout(config: NdpConfig, count_bits: int) -> data.StructLayout:
    """A run of stripes to be read.

    ``address`` is the channel-local word of the first, ``words`` their number (``count_bits`` bits),
    ``slot`` the job slot. Where ``group`` is not zero, no burst spans a multiple of that many stripes
    from the start of the run, and after each of them ``skip`` words are left out.
    """
    return data.StructLayout(
        {
            "address": local_address_bits(config),
            "words": count_bits,
            "group": count_bits,
            "skip": count_bits,
            "slot": JOB_SLOT_BITS,
        }
    )


class BurstCutter(wiring.Component):
    """Cuts runs of stripes into bursts that stay within 4 KiB and wait until there is room for their words.

    Parameters:
        config: device configuration.
        count_bits: bits of the length of a run.
        max_words: longest burst, at most `PAGE_WORDS`.
        operand: what the bursts are for, see `burst_layout`.

    Ports:
        run: taken when the run before it is done. At least one stripe long.
        bursts: one every two cycles; one more cycle where words are left out.
        room: words that may be asked for; must not shrink but by the bursts that are taken.
    """

    def __init__(self, config: NdpConfig, *, count_bits: int, max_words: int, operand: bool) -> None:
        if not 1 <= max_words <= PAGE_WORDS:
            raise ValueError(f"max_words must be 1 ... {PAGE_WORDS}, not {max_words!r}")
        self._config = config
        self._count_bits = count_bits
        self._max_words = max_words
        self._operand = operand
        super().__init__(
            {
                "run": In(stream.Signature(run_layout(config, count_bits))),
                "bursts": Out(stream.Signature(burst_layout(config))),
                "room": In(count_bits),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        count_bits = self._count_bits
        address = Signal(local_address_bits(self._config), reset_less=True)
        slot = Signal(JOB_SLOT_BITS, reset_less=True)
        start = Signal()
        left = Signal(count_bits)
        group = Signal(count_bits, reset_less=True)
        group_left = Signal(count_bits, reset_less=True)
        skip = Signal(count_bits, reset_less=True)
        words = Signal(range(PAGE_WORDS + 1), reset_less=True)

        next_words = Signal(range(PAGE_WORDS + 1))
        limits = [PAGE_WORDS - address[:LENGTH_BITS], left, Mux(group == 0, self._max_words, group_left)]
        shortest: Value = C(self._max_words)
        for limit in limits:
            shortest = Mux(limit < shortest, limit, shortest)
        m.d.comb += next_words.eq(shortest)

        burst = self.bursts.payload
        m.d.comb += [
            burst.operand.eq(self._operand),
            burst.slot.eq(slot),
            burst.start.eq(start),
            burst.end.eq(words == left),
            burst.address.eq(address),
            burst.length.eq(words - 1),
        ]
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.run.ready.eq(1)
                m.d.sync += [
                    address.eq(self.run.payload.address),
                    slot.eq(self.run.payload.slot),
                    left.eq(self.run.payload.words),
                    group.eq(self.run.payload.group),
                    group_left.eq(self.run.payload.group),
                    skip.eq(self.run.payload.skip),
                    start.eq(1),
                ]
                with m.If(self.run.valid):
                    m.next = "CUT"
            with m.State("CUT"):
                m.d.sync += words.eq(next_words)
                m.next = "OFFER"
            with m.State("OFFER"):
                m.d.comb += self.bursts.valid.eq(words <= self.room)
                with m.If(self.bursts.valid & self.bursts.ready):
                    m.d.sync += [
                        address.eq(address + words),
                        left.eq(left - words),
                        group_left.eq(Mux(group_left == words, group, group_left - words)),
                        start.eq(0),
                    ]
                    m.next = "CUT"
                    with m.If((group_left == words) & (skip != 0)):
                        m.next = "SKIP"
                    with m.If(words == left):
                        m.next = "IDLE"
            with m.State("SKIP"):
                m.d.sync += address.eq(address + skip)
                m.next = "CUT"
        return m


class BurstBroadcast(wiring.Component):
    """Gives every burst to all channels; operands go before weights.

    An operand is short and needed before the first beat of its job, whereas weights are asked for as
    far ahead as the DRAM buffer has room. Channels take a burst independently, so that one may run
    ahead of another by one burst here and by what their own queues hold.

    Ports:
        operands, weights: bursts of the operand loader and of the weight reader.
        channels: the same bursts for each channel.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        bursts = stream.Signature(burst_layout(config))
        super().__init__(
            {
                "operands": In(bursts),
                "weights": In(bursts),
                "channels": Out(bursts).array(config.channels),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        channels = self._config.channels
        burst = Signal(burst_layout(self._config), reset_less=True)
        pending, left = Signal(channels), Signal(channels)
        for index, channel in enumerate(self.channels):
            m.d.comb += [
                channel.payload.eq(burst),
                channel.valid.eq(pending[index]),
                left[index].eq(pending[index] & ~channel.ready),
            ]
        m.d.sync += pending.eq(left)
        with m.If(left == 0):
            m.d.comb += [
                self.operands.ready.eq(1),
                self.weights.ready.eq(~self.operands.valid),
            ]
            with m.If(self.operands.valid):
                m.d.sync += burst.eq(self.operands.payload)
            with m.Else():
                m.d.sync += burst.eq(self.weights.payload)
            with m.If(self.operands.valid | self.weights.valid):
                m.d.sync += pending.eq(~0)
        return m
