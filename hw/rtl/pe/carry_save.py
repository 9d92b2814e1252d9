"""Carry-save addition: many numbers become a few with the same sum, without a carry chain."""

from __future__ import annotations

from collections.abc import Sequence

from amaranth import Module, Signal
from amaranth.hdl import Cat, Const, Value, ValueLike


def add3(
    m: Module, name: str, terms: Sequence[ValueLike], carry_in: ValueLike, width: int | None = None
) -> tuple[Signal, Signal]:
    """Return two unsigned numbers with the sum of three unsigned numbers and a bit: a row of full adders.

    The carry row starts one bit higher and so has room for ``carry_in``, a bit of weight one. Bits
    from ``width`` up, where given, are dropped.
    """
    a, b, c = (Value.cast(term) for term in terms)
    natural = max(len(a), len(b), len(c))
    limit = natural + 1 if width is None else width
    total = Signal(min(natural, limit), name=f"{name}_sum")
    carry = Signal(min(natural + 1, limit), name=f"{name}_carry")
    half = a ^ b
    m.d.comb += [total.eq(half ^ c), carry.eq(Cat(carry_in, (a & b) | (half & c)))]
    return total, carry


def reduce(
    m: Module, name: str, terms: Sequence[ValueLike], bits: Sequence[ValueLike], count: int, width: int
) -> tuple[list[Value], list[Value]]:
    """Return ``count`` (>= 2) unsigned numbers with the sum of ``terms`` and of as many ``bits`` as find room.

    ``bits`` are of weight one; one finds room in every row of full adders, ``len(terms) - count`` in
    all. Those left over are returned too. The sum of everything must be below ``2**width``: as no
    number is negative, none of those made on the way then needs more bits.
    """
    terms, bits = [Value.cast(term) for term in terms], [Value.cast(bit) for bit in bits]
    rows = 0
    while len(terms) > count:
        level: list[Value] = []
        while len(terms) >= 3 and len(terms) + len(level) > count:
            carry_in = bits.pop(0) if bits else Const(0, 1)
            level += add3(m, f"{name}{rows}", terms[:3], carry_in, width)
            del terms[:3]
            rows += 1
        terms += level
    return terms, bits
