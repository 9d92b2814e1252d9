"""The operand loader: brings GPU operands from their submission slots into the input buffer."""

from __future__ import annotations

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from plora.hw.defs.config import PE_ROWS, NdpConfig
from plora.hw.rtl.core.bursts import PAGE_WORDS, BurstCutter, burst_layout
from plora.hw.rtl.core.job import JOB_SLOT_BITS, JOB_SLOTS, input_capacity, work_layout


def issued_layout(config: NdpConfig) -> data.StructLayout:
    """A job in flight: its work, its job slot, and the input buffer stripe where its operand begins."""
    return data.StructLayout(
        {
            "work": work_layout(config),
            "slot": JOB_SLOT_BITS,
            "operand_base": range(input_capacity(config)),
            "operand_space": range(input_capacity(config) + 1),
        }
    )


def placement_layout(config: NdpConfig) -> data.StructLayout:
    """Where the words of an operand go: first stripe in the input buffer, and stripes of one row."""
    return data.StructLayout(
        {"base": range(input_capacity(config)), "row_stripes": config.input_half_stripes.bit_length()}
    )


class OperandLoader(wiring.Component):
    """Takes jobs in order, gives each its place in the input buffer, and asks for its operand.

    The input buffer is used as a ring. A job whose operand comes from the slot gets the next
    ``pairs * row_stripes`` stripes as soon as they are free; one that shares the chain's operand gets
    the place of the last one loaded. The job goes on at once, ahead of its data.

    A legal operand needs at most half of the ring, and the place of an operand is given back when the
    first job with a later operand starts; so the next operand always fits beside the current one.

    Ports:
        input: jobs with their job slot.
        output: the same jobs, placed.
        bursts: the operands' bursts.
        placements: for each job slot, where its operand's words go.
        freed: stripes of the ring given back in this cycle.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "input": In(stream.Signature(data.StructLayout({"work": work_layout(config), "slot": JOB_SLOT_BITS}))),
                "output": Out(stream.Signature(issued_layout(config))),
                "bursts": Out(stream.Signature(burst_layout(config))),
                "placements": Out(placement_layout(config)).array(JOB_SLOTS),
                "freed": In(range(input_capacity(config) + 1)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        capacity = input_capacity(self._config)
        count_bits = (PE_ROWS * self._config.input_half_stripes).bit_length()
        work, slot = self.input.payload.work, self.input.payload.slot
        m.submodules.cutter = cutter = BurstCutter(
            self._config, count_bits=count_bits, max_words=PAGE_WORDS, operand=True
        )
        connect(m, cutter.bursts, flipped(self.bursts))

        free = Signal(range(capacity + 1), init=capacity)
        head, current = Signal(range(capacity)), Signal(range(capacity))
        space = Signal(range(capacity + 1))
        may_go, taken = Signal(), Signal()
        m.d.comb += [
            # Half of all rows, a last single row counted as two.
            space.eq((work.operand_stripes + Mux(work.single, work.row_stripes, 0)) >> 1),
            may_go.eq(~work.load | ((space <= free) & cutter.run.ready)),
            self.output.valid.eq(self.input.valid & may_go),
            self.input.ready.eq(self.output.ready & may_go),
            taken.eq(self.input.valid & self.input.ready & work.load),
            self.output.payload.work.eq(work),
            self.output.payload.slot.eq(slot),
            self.output.payload.operand_base.eq(Mux(work.load, head, current)),
            self.output.payload.operand_space.eq(space),
            cutter.run.valid.eq(taken),
            cutter.run.payload.address.eq(work.operand_address),
            cutter.run.payload.words.eq(work.operand_stripes),
            cutter.run.payload.group.eq(0),
            cutter.run.payload.skip.eq(0),
            cutter.run.payload.slot.eq(slot),
            # The ring has room for the whole operand.
            cutter.room.eq(~0),
        ]
        m.d.sync += free.eq(free + self.freed - Mux(taken, space, 0))
        with m.If(taken):
            m.d.sync += [head.eq(head + space), current.eq(head)]
            with m.Switch(slot):
                for index, placement in enumerate(self.placements):
                    with m.Case(index):
                        m.d.sync += [placement.base.eq(head), placement.row_stripes.eq(work.row_stripes)]
        return m
