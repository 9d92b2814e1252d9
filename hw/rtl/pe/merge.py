"""Brings the sums of a PE row together: the dot units of a channel, then the parts over which K is split."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_

from amaranth import Module, Signal
from amaranth.hdl import Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import DOTS_PER_WORD, NdpConfig
from plora.hw.rtl.pe.dot_unit import dot_sum_layout, grid_name
from plora.hw.rtl.pe.sum_adder import SumAdder


def split_steps(config: NdpConfig) -> int:
    """Most steps that merge the parts of a split K: log2 of the channels."""
    return config.channels.bit_length() - 1


def _gated(total: data.View, select: Value) -> Value:
    bits = total.as_value()
    return bits & select.replicate(len(bits))


def _any(values: Iterable[Value]) -> Value:
    return reduce(or_, values)


class RowMerge(wiring.Component):
    """One adder a channel, used for one step a cycle.

    ====================  ==========================================================================
    ``load``              ``merged[c]`` becomes the sum of the dot units of channel c; with ``apart``
                          that of dot unit 0 alone, and that of dot unit 1 is held
    ``load_held``         ``merged[c]`` becomes what was held
    ``steps[i]``          ``merged[c] += merged[c + stride]`` with ``stride = channels >> (i + 1)``,
                          for ``c < stride``; the others lose their meaning
    none of these         ``merged`` becomes zero, so that nothing toggles
    ====================  ==========================================================================

    At most one of them is set. Steps 0 ... s - 1 in the cycles after a load leave the sum over
    ``2**s`` parts of the channels in the first ``channels >> s`` of ``merged``. The held sums are safe
    from whatever the dot units begin after the load.

    Parameters:
        config: sizes.

    Ports:
        sums: accumulators of the row's dot units, by channel.
        load, apart, load_held, steps: as above. ``steps`` has one bit even where there is a single channel.
        merged: registers, valid in the cycle after.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        layout = dot_sum_layout(config.accumulator)
        super().__init__(
            {
                "sums": In(data.ArrayLayout(data.ArrayLayout(layout, DOTS_PER_WORD), config.channels)),
                "load": In(1),
                "apart": In(1),
                "load_held": In(1),
                "steps": In(max(1, split_steps(config))),
                "merged": Out(data.ArrayLayout(layout, config.channels)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build it."""
        m = Module()
        channels, accumulator = self._config.channels, self._config.accumulator
        together = Signal()
        m.d.comb += together.eq(self.load & ~self.apart)
        for channel in range(channels):
            adder = SumAdder(accumulator)
            add_shared(m, platform, f"adder{channel}", f"sum_adder_{grid_name(accumulator)}", adder)
            m.d.comb += self.merged[channel].eq(adder.sum)
            partners = {
                step: self.merged[channel + (channels >> step + 1)]
                for step in range(split_steps(self._config))
                if channel < channels >> step + 1
            }
            one, other = self.sums[channel]
            held = Signal(dot_sum_layout(accumulator), name=f"held{channel}", reset_less=True)
            with m.If(self.load & self.apart):
                m.d.sync += held.eq(other)
            a = [_gated(one, self.load), _gated(held, self.load_held)]
            b = [_gated(other, together)]
            if partners:
                a.append(_gated(self.merged[channel], _any(self.steps[step] for step in partners)))
                b += [_gated(partner, self.steps[step]) for step, partner in partners.items()]
            m.d.comb += [adder.a.eq(_any(a)), adder.b.eq(_any(b))]
        return m
