"""The weight reader: streams device operands from memory into the DRAM buffer."""

from __future__ import annotations

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from plora.hw.defs.config import NdpConfig
from plora.hw.rtl.core.bursts import PAGE_WORDS, BurstCutter, burst_layout
from plora.hw.rtl.core.job import JOB_SLOT_BITS, local_address_bits, stripe_count_bits


def weights_layout(config: NdpConfig) -> data.StructLayout:
    """Which stripes a job wants: names as in `plora.hw.rtl.core.job.work_layout`.

    ``group``: stripes of a group. ``held``: those stay in the DRAM buffer while further pairs of rows pass.
    """
    stripes = stripe_count_bits(config)
    return data.StructLayout(
        {
            "address": local_address_bits(config),
            "stripes": stripes,
            "group": stripes,
            "skip": stripes,
            "held": 1,
            "slot": JOB_SLOT_BITS,
        }
    )


def longest_burst(config: NdpConfig) -> int:
    """Most words of a weight burst: a page, or a quarter of a small DRAM buffer."""
    return min(PAGE_WORDS, config.dram_buffer_stripes // 4)


class WeightReader(wiring.Component):
    """Asks for the stripes of one job after the other, as far ahead as the DRAM buffer has room.

    Room is counted when stripes are asked for, so that answers always find it. Full bursts are waited
    for rather than cut to the room there is: memory likes long bursts. That cannot hang. A group that
    is held has to arrive whole before any of it is freed; a burst that ends with the group, or a group
    shorter than a burst, leaves it enough room (a burst is at most a quarter of the buffer). So does one of keys that
    are integers, which may begin within a stripe: it lies in at most four, and the least buffer has eight.

    Ports:
        input: jobs in order.
        bursts: their bursts.
        freed: one stripe was read for the last time.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "input": In(stream.Signature(weights_layout(config))),
                "bursts": Out(stream.Signature(burst_layout(config))),
                "freed": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        depth = self._config.dram_buffer_stripes
        longest = longest_burst(self._config)
        count_bits = max(stripe_count_bits(self._config), depth.bit_length())
        m.submodules.cutter = cutter = BurstCutter(
            self._config, count_bits=count_bits, max_words=longest, operand=False
        )
        connect(m, cutter.bursts, flipped(self.bursts))
        wanted = self.input.payload
        free = Signal(range(depth + 1), init=depth)
        asked = Signal(range(PAGE_WORDS + 1))
        m.d.comb += [
            cutter.run.valid.eq(self.input.valid),
            self.input.ready.eq(cutter.run.ready),
            cutter.run.payload.address.eq(wanted.address),
            cutter.run.payload.words.eq(wanted.stripes),
            cutter.run.payload.group.eq(
                Mux((wanted.held & (wanted.group >= longest)) | (wanted.skip != 0), wanted.group, 0)
            ),
            cutter.run.payload.skip.eq(wanted.skip),
            cutter.run.payload.slot.eq(wanted.slot),
            cutter.room.eq(free),
            asked.eq(Mux(self.bursts.valid & self.bursts.ready, self.bursts.payload.length + 1, 0)),
        ]
        m.d.sync += free.eq(free - asked + self.freed)
        return m
