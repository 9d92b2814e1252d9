"""An unsigned multiplier that takes its time: two bits a cycle, one narrow adder."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

BITS_PER_STEP = 2


def multiply_steps(width: int) -> int:
    """Return the additions made for a product of two factors of ``width`` bits."""
    return width // BITS_PER_STEP


class SequentialMultiplier(wiring.Component):
    """``product = a * b``, ``width`` bits each, where there is time to spare.

    Parameters:
        width: bits of a factor, even, at least 2.

    Ports:
        a, b: factors; ``a`` must stay as it is until ``done``.
        start: begins with the factors as they are in this cycle.
        product: ``2 * width`` bits, valid while ``done``.
        done: the product of the last start is there: `multiply_steps` + 1 cycles after the cycle of ``start``.
            Low in the cycle after ``start``, also if it was high before.
    """

    def __init__(self, width: int) -> None:
        if width < BITS_PER_STEP or width % BITS_PER_STEP:
            raise ValueError(f"width must be a positive multiple of {BITS_PER_STEP}, not {width!r}")
        self._width = width
        super().__init__(
            {
                "a": In(width),
                "b": In(width),
                "start": In(1),
                "product": Out(2 * width),
                "done": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        width = self._width
        high = Signal(width, reset_less=True)
        low = Signal(width, reset_less=True)  # bits of b not used yet, with product bits moving in from above
        left = Signal(range(multiply_steps(width) + 1))
        term = Signal(width + BITS_PER_STEP)
        total = Signal(width + BITS_PER_STEP)
        m.d.comb += [
            term.eq(Mux(low[0], self.a, 0) + Mux(low[1], self.a << 1, 0)),
            total.eq(high + term),
            self.product.eq(Cat(low, high)),
            self.done.eq(left == 0),
        ]
        with m.If(self.start):
            m.d.sync += [high.eq(0), low.eq(self.b), left.eq(multiply_steps(width))]
        with m.Elif(left != 0):
            m.d.sync += [
                Cat(low, high).eq(Cat(low[BITS_PER_STEP:], total)),
                left.eq(left - 1),
            ]
        return m
