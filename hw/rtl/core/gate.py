"""The job gate: lets a job into the array once everything it needs is there."""

from __future__ import annotations

from amaranth.hdl import Array, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import SOFTMAX_BANKS, NdpConfig
from plora.hw.rtl.core.input_buffer import ARRIVALS_BITS
from plora.hw.rtl.core.job import FINISHED, RESULT_HALVES, Destination, Region, input_capacity
from plora.hw.rtl.core.operand_loader import issued_layout
from plora.hw.rtl.core.sequencer import granted_layout


class JobGate(wiring.Component):
    """Grants jobs in order, each when

    * its operand has arrived in the input buffer, or, where that is a kept intermediate, all of it has been stored,
      and the softmax unit is done with its rows. Of softmax terms those of the other bank may still be on their way;
    * a result half is free for it, if its results go to memory: the halves are used in turn;
    * fewer than `FINISHED` jobs before it wait for completion.

    Its weights need not have arrived.

    Ports:
        jobs: placed by the operand loader.
        granted: to the beat sequencer.
        arrivals: of the input buffer.
        freed: stripes of the input buffer to give back: those of the operand before that of the job
            which is being granted.
        collected: a job's last result is being stored.
        softmax_busy: by bank: the states of rows in the softmax unit are not complete.
        half_freed: result halves that may be filled again.
        completed: a granted job is completed.
        waits_for_input: the next job lacks its operand and nothing else.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "jobs": In(stream.Signature(issued_layout(config))),
                "granted": Out(stream.Signature(granted_layout(config))),
                "arrivals": In(ARRIVALS_BITS),
                "freed": Out(range(input_capacity(config) + 1)),
                "collected": In(1),
                "softmax_busy": In(SOFTMAX_BANKS),
                "half_freed": In(RESULT_HALVES),
                "completed": In(1),
                "waits_for_input": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        job, granted = self.jobs.payload, self.granted.payload
        work = job.work
        to_memory, has_results = Signal(), Signal()
        taken = Signal()
        m.d.comb += [
            to_memory.eq(work.destination == Destination.MEMORY),
            has_results.eq(work.destination != Destination.ACCUMULATORS),
            taken.eq(self.granted.valid & self.granted.ready),
        ]

        consumed = Signal(ARRIVALS_BITS)
        resident = Signal(range(input_capacity(self._config) + 1))
        uncollected, uncompleted = Signal(range(FINISHED + 1)), Signal(range(FINISHED + 1))
        still = Signal(range(FINISHED + 1))
        half = Signal(range(RESULT_HALVES))
        busy, becomes_busy = Signal(RESULT_HALVES), Signal(RESULT_HALVES)
        operand_there, room_there, kept_there = Signal(), Signal(), Signal()
        # By bank: jobs to be collected until what was kept there is complete. A job of no softmax terms keeps in
        # bank 0, whatever words it uses: of these, only one that is kept last is ever taken.
        incomplete = Array(Signal(range(FINISHED + 1), name=f"incomplete_{bank}") for bank in range(SOFTMAX_BANKS))
        m.d.comb += [
            kept_there.eq(
                (incomplete[work.bank] == 0) & ~(work.token_wise & self.softmax_busy.bit_select(work.bank, 1))
            ),
            operand_there.eq(Mux(work.load, self.arrivals != consumed, ~work.from_kept | kept_there)),
            room_there.eq((uncompleted != FINISHED) & ~(to_memory & busy.bit_select(half, 1))),
            self.granted.valid.eq(self.jobs.valid & operand_there & room_there),
            self.jobs.ready.eq(self.granted.ready & operand_there & room_there),
            self.waits_for_input.eq(self.jobs.valid & self.granted.ready & room_there & ~operand_there),
            granted.work.eq(work),
            granted.slot.eq(job.slot),
            granted.operand_base.eq(job.operand_base),
            granted.region.eq(Mux(half, Region.HALF_1, Region.HALF_0)),
            self.freed.eq(Mux(taken & work.load, resident, 0)),
            becomes_busy.eq(Mux(taken & to_memory, 1 << half, 0)),
        ]
        with m.If(work.destination == Destination.KEPT):
            m.d.comb += granted.region.eq(Region.KEPT)
        m.d.comb += still.eq(uncollected - self.collected)
        for bank, left in enumerate(incomplete):
            with m.If(taken & (work.destination == Destination.KEPT) & (work.bank == bank)):
                m.d.sync += left.eq(still + 1)
            with m.Elif(self.collected & (left != 0)):
                m.d.sync += left.eq(left - 1)
        m.d.sync += [
            busy.eq((busy & ~self.half_freed) | becomes_busy),
            uncollected.eq(still + (taken & has_results)),
            uncompleted.eq(uncompleted + taken - self.completed),
        ]
        with m.If(taken & work.load):
            m.d.sync += [consumed.eq(consumed + 1), resident.eq(job.operand_space)]
        with m.If(taken & to_memory):
            m.d.sync += half.eq(~half)
        return m
