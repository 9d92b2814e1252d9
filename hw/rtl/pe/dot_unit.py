"""Sixteen multiply-adds: exact products on a fixed-point grid, summed into one accumulator."""

from __future__ import annotations

from itertools import pairwise

from amaranth import Module, Signal
from amaranth.hdl import Cat, Const, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import DOT_LANES, AccumulatorConfig
from plora.hw.rtl.pe.align import GridAlign
from plora.hw.rtl.pe.carry_save import add3, reduce
from plora.hw.rtl.pe.product import FP16_BITS, PRODUCT_BITS, SHIFT_BITS, Fp16Product

PARTIAL_SUMS = 4
"""Numbers that the adder tree is cut at by registers."""

SEGMENTS = 4
"""Pieces of the accumulator. A carry from one piece to the next waits a cycle in a register, which
keeps the longest carry chain of the loop at a quarter of the accumulator."""

sticky_layout = data.StructLayout({"nan": 1, "positive_infinity": 1, "negative_infinity": 1, "clipped": 1})
"""What a sum saw that is not on the grid, as in `plora.sim.golden.numerics.Grid`."""


def segment_starts(accumulator: AccumulatorConfig) -> list[int]:
    """Lowest bit of every piece of the accumulator."""
    return [round(accumulator.bits * piece / SEGMENTS) for piece in range(SEGMENTS)]


def grid_name(accumulator: AccumulatorConfig) -> str:
    """Return what tells modules for one grid from those for another, fit for a Verilog name."""
    return f"{-accumulator.lsb_exponent}_{accumulator.msb_exponent}_{accumulator.terms_log2}"


def dot_sum_layout(accumulator: AccumulatorConfig) -> data.StructLayout:
    """An accumulator: ``value``, plus ``2**segment_starts()[i + 1]`` for every bit i of ``carries``, modulo
    ``2**bits`` and read as two's complement, in grid steps; and the sticky flags.
    """
    return data.StructLayout({"value": accumulator.bits, "carries": SEGMENTS - 1, "sticky": sticky_layout})


