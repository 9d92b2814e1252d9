"""What the SFU knows of every query row: anchor, sum, and whether some p is NaN."""

from __future__ import annotations

from amaranth import Array, Module, Signal
from amaranth.hdl import Cat, Const, Mux, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import KEPT_MAX_TOKENS, PE_ROWS
from plora.hw.rtl.pe.drain import OFFSET_BITS
from plora.hw.rtl.sfu.pipeline import delayed
from plora.hw.rtl.sfu.score_scale import ANCHOR_BITS
from plora.hw.rtl.sfu.unit_sum import P_STEPS_BITS

SUM_BITS = P_STEPS_BITS + KEPT_MAX_TOKENS.bit_length() - 1
"""Bits of l in steps of 2**-24: as many ones as there can be tokens."""
READERS = 2
"""Ports for reading: one where V is weighed, one where anchors are returned."""
GROWTH_BITS = 6
"""Bits of a growth of the anchor that matter to l, which has fewer bits than it can be shifted by."""

state_layout = data.StructLayout({"anchor": ANCHOR_BITS, "shift": OFFSET_BITS, "total": SUM_BITS, "nan": 1})
"""``anchor``: M, signed, or `NO_ANCHOR`; ``total``: l in steps of 2**-24; ``shift``: the least e with
``l <= 2**e``; ``nan``: some p of the row is NaN."""

NO_ANCHOR = -(1 << ANCHOR_BITS - 1)
"""Anchor of a row without a finite t, as a signed number."""


def sum_shift(total: Value) -> Value:
    """Return the least e >= 0 for which ``total <= 2**(24 + e)``."""
    top = P_STEPS_BITS - 1
    beyond = [total[top + e + 1 :].any() | (total[top + e] & total[: top + e].any()) for e in range(len(total) - top)]
    # beyond[e] says that e is too small; all below the answer are.
    bits = []
    for bit in range(OFFSET_BITS):
        ones = Const(0, 1)
        for start in range(1 << bit, 1 << OFFSET_BITS, 2 << bit):
            # From `start` to before `end` the answers have this bit.
            end = start + (1 << bit)
            here = beyond[start - 1] if start - 1 < len(beyond) else Const(0, 1)
            after = beyond[end - 1] if end - 1 < len(beyond) else Const(0, 1)
            ones |= here & ~after
        bits.append(ones)
    return Cat(bits)


