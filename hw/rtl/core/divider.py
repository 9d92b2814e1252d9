"""An unsigned divider that takes its time: one bit of the quotient a cycle."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out


class SequentialDivider(wiring.Component):
    """``quotient, remainder = divmod(dividend, divisor)``, where there is time to spare.

    Parameters:
        dividend_bits, divisor_bits: widths, at least 1.

    Ports:
        dividend: taken with ``start``.
        divisor: must stay as it is until ``done``. By 0 the results mean nothing.
        start: begins.
        quotient, remainder: valid while ``done``.
        done: the results of the last start are there: ``dividend_bits + 1`` cycles after the cycle of
            ``start``. Low in the cycle after ``start``, also if it was high before.
    """

    def __init__(self, dividend_bits: int, divisor_bits: int) -> None:
        if dividend_bits < 1 or divisor_bits < 1:
            raise ValueError(f"widths must be at least 1, not {dividend_bits!r} and {divisor_bits!r}")
        self._dividend_bits = dividend_bits
        super().__init__(
            {
                "dividend": In(dividend_bits),
                "divisor": In(divisor_bits),
                "start": In(1),
                "quotient": Out(dividend_bits),
                "remainder": Out(divisor_bits),
                "done": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        rest = Signal(len(self.divisor), reset_less=True)
        # Bits of the dividend not used yet, with bits of the quotient moving in from below.
        low = Signal(self._dividend_bits, reset_less=True)
        left = Signal(range(self._dividend_bits + 1))
        grown = Signal(len(rest) + 1)
        less = Signal(len(rest) + 2)
        fits = Signal()
        m.d.comb += [
            grown.eq(Cat(low[-1], rest)),
            less.eq(grown - self.divisor),
            fits.eq(~less[-1]),
            self.quotient.eq(low),
            self.remainder.eq(rest),
            self.done.eq(left == 0),
        ]
        with m.If(self.start):
            m.d.sync += [rest.eq(0), low.eq(self.dividend), left.eq(self._dividend_bits)]
        with m.Elif(left != 0):
            m.d.sync += [low.eq(Cat(fits, low[:-1])), left.eq(left - 1), rest.eq(grown)]
            with m.If(fits):
                m.d.sync += rest.eq(less)
        return m