class DotUnit(wiring.Component):
    """``sum += sum over the lanes of a * b``, a new set of operands every cycle.

    Cycle behaviour: operands of cycle t are in ``sum`` from cycle ``t + LATENCY`` on. A cycle with
    no lane enabled and ``first`` low changes nothing, so there is no separate valid bit::

        a, b -> [multiply] -> [align, add 16 to 4] -> [add 4 to 2, accumulate] -> sum

    Every bracket ends in registers; operands must come from registers. A negative addend is the
    complement of its magnitude: the missing ones are added in the free lowest bits of the carry rows.

    Parameters:
        accumulator: the grid.

    Ports:
        a, b: FP16 operands of the lanes.
        enable: lanes that count; others contribute nothing, NaN and infinity included.
        first: forget the sum so far.
        sum: see `dot_sum_layout`. Exact and free of wrapping for up to ``accumulator.max_terms``
            products; what special values do is in docs/numerics.md.
    """

    LATENCY = 3

    def __init__(self, accumulator: AccumulatorConfig) -> None:
        self._accumulator = accumulator
        lanes = data.ArrayLayout(FP16_BITS, DOT_LANES)
        super().__init__(
            {
                "a": In(lanes),
                "b": In(lanes),
                "enable": In(DOT_LANES),
                "first": In(1),
                "sum": Out(dot_sum_layout(accumulator)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build it."""
        m = Module()
        width = self._accumulator.product_bits + 1 + (DOT_LANES - 1).bit_length()

        def registers(name: str, values: list[Value]) -> list[Value]:
            stage: list[Value] = []
            for index, value in enumerate(values):
                stage.append(Signal(len(value), name=f"{name}{index}", reset_less=True))
                m.d.sync += stage[-1].eq(value)
            return stage

        # Multiply.
        addends: list[Value] = []
        negatives: list[Value] = []
        nans, positives, negative_infinities, clips = [], [], [], []
        for lane in range(DOT_LANES):
            product, align = Fp16Product(), GridAlign(self._accumulator)
            add_shared(m, platform, f"product{lane}", "fp16_product", product)
            add_shared(m, platform, f"align{lane}", f"grid_align_{grid_name(self._accumulator)}", align)
            significand = Signal(PRODUCT_BITS, name=f"significand{lane}", reset_less=True)
            shift = Signal(SHIFT_BITS, name=f"shift{lane}", reset_less=True)
            negative = Signal(name=f"negative{lane}", reset_less=True)
            m.d.comb += [
                product.a.eq(self.a[lane]),
                product.b.eq(self.b[lane]),
                product.enable.eq(self.enable[lane]),
                align.significand.eq(significand),
                align.shift.eq(shift),
                align.negative.eq(negative),
            ]
            m.d.sync += [
                significand.eq(product.significand),
                shift.eq(product.shift),
                negative.eq(product.negative),
            ]
            nans.append(product.nan)
            positives.append(product.infinite & ~product.negative)
            negative_infinities.append(product.infinite & product.negative)
            addends.append(align.addend)
            negatives.append(negative)
            clips.append(align.clipped)

        # Align, and the first part of the adder tree.
        partial, ones = reduce(m, "upper", addends, negatives, PARTIAL_SUMS, width)
        partial, ones = registers("partial", partial), registers("ones", ones)

        # The rest of it.
        (low, high), (one_more, carry_in) = reduce(m, "lower", partial, ones, 2, width)

        # Side band: ``first`` and the flags, in step with the sums.
        sticky = [Signal(sticky_layout, name=f"sticky{stage}", reset_less=True) for stage in range(2)]
        first = [Signal(name=f"first{stage}", reset_less=True) for stage in range(2)]
        clipped = Cat(clips)
        clipped_negative = clipped & Cat(negatives)
        m.d.sync += [
            sticky[0].nan.eq(Cat(nans).any()),
            sticky[0].positive_infinity.eq(Cat(positives).any()),
            sticky[0].negative_infinity.eq(Cat(negative_infinities).any()),
            sticky[1].nan.eq(sticky[0].nan),
            sticky[1].positive_infinity.eq(sticky[0].positive_infinity | (clipped & ~Cat(negatives)).any()),
            sticky[1].negative_infinity.eq(sticky[0].negative_infinity | clipped_negative.any()),
            sticky[1].clipped.eq(clipped.any()),
            Cat(first).eq(Cat(self.first, first)),
        ]

        # Accumulate. The tree's sum is that of the steps plus ``lanes * 2**product_bits``, the top
        # bit of ``width``: subtracted here, as ones from that bit up. Not both numbers have the bit.
        top = width - 1
        offset = Const((1 << self._accumulator.bits - width) - 1, self._accumulator.bits - width)
        low, high = Cat(low[:top], low[top] | high[top], offset), Cat(high[:top], Const(1, 1))
        total = Signal(self.sum.shape(), name="total", reset_less=True)
        m.d.comb += self.sum.eq(total)
        keep = ~first[-1]
        starts = [*segment_starts(self._accumulator), self._accumulator.bits]
        for piece, (start, end) in enumerate(pairwise(starts)):
            kept = total.value[start:end] & keep.replicate(end - start)
            partial, carries = add3(m, f"piece{piece}", [kept, low[start:end], high[start:end]], one_more)
            carry = total.carries[piece - 1] & keep if piece else carry_in
            piece_sum = Signal(end - start + 1, name=f"piece{piece}")
            m.d.comb += piece_sum.eq(partial + carries[: end - start] + carry)
            m.d.sync += total.value[start:end].eq(piece_sum)
            if end != self._accumulator.bits:
                m.d.sync += total.carries[piece].eq(piece_sum[-1])
            one_more = carries[-1]
        m.d.sync += total.sticky.eq(sticky[1].as_value() | (total.sticky.as_value() & keep.replicate(4)))
        return m