class StateRead(wiring.Signature):
    """Reading of the states of a pair of rows, seen from the reader.

    At an edge with ``enable`` the states of the rows of ``pair`` come to ``states``, see `state_layout`, and stay
    there until the next.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        super().__init__(
            {
                "pair": Out(range(rows // PE_ROWS)),
                "enable": Out(1),
                "states": In(data.ArrayLayout(state_layout, PE_ROWS)),
            }
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateRead) and self._rows == other._rows

    def __repr__(self) -> str:
        return f"StateRead({self._rows!r})"


class RowState(wiring.Component):
    """Anchors and sums of rows, from unit to unit.

    ::

        largest, row, begin -> [M of the row] -> [M = max(M, largest)] -> anchor
        total (later)       -> [l of the row] -> [l >> growth] -> [l + total] -> [write]

    Cycle behaviour, for a unit whose ``row``, ``begin`` and ``valid`` are given in cycle t: ``largest`` and
    ``nan`` are given in cycle ``t + 1``, ``anchor`` is there in ``t + ANCHOR_LATENCY``, and ``total`` is given in
    ``t + total_delay``. Units of one row come at most every second cycle. A row's state may be asked for
    ``SETTLE`` cycles after its last ``total`` was given; before that its parts may be of different units.

    Parameters:
        rows: query rows, a power of two.
        total_bits: width of ``total``.
        total_delay: cycles from ``row`` to ``total``.

    Ports:
        valid, row, begin: a unit, and whether it is the first of its row.
        largest: largest rounded t of the unit, offset; 0 if it has none.
        nan: a p of the unit is NaN.
        total: sum of the unit's p.
        anchor: the row's anchor with the unit, offset.
        reads: of the states, one for each reader.
    """

    ANCHOR_LATENCY = 2
    SETTLE = 3
    READ_LATENCY = 1

    def __init__(self, rows: int, *, total_bits: int, total_delay: int) -> None:
        if rows < 2 or rows & (rows - 1):
            raise ValueError(f"rows must be a power of two of at least 2, not {rows!r}")
        if total_delay < 4:
            raise ValueError(f"total_delay must be at least 4, not {total_delay!r}")
        self._rows = rows
        self._total_delay = total_delay
        super().__init__(
            {
                "valid": In(1),
                "row": In(range(rows)),
                "begin": In(1),
                "largest": In(ANCHOR_BITS),
                "nan": In(1),
                "total": In(total_bits),
                "anchor": Out(ANCHOR_BITS),
                "reads": In(StateRead(rows)).array(READERS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        anchors, sums, nans = (
            Array(Signal(bits, name=f"{name}{row}", reset_less=True) for row in range(self._rows))
            for name, bits in (("anchor", ANCHOR_BITS), ("sum", SUM_BITS), ("nan", 1))
        )

        # Anchor. Two cycles from reading to reading back: what a unit writes, the next of its row reads.
        valid = delayed(m, "valid", self.valid, 1, reset_less=False)
        row = delayed(m, "row", self.row, 1)
        known = Signal(ANCHOR_BITS, reset_less=True)
        known_nan = Signal(reset_less=True)
        m.d.sync += [
            known.eq(anchors[self.row] & ~self.begin.replicate(ANCHOR_BITS)),
            known_nan.eq(nans[self.row] & ~self.begin),
        ]
        before, after = Signal(ANCHOR_BITS, reset_less=True), Signal(ANCHOR_BITS, reset_less=True)
        grows = self.largest > known
        m.d.sync += [before.eq(known), after.eq(Mux(grows, self.largest, known))]
        with m.If(valid):
            m.d.sync += [
                anchors[row].eq(Mux(grows, self.largest, known)),
                nans[row].eq(known_nan | self.nan),
            ]
        m.d.comb += self.anchor.eq(after)
        difference = Signal(ANCHOR_BITS)
        growth = Signal(GROWTH_BITS, reset_less=True)
        m.d.comb += difference.eq(after - before)
        m.d.sync += growth.eq(difference[:GROWTH_BITS] | difference[GROWTH_BITS:].any().replicate(GROWTH_BITS))

        # Sum. The cycle before ``total`` is given reads; then shift, add, write. A unit two cycles
        # later takes the sum from the register, one three cycles later while it is written.
        early = self._total_delay - 1
        reading = delayed(m, "reading", self.row, early)
        forget = delayed(m, "forget", self.begin, early)
        shifting = delayed(m, "shifting", reading, 1)
        adding = delayed(m, "adding", shifting, 1)
        writing = delayed(m, "writing", adding, 1)
        shifting_valid = delayed(m, "shifting_valid", self.valid, early + 1, reset_less=False)
        adding_valid = delayed(m, "adding_valid", shifting_valid, 1, reset_less=False)
        writing_valid = delayed(m, "writing_valid", adding_valid, 1, reset_less=False)
        places = delayed(m, "growth", growth, self._total_delay - 3)
        added = Signal(SUM_BITS, reset_less=True)
        old = Signal(SUM_BITS, reset_less=True)
        forward = Signal(reset_less=True)
        m.d.sync += [
            old.eq(
                Mux(writing_valid & (writing == reading), added, sums[reading]) & ~forget.replicate(SUM_BITS),
            ),
            forward.eq(adding_valid & (adding == reading) & ~forget),
        ]
        shifted = Signal(SUM_BITS, reset_less=True)
        m.d.sync += [
            shifted.eq(Mux(forward, added, old) >> places),
            added.eq(shifted + delayed(m, "total", self.total, 1)),
        ]
        with m.If(writing_valid):
            m.d.sync += sums[writing].eq(added)

        # Reading.
        for reader, read in enumerate(self.reads):
            for place in range(PE_ROWS):
                state = read.states[place]
                found = {}
                for name, known in (("anchor", anchors), ("total", sums), ("nan", nans)):
                    found[name] = Signal.like(known[0], name=f"{name}_{reader}_{place}", reset_less=True)
                    with m.If(read.enable):
                        m.d.sync += found[name].eq(Array(known[place::PE_ROWS])[read.pair])
                m.d.comb += [
                    # Offset to signed.
                    state.anchor.eq(found["anchor"] ^ (1 << ANCHOR_BITS - 1)),
                    state.total.eq(found["total"]),
                    state.shift.eq(sum_shift(found["total"])),
                    state.nan.eq(found["nan"]),
                ]
        return m
