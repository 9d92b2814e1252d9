"""Places a product on the accumulator's fixed-point grid."""

from __future__ import annotations

from amaranth import Module, Signal
from amaranth.hdl import Cat
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import AccumulatorConfig
from plora.hw.rtl.pe.product import PRODUCT_BITS, SHIFT_BITS, UNIT_EXPONENT

_FINE_BITS = 4


class GridAlign(wiring.Component):
    """Turns a product into a number of grid steps, combinational.

    The bits of the magnitude below ``2**lsb_exponent`` are dropped. The result is offset binary in
    two parts, so that many of them can be summed as unsigned numbers::

        steps = addend + negative - 2**product_bits       (negative: the bit, as a number)

    Parameters:
        accumulator: the grid.

    Ports:
        significand, shift, negative: a product of `Fp16Product`.
        addend: ``product_bits + 1`` bits.
        clipped: the magnitude is ``2**msb_exponent`` or more; ``addend`` has no meaning.
    """

    def __init__(self, accumulator: AccumulatorConfig) -> None:
        self._accumulator = accumulator
        super().__init__(
            {
                "significand": In(PRODUCT_BITS),
                "shift": In(SHIFT_BITS),
                "negative": In(1),
                "addend": Out(accumulator.product_bits + 1),
                "clipped": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build it."""
        m = Module()
        bits = self._accumulator.product_bits
        # Position of the grid's first bit in a significand shifted by ``shift``.
        first = self._accumulator.lsb_exponent - UNIT_EXPONENT
        # Two steps, as no value between need be wider than a machine word of a simulator.
        fine = Signal(PRODUCT_BITS + (1 << _FINE_BITS) - 1)
        magnitude = Signal(bits)
        m.d.comb += fine.eq(self.significand << self.shift[:_FINE_BITS])
        with m.Switch(self.shift[_FINE_BITS:]):
            for coarse in range(1 << SHIFT_BITS - _FINE_BITS):
                position = (coarse << _FINE_BITS) - first
                with m.Case(coarse):
                    m.d.comb += magnitude.eq(fine << position if position >= 0 else fine >> -position)
        # 2**20 <= significand < 2**22 for two normal operands, and others never come near the top.
        top = self._accumulator.msb_exponent - UNIT_EXPONENT - (PRODUCT_BITS - 2)
        m.d.comb += [
            self.addend.eq(Cat(magnitude ^ self.negative.replicate(bits), ~self.negative)),
            self.clipped.eq((self.shift >= top) | ((self.shift == top - 1) & self.significand[-1])),
        ]
        return m
